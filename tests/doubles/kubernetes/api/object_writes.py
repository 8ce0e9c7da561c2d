"""Writes of objects: create, update, patch, server-side apply and scale, with the rules that all kinds share."""

import random
import uuid
from collections.abc import Callable, Iterator
from copy import deepcopy
from datetime import UTC, datetime

import msgspec

from penstock.kernel.values import JsonObject
from tests.doubles.kubernetes.kinds.kind_defaults import allocated, carried_over, with_defaults
from tests.doubles.kubernetes.kinds.kind_rules import breaches, changes_refused
from tests.doubles.kubernetes.kinds.resource_kinds import ResourceKind, ResourceKinds
from tests.doubles.kubernetes.objects.api_failures import (
    Cause,
    already_exists,
    apply_conflict,
    bad_request,
    conflict,
    forbidden,
    invalid,
    missing_object,
)
from tests.doubles.kubernetes.objects.api_store import ApiStore, ObjectKey, key_of
from tests.doubles.kubernetes.objects.field_ownership import (
    FieldOwner,
    FieldPath,
    ListKeys,
    Owners,
    apply_conflicts,
    owners_after_write,
    read_owners,
    write_owners,
)
from tests.doubles.kubernetes.objects.patches import first_at, patched
from tests.doubles.kubernetes.objects.schema_walk import Mistyped, SchemaWalk, rule_breaches

SUFFIX = "bcdfghjklmnpqrstvwxz2456789"
"""Letters of generated names: no vowels, so that no word comes of them."""
SERVER_METADATA = ("uid", "creationTimestamp", "deletionTimestamp", "deletionGracePeriodSeconds", "generation")
"""Metadata that no client writes."""
META_SCHEMA: JsonObject = {"$ref": "#/components/schemas/io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"}


class WriteOptions(msgspec.Struct, frozen=True):
    """What the query of a write says."""

    manager: str = "unknown"
    force: bool = False
    dry_run: bool = False
    field_validation: str = ""
    subresource: str = ""


SERVICES = "10.96.0.0/16"
"""Addresses of Services, as kubeadm has them; nobody answers there without a kubelet's double."""


class ObjectWrites:
    """Writes into the store; what was written is returned as it is stored, and never changed in place."""

    def __init__(self, store: ApiStore, kinds: ResourceKinds, now: Callable[[], float], rng: random.Random) -> None:
        self.store = store
        self.kinds = kinds
        self.now = now
        self.rng = rng
        self.services = SERVICES

    def timestamp(self, after_s: float = 0) -> str:
        """Return the server's time as objects have it: in UTC, in whole seconds."""
        return datetime.fromtimestamp(self.now() + after_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

    def read(self, kind: ResourceKind, key: ObjectKey) -> JsonObject:
        """Return an object in the version of a kind."""
        item = self.store.get(kind.resource, key)
        if item is None:
            raise missing_object(kind.resource, key[1])
        return as_version(kind, item)

    def create(self, kind: ResourceKind, namespace: str, item: JsonObject, options: WriteOptions) -> JsonObject:
        """Store a new object."""
        item = self._addressed(kind, namespace, item)
        if item["metadata"].get("resourceVersion"):
            raise bad_request("resourceVersion should not be set on objects to be created")
        return self._create(kind, item, {}, options)

    def _create(self, kind: ResourceKind, item: JsonObject, owners: Owners, options: WriteOptions) -> JsonObject:
        metadata = item["metadata"]
        if not metadata.get("name") and metadata.get("generateName"):
            metadata["name"] = metadata["generateName"] + "".join(self.rng.choices(SUFFIX, k=5))
        if not metadata.get("name"):
            text = "Required value: name or generateName is required"
            raise invalid(kind.group, kind.kind, "", [Cause("metadata.name", text, "FieldValueRequired")])
        key = key_of(item)
        if kind.namespaced:
            self._check_namespace(kind, *key)
        if self.store.get(kind.resource, key) is not None:
            raise already_exists(kind.resource, key[1])
        if kind.has_status and kind.kind != "Node":
            item.pop("status", None)
        for name in (*SERVER_METADATA, "resourceVersion", "managedFields"):
            metadata.pop(name, None)
        metadata["uid"] = str(uuid.UUID(int=self.rng.getrandbits(128), version=4))
        metadata["creationTimestamp"] = self.timestamp()
        if kind.generation:
            metadata["generation"] = 1
        item = self._conform(kind, item, options)
        item = item if kind.custom else allocated(kind.kind, item, self.timestamp(), self.rng, self.services)
        self._check(kind, item, breaches(kind.kind, item))
        keys = ListKeys(kind.schema, self.kinds.schemas.resolve)
        if not owners:
            owner = FieldOwner(options.manager, "Update", options.subresource)
            owners = {owner: frozenset(keys.fields_of(item))}
        item["metadata"]["managedFields"] = write_owners(owners, kind.api_version)
        return item if options.dry_run else self._put(kind, item)

    def update(self, kind: ResourceKind, key: ObjectKey, item: JsonObject, options: WriteOptions) -> JsonObject:
        """Replace an object, or its status."""
        before = self.read(kind, key)
        item = self._addressed(kind, key[0], item)
        metadata = item["metadata"]
        if metadata.get("name") != key[1]:
            raise bad_request("the name of the object does not match the name on the URL")
        version, uid = metadata.get("resourceVersion"), metadata.get("uid")
        if version and version != before["metadata"]["resourceVersion"]:
            raise conflict(kind.resource, key[1])
        if uid and uid != before["metadata"]["uid"]:
            texts = f"UID in precondition: {uid}, UID in object meta: {before['metadata']['uid']}"
            raise conflict(kind.resource, key[1], f"Precondition failed: {texts}")
        entries = metadata.get("managedFields")
        owners = read_owners(before["metadata"].get("managedFields", []) if entries is None else entries)
        item = self._conform(kind, _merged_parts(kind, before, item, options.subresource), options)
        keys = ListKeys(kind.schema, self.kinds.schemas.resolve)
        owner = FieldOwner(options.manager, "Update", options.subresource)
        owners = owners_after_write(owners, keys.fields_of(before), keys.fields_of(item), owner)
        return self._replace(kind, before, item, owners, options)

    def patch(
        self, kind: ResourceKind, key: ObjectKey, media_type: str, body: bytes, options: WriteOptions
    ) -> JsonObject:
        """Change an object by a patch."""
        before = self.read(kind, key)
        schema = None if kind.custom else kind.schema
        item = patched(before, media_type, body, schema, self.kinds.schemas.resolve)
        return self.update(kind, key, item, options)

    def apply(
        self, kind: ResourceKind, key: ObjectKey, item: JsonObject, options: WriteOptions
    ) -> tuple[JsonObject, bool]:
        """Carry out a server-side apply: return the object, and whether it is new.

        Raises:
            ApiFailure: 409 where other managers own a field with another value and nothing is forced.
        """
        applied = self._addressed(kind, key[0], item)
        if applied["metadata"].setdefault("name", key[1]) != key[1]:
            raise bad_request("the name of the object does not match the name on the URL")
        if applied["metadata"].get("managedFields"):
            raise bad_request("metadata.managedFields must be nil")
        applied = self._walked(kind, applied, options, defaults=False)
        keys = ListKeys(kind.schema, self.kinds.schemas.resolve)
        if options.subresource == "status":
            applied = {name: applied[name] for name in ("apiVersion", "kind", "metadata", "status") if name in applied}
        elif kind.has_status:
            applied.pop("status", None)
        wanted = keys.fields_of(applied)
        owner = FieldOwner(options.manager, "Apply", options.subresource)
        stored = self.store.get(kind.resource, key)
        if stored is None:
            if options.subresource:
                raise missing_object(kind.resource, key[1])
            return self._create(kind, applied, {owner: frozenset(wanted)}, options), True
        before = as_version(kind, stored)
        version = applied["metadata"].get("resourceVersion")
        if version and version != before["metadata"]["resourceVersion"]:
            raise conflict(kind.resource, key[1])
        owners = read_owners(before["metadata"].get("managedFields", []))
        conflicts = apply_conflicts(owners, keys.fields_of(before), wanted, owner, kind.api_version)
        if conflicts and not options.force:
            raise apply_conflict(kind.resource, key[1], [each for each, _ in conflicts])
        lost = {path for _, path in conflicts}
        previous = owners.pop(owner, frozenset())
        owners = {each: fields - lost for each, fields in owners.items()}
        others = frozenset[FieldPath]().union(*owners.values())
        dropped = {path for path in previous - wanted.keys() if not any(o[: len(path)] == path for o in others)}
        merged = keys.merged(keys.without(before, dropped) if dropped else before, applied)
        owners[owner] = frozenset(wanted)
        item = self._conform(kind, _merged_parts(kind, before, merged, options.subresource), options)
        return self._replace(kind, before, item, owners, options), False

    def _replace(
        self, kind: ResourceKind, before: JsonObject, item: JsonObject, owners: Owners, options: WriteOptions
    ) -> JsonObject:
        """Store the next state of an object, unless nothing changed."""
        if not kind.custom:
            item = carried_over(kind.kind, before, item)
        self._check(kind, item, breaches(kind.kind, item), changes_refused(kind.kind, before, item))
        metadata = item["metadata"] = dict(item["metadata"])
        metadata.pop("managedFields", None)
        if entries := write_owners(owners, kind.api_version):
            metadata["managedFields"] = entries
        for name in (*SERVER_METADATA, "resourceVersion"):
            metadata.pop(name, None)
            if name in before["metadata"]:
                metadata[name] = before["metadata"][name]
        if kind.generation and _spec_of(kind, item) != _spec_of(kind, before):
            metadata["generation"] = before["metadata"].get("generation", 0) + 1
        if item == before:
            return before
        if options.dry_run:
            return item
        pending = metadata.get("finalizers") or metadata.get("deletionGracePeriodSeconds")
        if metadata.get("deletionTimestamp") and not pending and kind.kind != "Namespace":
            self._put(kind, item)
            return self.store.remove(kind.resource, key_of(item))
        return self._put(kind, item)

    def rescale(self, kind: ResourceKind, key: ObjectKey, scale: JsonObject, options: WriteOptions) -> JsonObject:
        """Set the replicas of an object as its scale subresource does, and return its scale."""
        item = deepcopy(self.read(kind, key))
        metadata = scale.get("metadata") or {}
        version = metadata.get("resourceVersion")
        if version and version != item["metadata"]["resourceVersion"]:
            raise conflict(kind.resource, key[1])
        replicas = (scale.get("spec") or {}).get("replicas", 0)
        if not isinstance(replicas, int) or replicas < 0:
            cause = Cause("spec.replicas", f"Invalid value: {replicas}: must be greater than or equal to 0")
            raise invalid("autoscaling", "Scale", key[1], [cause])
        *parents, last = kind.scale.replicas.strip(".").split(".")
        node = item
        for name in parents:
            node = node.setdefault(name, {})
        node[last] = replicas
        options = msgspec.structs.replace(options, subresource="scale")
        return scale_of(kind, self.update(kind, key, item, options))

    def put(self, kind: ResourceKind, item: JsonObject) -> JsonObject:
        """Store an object as it is: for the server's own writes."""
        return self._put(kind, item)

    def _put(self, kind: ResourceKind, item: JsonObject) -> JsonObject:
        if kind.kind == "CustomResourceDefinition":
            self.kinds.define(item)
        stored = self.store.put(kind.resource, item)
        if kind.kind == "Namespace" and not item["metadata"].get("resourceVersion"):
            self._furnish(item["metadata"]["name"])
        return stored

    def _furnish(self, namespace: str) -> None:
        """Give a new namespace what the controllers of every cluster put there."""
        options = WriteOptions("kube-controller-manager")
        for plural, name, more in (
            ("serviceaccounts", "default", {}),
            ("configmaps", "kube-root-ca.crt", {"data": {"ca.crt": ""}}),
        ):
            kind = self.kinds.find("", "v1", plural)
            if kind is not None:
                self.create(kind, namespace, {"metadata": {"name": name}} | more, options)

    def _addressed(self, kind: ResourceKind, namespace: str, item: JsonObject) -> JsonObject:
        """Return a copy of a request's object that has the kind and the namespace of its path."""
        if (item.get("apiVersion", kind.api_version), item.get("kind", kind.kind)) != (kind.api_version, kind.kind):
            raise bad_request(
                f'{item.get("kind")} in version "{item.get("apiVersion")}" cannot be handled as a {kind.kind}: '
                f"the path is one of {kind.api_version}"
            )
        item = {**deepcopy(item), "apiVersion": kind.api_version, "kind": kind.kind}
        metadata = item["metadata"] = self._read_metadata(kind, item.get("metadata"))
        if kind.namespaced:
            if metadata.get("namespace") not in (None, "", namespace):
                raise bad_request(
                    "the namespace of the provided object does not match the namespace sent on the request"
                )
            metadata["namespace"] = namespace
        else:
            metadata.pop("namespace", None)
        return item

    def _read_metadata(self, kind: ResourceKind, written: object) -> JsonObject:
        """Return the metadata of a request as they are typed; a write builds on them before it walks the whole."""
        walk = SchemaWalk(self.kinds.schemas.resolve)
        metadata: JsonObject = walk.conform({} if written is None else written, META_SCHEMA, "metadata")
        if walk.mistyped:
            raise bad_request(_mistyped_text(kind, walk.mistyped[0]))
        return {**written, **metadata} if isinstance(written, dict) else metadata

    def _walked(
        self, kind: ResourceKind, item: JsonObject, options: WriteOptions, *, defaults: bool = True
    ) -> JsonObject:
        """Return an object without unknown fields, as the kind of validation asks."""
        walk = SchemaWalk(self.kinds.schemas.resolve, defaults=defaults)
        walked: JsonObject = walk.conform(item, kind.schema, root=True)
        if kind.custom:
            meta = SchemaWalk(self.kinds.schemas.resolve)
            walked["metadata"] = meta.conform(item["metadata"], META_SCHEMA, "metadata")
            walk.unknown += meta.unknown
            if walk.mistyped:
                raise invalid(kind.group, kind.kind, item["metadata"].get("name", ""), rule_breaches(item, kind.schema))
        if walk.mistyped:
            raise bad_request(_mistyped_text(kind, walk.mistyped[0]))
        unknown = [f'unknown field "{path}"' for path in walk.unknown]
        if unknown and options.field_validation == "Strict":
            head = f'{kind.kind} in version "{kind.version}" cannot be handled as a {kind.kind}'
            raise bad_request(f"{head}: strict decoding error: {', '.join(unknown)}")
        return walked

    def _conform(self, kind: ResourceKind, item: JsonObject, options: WriteOptions) -> JsonObject:
        item = self._walked(kind, item, options)
        return item if kind.custom else with_defaults(kind.kind, item)

    def _check(self, kind: ResourceKind, item: JsonObject, *more: Iterator[Cause]) -> None:
        causes: list[Cause] = []
        if kind.custom:
            causes += rule_breaches(item, kind.schema)
        else:
            walk = SchemaWalk(self.kinds.schemas.resolve)
            walk.conform(item, kind.schema, root=True)
            causes += [
                Cause(path, "Required value", "FieldValueRequired")
                for path in walk.missing
                if not path.startswith(("status", "metadata"))
            ]
        for each in more:
            causes += [cause for cause in each if cause.field not in {known.field for known in causes}]
        if causes:
            raise invalid(kind.group, kind.kind, item["metadata"]["name"], causes)

    def _check_namespace(self, kind: ResourceKind, namespace: str, name: str) -> None:
        item = self.store.get("namespaces", ("", namespace))
        if item is None:
            raise missing_object("namespaces", namespace)
        if item["metadata"].get("deletionTimestamp"):
            reason = f"unable to create new content in namespace {namespace} because it is being terminated"
            raise forbidden(f'{kind.resource} "{name}" is forbidden: {reason}', kind.resource, name)


def as_version(kind: ResourceKind, item: JsonObject) -> JsonObject:
    """Return a stored object under the version of its kind; no version has fields of its own."""
    return item | {"apiVersion": kind.api_version, "kind": kind.kind}


def scale_of(kind: ResourceKind, item: JsonObject) -> JsonObject:
    """Return the scale subresource of an object."""
    metadata = {
        name: item["metadata"][name] for name in ("name", "namespace", "uid", "resourceVersion", "creationTimestamp")
    }
    selector: object = first_at(item, kind.scale.selector) if kind.scale.selector else None
    if not kind.custom:
        selector = ",".join(f"{k}={v}" for k, v in sorted((item["spec"]["selector"].get("matchLabels") or {}).items()))
    status = {"replicas": first_at(item, kind.scale.status_replicas) or 0} | (
        {"selector": selector} if selector else {}
    )
    spec = {"replicas": first_at(item, kind.scale.replicas) or 0}
    return {"kind": "Scale", "apiVersion": "autoscaling/v1", "metadata": metadata, "spec": spec, "status": status}


def _merged_parts(kind: ResourceKind, before: JsonObject, item: JsonObject, subresource: str) -> JsonObject:
    """Return what a write may change: its status alone, or all but the status."""
    if subresource == "status":
        status = {"status": item["status"]} if "status" in item else {}
        return {name: value for name, value in before.items() if name != "status"} | status
    if not kind.has_status:
        return item
    status = {"status": before["status"]} if "status" in before else {}
    return {name: value for name, value in item.items() if name != "status"} | status


def _spec_of(kind: ResourceKind, item: JsonObject) -> JsonObject:
    """Return what counts for the generation."""
    apart = {"metadata", "status"} if kind.has_status else {"metadata"}
    return {name: value for name, value in item.items() if name not in apart}


def _mistyped_text(kind: ResourceKind, fault: Mistyped) -> str:
    names = {dict: "object", list: "array", str: "string", bool: "bool"}
    written = names.get(type(fault.value), "number")
    return (
        f'{kind.kind} in version "{kind.version}" cannot be handled as a {kind.kind}: '
        f"json: cannot unmarshal {written} into Go struct field {kind.kind}.{fault.path} of type {fault.type}"
    )
