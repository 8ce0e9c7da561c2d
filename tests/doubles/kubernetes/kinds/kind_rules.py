"""Rules of kinds that no schema holds: names, labels, selectors that fit, fields that never change."""

import re
from collections.abc import Iterator

from penstock.kernel.values import JsonObject
from tests.doubles.kubernetes.objects.api_failures import Cause
from tests.doubles.kubernetes.objects.api_store import matches_label_selector
from tests.doubles.kubernetes.objects.schema_walk import quoted, schema_fault

_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_LABEL_VALUE = re.compile(r"(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?")
SHORT_NAMES = {"Service", "Namespace"}
"""Kinds whose name is one label of a domain name: at most 63 characters, no dots."""
WORKLOADS = {"Deployment", "ReplicaSet", "StatefulSet"}
POD_MUTABLE = {"activeDeadlineSeconds", "terminationGracePeriodSeconds", "tolerations", "nodeName"}


def breaches(kind: str, item: JsonObject) -> Iterator[Cause]:
    """Yield what is wrong with an object of a kind, new or changed."""
    metadata, spec = item["metadata"], item.get("spec") or {}
    yield from _name_breaches(kind, metadata.get("name", ""))
    for name, value in (metadata.get("labels") or {}).items():
        if not isinstance(value, str) or len(value) > 63 or not _LABEL_VALUE.fullmatch(value):
            text = "a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or '.'"
            yield Cause("metadata.labels", f"Invalid value: {quoted(value)}: {text} (label {name})")
    for name, value in (metadata.get("annotations") or {}).items():
        if not isinstance(value, str):
            yield Cause(f"metadata.annotations[{name}]", f"Invalid value: {quoted(value)}: must be a string")
    if kind in WORKLOADS:
        labels = ((spec.get("template") or {}).get("metadata") or {}).get("labels") or {}
        selector = spec.get("selector") or {}
        if not selector.get("matchLabels") and not selector.get("matchExpressions"):
            yield Cause("spec.selector", "Invalid value: {}: empty selector is invalid for " + kind.lower())
        elif not matches_label_selector(selector, labels):
            text = "`selector` does not match template `labels`"
            yield Cause("spec.template.metadata.labels", f"Invalid value: {quoted(labels)}: {text}")
    for name in ("replicas", "minReadySeconds"):
        if isinstance(spec.get(name), int) and spec[name] < 0 and kind in WORKLOADS:
            yield Cause(f"spec.{name}", f"Invalid value: {spec[name]}: must be greater than or equal to 0")
    if kind == "Pod" or (kind in WORKLOADS and "template" in spec):
        yield from _pod_breaches(kind, spec)
    if kind == "Service" and not spec.get("ports") and spec.get("clusterIP") != "None":
        yield Cause("spec.ports", "Required value", "FieldValueRequired")
    if kind == "Lease" and spec.get("leaseDurationSeconds", 1) <= 0:
        yield Cause(
            "spec.leaseDurationSeconds", f"Invalid value: {spec['leaseDurationSeconds']}: must be greater than 0"
        )
    if kind == "CustomResourceDefinition":
        yield from _definition_breaches(metadata.get("name"), spec)


def _name_breaches(kind: str, name: str) -> Iterator[Cause]:
    if kind in SHORT_NAMES:
        if len(name) > 63 or not _LABEL.fullmatch(name):
            text = "a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-'"
            yield Cause("metadata.name", f"Invalid value: {quoted(name)}: {text}, and be no more than 63 characters")
    elif kind.endswith(("Role", "RoleBinding")):
        if "/" in name or "%" in name or name in (".", ".."):
            yield Cause("metadata.name", f"Invalid value: {quoted(name)}: may not contain '/' or '%'")
    elif len(name) > 253 or not _SUBDOMAIN.fullmatch(name):
        text = (
            "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', "
            "and must start and end with an alphanumeric character"
        )
        yield Cause("metadata.name", f"Invalid value: {quoted(name)}: {text}")


def _definition_breaches(name: object, spec: JsonObject) -> Iterator[Cause]:
    whole, versions = f"{(spec.get('names') or {}).get('plural')}.{spec.get('group')}", spec.get("versions") or []
    if name != whole:
        text = f'must be spec.names.plural+"."+spec.group: {quoted(whole)}'
        yield Cause("metadata.name", f"Invalid value: {quoted(name)}: {text}")
    if sum(bool(each.get("storage")) for each in versions) != 1:
        text = "must have exactly one version marked as storage version"
        yield Cause("spec.versions", f"Invalid value: {quoted([each.get('name') for each in versions])}: {text}")
    for index, each in enumerate(versions):
        schema = (each.get("schema") or {}).get("openAPIV3Schema") or {}
        where = f"spec.versions[{index}].schema.openAPIV3Schema"
        if schema.get("type") != "object":
            yield Cause(f"{where}.type", "Required value: must be object at the root", "FieldValueRequired")
        if fault := schema_fault(schema):
            yield Cause(where, f"Invalid value: {fault}")
        else:
            yield from _structure_breaches(where, schema)


def _structure_breaches(where: str, schema: JsonObject) -> Iterator[Cause]:
    """Yield the parts of a CRD's schema that have no type: a structural schema names the type of every field."""
    parts = {f".properties[{name}]": part for name, part in (schema.get("properties") or {}).items()}
    for name in ("items", "additionalProperties"):
        if isinstance(schema.get(name), dict):
            parts[f".{name}"] = schema[name]
    for name, part in parts.items():
        if not isinstance(part, dict):
            yield Cause(f"{where}{name}", f"Invalid value: {quoted(part)}: must be a schema")
            continue
        free = part.get("x-kubernetes-preserve-unknown-fields") or part.get("x-kubernetes-int-or-string")
        if "type" not in part and not free:
            text = "Required value: must not be empty for specified object fields"
            yield Cause(f"{where}{name}.type", text, "FieldValueRequired")
        keys = part.get("x-kubernetes-list-map-keys", [])
        if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
            text = f"Invalid value: {quoted(keys)}: must be names of the items' properties"
            yield Cause(f"{where}{name}.x-kubernetes-list-map-keys", text)
        yield from _structure_breaches(f"{where}{name}", part)


def _pod_breaches(kind: str, spec: JsonObject) -> Iterator[Cause]:
    path = "spec" if kind == "Pod" else "spec.template.spec"
    pod = spec if kind == "Pod" else spec["template"].get("spec") or {}
    names = set[str]()
    if not pod.get("containers"):
        yield Cause(f"{path}.containers", "Required value", "FieldValueRequired")
    for index, container in enumerate(pod.get("containers") or []):
        where, name = f"{path}.containers[{index}]", container.get("name", "")
        if not container.get("image"):
            yield Cause(f"{where}.image", "Required value", "FieldValueRequired")
        if name in names:
            yield Cause(f"{where}.name", f"Duplicate value: {quoted(name)}", "FieldValueDuplicate")
        elif not _LABEL.fullmatch(name):
            yield Cause(f"{where}.name", f"Invalid value: {quoted(name)}: a lowercase RFC 1123 label is needed")
        names.add(name)
        volumes = {each.get("name") for each in pod.get("volumes") or []}
        for number, mount in enumerate(container.get("volumeMounts") or []):
            if mount.get("name") not in volumes:
                yield Cause(
                    f"{where}.volumeMounts[{number}].name",
                    f"Not found: {quoted(mount.get('name'))}",
                    "FieldValueNotFound",
                )
        for resource, request in ((container.get("resources") or {}).get("requests") or {}).items():
            limit = ((container.get("resources") or {}).get("limits") or {}).get(resource)
            if "/" in resource and limit is not None and str(limit) != str(request):
                text = f"must be equal to {resource} limit of {limit}"
                yield Cause(f"{where}.resources.requests", f"Invalid value: {quoted(str(request))}: {text}")
    policy = pod.get("restartPolicy")
    if kind in WORKLOADS and policy != "Always":
        text = f'Unsupported value: {quoted(policy)}: supported values: "Always"'
        yield Cause(f"{path}.restartPolicy", text, "FieldValueNotSupported")


def changes_refused(kind: str, before: JsonObject, item: JsonObject) -> Iterator[Cause]:
    """Yield the changes that a kind does not allow."""
    old, new = before.get("spec") or {}, item.get("spec") or {}
    immutable = {**dict.fromkeys(WORKLOADS, "selector"), "Service": "clusterIP"}
    if (name := immutable.get(kind)) and old.get(name) not in (None, new.get(name)):
        yield Cause(f"spec.{name}", f"Invalid value: {quoted(new.get(name))}: field is immutable")
    if kind == "Pod" and _pod_identity(old) != _pod_identity(new):
        mutable = ", ".join(["spec.containers[*].image", *sorted(POD_MUTABLE)])
        text = f"Forbidden: pod updates may not change fields other than {mutable}"
        yield Cause("spec", text, "FieldValueForbidden")
    if kind == "Secret" and before.get("type") != item.get("type"):
        yield Cause("type", f"Invalid value: {quoted(item.get('type'))}: field is immutable")
    if kind.endswith("RoleBinding") and before.get("roleRef") != item.get("roleRef"):
        yield Cause("roleRef", f"Invalid value: {quoted(item.get('roleRef'))}: cannot change roleRef")


def _without(spec: JsonObject, names: set[str]) -> JsonObject:
    return {name: value for name, value in spec.items() if name not in names}


def _pod_identity(spec: JsonObject) -> JsonObject:
    containers = [_without(each, {"image"}) for each in spec.get("containers") or []]
    return {**_without(spec, POD_MUTABLE), "containers": containers}
