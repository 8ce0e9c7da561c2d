"""What can be set for a whole cluster? The top of the tree of settings; the rooms' own knobs hang below it."""

from typing import Annotated, Literal

import msgspec

from penstock.config.discovery import DiscoverySettings
from penstock.config.frontend import FrontendSettings
from penstock.config.planner import PlanningSettings
from penstock.engine.settings import SimSettings
from penstock.kernel.settings import Knob, Settings
from penstock.kernel.values import HandoffProtocol, Role
from penstock.router.settings import RouterSettings

EngineKind = Literal["sim", "vllm", "sglang", "trtllm", "llamacpp", "openai"]
LogFormat = Literal["text", "json"]
StatsSource = Literal["auto", "metrics"]
LogLevel = Literal["debug", "info", "warning", "error"]

BUILTIN_TOKENIZER = "builtin:sim"


class VllmSettings(Settings, frozen=True, kw_only=True):
    """A vLLM server that is started here."""

    command: Annotated[
        str, Knob("The vllm program: a name found in PATH, or the path of the one in an environment of its own.")
    ] = "vllm"
    model: Annotated[
        str | None, Knob("Folder or hub id of the checkpoint; unset takes the name under which clients ask for it.")
    ] = None
    args: Annotated[
        tuple[str, ...],
        Knob("More flags of vllm serve, one word each; a flag that stands here replaces ours of the same name."),
    ] = ()
    env: Annotated[
        dict[str, str],
        Knob("More environment of the server, such as VLLM_CPU_KVCACHE_SPACE; wins over ours.", secret=True),
    ] = {}
    start_timeout: Annotated[
        float,
        Knob("Longest from the start of the process until it answers; large checkpoints take minutes.", unit="s", gt=0),
    ] = 600.0
    shutdown_timeout: Annotated[
        float,
        Knob(
            "How long running requests may go on once the server was told to end; it refuses new ones.", unit="s", ge=0
        ),
    ] = 20.0
    kv_events: Annotated[
        bool, Knob("Let it announce what its KV cache holds; without it routing by prefix is only a guess.")
    ] = True
    iteration_stats: Annotated[
        bool | None,
        Knob(
            "Let it tell every forward pass through the plug-in that comes with penstock; unset does so where that is "
            "installed in the program's environment. Without the plug-in vLLM logs a line for each pass instead."
        ),
    ] = None


class PoolSettings(Settings, frozen=True, kw_only=True):
    """Engines that stand in for each other."""

    engine: Annotated[
        EngineKind,
        Knob(
            "What serves: sim and vllm are started here unless urls are given; the others are servers that run already."
        ),
    ] = "sim"
    role: Annotated[
        Role,
        Knob(
            "What the engines do for a request: aggregated all of it; prefill hands its KV over to a pool of decode; "
            "encode makes a prompt's images known to those before it is prefilled."
        ),
    ] = "aggregated"
    handoff: Annotated[
        HandoffProtocol | None,
        Knob(
            "How KV goes from prefill to decode: completed waits for the prefill (vLLM, TensorRT-LLM), push and "
            "bootstrap ask both at once (vLLM's push connector, SGLang); unset is the engine's own way."
        ),
    ] = None
    layout: Annotated[
        str | None,
        Knob(
            "Name of how the KV of these engines is laid out, where they do not tell; prefill and decode of a model "
            "must have the same."
        ),
    ] = None
    labels: Annotated[
        dict[str, str],
        Knob("Labels of the engines, such as rack or zone; router.handoff.distance weighs them."),
    ] = {}
    replicas: Annotated[
        int, Knob("Engine processes to start; more serve more and need CPU.", unit="count", ge=1, le=1024)
    ] = 4
    gpus: Annotated[
        int | None,
        Knob(
            "GPUs of this machine that each engine gets to itself; unset is one for an engine that computes on them, "
            "where there is any.",
            unit="count",
            ge=0,
            le=64,
        ),
    ] = None
    urls: Annotated[
        tuple[str, ...],
        Knob("Base URLs of servers that run already, without /v1; where there are any, none is started."),
    ] = ()
    block_size: Annotated[
        int | None,
        Knob("Tokens per KV block, where the server does not tell it; must be the engine's own.", unit="tokens", gt=0),
    ] = None
    kv_blocks: Annotated[
        int | None, Knob("KV blocks of one engine, where the server does not tell it.", unit="blocks", gt=0)
    ] = None
    max_len: Annotated[
        int | None, Knob("Longest prompt and output together, where the server does not tell it.", unit="tokens", gt=0)
    ] = None
    max_batched_tokens: Annotated[
        int | None,
        Knob(
            "Tokens of one forward pass, where the server does not tell it; router.queue.threshold needs it.",
            unit="tokens",
            gt=0,
        ),
    ] = None
    events: Annotated[
        tuple[str, ...],
        Knob(
            "KV event endpoints (ZMQ) of servers in urls that do not tell them, as URL=tcp://HOST:PORT, or without URL "
            "where there is one server; one for each rank; a leading @ binds it here, for an engine that connects."
        ),
    ] = ()
    replay: Annotated[tuple[str, ...], Knob("Replay endpoints (ZMQ) of those servers, in the same way and order.")] = ()
    topic: Annotated[str | None, Knob("Topic of those servers' KV events; unset takes every topic.")] = None
    stats: Annotated[
        tuple[str, ...],
        Knob("Endpoints (ZMQ) at which those servers' statistics plug-in publishes, in the same way."),
    ] = ()
    priority: Annotated[
        bool | None,
        Knob(
            "Send a request's priority on to the engines; only for engines that schedule by it, since others refuse. "
            "Unset does so for engines that are started here and do."
        ),
    ] = None
    sim: SimSettings = SimSettings()
    vllm: VllmSettings = VllmSettings()


class ModelSettings(Settings, frozen=True, kw_only=True):
    """One model and the pools that serve it."""

    tokenizer: Annotated[
        str | None,
        Knob(
            "Folder or tokenizer.json of the model, or builtin:sim; unset routes by hashed text blocks, which match "
            "an engine's cache less well."
        ),
    ] = None
    pools: Annotated[
        dict[str, PoolSettings], Knob("Pools by name; all pools of a model have the same block size.")
    ] = {}


class LogSettings(Settings, frozen=True, kw_only=True):
    """What the processes write to their logs."""

    format: Annotated[LogFormat, Knob("text is key=value for people, json one object per line for machines.")] = "text"
    level: Annotated[
        LogLevel, Knob("Least severity that is written; debug is one line per request and more.", live=True)
    ] = "info"


class RunSettings(Settings, frozen=True, kw_only=True):
    """Where a run leaves its traces."""

    dir: Annotated[str, Knob("Folder in which every run makes a folder of its own.")] = "runs"
    journal: Annotated[
        bool,
        Knob("Write down what each router hears and decides, hashes and lengths only, so that it can be replayed."),
    ] = True
    journal_segment: Annotated[
        int,
        Knob(
            "Size of a journal's segment; each begins with all that the router knows, so that larger ones hold it up "
            "more rarely.",
            unit="bytes",
            ge=1 << 16,
        ),
    ] = 32 << 20
    journal_segments: Annotated[
        int, Knob("Segments kept of each router's journal; the oldest go.", unit="count", ge=1)
    ] = 4


class SuperviseSettings(Settings, frozen=True, kw_only=True):
    """How processes are started, restarted and ended."""

    start_timeout: Annotated[
        float,
        Knob(
            "Longest that engines and frontends may take to start before the cluster gives up.",
            unit="s",
            gt=0,
            live=True,
        ),
    ] = 60.0
    restart_backoff: Annotated[
        float,
        Knob("Wait before a crashed process is started again; doubles with each crash.", unit="s", gt=0, live=True),
    ] = 0.5
    restart_backoff_max: Annotated[float, Knob("Upper end of that wait.", unit="s", gt=0, live=True)] = 30.0
    stop_grace: Annotated[
        float,
        Knob(
            "How long a process may take to end after it was asked to, before it is killed.", unit="s", gt=0, live=True
        ),
    ] = 5.0
    drain_timeout: Annotated[
        float,
        Knob(
            "How long an engine that is drained, by drain, scale or restart, may take to finish its requests before it "
            "is ended with what still runs.",
            unit="s",
            ge=0,
            live=True,
        ),
    ] = 60.0
    orphan_grace: Annotated[
        float,
        Knob(
            "How long engines outlive a supervisor that was killed, so that the next one of the same namespace takes "
            "them over instead of starting them; 0 ends them at once.",
            unit="s",
            ge=0,
        ),
    ] = 30.0
    namespace: Annotated[
        str | None,
        Knob(
            "Name of the state file, by which a supervisor finds the engines of its forerunner; unset is the cluster's "
            "name and port."
        ),
    ] = None
    gpus: Annotated[
        tuple[int, ...] | None,
        Knob("Indices of the GPUs that may be given to engines; unset asks nvidia-smi and CUDA_VISIBLE_DEVICES.", ge=0),
    ] = None


class SloSettings(Settings, frozen=True, kw_only=True):
    """What users are promised. Requests that can't be served in time are refused early instead of late."""

    ttft: Annotated[
        float | None, Knob("Time to first token, queueing included; unset promises nothing.", unit="s", gt=0, live=True)
    ] = None
    itl: Annotated[
        float | None, Knob("Mean gap between output tokens of a request; unset promises nothing.", unit="s", gt=0)
    ] = None


class EngineStatsSettings(Settings, frozen=True, kw_only=True):
    """What is asked of engines about their forward passes."""

    interval: Annotated[
        float,
        Knob(
            "Length of a window in which an engine's passes are added up; shorter sees changes sooner and asks more "
            "often, 0 never asks.",
            unit="s",
            ge=0,
        ),
    ] = 5.0
    source: Annotated[
        StatsSource,
        Knob("auto takes the most exact there is (plug-in, then /metrics); metrics looks at /metrics only."),
    ] = "auto"


class CanarySettings(Settings, frozen=True, kw_only=True):
    """One-token requests to workers that nobody uses, so that a dead one is known before it is needed."""

    idle: Annotated[
        float,
        Knob(
            "Send one after a worker had no request for so long, and again each time; shorter notices sooner and costs "
            "more tokens, 0 sends none.",
            unit="s",
            ge=0,
        ),
    ] = 30.0
    timeout: Annotated[float, Knob("Longest that its token may take before it counts as missed.", unit="s", gt=0)] = (
        10.0
    )
    misses: Annotated[
        int, Knob("Misses in a row that cordon a worker; the next answer lifts it.", unit="count", ge=1)
    ] = 2
    unknown: Annotated[
        bool,
        Knob("Send them also to servers that do not say of which kind they are; somebody may pay for each token."),
    ] = False


def _default_models() -> dict[str, ModelSettings]:
    return {"sim": ModelSettings(tokenizer=BUILTIN_TOKENIZER, pools={"main": PoolSettings()})}


class ClusterSettings(Settings, frozen=True, kw_only=True):
    """A cluster: models, the endpoint before them, and the router between."""

    name: Annotated[str, Knob("Name of the cluster, as status and the page show it.")] = "penstock"
    cluster_secret: Annotated[
        str | None,
        Knob(
            "By which the processes of the cluster know each other, 16 characters or more; unset makes a new one at "
            "each start.",
            secret=True,
        ),
    ] = None
    cluster_secret_file: Annotated[
        str | None, Knob("File that holds cluster_secret instead; only this user may be able to read it.")
    ] = None
    models: Annotated[
        dict[str, ModelSettings], Knob("Models by the name that clients ask for; giving any replaces the default.")
    ] = msgspec.field(default_factory=_default_models)
    frontend: FrontendSettings = FrontendSettings()
    router: RouterSettings = RouterSettings()
    slo: SloSettings = SloSettings()
    discovery: DiscoverySettings = DiscoverySettings()
    logs: LogSettings = LogSettings()
    runs: RunSettings = RunSettings()
    supervise: SuperviseSettings = SuperviseSettings()
    engine_stats: EngineStatsSettings = EngineStatsSettings()
    canary: CanarySettings = CanarySettings()
    planner: PlanningSettings = PlanningSettings()

    @property
    def planning(self) -> PlanningSettings:
        """The planner's settings, with what the service level says where they leave it open."""
        slo = self.planner.slo
        slo = msgspec.structs.replace(
            slo, ttft=self.slo.ttft if slo.ttft is None else slo.ttft, itl=self.slo.itl if slo.itl is None else slo.itl
        )
        return msgspec.structs.replace(self.planner, slo=slo)

    @property
    def routing(self) -> RouterSettings:
        """The router's settings, with what the service level says where they leave it open."""
        overload, handoff, slo = self.router.overload, self.router.handoff, self.slo
        if overload.ttft is None and slo.ttft is not None:
            overload = msgspec.structs.replace(overload, ttft=slo.ttft)
        handoff = msgspec.structs.replace(
            handoff,
            ttft=slo.ttft if handoff.ttft is None else handoff.ttft,
            itl=slo.itl if handoff.itl is None else handoff.itl,
        )
        queue = self.router.queue
        if self.planner.enabled and self.planner.may_be_none and not queue.start_wait:
            queue = msgspec.structs.replace(queue, start_wait=self.planner.start.deadline)
        return msgspec.structs.replace(self.router, overload=overload, handoff=handoff, queue=queue)
