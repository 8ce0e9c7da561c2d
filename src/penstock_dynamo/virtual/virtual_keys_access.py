"""Opens the virtual keys of a namespace over an etcd client, for an outside orchestrator or for a planner."""

from collections.abc import Callable, Mapping, Sequence

from penstock.adapters.stores.etcd_client import EtcdClient, EtcdLogin
from penstock.config.settings.cluster_settings import ClusterSettings
from penstock.kernel.errors import ConfigError
from penstock.kernel.values import Pool, Role
from penstock.runtime.backends import open_etcd
from penstock_dynamo.virtual.etcd_keys import EtcdKeys
from penstock_dynamo.virtual.virtual_client import UnknownDecision, VirtualClient, VirtualDecision
from penstock_dynamo.virtual.virtual_connector import VirtualConnector
from penstock_dynamo.virtual.virtual_keys import prefix_of

__all__ = ["UnknownDecision", "VirtualClient", "VirtualDecision", "connect", "keys_of"]


def connect(
    urls: Sequence[str], namespace: str = "dynamo", *, login: EtcdLogin | None = None, every: float = 1.0
) -> VirtualClient:
    """Return a client of the decisions in an etcd; no request is sent yet.

    Args:
        urls: of the etcd's client ports, such as ``http://127.0.0.1:2379``.
        namespace: first part of the keys.
        every: seconds between two reads while it waits.
    """
    return VirtualClient(keys_of(EtcdClient(urls, login=login), namespace), every=every)


def keys_of(client: EtcdClient, namespace: str) -> EtcdKeys:
    """Return the keys of a namespace; they own the client from here on."""
    return EtcdKeys(client, prefix_of(namespace))


def virtual_connector(
    settings: ClusterSettings, pools: Mapping[str, Pool], roles: Callable[[str], Mapping[Role, int]]
) -> VirtualConnector:
    """Return the connector of ``planner.connector: virtual``.

    Args:
        pools: of the config; ``roles``: returns how many workers of each role a model begins with.
    Raises:
        ConfigError: it is not clear which model is scaled, or a certificate can't be read.
    """
    keys = keys_of(open_etcd(settings.discovery.etcd), settings.planner.virtual.namespace)
    model = only_model(settings)
    return VirtualConnector(keys, settings.planner.virtual, model=model, pools=roles(model))


def only_model(settings: ClusterSettings) -> str:
    """Return the model whose workers an outside orchestrator scales.

    Raises:
        ConfigError: there are several.
    """
    named = settings.planner.virtual.model
    if named is not None:
        return named
    if len(settings.models) == 1:
        return next(iter(settings.models))
    raise ConfigError(
        f"the config has {len(settings.models)} models: {', '.join(settings.models)}",
        hint="say with planner.virtual.model which of them is scaled",
    )
