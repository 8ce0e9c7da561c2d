"""Garbage collector: deletes objects whose owner was deleted, and what deletions in the foreground wait for.

The API server's double empties a namespace that is being deleted itself.
"""

from collections import defaultdict

from penstock.kernel.values import JsonObject
from tests.doubles.kubernetes.controllers.cluster_objects import ClusterObjects, deleting, name_of

FOREGROUND, ORPHAN = "foregroundDeletion", "orphan"
"""Finalizers with which the API server leaves the deletion to this controller."""


async def collect_garbage(objects: ClusterObjects) -> None:
    """Delete what has no owner any more, and do what deletions in the foreground wait for."""
    everything = list(objects.everything())
    uids = {item["metadata"]["uid"] for item in everything}
    dependents = defaultdict(list)
    for item in everything:
        for owner in item["metadata"].get("ownerReferences") or ():
            dependents[owner["uid"]].append(item)
    for item in everything:
        finalizers = item["metadata"].get("finalizers") or ()
        if deleting(item) and ORPHAN in finalizers:
            for each in dependents[item["metadata"]["uid"]]:
                await _disown(objects, each, {item["metadata"]["uid"]})
            await _release(objects, item, ORPHAN)
        elif deleting(item) and FOREGROUND in finalizers:
            await _foreground(objects, item, dependents[item["metadata"]["uid"]])
        elif not deleting(item):
            await _ownerless(objects, item, uids)


async def _ownerless(objects: ClusterObjects, item: JsonObject, uids: set[str]) -> None:
    owners = item["metadata"].get("ownerReferences") or ()
    missing = [owner for owner in owners if owner["uid"] not in uids]
    if not missing:
        return
    absent = {owner["uid"] for owner in missing if await _absent(objects, item, owner)}
    if len(absent) == len(owners):
        await objects.delete(item, propagation="Background")
    elif absent:
        await _disown(objects, item, absent)


async def _absent(objects: ClusterObjects, item: JsonObject, owner: JsonObject) -> bool:
    """Return whether an owner is not there: the cache may not have it yet, so the API server is asked."""
    try:
        space = item["metadata"].get("namespace") or ""
        there = await objects.current(owner["apiVersion"], owner["kind"], space, owner["name"])
    except LookupError:
        return False  # a kind that is not served now may be served again
    return there is None or there["metadata"]["uid"] != owner["uid"]


async def _disown(objects: ClusterObjects, item: JsonObject, uids: set[str]) -> None:
    owners = [owner for owner in item["metadata"].get("ownerReferences") or () if owner["uid"] not in uids]
    await objects.merge(item, {"metadata": {"ownerReferences": owners or None}})


async def _foreground(objects: ClusterObjects, item: JsonObject, dependents: list[JsonObject]) -> None:
    uid = item["metadata"]["uid"]
    there = [each for each in dependents if objects.get(each["kind"], *name_of(each)) is not None]
    for each in there:
        if not deleting(each):
            await objects.delete(each, propagation="Foreground")
    blocking = [
        each
        for each in there
        if any(owner["uid"] == uid and owner.get("blockOwnerDeletion") for owner in each["metadata"]["ownerReferences"])
    ]
    if not any(objects.get(each["kind"], *name_of(each)) for each in blocking):
        await _release(objects, item, FOREGROUND)


async def _release(objects: ClusterObjects, item: JsonObject, finalizer: str) -> None:
    left = [each for each in item["metadata"].get("finalizers") or () if each != finalizer]
    await objects.merge(item, {"metadata": {"finalizers": left or None}})
