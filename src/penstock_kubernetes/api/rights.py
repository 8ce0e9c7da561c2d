"""Rights that our processes need at an API server, as data: the chart grants them, `penstock doctor` asks for them."""

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from penstock.kernel.values import JsonObject
from penstock_kubernetes.api.api_client import ask, unavailable

if TYPE_CHECKING:
    from lightkube import AsyncClient

READ = ("get", "list", "watch")


class ResourceRight(NamedTuple):
    """What may be done with one resource of a namespace; ``group`` is "" for the core."""

    group: str
    resource: str
    verbs: tuple[str, ...]


STORE_RIGHTS = (
    ResourceRight("penstock.io", "penstockentries", (*READ, "create", "patch", "delete")),
    ResourceRight("coordination.k8s.io", "leases", (*READ, "create", "patch", "delete")),
)
"""Of every process of a cluster, where discovery.store is kubernetes."""

POD_POOL_RIGHTS = (
    ResourceRight("", "pods", READ),
    ResourceRight("inference.networking.k8s.io", "inferencepools", READ),
)
"""Of `penstock up` and `penstock attach`, where a pool has a selector; InferencePools only where one is named."""

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


async def is_allowed(client: "AsyncClient", verb: str, group: str, resource: str, name: str = "") -> bool:
    """Ask the API server whether this login may do something in the client's namespace.

    Args:
        resource: with its subresource, such as ``deployments/scale``.
        name: of the one object that is meant; empty for all of them.
    Raises: what lightkube raises; the caller says how often it asks, and what a failure means.
    """
    from lightkube.models.authorization_v1 import ResourceAttributes, SelfSubjectAccessReviewSpec
    from lightkube.resources.authorization_v1 import SelfSubjectAccessReview

    kind, _, subresource = resource.partition("/")
    attributes = ResourceAttributes(
        verb=verb, group=group, resource=kind, subresource=subresource, name=name, namespace=client.namespace
    )
    spec = SelfSubjectAccessReviewSpec(resourceAttributes=attributes)
    answer = await client.create(SelfSubjectAccessReview(spec=spec))
    return answer.status is not None and bool(answer.status.allowed)


async def missing_rights(client: "AsyncClient", rights: Iterable[ResourceRight]) -> list[str]:
    """Return what this login may not do, as ``VERB RESOURCE.GROUP``.

    Raises:
        StoreUnavailable: the API server can't be reached, or does not know us.
    """
    from lightkube import ApiError

    missing = []
    for right in rights:
        for verb in right.verbs:
            try:
                allowed = await ask(partial(is_allowed, client, verb, right.group, right.resource))
            except ApiError as error:
                raise unavailable(error) from error
            if not allowed:
                missing.append(f"{verb} {'.'.join(filter(None, (right.resource, right.group)))}")
    return missing
