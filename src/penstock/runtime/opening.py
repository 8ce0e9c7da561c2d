"""Which store, event plane and broker do the settings ask for? The one place where each is made."""

from collections.abc import Callable
from pathlib import Path

from penstock.adapters.nats_link import NatsLink, subject_of
from penstock.adapters.planes.forwarder import ForwardedPlane
from penstock.adapters.planes.nats import NatsPlane
from penstock.adapters.planes.zmq import ZmqPlane
from penstock.adapters.seams import Store
from penstock.adapters.stores.etcd import EtcdStore
from penstock.adapters.stores.etcd_client import EtcdClient, Login
from penstock.adapters.stores.file import FileStore
from penstock.adapters.tls import client_context
from penstock.config.cluster import ClusterSettings
from penstock.config.discovery import EtcdSettings
from penstock.kernel.secret import ClusterSecret
from penstock.runtime.durable import Durable
from penstock.runtime.relay import Relays
from penstock.runtime.relayed import Relayed


def open_store(
    settings: ClusterSettings,
    run: Path,
    secret: ClusterSecret | None,
    *,
    revoked: Callable[[str], None] = lambda key: None,
) -> Store:
    """Return a handle on the cluster's store; nothing is asked of it yet.

    Args:
        run: the run folder, in which a file store stands.
        revoked: told each key of ours that an operator took away by revoking its lease.
    Raises:
        ConfigError: a certificate can't be read.
    """
    discovery = settings.discovery
    if discovery.store == "file":
        return FileStore(run / "discovery", secret=secret)
    return EtcdStore(
        open_etcd(discovery.etcd),
        prefix=etcd_prefix(settings),
        # Owners renew every third of their ttl, so by then each that lives has put again what was lost.
        settle=discovery.ttl / 2,
        probe=discovery.etcd.timeout,
        secret=secret,
        revoked=revoked,
    )


def open_etcd(settings: EtcdSettings) -> EtcdClient:
    """Return a client of the etcd that the settings name.

    Raises:
        ConfigError: a certificate can't be read.
    """
    https = any(url.startswith("https") for url in settings.urls)
    login = None
    if settings.user is not None and settings.password is not None:
        login = Login(settings.user, settings.password)
    tls = client_context(ca=settings.ca, cert=settings.cert, key=settings.key) if https else None
    return EtcdClient(settings.urls, login=login, tls=tls, timeout=settings.timeout)


def etcd_prefix(settings: ClusterSettings) -> str:
    """Return what all keys of a cluster begin with, in etcd; it ends in a slash."""
    prefix = settings.discovery.etcd.prefix
    return f"/penstock/{settings.name}/" if prefix is None else prefix.rstrip("/") + "/"


Plane = ZmqPlane | NatsPlane
"""What frontends talk over; a `ZmqPlane` that is not forwarded connects to each of the others."""


def open_plane(settings: ClusterSettings, name: str, secret: ClusterSecret | None) -> Plane:
    """Return the event plane of a frontend; call it with the event loop running.

    Raises:
        ConfigError: a certificate can't be read, or a package is missing.
    """
    discovery = settings.discovery
    if discovery.plane == "nats":
        return NatsPlane(name, discovery.nats, prefix=nats_prefix(settings), secret=secret)
    if discovery.plane == "forwarder":
        ends = discovery.forwarder
        return ForwardedPlane(name, ends.publish, ends.subscribe, secret=secret)
    return ZmqPlane(name, discovery.host, secret=secret)


def open_relays(settings: ClusterSettings, secret: ClusterSecret | None) -> Relays | None:
    """Return what relays the KV events of this process's engines; None where the routers hear them directly.

    Raises:
        ConfigError: a certificate can't be read, or a package is missing.
    """
    discovery = settings.discovery
    if discovery.kv_events == "direct":
        return None
    link = NatsLink(discovery.nats, f"penstock relay {discovery.host}")
    return Relays(link, nats_prefix(settings), secret, _durable(settings, link, secret))


def open_relayed(settings: ClusterSettings, name: str, secret: ClusterSecret | None) -> Relayed | None:
    """Return by what a router hears relayed KV events; None where it hears the engines directly.

    Raises:
        ConfigError: a certificate can't be read, or a package is missing.
    """
    discovery = settings.discovery
    if discovery.kv_events == "direct":
        return None
    link = NatsLink(discovery.nats, f"{name} KV events")
    return Relayed(link, nats_prefix(settings), secret, _durable(settings, link, secret))


def _durable(settings: ClusterSettings, link: NatsLink, secret: ClusterSecret | None) -> Durable | None:
    if settings.discovery.kv_events != "jetstream":
        return None
    return Durable(link, nats_prefix(settings), settings.discovery.nats, secret)


def nats_prefix(settings: ClusterSettings) -> str:
    """Return what all subjects of a cluster begin with, in NATS."""
    prefix = settings.discovery.nats.prefix
    return f"penstock.{subject_of(settings.name)}" if prefix is None else prefix
