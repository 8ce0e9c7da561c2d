"""Discovery documents: which groups, versions and resources there are, and OpenAPI documents of their schemas."""

from collections.abc import Iterator

from penstock.kernel.values import JsonObject
from tests.doubles.kubernetes.kinds.resource_kinds import REF, ResourceKind, ResourceKinds
from tests.doubles.kubernetes.objects.api_failures import no_such_path
from tests.doubles.kubernetes.objects.patches import APPLY_PATCH, JSON_PATCH, MERGE_PATCH, STRATEGIC_MERGE_PATCH

_INFO: JsonObject = {"title": "Kubernetes", "version": "v1.35.0"}
_QUERY = ("dryRun", "fieldManager", "fieldValidation", "force")


def group_paths(kinds: ResourceKinds) -> JsonObject:
    """Return the answer of ``/openapi/v3``: where each group's document is."""
    paths = {path_of(kind): {"serverRelativeURL": f"/openapi/v3/{path_of(kind)}"} for kind in kinds}
    return {"paths": paths}


def path_of(kind: ResourceKind) -> str:
    """Return the path of a kind's group and version."""
    return f"apis/{kind.group}/{kind.version}" if kind.group else f"api/{kind.version}"


def document(kinds: ResourceKinds, path: str) -> JsonObject:
    """Return the document of one group and version."""
    inside = [kind for kind in kinds if path_of(kind) == path]
    if not inside:
        raise no_such_path()
    paths: JsonObject = {}
    schemas: dict[str, JsonObject] = {}
    for kind in inside:
        name = _schema_name(kind)
        whole = _whole_schema(kinds, kind)
        schemas[name] = whole | {"x-kubernetes-group-version-kind": [_group_version_kind(kind)]}
        paths |= _paths(kind, path)
    pending = list(schemas)
    while pending:
        for reference in _references(schemas[pending.pop()]):
            if reference not in schemas:
                schemas[reference] = kinds.schemas.definitions[reference]
                pending.append(reference)
    return {"openapi": "3.0.0", "info": _INFO, "paths": paths, "components": {"schemas": schemas}}


def _whole_schema(kinds: ResourceKinds, kind: ResourceKind) -> JsonObject:
    schema = kinds.schemas.resolve(kind.schema)
    if not kind.custom:
        return schema
    known = schema.get("properties") or {}
    text = {"type": "string"}
    metadata = {"$ref": f"{REF}io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"}
    return schema | {"type": "object", "properties": known | {"apiVersion": text, "kind": text, "metadata": metadata}}


def _schema_name(kind: ResourceKind) -> str:
    if not kind.custom:
        return str(kind.schema["$ref"]).removeprefix(REF)
    return ".".join([*reversed(kind.group.split(".")), kind.version, kind.kind])


def _group_version_kind(kind: ResourceKind) -> JsonObject:
    return {"group": kind.group, "version": kind.version, "kind": kind.kind}


def _paths(kind: ResourceKind, path: str) -> JsonObject:
    """Return the path by which kubectl sees which parameters a patch takes; it reads no other."""
    place = f"/{path}/namespaces/{{namespace}}/{kind.plural}" if kind.namespaced else f"/{path}/{kind.plural}"
    media_types = [JSON_PATCH, MERGE_PATCH, APPLY_PATCH, *([] if kind.custom else [STRATEGIC_MERGE_PATCH])]
    parameters = [{"name": each, "in": "query", "schema": {"type": "string", "uniqueItems": True}} for each in _QUERY]
    patch = {
        "x-kubernetes-action": "patch",
        "x-kubernetes-group-version-kind": _group_version_kind(kind),
        "parameters": parameters,
        "requestBody": {"content": {each: {"schema": {"type": "object"}} for each in media_types}},
        "responses": {"200": {"description": "OK"}},
    }
    return {f"{place}/{{name}}": {"patch": patch}}


def _references(schema: object) -> Iterator[str]:
    if isinstance(schema, dict):
        if isinstance(reference := schema.get("$ref"), str):
            yield reference.removeprefix(REF)
        for value in schema.values():
            yield from _references(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from _references(value)


VERSION: JsonObject = {
    "major": "1",
    "minor": "35",
    "gitVersion": "v1.35.0+penstock-double",
}
PART_VERBS = ["create", "get", "patch", "update"]
VERBS = ["create", "delete", "get", "list", "patch", "update", "watch"]


def core_versions(url: str) -> JsonObject:
    """Return the answer of ``/api``."""
    addresses = [{"clientCIDR": "0.0.0.0/0", "serverAddress": url.partition("//")[2]}]
    return {"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": addresses}


def groups(kinds: ResourceKinds) -> JsonObject:
    """Return the answer of ``/apis``."""
    names = [name for name in kinds.versions() if name]
    return {"kind": "APIGroupList", "apiVersion": "v1", "groups": [_group(kinds, name) for name in names]}


def _group(kinds: ResourceKinds, name: str) -> JsonObject:
    versions = [{"groupVersion": f"{name}/{each}", "version": each} for each in kinds.versions()[name]]
    return {"name": name, "versions": versions, "preferredVersion": versions[0]}


def resources(kinds: ResourceKinds, group_name: str, version: str) -> JsonObject:
    """Return the answer of ``/api/v1`` and of ``/apis/GROUP/VERSION``."""
    entries = []
    for kind in kinds:
        if (kind.group, kind.version) != (group_name, version):
            continue
        entry = {"name": kind.plural, "singularName": kind.singular, "namespaced": kind.namespaced, "kind": kind.kind}
        entries.append(entry | {"verbs": ["create"] if kind.review else VERBS} | _short_names(kind))
        for name, (own_group, own_version, own_kind) in kind.subresources.items():
            entry = {"name": f"{kind.plural}/{name}", "singularName": "", "namespaced": kind.namespaced}
            entry |= {"kind": own_kind, "verbs": PART_VERBS}
            if (own_group, own_version) != (kind.group, kind.version):
                entry |= {"group": own_group, "version": own_version}
            entries.append(entry)
    if not entries:
        raise no_such_path()
    name = f"{group_name}/{version}" if group_name else version
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": name, "resources": entries}


def _short_names(kind: ResourceKind) -> JsonObject:
    return {"shortNames": list(kind.short_names)} if kind.short_names else {}
