"""Objects of a cluster as its controllers have them by watches, their writes, and pods made from a template."""

import asyncio
import hashlib
import json
import logging
import random
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.adapters.seams import StoreUnavailable
from penstock.adapters.task_cancel import cancel_all
from penstock.kernel.values import JsonObject
from penstock_kubernetes.api.resource_watch import follow, older
from tests.doubles.kubernetes.objects.api_store import matches_label_selector

if TYPE_CHECKING:
    from lightkube import AsyncClient


log = logging.getLogger(__name__)

UNWATCHED = "Event"
"""Kind that no controller reads."""
QUIET = {"Lease"}
"""Kinds that change every few seconds and concern no controller but the garbage collector."""
SHARED = {"Pod", "Node"}
"""Kinds whose conditions have several writers: each sends its own, and the API server puts them together."""
MERGE, STRATEGIC = "application/merge-patch+json", "application/strategic-merge-patch+json"
RETRY_S = 0.5
"""Seconds before a kind is followed again whose watch ended."""


def timestamp(at: float) -> str:
    """Return a time as objects have it."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def seconds_of(text: str | None) -> float:
    """Return the time of a timestamp; 0 where there is none."""
    return datetime.fromisoformat(text).timestamp() if text else 0.0


def name_of(item: JsonObject) -> tuple[str, str]:
    """Return the namespace ("" for none) and the name of an object."""
    return item["metadata"].get("namespace") or "", item["metadata"]["name"]


def controller_of(item: JsonObject) -> JsonObject | None:
    """Return the reference to the one controller of an object."""
    return next((owner for owner in item["metadata"].get("ownerReferences") or () if owner.get("controller")), None)


def owner_reference(owner: JsonObject) -> JsonObject:
    """Return the reference by which a controller owns an object."""
    reference = {"apiVersion": owner["apiVersion"], "kind": owner["kind"], "name": owner["metadata"]["name"]}
    return {**reference, "uid": owner["metadata"]["uid"], "controller": True, "blockOwnerDeletion": True}


def deleting(item: JsonObject) -> bool:
    """Return whether somebody has deleted an object that is still there."""
    return bool(item["metadata"].get("deletionTimestamp"))


class RequestFailed(Exception):
    """The API server did not do what a controller asked: it is away, busy, or refuses."""


@contextmanager
def _request(what: str) -> Iterator[None]:
    from httpx2 import HTTPError

    try:
        yield
    except (HTTPError, OSError) as error:
        raise RequestFailed(f"{what}: {error}") from error


class ClusterObjects:
    """All objects of a cluster, kept up to date by watches; ``changed`` is set with each change.

    A write puts its answer into the cache at once, so a controller never acts twice on what it has just done.
    """

    def __init__(self, client: "AsyncClient") -> None:
        self.client = client
        self.changed = asyncio.Event()
        self._resources: dict[str, type[Any]] = {}
        self._objects: dict[str, dict[tuple[str, str], JsonObject]] = defaultdict(dict)
        self._removed: dict[str, str] = {}
        self._followers: dict[str, asyncio.Task[None]] = {}

    async def __aenter__(self) -> "ClusterObjects":
        await self.discover()
        return self

    async def __aexit__(self, *_: object) -> None:
        await cancel_all(self._followers.values())

    # --- reading ------------------------------------------------------------------------------------------------------

    def all(self, kind: str, namespace: str | None = None) -> list[JsonObject]:
        """Return the objects of a kind, of one namespace or of all."""
        return [item for key, item in self._objects[kind].items() if namespace in (None, key[0])]

    def get(self, kind: str, namespace: str, name: str) -> JsonObject | None:
        """Return an object, or None."""
        return self._objects[kind].get((namespace, name))

    def owned(self, kind: str, owner: JsonObject) -> list[JsonObject]:
        """Return the objects of a kind whose controller is an object."""
        uid = owner["metadata"]["uid"]
        items = self.all(kind, owner["metadata"].get("namespace"))
        return [item for item in items if (controller_of(item) or {}).get("uid") == uid]

    def everything(self) -> Iterator[JsonObject]:
        """Yield every object."""
        for items in list(self._objects.values()):
            yield from list(items.values())

    def serves(self, kind: str) -> bool:
        """Return whether the API server serves a kind, and it is followed."""
        return kind in self._resources and kind in self._objects

    async def current(self, api_version: str, kind: str, namespace: str, name: str) -> JsonObject | None:
        """Return what the API server has now, past the cache; None where there is none.

        Raises:
            LookupError: no such kind is served.
        """
        resource = self._resources.get(kind)
        if resource is None or resource._api_info.resource.api_version != api_version:
            raise LookupError(kind)
        info = resource._api_info
        return await self.raw("GET", f"{_path(info, namespace)}/{name}", {})

    # --- writing ------------------------------------------------------------------------------------------------------

    async def create(self, item: JsonObject) -> JsonObject | None:
        """Create an object; return None where it is there already, or its namespace is being deleted."""
        path = _path(self._resources[item["kind"]]._api_info, item["metadata"].get("namespace") or "")
        made = await self.raw("POST", path, item, missing=(403, 404, 409))
        if made is None:
            log.info("%s %s is not created", item["kind"], item["metadata"].get("name"))
        else:
            self._store(item["kind"], made)
        return made

    async def merge(self, item: JsonObject, patch: Mapping[str, object]) -> None:
        """Change fields of an object: None removes one."""
        await self._patch(item, dict(patch))

    async def set_status(self, item: JsonObject, status: Mapping[str, object]) -> None:
        """Change fields of an object's status, where they differ; None removes one."""
        before = item.get("status") or {}
        changes = {name: value for name, value in status.items() if before.get(name) != value}
        if not changes:
            return
        strategic = item["kind"] in SHARED and "conditions" in changes
        if strategic:
            conditions: Any = status["conditions"]
            changes["conditions"] = [each for each in conditions if each not in (before.get("conditions") or ())]
        await self._patch(item, {"status": changes}, "/status", STRATEGIC if strategic else MERGE)

    async def delete(self, item: JsonObject, *, grace_s: int | None = None, propagation: str | None = None) -> None:
        """Delete an object, unless another has its name by now."""
        kind, (namespace, name) = item["kind"], name_of(item)
        options = {"gracePeriodSeconds": grace_s, "propagationPolicy": propagation}
        body: JsonObject = {key: value for key, value in options.items() if value is not None}
        body |= {"kind": "DeleteOptions", "apiVersion": "v1", "preconditions": {"uid": item["metadata"]["uid"]}}
        path = f"{_path(self._resources[kind]._api_info, namespace)}/{name}"
        answer = await self.raw("DELETE", path, body, missing=(404, 409))
        if answer is None or answer.get("kind") == "Status":
            self._remove(kind, (namespace, name))
        elif answer.get("metadata"):
            self._store(kind, answer)

    async def raw(
        self,
        method: str,
        path: str,
        body: JsonObject,
        missing: tuple[int, ...] = (404,),
        kind: str = "application/json",
    ) -> JsonObject | None:
        """Send a request by the client's connections and login; return None for a code of ``missing``.

        The objects are plain JSON: typed ones would drop the fields that a model does not know.

        Raises:
            RequestFailed: the API server is away or refuses.
        """
        content = json.dumps(body) if body else None
        with _request(f"{method} {path}"):
            http = self.client._client._client
            answer = await http.request(method, path, content=content, headers={"Content-Type": kind})
            if answer.status_code in missing:
                return None
            answer.raise_for_status()
        return answer.json()  # type: ignore[no-any-return]

    async def event(self, item: JsonObject, reason: str, message: str, warning: bool = False) -> None:
        """Record an event about an object."""
        namespace, name = name_of(item)
        now = timestamp(time.time())
        about = {"kind": item["kind"], "apiVersion": item["apiVersion"], "name": name, "uid": item["metadata"]["uid"]}
        about |= {"namespace": namespace} if namespace else {}
        space = namespace or "default"
        event = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"generateName": f"{name}.", "namespace": space},
            "involvedObject": about,
            "reason": reason,
            "message": message,
            "type": "Warning" if warning else "Normal",
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
            "source": {"component": "penstock-testing"},
        }
        await self.raw("POST", f"/api/v1/namespaces/{space}/events", event, missing=(403, 404, 409))

    # --- internals ----------------------------------------------------------------------------------------------------

    async def discover(self) -> None:
        """Follow every kind that the API server serves, those of new CRDs too."""
        groups = (await self.raw("GET", "/apis", {}) or {}).get("groups", ())
        versions = ["v1", *(group["preferredVersion"]["groupVersion"] for group in groups)]
        for version in versions:
            group, _, number = version.rpartition("/")
            served = await self.raw("GET", _folder(group, number), {})
            for each in (served or {}).get("resources", ()):
                kind, verbs = each["kind"], each.get("verbs", ())
                if "/" in each["name"] or "watch" not in verbs or kind in self._resources:
                    continue
                self._resources[kind] = _resource(group, number, kind, each["name"], each["namespaced"])
                if kind != UNWATCHED:
                    self._followers[kind] = asyncio.create_task(self._follow(kind))
        await self._listed()

    async def _listed(self) -> None:
        """Wait until every kind was listed once."""
        while any(kind not in self._objects for kind in self._followers):
            self.changed.clear()
            await self.changed.wait()
        self.changed.set()

    async def _follow(self, kind: str) -> None:
        from lightkube.core.resource import NamespacedResource

        resource = self._resources[kind]
        space = "*" if issubclass(resource, NamespacedResource) else None
        while True:
            try:
                async for changes in follow(self.client, resource, namespace=space):
                    objects = self._objects[kind]
                    for change in changes:
                        if change.object is None:
                            objects.pop((change.namespace, change.name), None)
                        else:
                            self._store(kind, change.object)
                    if kind not in QUIET or not objects:
                        self.changed.set()
            except StoreUnavailable as error:
                log.info("%s can't be followed and is tried again: %s", kind, error)
                if "404" in str(error):  # its CRD was deleted
                    self._objects[kind].clear()
                await asyncio.sleep(RETRY_S)

    async def _patch(self, item: JsonObject, patch: JsonObject, part: str = "", kind_of_patch: str = MERGE) -> None:
        kind, (namespace, name) = item["kind"], name_of(item)
        patch = patch | {"metadata": {**patch.get("metadata", {}), "uid": item["metadata"]["uid"]}}
        path = f"{_path(self._resources[kind]._api_info, namespace)}/{name}{part}"
        made = await self.raw("PATCH", path, patch, missing=(404, 409), kind=kind_of_patch)
        if made is None:
            log.info("%s %s is not changed: it is another one by now", kind, name)
        else:
            self._store(kind, made)

    def _store(self, kind: str, item: JsonObject) -> None:
        item.setdefault("kind", kind)
        item.setdefault("apiVersion", self._resources[kind]._api_info.resource.api_version)
        metadata = item["metadata"]
        if metadata["uid"] in self._removed:
            return
        before = self._objects[kind].get(name_of(item))
        if before is None or not older(metadata["resourceVersion"], before["metadata"]["resourceVersion"]):
            self._objects[kind][name_of(item)] = item
            self.changed.set()

    def _remove(self, kind: str, key: tuple[str, str]) -> None:
        item = self._objects[kind].pop(key, None)
        if item is not None:
            self._removed[item["metadata"]["uid"]] = ""
            if len(self._removed) > 1000:  # a late event of a removed object comes within seconds
                self._removed.pop(next(iter(self._removed)))
            self.changed.set()


def _folder(group: str, version: str) -> str:
    return f"/apis/{group}/{version}" if group else f"/api/{version}"


def _path(info: Any, namespace: str) -> str:
    """Return the path of a kind's objects."""
    space = f"/namespaces/{namespace}" if namespace else ""
    return f"{_folder(info.resource.group, info.resource.version)}{space}/{info.plural}"


def _resource(group: str, version: str, kind: str, plural: str, namespaced: bool) -> Any:
    """Return a class of lightkube for a kind, whose objects are plain JSON."""
    from lightkube import generic_resource as generic

    main = generic.GenericNamespacedResource if namespaced else generic.GenericGlobalResource
    return type(kind, (main,), {"_api_info": generic.create_api_info(group, version, kind, plural)})


LETTERS = "bcdfghjklmnpqrstvwxz2456789"
DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
_rng = random.Random()


def suffix(length: int = 5) -> str:
    """Return letters that make a name unique."""
    return "".join(_rng.choices(LETTERS, k=length))


def hash_of(template: JsonObject) -> str:
    """Return a name for a pod template: equal ones have the same."""
    digest = hashlib.sha256(msgspec.json.encode(template, order="deterministic")).digest()
    return "".join(LETTERS[byte % len(LETTERS)] for byte in digest[:10])


def pod_of(owner: JsonObject, template: JsonObject, name: str, labels: Mapping[str, str] | None = None) -> JsonObject:
    """Return a new pod from a template."""
    pod = deepcopy(template)
    metadata = pod.setdefault("metadata", {})
    metadata |= {
        "name": name,
        "namespace": owner["metadata"]["namespace"],
        "labels": {**(metadata.get("labels") or {}), **(labels or {})},
        "ownerReferences": [owner_reference(owner)],
    }
    return {"apiVersion": "v1", "kind": "Pod", **pod}


def condition(item: JsonObject, kind: str) -> JsonObject:
    """Return a condition of an object; {} where it has none of that kind."""
    conditions = (item.get("status") or {}).get("conditions") or ()
    return next((each for each in conditions if each["type"] == kind), {})


def with_condition(item: JsonObject, kind: str, true: bool, reason: str, message: str = "") -> list[JsonObject]:
    """Return an object's conditions with one of them as it is now; its transition time moves only with its status."""
    before = condition(item, kind)
    status = "True" if true else "False"
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    new: JsonObject = {"type": kind, "status": status, "reason": reason, "message": message}
    new["lastTransitionTime"] = before["lastTransitionTime"] if before.get("status") == status else now
    return [*(each for each in (item.get("status") or {}).get("conditions") or () if each["type"] != kind), new]


def phase(pod: JsonObject) -> str:
    """Return a pod's phase."""
    return (pod.get("status") or {}).get("phase") or "Pending"


def active(pod: JsonObject) -> bool:
    """Return whether a pod counts as a replica: neither ended nor deleted."""
    return not deleting(pod) and phase(pod) not in ("Succeeded", "Failed")


def ready(pod: JsonObject) -> bool:
    """Return whether a pod's condition says that it is ready."""
    return condition(pod, "Ready").get("status") == "True"


def available(pod: JsonObject, min_ready_s: int) -> bool:
    """Return whether a pod has been ready for long enough."""
    return ready(pod) and time.time() - seconds_of(condition(pod, "Ready").get("lastTransitionTime")) >= min_ready_s


def matches(selector: JsonObject | None, labels: Mapping[str, str] | None) -> bool:
    """Return whether a label selector of the API selects labels; {} selects all, None nothing."""
    return selector is not None and matches_label_selector(selector, dict(labels or {}))


def replicas_of(owner: JsonObject) -> int:
    """Return how many replicas an object wants; 1 where it doesn't say."""
    replicas = (owner.get("spec") or {}).get("replicas")
    return 1 if replicas is None else int(replicas)


def leaving_first(pods: Iterable[JsonObject], related: Iterable[JsonObject]) -> list[JsonObject]:
    """Return pods in the order in which a ReplicaSet deletes them.

    Unassigned first, then Pending, then not ready, then lower deletion cost, then those on nodes with many pods of the
    same Deployment, then the youngest.
    """
    crowd = Counter(pod["spec"].get("nodeName") for pod in related if active(pod))

    def rank(pod: JsonObject) -> tuple[object, ...]:
        node = pod["spec"].get("nodeName")
        cost = (pod["metadata"].get("annotations") or {}).get(DELETION_COST, "0")
        pending = ("Pending", "Unknown", "Running").index(phase(pod))
        age = -seconds_of(pod["metadata"]["creationTimestamp"])
        return (bool(node), pending, ready(pod), int(cost), -crowd[node] if node else 0, age, pod["metadata"]["name"])

    return sorted(pods, key=rank)


async def create_pods(objects: ClusterObjects, owner: JsonObject, template: JsonObject, count: int) -> None:
    """Create pods with names of chance."""
    for _ in range(count):
        pod = pod_of(owner, template, f"{owner['metadata']['name']}-{suffix()}")
        await objects.create(pod)
