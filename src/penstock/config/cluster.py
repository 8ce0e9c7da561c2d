"""What can be set for a whole cluster? The top of the tree of settings; the rooms' own knobs hang below it."""

from typing import Annotated, Literal

import msgspec

from penstock.config.frontend import FrontendSettings
from penstock.engine.settings import SimSettings
from penstock.kernel.settings import Knob, Settings
from penstock.kernel.values import Role
from penstock.router.settings import RouterSettings

EngineKind = Literal["sim", "vllm", "openai"]
LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]

BUILTIN_TOKENIZER = "builtin:sim"


class PoolSettings(Settings, frozen=True, kw_only=True):
    """Engines that stand in for each other."""

    engine: Annotated[
        EngineKind,
        Knob("What serves: sim is started here unless urls are given; vllm and openai are servers that run already."),
    ] = "sim"
    role: Annotated[
        Role, Knob("What the engines do for a request; at present only aggregated, prefill and decode.")
    ] = "aggregated"
    replicas: Annotated[
        int, Knob("Simulated engine processes to start; more serve more and need CPU.", unit="count", ge=1, le=1024)
    ] = 4
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
    sim: SimSettings = SimSettings()


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


class DiscoverySettings(Settings, frozen=True, kw_only=True):
    """How the processes of a cluster find each other."""

    ttl: Annotated[
        float,
        Knob(
            "Seconds after which the entry of a process that died goes away; shorter notices sooner, writes more.",
            unit="s",
            ge=1,
        ),
    ] = 10.0


class LogSettings(Settings, frozen=True, kw_only=True):
    """What the processes write to their logs."""

    format: Annotated[LogFormat, Knob("text is key=value for people, json one object per line for machines.")] = "text"
    level: Annotated[LogLevel, Knob("Least severity that is written; debug is one line per request and more.")] = "info"


class RunSettings(Settings, frozen=True, kw_only=True):
    """Where a run leaves its traces."""

    dir: Annotated[str, Knob("Folder in which every run makes a folder of its own.")] = "runs"


class SuperviseSettings(Settings, frozen=True, kw_only=True):
    """How processes are started, restarted and ended."""

    start_timeout: Annotated[
        float, Knob("Longest that engines and frontends may take to start before the cluster gives up.", unit="s", gt=0)
    ] = 60.0
    restart_backoff: Annotated[
        float, Knob("Wait before a crashed process is started again; doubles with each crash.", unit="s", gt=0)
    ] = 0.5
    restart_backoff_max: Annotated[float, Knob("Upper end of that wait.", unit="s", gt=0)] = 30.0
    stop_grace: Annotated[
        float, Knob("How long a process may take to end after it was asked to, before it is killed.", unit="s", gt=0)
    ] = 5.0


def _default_models() -> dict[str, ModelSettings]:
    return {"sim": ModelSettings(tokenizer=BUILTIN_TOKENIZER, pools={"main": PoolSettings()})}


class ClusterSettings(Settings, frozen=True, kw_only=True):
    """A cluster: models, the endpoint before them, and the router between."""

    name: Annotated[str, Knob("Name of the cluster, as status and the page show it.")] = "penstock"
    models: Annotated[
        dict[str, ModelSettings], Knob("Models by the name that clients ask for; giving any replaces the default.")
    ] = msgspec.field(default_factory=_default_models)
    frontend: FrontendSettings = FrontendSettings()
    router: RouterSettings = RouterSettings()
    discovery: DiscoverySettings = DiscoverySettings()
    logs: LogSettings = LogSettings()
    runs: RunSettings = RunSettings()
    supervise: SuperviseSettings = SuperviseSettings()
