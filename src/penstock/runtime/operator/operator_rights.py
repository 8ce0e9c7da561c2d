"""Rights of the operator and of a cluster's own pods, as rules of a Role."""

from collections.abc import Iterable

from penstock.adapters.kubernetes.rights import READ, STORE_RIGHTS, ResourceRight
from penstock.kernel.values import JsonObject

OPERATOR_RIGHTS = (
    ResourceRight("penstock.io", "penstockclusters", READ),
    ResourceRight("penstock.io", "penstockclusters/status", ("patch",)),
    *STORE_RIGHTS,
    ResourceRight("coordination.k8s.io", "leases", ("update",)),
    ResourceRight("", "pods", (*READ, "create", "delete")),
    ResourceRight("leaderworkerset.x-k8s.io", "leaderworkersets", ("get", "list", "create", "delete")),
    ResourceRight("", "secrets", ("get", "create")),
    ResourceRight("", "events", ("create",)),
    ResourceRight("", "nodes", ("list",)),
    ResourceRight("", "services", ("get", "create", "patch")),
    ResourceRight("", "configmaps", ("get", "create", "patch")),
    ResourceRight("", "serviceaccounts", ("get", "create", "patch")),
    ResourceRight("apps", "deployments", ("get", "create", "patch", "delete")),
    ResourceRight("policy", "poddisruptionbudgets", ("get", "create", "patch")),
    ResourceRight("rbac.authorization.k8s.io", "roles", ("get", "create", "patch")),
    ResourceRight("rbac.authorization.k8s.io", "rolebindings", ("get", "create", "patch")),
    ResourceRight("monitoring.coreos.com", "podmonitors", ("get", "create", "patch")),
)
"""Of the operator, in every namespace that it looks after. Who makes a Role must have what it grants: the store's."""


def rules(rights: Iterable[ResourceRight]) -> list[JsonObject]:
    """Return rights as the rules of a Role."""
    return [{"apiGroups": [right.group], "resources": [right.resource], "verbs": list(right.verbs)} for right in rights]
