"""Configured targets: from the settings to the objects that the planner's connector scales."""

import os
from collections.abc import Callable, Mapping, Sequence

from lightkube import AsyncClient

from penstock.config.settings.cluster_settings import ClusterSettings
from penstock.kernel.errors import ConfigError
from penstock.kernel.values import Pool, Role
from penstock_kubernetes.api.api_client import open_client
from penstock_kubernetes.connector.api_access import ApiAccess
from penstock_kubernetes.connector.graph_deployment import KIND as GRAPH
from penstock_kubernetes.connector.graph_deployment import PARENT_ENV, GraphDeployment
from penstock_kubernetes.connector.kubernetes_connector import KubernetesConnector
from penstock_kubernetes.connector.own_cluster import KIND as OWN
from penstock_kubernetes.connector.own_cluster import OwnCluster
from penstock_kubernetes.connector.scale_target import ScaleTarget
from penstock_kubernetes.connector.scaled_object import ScaledObject


def kubernetes_connector(
    settings: ClusterSettings, pools: Mapping[str, Pool], roles: Callable[[str], Mapping[Role, int]]
) -> KubernetesConnector:
    """Return the connector of ``planner.connector: kubernetes``; the arguments are those of `connector_of`.

    Raises:
        ConfigError: there is no login at an API server, or nothing is named to scale.
    """
    return connector_of(open_client(settings.discovery.kubernetes), settings, pools, roles)


def connector_of(
    client: AsyncClient,
    settings: ClusterSettings,
    pools: Mapping[str, Pool],
    roles: Callable[[str], Mapping[Role, int]],
) -> KubernetesConnector:
    """Return the connector of the settings.

    Args:
        client: owned by the connector from here on.
        pools: of the config, under their names in the cluster.
        roles: returns the roles of a model's workers.
    Raises:
        ConfigError: the settings name no object or one of another kind.
    """
    scaling = settings.planner.kubernetes
    named = scaling.target
    if named is None and not scaling.pools and (parent := os.environ.get(PARENT_ENV)):
        named = f"{GRAPH}/{parent}"
    targets: Sequence[ScaleTarget]
    if named is None:
        targets = [
            ScaledObject(client, *_split_knob(f"pools.{pool}", text), pool=pool, configured=_named_pool(pool, pools))
            for pool, text in scaling.pools.items()
        ]
    else:
        kind, name = _split_knob("target", named)
        if scaling.pools or kind not in (GRAPH, OWN):
            raise ConfigError(
                f"planner.kubernetes.target is {named}" + (", and pools are named as well" if scaling.pools else ""),
                hint=f"name a {GRAPH} or a {OWN}, or else pools with objects of their own",
            )
        model = _only_model(settings) if kind == GRAPH else ""
        targets = [
            GraphDeployment(client, name, model=model, roles=list(roles(model)))
            if kind == GRAPH
            else OwnCluster(client, name)
        ]
    if not targets:
        raise ConfigError(
            "planner.connector is kubernetes, but nothing is named that could be scaled",
            hint=f"set planner.kubernetes.target or planner.kubernetes.pools; {PARENT_ENV} is not set either",
        )
    return KubernetesConnector(targets, ApiAccess(client), namespace=client.namespace, wait=scaling.wait)


def _split_knob(knob: str, text: str) -> tuple[str, str]:
    kind, _, name = text.partition("/")
    if not kind or not name or "/" in name:
        raise ConfigError(f"planner.kubernetes.{knob} is {text!r}", hint="write KIND/NAME, such as Deployment/vllm")
    return kind, name


def _named_pool(pool: str, pools: Mapping[str, Pool]) -> Pool:
    if pool not in pools:
        raise ConfigError(
            f"planner.kubernetes.pools names {pool!r}, and the config's pools are {', '.join(pools)}",
            hint="describe the pool under models, with its role and engine; nothing of it is started",
        )
    return pools[pool]


def _only_model(settings: ClusterSettings) -> str:
    if len(settings.models) == 1:
        return next(iter(settings.models))
    raise ConfigError(
        f"the config has {len(settings.models)} models: {', '.join(settings.models)}",
        hint="a DynamoGraphDeployment is scaled for one model: name only that one",
    )
