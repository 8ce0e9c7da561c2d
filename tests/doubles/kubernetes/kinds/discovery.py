"""Discovery documents: which groups, versions and resources there are, one by one and all at once."""

from penstock.kernel.values import JsonObject
from tests.doubles.kubernetes.kinds.resource_kinds import ResourceKind, ResourceKinds
from tests.doubles.kubernetes.objects.api_failures import no_such_path

VERSION: JsonObject = {
    "major": "1",
    "minor": "35",
    "gitVersion": "v1.35.0+penstock-double",
    "gitCommit": "0" * 40,
    "gitTreeState": "clean",
    "buildDate": "2026-01-01T00:00:00Z",
    "goVersion": "none",
    "compiler": "none",
    "platform": "linux/amd64",
}
AGGREGATED = "g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList"
AGGREGATED_TYPE = f"application/json;{AGGREGATED}"
VERBS = ["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"]
CREATE_ONLY = {"eviction", "binding", "token"}
CONNECT = {"exec", "attach", "portforward"}


def core_versions(url: str) -> JsonObject:
    """Return the answer of ``/api``."""
    addresses = [{"clientCIDR": "0.0.0.0/0", "serverAddress": url.partition("//")[2]}]
    return {"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": addresses}


def groups(kinds: ResourceKinds) -> JsonObject:
    """Return the answer of ``/apis``."""
    names = [name for name in kinds.versions() if name]
    return {"kind": "APIGroupList", "apiVersion": "v1", "groups": [_group(kinds, name) for name in names]}


def group(kinds: ResourceKinds, name: str) -> JsonObject:
    """Return the answer of ``/apis/GROUP``."""
    if name not in kinds.versions():
        raise no_such_path()
    return {"kind": "APIGroup", "apiVersion": "v1"} | _group(kinds, name)


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
        entries.append(entry | {"verbs": ["create"] if kind.review else VERBS} | _names(kind))
        for name, (own_group, own_version, own_kind) in kind.subresources.items():
            entry = {"name": f"{kind.plural}/{name}", "singularName": "", "namespaced": kind.namespaced}
            entry |= {"kind": own_kind, "verbs": _verbs(name)}
            if (own_group, own_version) != (kind.group, kind.version):
                entry |= {"group": own_group, "version": own_version}
            entries.append(entry)
    if not entries:
        raise no_such_path()
    name = f"{group_name}/{version}" if group_name else version
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": name, "resources": entries}


def aggregated(kinds: ResourceKinds, *, core: bool) -> JsonObject:
    """Return all groups, versions and resources in one document: the core group's, or that of the others."""
    items = []
    for name, versions in kinds.versions().items():
        if (name == "") != core:
            continue
        described = [
            {
                "version": version,
                "freshness": "Current",
                "resources": [_described(kind) for kind in kinds if (kind.group, kind.version) == (name, version)],
            }
            for version in versions
        ]
        items.append({"metadata": {"name": name or None, "creationTimestamp": None}, "versions": described})
    return {"kind": "APIGroupDiscoveryList", "apiVersion": "apidiscovery.k8s.io/v2", "metadata": {}, "items": items}


def _described(kind: ResourceKind) -> JsonObject:
    own = {"group": kind.group, "version": kind.version, "kind": kind.kind}
    parts = [
        {
            "subresource": name,
            "responseKind": dict(zip(("group", "version", "kind"), response, strict=True)),
            "verbs": _verbs(name),
        }
        for name, response in kind.subresources.items()
    ]
    return {
        "resource": kind.plural,
        "responseKind": own,
        "scope": "Namespaced" if kind.namespaced else "Cluster",
        "singularResource": kind.singular,
        "verbs": ["create"] if kind.review else VERBS,
        **_names(kind),
        **({"subresources": parts} if parts else {}),
    }


def _names(kind: ResourceKind) -> JsonObject:
    names: JsonObject = {"shortNames": list(kind.short_names)} if kind.short_names else {}
    return names | ({"categories": list(kind.categories)} if kind.categories else {})


def _verbs(subresource: str) -> list[str]:
    if subresource in CREATE_ONLY:
        return ["create"]
    if subresource in CONNECT:
        return ["create", "get"]
    return ["get"] if subresource == "log" else ["get", "patch", "update"]
