"""Deletions: finalizers, grace of pods, and the ends of namespaces and CRDs."""

from collections.abc import Mapping

from penstock.kernel.values import JsonObject
from tests.doubles.kubernetes.api.object_writes import ObjectWrites
from tests.doubles.kubernetes.kinds.resource_kinds import ResourceKind
from tests.doubles.kubernetes.objects.api_failures import conflict
from tests.doubles.kubernetes.objects.api_store import ObjectKey, key_of

FOREGROUND = "foregroundDeletion"
"""Finalizer that the garbage collector takes off once the dependents are gone."""


class Deletions:
    """Deletes objects, at once or when their finalizers and their kubelet are done."""

    def __init__(self, writes: ObjectWrites) -> None:
        self.writes = writes
        self.store = writes.store
        self.store.on_removal = self._removed

    def delete(
        self, kind: ResourceKind, key: ObjectKey, body: JsonObject, query: Mapping[str, str]
    ) -> tuple[JsonObject, bool]:
        """Delete an object: return its last state, and whether it is removed by now."""
        item = self.writes.read(kind, key)
        options: JsonObject = {
            name: query[name] for name in ("propagationPolicy", "gracePeriodSeconds", "dryRun") if name in query
        }
        options |= {name: value for name, value in body.items() if value is not None}
        wanted, uid = (options.get("preconditions") or {}).get("uid"), item["metadata"]["uid"]
        if wanted not in (None, uid):
            texts = f"Precondition failed: UID in precondition: {wanted}, UID in object meta: {uid}"
            raise conflict(kind.resource, item["metadata"]["name"], texts)
        metadata = item["metadata"]
        finalizers = list(metadata.get("finalizers") or [])
        if options.get("propagationPolicy") == "Foreground" and not metadata.get("deletionTimestamp"):
            finalizers.append(FOREGROUND)
        grace = _grace_s(kind, item, options.get("gracePeriodSeconds"))
        if options.get("dryRun"):
            return item, not finalizers and not grace
        if kind.kind == "CustomResourceDefinition":  # its objects go with it, whatever they wait for
            for each in self.store.items(metadata["name"]):
                self.store.remove(metadata["name"], key_of(each))
        if not (finalizers or grace or kind.kind == "Namespace"):
            return self.store.remove(kind.resource, key_of(item)), True
        if not metadata.get("deletionTimestamp") or grace < metadata.get("deletionGracePeriodSeconds", 0):
            item = self._mark(kind, item, finalizers, grace)
        if kind.kind == "Namespace":
            self._empty(key[1])
        return item, self.store.get(kind.resource, key) is None

    def _mark(self, kind: ResourceKind, item: JsonObject, finalizers: list[str], grace: int) -> JsonObject:
        metadata = item["metadata"] | {
            "deletionTimestamp": self.writes.timestamp(grace),
            "deletionGracePeriodSeconds": grace,
        }
        metadata |= {"finalizers": finalizers} if finalizers else {}
        if kind.generation:
            metadata["generation"] = metadata.get("generation", 0) + 1
        item = item | {"metadata": metadata}
        if kind.kind == "Namespace":
            item = item | {"status": (item.get("status") or {}) | {"phase": "Terminating"}}
        return self.writes.put(kind, item)

    def _empty(self, namespace: str) -> None:
        """Delete what is in a namespace, and then the namespace, if nothing waits for a finalizer."""
        for table in self.store.resources():
            kind = self.writes.kinds.by_table(table)
            if kind is not None and kind.namespaced:
                for item in self.store.items(table, namespace):
                    if not item["metadata"].get("deletionTimestamp"):
                        self.delete(kind, key_of(item), {}, {})
        self._end_namespace(namespace)

    def _end_namespace(self, namespace: str) -> None:
        item = self.store.get("namespaces", ("", namespace))
        if item is None or not item["metadata"].get("deletionTimestamp") or item["metadata"].get("finalizers"):
            return
        for table in self.store.resources():
            kind = self.writes.kinds.by_table(table)
            if kind is not None and kind.namespaced and self.store.items(table, namespace):
                return
        self.store.remove("namespaces", ("", namespace))

    def _removed(self, table: str, item: JsonObject) -> None:
        """Go on with what waited for a removal."""
        if namespace := item["metadata"].get("namespace"):
            self._end_namespace(namespace)
        if table == "customresourcedefinitions.apiextensions.k8s.io":
            self.writes.kinds.forget(item["metadata"]["name"])


def _grace_s(kind: ResourceKind, item: JsonObject, wanted: object) -> int:
    """Return the seconds that a kubelet has to end a pod; 0 for what no kubelet runs."""
    spec, phase = item.get("spec") or {}, (item.get("status") or {}).get("phase")
    if kind.resource != "pods" or not spec.get("nodeName") or phase in ("Succeeded", "Failed"):
        return 0
    grace = spec.get("terminationGracePeriodSeconds", 30) if wanted is None else wanted
    return max(0, int(str(grace)))
