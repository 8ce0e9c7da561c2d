"""Knobs of the planner's sources and connectors, beside those of planning itself."""

from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

from penstock import extension
from penstock.config.settings.planner_report_settings import PlannerReportSettings
from penstock.kernel.settings import Knob, Settings
from penstock.planner.settings import PlannerSettings

SourceKind = Literal["streams", "prometheus"]
if TYPE_CHECKING:
    ConnectorKind: TypeAlias = str
else:
    ConnectorKind = extension.choices("connector", "process", "webhook")
MetricsSource = Literal["frontend", "router"]

PROMETHEUS_TIMEOUT = 10.0
"""Seconds that a query may take: Dynamo's default."""


class PrometheusSettings(Settings, frozen=True, kw_only=True):
    """The Prometheus that is asked, where planner.source is prometheus."""

    url: Annotated[str, Knob("Its base URL.")] = "http://127.0.0.1:9090"
    throughput_metrics_source: Annotated[
        MetricsSource,
        Knob("Whose metrics: the frontend's know models; the router's are all of one component."),
    ] = "frontend"
    namespace: Annotated[
        str | None,
        Knob("Label dynamo_namespace that counts; unset asks for none, since our frontend has none."),
    ] = None
    window: Annotated[
        float | None,
        Knob(
            "Seconds that a query looks back: several scrapes, or nothing is seen between them; longer sees a change "
            "later; unset is the shorter of planner.throughput_interval and a minute.",
            unit="s",
            gt=0,
        ),
    ] = None
    token_file: Annotated[
        str | None, Knob("File that holds the bearer token that it asks for, read anew for each query.")
    ] = None
    ca: Annotated[str | None, Knob("File of the certificates that sign its own; unset trusts the system's.")] = None
    verify: Annotated[bool, Knob("Check its certificate; false trusts any server that answers.")] = True
    params: Annotated[dict[str, str], Knob("More parameters of every query, such as a tenant's.")] = {}


class VirtualSettings(Settings, frozen=True, kw_only=True):
    """The keys in etcd by which an orchestrator scales, where planner.connector is virtual; in discovery.etcd."""

    namespace: Annotated[str, Knob("First part of the keys: /NAMESPACE/planner/num_prefill_workers and so on.")] = (
        "dynamo"
    )
    model: Annotated[str | None, Knob("Model whose workers are meant; unset is the only one of the config.")] = None
    gpus_prefill: Annotated[int, Knob("GPUs of a prefill worker.", unit="count", ge=1)] = 1
    gpus_decode: Annotated[int, Knob("GPUs of a decode worker, or of one that does both.", unit="count", ge=1)] = 1


class WebhookSettings(Settings, frozen=True, kw_only=True):
    """Whom a scaling is posted to, where planner.connector is webhook."""

    url: Annotated[str | None, Knob("URL that takes the POST.")] = None
    secret: Annotated[
        str | None, Knob("By which each POST is signed (HMAC-SHA256), 16 characters or more.", secret=True)
    ] = None


class KubernetesScaling(Settings, frozen=True, kw_only=True):
    """What is scaled where planner.connector is kubernetes."""

    target: Annotated[
        str | None,
        Knob(
            "KIND/NAME of the object that holds the replicas of all pools: a DynamoGraphDeployment or a PenstockCluster"
            "; unset is the DynamoGraphDeployment that DYN_PARENT_DGD_K8S_NAME names, where pools names none."
        ),
    ] = None
    pools: Annotated[
        dict[str, str],
        Knob("Pool of the config -> KIND/NAME of its own Deployment, StatefulSet or LeaderWorkerSet, instead."),
    ] = {}
    wait: Annotated[
        bool,
        Knob(
            "Write a decision only once the pods of the one before are ready, at most 1,800 s later; false writes each "
            "at once and counts what starts."
        ),
    ] = False


class PlanningSettings(PlannerSettings, frozen=True, kw_only=True):
    """How many workers there should be, who says so, and where that is read and written."""

    source: Annotated[
        SourceKind, Knob("Where traffic is read: streams asks our own frontends, prometheus a Prometheus.")
    ] = "streams"
    connector: Annotated[
        ConnectorKind,
        Knob(
            "What carries scalings out: process is penstock up; virtual an orchestrator that follows keys in an etcd; "
            "webhook a server that takes a signed POST; kubernetes objects of an API server (discovery.kubernetes)."
        ),
    ] = "process"
    metrics_port: Annotated[
        int,
        Knob(
            "Port on discovery.host for the planner's metrics (dynamo_planner_*) at /metrics; 0 shows none.",
            ge=0,
            le=65535,
        ),
    ] = 0
    external_scaler_port: Annotated[
        int,
        Knob(
            "Port on discovery.host at which KEDA asks for each pool's recommended replicas (its external scaler over "
            "gRPC); 0 serves none.",
            ge=0,
            le=65535,
        ),
    ] = 0
    report: PlannerReportSettings = PlannerReportSettings()
    tensorboard: Annotated[
        str | None, Knob("Folder for TensorBoard event files with the scalars of every tick; unset writes none.")
    ] = None
    prometheus: PrometheusSettings = PrometheusSettings()
    virtual: VirtualSettings = VirtualSettings()
    webhook: WebhookSettings = WebhookSettings()
    kubernetes: KubernetesScaling = KubernetesScaling()
