"""Knobs of stores and event planes, through which the processes of a cluster discover and inform each other."""

from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

from penstock import extension
from penstock.kernel.settings import Knob, Settings

if TYPE_CHECKING:
    StoreKind: TypeAlias = str
    PlaneKind: TypeAlias = str
else:
    StoreKind = extension.choices("store", "sqlite", "etcd")
    PlaneKind = extension.choices("plane", "zmq", "forwarder", "nats")
KvRoute = Literal["direct", "nats", "jetstream"]


class ServiceLogin(Settings, frozen=True, kw_only=True):
    """How the servers of a service know us, and we them."""

    user: Annotated[str | None, Knob("User, where the servers ask for one.")] = None
    password: Annotated[str | None, Knob("Password of that user.", secret=True)] = None
    ca: Annotated[
        str | None, Knob("File of the certificates that sign the servers'; unset trusts those of the system.")
    ] = None
    cert: Annotated[str | None, Knob("File of our certificate, where the servers ask for one.")] = None
    key: Annotated[str | None, Knob("File of that certificate's key.")] = None


class EtcdSettings(ServiceLogin, frozen=True, kw_only=True):
    """The etcd that holds the membership, where discovery.store is etcd."""

    urls: Annotated[
        tuple[str, ...], Knob("Client URLs of its members; the next one is asked where one does not answer.")
    ] = ("http://127.0.0.1:2379",)


class NatsSettings(ServiceLogin, frozen=True, kw_only=True):
    """The NATS servers, where discovery.plane or discovery.kv_events go by NATS."""

    urls: Annotated[tuple[str, ...], Knob("URLs of the servers, nats://HOST:PORT or tls://HOST:PORT.")] = (
        "nats://127.0.0.1:4222",
    )
    token: Annotated[str | None, Knob("Token, where the servers ask for one instead.", secret=True)] = None
    nkey: Annotated[str | None, Knob("File of an nkey's seed; needs the package nkeys, the extra of that name.")] = None
    creds: Annotated[str | None, Knob("File of credentials (JWT and seed), as nsc writes it; needs nkeys as well.")] = (
        None
    )


class KubernetesSettings(Settings, frozen=True, kw_only=True):
    """The Kubernetes API server, for everything of ours that talks to one."""

    context: Annotated[
        str | None,
        Knob("Context of the kubeconfig; unset is the account of the pod that we run in, or the current context."),
    ] = None
    namespace: Annotated[str | None, Knob("Namespace; unset is the one of the login.")] = None


class DiscoverySettings(Settings, frozen=True, kw_only=True):
    """How the processes of a cluster find and hear each other."""

    ttl: Annotated[
        float,
        Knob(
            "Seconds after which the entry of a process that died goes away; shorter notices sooner, writes more.",
            unit="s",
            ge=1,
        ),
    ] = 10.0
    store: Annotated[
        StoreKind,
        Knob(
            "Where membership is kept: sqlite in the run folder, for one machine; etcd for any number of them; "
            "kubernetes in resources of its API server."
        ),
    ] = "sqlite"
    host: Annotated[
        str,
        Knob(
            "Address of this machine on which engines that are started here and the frontends' event sockets listen, "
            "and which the others are told; loopback where the cluster has one machine."
        ),
    ] = "127.0.0.1"
    plane: Annotated[
        PlaneKind,
        Knob(
            "How frontends tell each other placements and sessions: zmq directly, forwarder through `penstock forward`"
            ", nats through a broker."
        ),
    ] = "zmq"
    kv_events: Annotated[
        KvRoute,
        Knob(
            "How KV events come to the routers: direct from each engine's sockets; nats through a relay beside the "
            "engines and a broker; jetstream the same, kept by the broker for routers that start late."
        ),
    ] = "direct"
    forwarder: Annotated[
        tuple[str, str],
        Knob(
            "Endpoints (ZMQ) of the `penstock forward` between the frontends, where plane is forwarder: to which they "
            "publish, and from which they hear the others."
        ),
    ] = ("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558")
    etcd: EtcdSettings = EtcdSettings()
    nats: NatsSettings = NatsSettings()
    kubernetes: KubernetesSettings = KubernetesSettings()
