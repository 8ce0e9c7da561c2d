"""Opens the virtual keys of a namespace over an etcd client, for an outside orchestrator or for a planner."""

from collections.abc import Sequence

from penstock.adapters.connectors.virtual_client import UnknownDecision, VirtualClient, VirtualDecision
from penstock.adapters.connectors.virtual_keys import prefix_of
from penstock.adapters.stores.etcd_client import EtcdClient, EtcdLogin
from penstock.adapters.stores.etcd_keys import EtcdKeys

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
