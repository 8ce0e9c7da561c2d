"""Opens the store, event plane and NATS broker that the settings name; the one place where each is made."""

from collections.abc import Callable
from pathlib import Path

from penstock import extension
from penstock.adapters.nats_link import NatsLink, subject_of
from penstock.adapters.planes.nats_plane import NatsPlane
from penstock.adapters.planes.zmq_forwarder import ForwardedPlane
from penstock.adapters.planes.zmq_plane import ZmqPlane
from penstock.adapters.seams import Store
from penstock.adapters.stores.etcd_client import EtcdClient, EtcdLogin
from penstock.adapters.stores.etcd_store import EtcdStore
from penstock.adapters.stores.sqlite_store import SqliteStore
from penstock.adapters.tls import client_context
from penstock.config.settings.cluster_settings import ClusterSettings
from penstock.config.settings.discovery_settings import EtcdSettings
from penstock.kernel.secret import ClusterSecret
from penstock.runtime.kv_events.jetstream_history import JetStreamHistory
from penstock.runtime.kv_events.kv_event_relay import KvEventRelays
from penstock.runtime.kv_events.kv_event_relay_client import KvRelayClient


def open_store(
    settings: ClusterSettings,
    run: Path,
    secret: ClusterSecret | None,
    *,
    revoked: Callable[[str], None] = lambda key: None,
) -> Store:
    """Return a handle on the cluster's store; no request is sent yet.

    Args:
        run: the run folder, which holds the database.
        revoked: called with each key of ours whose lease an operator revoked.
    Raises:
        ConfigError: a certificate can't be read, or there is no login at an API server.
    """
    discovery = settings.discovery
    if discovery.store == "sqlite":
        return SqliteStore(run / "discovery", secret=secret)
    if discovery.store != "etcd":
        store: Store = extension.entry("store", discovery.store, "discovery.store")(settings, secret, revoked)
        return store
    return EtcdStore(
        open_etcd(discovery.etcd),
        prefix=etcd_prefix(settings),
        # Owners renew every third of their ttl, so by then each live owner has put its lost keys again.
        settle=discovery.ttl / 2,
        secret=secret,
        revoked=revoked,
    )


def open_lasting_store(settings: ClusterSettings, store: Store) -> Store | None:
    """Return where the tenants' budgets are kept: the cluster's store, or a database beside its run folders where that
    store goes with the run; None where no tenant has one.

    Args:
        store: the cluster's.
    """
    if all(tenant.budget is None for tenant in settings.tenants.values()):
        return None
    return (
        SqliteStore(Path(settings.runs.dir).expanduser() / "budgets") if settings.discovery.store == "sqlite" else store
    )


def open_etcd(settings: EtcdSettings) -> EtcdClient:
    """Return a client of the etcd that the settings name.

    Raises:
        ConfigError: a certificate can't be read.
    """
    https = any(url.startswith("https") for url in settings.urls)
    login = None
    if settings.user is not None and settings.password is not None:
        login = EtcdLogin(settings.user, settings.password)
    tls = client_context(ca=settings.ca, cert=settings.cert, key=settings.key) if https else None
    return EtcdClient(settings.urls, login=login, tls=tls)


def etcd_prefix(settings: ClusterSettings) -> str:
    """Return the prefix of all keys of a cluster in etcd; clusters that share an etcd differ in their names."""
    return f"/penstock/{settings.name}/"


Plane = ZmqPlane | NatsPlane
"""The event plane between frontends; a `ZmqPlane` that is not forwarded connects to each of the others."""


def open_plane(settings: ClusterSettings, name: str, secret: ClusterSecret | None) -> Plane:
    """Return the event plane of a frontend; call it with the event loop running.

    Raises:
        ConfigError: a certificate can't be read, or a package is missing.
    """
    discovery = settings.discovery
    if discovery.plane == "nats":
        return NatsPlane(name, discovery.nats, prefix=nats_prefix(settings), secret=secret)
    if discovery.plane == "forwarder":
        return ForwardedPlane(name, *discovery.forwarder, secret=secret)
    if discovery.plane != "zmq":
        plane: Plane = extension.entry("plane", discovery.plane, "discovery.plane")(settings, name, secret)
        return plane
    return ZmqPlane(name, discovery.host, secret=secret)


def open_relays(settings: ClusterSettings, secret: ClusterSecret | None) -> KvEventRelays | None:
    """Return the relay of KV events of this process's engines; None where the routers receive them directly.

    Raises:
        ConfigError: a certificate can't be read, or a package is missing.
    """
    discovery = settings.discovery
    if discovery.kv_events == "direct":
        return None
    link = NatsLink(discovery.nats, f"penstock relay {discovery.host}")
    return KvEventRelays(link, nats_prefix(settings), secret, _durable(settings, link, secret))


def open_relayed(settings: ClusterSettings, name: str, secret: ClusterSecret | None) -> KvRelayClient | None:
    """Return a router's client for relayed KV events; None where it receives from the engines directly.

    Raises:
        ConfigError: a certificate can't be read, or a package is missing.
    """
    discovery = settings.discovery
    if discovery.kv_events == "direct":
        return None
    link = NatsLink(discovery.nats, f"{name} KV events")
    return KvRelayClient(link, nats_prefix(settings), secret, _durable(settings, link, secret))


def _durable(settings: ClusterSettings, link: NatsLink, secret: ClusterSecret | None) -> JetStreamHistory | None:
    if settings.discovery.kv_events != "jetstream":
        return None
    return JetStreamHistory(link, nats_prefix(settings), secret)


def nats_prefix(settings: ClusterSettings) -> str:
    """Return the prefix of all subjects of a cluster in NATS; clusters that share a broker differ in their names."""
    return f"penstock.{subject_of(settings.name)}"
