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
            yield _invalid("metadata.labels", value, f"{text} (label {name})")
    for name, value in (metadata.get("annotations") or {}).items():
        if not isinstance(value, str):
            yield _invalid(f"metadata.annotations[{name}]", value, "must be a string")
    if kind in WORKLOADS:
        yield from _workload_breaches(kind, spec)
    if kind == "Pod":
        yield from _pod_breaches("spec", spec)
    if kind == "Service" and not spec.get("ports") and spec.get("clusterIP") != "None":
        yield Cause("spec.ports", "Required value", "FieldValueRequired")
    if kind == "Lease" and (seconds := spec.get("leaseDurationSeconds", 1)) <= 0:
        yield _invalid("spec.leaseDurationSeconds", seconds, "must be greater than 0")
    if kind == "CustomResourceDefinition":
        yield from _definition_breaches(metadata.get("name"), spec)


def _invalid(field: str, value: object, text: str) -> Cause:
    return Cause(field, f"Invalid value: {quoted(value)}: {text}")


def _name_breaches(kind: str, name: str) -> Iterator[Cause]:
    if kind in SHORT_NAMES:
        fits = len(name) <= 63 and bool(_LABEL.fullmatch(name))
        text = "a lowercase RFC 1123 label of at most 63 lower case alphanumeric characters or '-' is needed"
    elif kind.endswith(("Role", "RoleBinding")):
        fits, text = not {"/", "%"} & set(name), "may not contain '/' or '%'"
    else:
        fits = len(name) <= 253 and bool(_SUBDOMAIN.fullmatch(name))
        text = "a lowercase RFC 1123 subdomain of lower case alphanumeric characters, '-' or '.' is needed"
    if not fits:
        yield _invalid("metadata.name", name, text)


def _workload_breaches(kind: str, spec: JsonObject) -> Iterator[Cause]:
    template = spec.get("template") or {}
    labels, selector = (template.get("metadata") or {}).get("labels") or {}, spec.get("selector") or {}
    if not selector.get("matchLabels"):
        yield _invalid("spec.selector", selector, f"empty selector is invalid for {kind.lower()}")
    elif not matches_label_selector(selector, labels):
        yield _invalid("spec.template.metadata.labels", labels, "`selector` does not match template `labels`")
    for name in ("replicas", "minReadySeconds"):
        if isinstance(spec.get(name), int) and spec[name] < 0:
            yield _invalid(f"spec.{name}", spec[name], "must be greater than or equal to 0")
    if (pod := template.get("spec") or {}).get("restartPolicy", "Always") != "Always":
        text = f'Unsupported value: {quoted(pod["restartPolicy"])}: supported values: "Always"'
        yield Cause("spec.template.spec.restartPolicy", text, "FieldValueNotSupported")
    yield from _pod_breaches("spec.template.spec", pod)


def _definition_breaches(name: object, spec: JsonObject) -> Iterator[Cause]:
    whole, versions = f"{(spec.get('names') or {}).get('plural')}.{spec.get('group')}", spec.get("versions") or []
    if name != whole:
        yield _invalid("metadata.name", name, f'must be spec.names.plural+"."+spec.group: {quoted(whole)}')
    if sum(bool(each.get("storage")) for each in versions) != 1:
        names = [each.get("name") for each in versions]
        yield _invalid("spec.versions", names, "must have exactly one version marked as storage version")
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
        free = part.get("x-kubernetes-preserve-unknown-fields") or part.get("x-kubernetes-int-or-string")
        if "type" not in part and not free:
            text = "Required value: must not be empty for specified object fields"
            yield Cause(f"{where}{name}.type", text, "FieldValueRequired")
        yield from _structure_breaches(f"{where}{name}", part)


def _pod_breaches(path: str, pod: JsonObject) -> Iterator[Cause]:
    names = set[str]()
    if not pod.get("containers"):
        yield Cause(f"{path}.containers", "Required value", "FieldValueRequired")
    volumes = {each.get("name") for each in pod.get("volumes") or []}
    for index, container in enumerate(pod.get("containers") or []):
        where, name = f"{path}.containers[{index}]", container.get("name", "")
        if not container.get("image"):
            yield Cause(f"{where}.image", "Required value", "FieldValueRequired")
        if name in names or not _LABEL.fullmatch(name):
            yield _invalid(f"{where}.name", name, "a lowercase RFC 1123 label is needed that no other container has")
        names.add(name)
        for mount in container.get("volumeMounts") or []:
            if mount.get("name") not in volumes:
                yield Cause(f"{where}.volumeMounts", f"Not found: {quoted(mount.get('name'))}", "FieldValueNotFound")
        resources = container.get("resources") or {}
        limits = resources.get("limits") or {}
        for resource, request in (resources.get("requests") or {}).items():
            if "/" in resource and str(limits.get(resource, request)) != str(request):
                text = f"must be equal to {resource} limit of {limits[resource]}"
                yield _invalid(f"{where}.resources.requests", str(request), text)


def changes_refused(kind: str, before: JsonObject, item: JsonObject) -> Iterator[Cause]:
    """Yield the changes that a kind does not allow."""
    old, new = before.get("spec") or {}, item.get("spec") or {}
    immutable = {**dict.fromkeys(WORKLOADS, "selector"), "Service": "clusterIP"}
    if (name := immutable.get(kind)) and old.get(name) not in (None, new.get(name)):
        yield _invalid(f"spec.{name}", new.get(name), "field is immutable")
    if kind == "Pod" and _pod_identity(old) != _pod_identity(new):
        mutable = ", ".join(["spec.containers[*].image", *sorted(POD_MUTABLE)])
        text = f"Forbidden: pod updates may not change fields other than {mutable}"
        yield Cause("spec", text, "FieldValueForbidden")
    if kind == "Secret" and before.get("type") != item.get("type"):
        yield _invalid("type", item.get("type"), "field is immutable")
    if kind.endswith("RoleBinding") and before.get("roleRef") != item.get("roleRef"):
        yield _invalid("roleRef", item.get("roleRef"), "cannot change roleRef")


def _without(spec: JsonObject, names: set[str]) -> JsonObject:
    return {name: value for name, value in spec.items() if name not in names}


def _pod_identity(spec: JsonObject) -> JsonObject:
    containers = [_without(each, {"image"}) for each in spec.get("containers") or []]
    return {**_without(spec, POD_MUTABLE), "containers": containers}
