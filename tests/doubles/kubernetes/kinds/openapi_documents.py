"""OpenAPI documents as far as kubectl reads them: schemas for explain and apply, and what its patches may say."""

from collections.abc import Iterator

from penstock.kernel.values import JsonObject
from tests.doubles.kubernetes.kinds.builtin_schemas import REF
from tests.doubles.kubernetes.kinds.resource_kinds import ResourceKind, ResourceKinds
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
        schemas[name] = whole | {"x-kubernetes-group-version-kind": [_names(kind)]}
        paths |= _paths(kind, path, name)
    pending = list(schemas)
    while pending:
        for reference in _references(schemas[pending.pop()]):
            if reference not in schemas:
                schemas[reference] = kinds.schemas.definitions[reference]
                pending.append(reference)
    return {"openapi": "3.0.0", "info": _INFO, "paths": paths, "components": {"schemas": schemas}}


def swagger(kinds: ResourceKinds) -> JsonObject:
    """Return the answer of ``/openapi/v2``: the schemas of all kinds, without paths."""
    definitions: JsonObject = dict(kinds.schemas.definitions)
    for kind in kinds:
        names = {"x-kubernetes-group-version-kind": [_names(kind)]}
        definitions[_schema_name(kind)] = _whole_schema(kinds, kind) | names
    return {"swagger": "2.0", "info": _INFO, "paths": {}, "definitions": definitions}


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


def _names(kind: ResourceKind) -> JsonObject:
    return {"group": kind.group, "version": kind.version, "kind": kind.kind}


def _paths(kind: ResourceKind, path: str, name: str) -> JsonObject:
    place = f"/{path}/namespaces/{{namespace}}/{kind.plural}" if kind.namespaced else f"/{path}/{kind.plural}"
    media_types = [JSON_PATCH, MERGE_PATCH, APPLY_PATCH, *([] if kind.custom else [STRATEGIC_MERGE_PATCH])]
    parameters = [{"name": each, "in": "query", "schema": {"type": "string", "uniqueItems": True}} for each in _QUERY]
    own = {"x-kubernetes-group-version-kind": _names(kind)}
    body = {"application/json": {"schema": {"$ref": f"{REF}{name}"}}}
    answer = {"200": {"description": "OK", "content": body}}
    patch_body = {"content": {each: {"schema": {"type": "object"}} for each in media_types}}

    def action(verb: str, **more: object) -> JsonObject:
        return {"x-kubernetes-action": verb, "parameters": parameters, "responses": answer, **own, **more}

    return {
        place: {"get": action("list"), "post": action("post", requestBody={"content": body})},
        f"{place}/{{name}}": {
            "get": action("get"),
            "put": action("put", requestBody={"content": body}),
            "patch": action("patch", requestBody=patch_body),
            "delete": action("delete"),
        },
    }


def _references(schema: object) -> Iterator[str]:
    if isinstance(schema, dict):
        if isinstance(reference := schema.get("$ref"), str):
            yield reference.removeprefix(REF)
        for value in schema.values():
            yield from _references(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from _references(value)
