"""How does an orchestrator, or a planner, get at the keys of a namespace? Here the client of an etcd meets them."""

from collections.abc import Sequence

from penstock.adapters.connectors.virtual_client import Decision, UnknownDecision, VirtualClient
from penstock.adapters.connectors.virtual_keys import prefix_of
from penstock.adapters.stores.etcd_client import EtcdClient, Login
from penstock.adapters.stores.etcd_keys import EtcdKeys

__all__ = ["Decision", "UnknownDecision", "VirtualClient", "connect", "keys_of"]


def connect(
    urls: Sequence[str], namespace: str = "dynamo", *, login: Login | None = None, every: float = 1.0
) -> VirtualClient:
    """Return a client of the decisions in an etcd; nothing is asked of it yet.

    Args:
        urls: of the etcd's client ports, such as ``http://127.0.0.1:2379``.
        namespace: first part of the keys.
        every: seconds between two looks while it waits.
    """
    return VirtualClient(keys_of(EtcdClient(urls, login=login), namespace), every=every)


def keys_of(client: EtcdClient, namespace: str) -> EtcdKeys:
    """Return the keys of a namespace; the client belongs to them from here on."""
    return EtcdKeys(client, prefix_of(namespace))
