"""Top of the tree of settings, for a whole cluster; the knobs of the other rooms hang below it."""

from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import msgspec

from penstock import extension
from penstock.config.settings.discovery_settings import DiscoverySettings
from penstock.config.settings.frontend_settings import FrontendSettings
from penstock.config.settings.planning_settings import PlanningSettings
from penstock.config.settings.pool_access_settings import PoolAccessSettings
from penstock.config.settings.tenant_settings import AuditSettings, TenantSettings
from penstock.fleet.crash_backoff import RESTART_BACKOFF_MAX
from penstock.fleet.fleet_state import HealthLimits
from penstock.kernel.settings import Knob, Settings
from penstock.kernel.values import HandoffProtocol, Role, Slo
from penstock.router.settings import RouterSettings

if TYPE_CHECKING:
    SimSettings: TypeAlias = Any
    CacheSettings: TypeAlias = Any
    PickerSettings: TypeAlias = Any
    ExtensionSettings: TypeAlias = Any
else:  # groups of the companions that have a place of their own, and those of everybody else
    SimSettings, CacheSettings, PickerSettings = map(extension.settings_group, ("sim", "cache", "picker"))
    ExtensionSettings = extension.settings_groups()

EngineKind = Literal["sim", "vllm", "sglang", "trtllm", "llamacpp", "openai"]
LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]

BUILTIN_TOKENIZER = "builtin:sim"


PROGRAMS = {"vllm": "vllm", "sglang": "python3", "llamacpp": "llama-server"}
"""Kind of engine -> the program that serves it, where no other is named."""
STARTED = ("sim", *PROGRAMS)
"""Kinds of engine that Penstock starts where no URL is given."""
HELD_ADAPTERS = 16
"""LoRA adapters that an engine holds where nothing else is set: some 100 MB each for a model of 8B at rank 16."""
START_TIMEOUT = 60.0
"""Longest start, in seconds, of a frontend, a planner or a simulated engine, where nothing else is set."""


LateSystem = Literal["user", "first", "keep"]


class HealthSettings(Settings, frozen=True, kw_only=True):
    """Health checks of engines that serve, of servers that others run and of engines that are started here."""

    interval: Annotated[
        float,
        Knob(
            "Time between two checks, and between two tries to reach a server that is away; shorter notices sooner and "
            "asks more often.",
            unit="s",
            gt=0,
        ),
    ] = 2.0
    timeout: Annotated[
        float,
        Knob(
            "Longest that a server may take to answer one; longer is more patient with engines that compile or load.",
            unit="s",
            gt=0,
        ),
    ] = 5.0
    misses: Annotated[
        int,
        Knob(
            "Failed checks in a row after which a server that takes no connections is removed, and one that takes them "
            "and says nothing gets requests only where no other is left; more is slower and surer.",
            unit="count",
            ge=1,
        ),
    ] = 2

    @property
    def limits(self) -> HealthLimits:
        """The same for the fleet machine."""
        return HealthLimits(interval=self.interval, timeout=self.timeout, misses=self.misses)


class PoolSettings(Settings, frozen=True, kw_only=True):
    """Engines that stand in for each other."""

    engine: Annotated[
        EngineKind,
        Knob(
            "What serves: sim, vllm, sglang and llamacpp are started here unless urls are given; the others run "
            "already."
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
    client_fields: Annotated[
        tuple[str, ...],
        Knob(
            "Fields that steer engines and that clients may set all the same, such as vllm_xargs.top_n or lora; "
            "docs/guides/security.md lists them and what each can do."
        ),
    ] = ()
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
    sleeping: Annotated[
        int,
        Knob(
            "Replicas that are put to sleep at most, in place of ending, where the pool shrinks: each keeps weights "
            "in host memory, frees its GPUs, and serves again sooner than a new one. For vllm on GPUs, and sim.",
            unit="count",
            ge=0,
            le=64,
        ),
    ] = 0
    share_weights: Annotated[
        bool,
        Knob(
            "Keep the checkpoint in this machine's page cache, serve its weights to engines of other machines that "
            "start, and take them from there. For vllm with a checkpoint in a folder, and penstock in its environment; "
            "a simulated engine then takes sim.sibling_load_time."
        ),
    ] = False
    urls: Annotated[
        tuple[str, ...],
        Knob("Base URLs of servers that run already, without /v1; where there are any, none is started."),
    ] = ()
    selector: Annotated[
        str | None,
        Knob(
            "Label selector of Kubernetes pods that are the pool's servers while they are ready, such as app=vllm; or "
            "inferencepool/NAME, for the pods that an InferencePool selects."
        ),
    ] = None
    block_size: Annotated[
        int | None,
        Knob("Tokens per KV block, where the server does not tell it; must be the engine's own.", unit="tokens", gt=0),
    ] = None
    kv_blocks: Annotated[
        int | None, Knob("KV blocks of one engine, where the server does not tell it.", unit="blocks", gt=0)
    ] = None
    max_model_len: Annotated[
        int | None, Knob("Longest prompt and output together, where the server does not tell it.", unit="tokens", gt=0)
    ] = None
    max_num_batched_tokens: Annotated[
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
            "Unset does so for engines that are started here and do, and for an SGLang that says so."
        ),
    ] = None
    command: Annotated[
        str | None,
        Knob(
            "Program that is started, a name found in PATH or a path: vllm, possibly of an environment of its own; "
            "llama-server, or the Python of an environment with llama-cpp-python[server]; unset is the kind's own name."
        ),
    ] = None
    args: Annotated[
        tuple[str, ...],
        Knob("More flags of the program, one word each; a flag that stands here replaces ours of the same name."),
    ] = ()
    env: Annotated[
        dict[str, str],
        Knob("More environment of the program, such as VLLM_CPU_KVCACHE_SPACE; wins over ours.", secret=True),
    ] = {}
    model_path: Annotated[
        str | None,
        Knob(
            "Folder or hub id of the checkpoint, for llamacpp the GGUF file; unset takes the name under which clients "
            "ask for it."
        ),
    ] = None
    tool_parser: Annotated[
        str | None,
        Knob(
            "Format in which the model writes tool calls, such as hermes. Engines with parsers of their own that are "
            "started here get it as a flag; in the answers of others, and after the prefix penstock:, Penstock parses."
        ),
    ] = None
    reasoning_parser: Annotated[
        str | None,
        Knob(
            "Format of the model's reasoning, such as qwen3, or for Penstock's parser a pair of tags such as "
            "<think>...</think>; goes the same ways."
        ),
    ] = None
    max_cpu_loras: Annotated[
        int | None,
        Knob(
            "LoRA adapters that each engine holds in memory; more need less loading and more host memory. Unset is "
            "16 for engines that are started here for a model with adapters, what the server tells for others.",
            unit="count",
            ge=1,
        ),
    ] = None
    max_loras: Annotated[
        int,
        Knob(
            "LoRA adapters that one batch of an engine may have; more let more of them run together and cost GPU "
            "memory. vLLM's --max-loras, SGLang's --max-loras-per-batch.",
            unit="count",
            ge=1,
        ),
    ] = 4
    max_lora_rank: Annotated[
        Literal[1, 8, 16, 32, 64, 128, 256, 320, 512],
        Knob("Highest rank of its LoRA adapters; higher costs GPU memory for each of max_loras. vLLM's own steps."),
    ] = 16
    embeddings: Annotated[
        str | None,
        Knob(
            "Folder in which a pool of role encode leaves encoded media, and all others of the model find them: the "
            "same for each, on storage that they share. Unset: every engine encodes for itself."
        ),
    ] = None
    embeddings_max: Annotated[
        int,
        Knob(
            "Bytes of that folder; the media used least lately go first. vLLM heeds it where its environment has "
            "Penstock.",
            unit="bytes",
            gt=0,
        ),
    ] = 16 * 1024**3
    access: PoolAccessSettings = PoolAccessSettings()
    health: HealthSettings = HealthSettings()
    cache: CacheSettings = msgspec.field(default_factory=lambda: CacheSettings())
    sim: SimSettings = msgspec.field(default_factory=lambda: SimSettings())

    @property
    def attached(self) -> bool:
        """Whether others run its servers."""
        return bool(self.urls) or self.selector is not None

    @property
    def size(self) -> int:
        """Its engines at the start; of pods that a selector names none is known yet."""
        return 0 if self.selector is not None else len(self.urls) or self.replicas

    @property
    def program(self) -> str:
        """The program that is started for an engine of this pool that is not simulated."""
        return self.command or PROGRAMS[self.engine]


class ModelSettings(Settings, frozen=True, kw_only=True):
    """One model and the pools that serve it."""

    tokenizer: Annotated[
        str | None,
        Knob(
            "Folder or tokenizer.json of the model, or builtin:sim; unset routes by hashed text blocks, which match "
            "an engine's cache less well."
        ),
    ] = None
    render: Annotated[
        str | None,
        Knob(
            "Who makes a prompt's tokens with vLLM's render routes: the URL of a server (`vllm launch render`), engine "
            "(the model's own servers, with --enable-scale-out) or off; unset is engine for a model without tokenizer "
            "whose servers have the routes, and else none: tokenising here costs no call."
        ),
    ] = None
    aliases: Annotated[
        tuple[str, ...],
        Knob("More names by which clients may ask for it; their answers say the name that was asked for."),
    ] = ()
    defaults: Annotated[
        dict[str, str],
        Knob(
            "Fields of the engines' API for requests that leave them out, such as temperature: 0.2; a list or an "
            "object is written as JSON in quotes."
        ),
    ] = {}
    system_prompt: Annotated[
        str | None,
        Knob("System message of chats that have none: a text, or file:PATH for what a file has in it."),
    ] = None
    late_system: Annotated[
        LateSystem,
        Knob(
            "What becomes of a system message after the first turn in requests of /v1/responses and /v1/messages: user "
            "puts it, marked, into the user's turn there, which keeps the cache's prefix and suits any template; "
            "first puts it at the beginning, where models heed it most and all that follows is computed anew; keep "
            "leaves it, for models whose template takes it there."
        ),
    ] = "user"
    chat_template: Annotated[
        str | None,
        Knob(
            "File with a Jinja chat template in place of the checkpoint's own, for prefixes as well as for the "
            "engines: those that are started here get it as a flag, others with each chat, where they take it."
        ),
    ] = None
    adapters: Annotated[
        dict[str, str],
        Knob("LoRA adapters by the name that clients ask for: a folder, or what else the engine takes for a path."),
    ] = {}
    adapter_folder: Annotated[
        str | None,
        Knob("Folder in which each subfolder with an adapter_config.json is a LoRA adapter of its name."),
    ] = None
    adapter_workers: Annotated[
        dict[str, int],
        Knob(
            "Workers that hold an adapter at any time, by its name: it is loaded there before anybody asks for it, and "
            "makes room for no other. Others come and go by demand, in the room that is left.",
            ge=0,
        ),
    ] = {}
    pools: Annotated[
        dict[str, PoolSettings], Knob("Pools by name; all pools of a model have the same block size.")
    ] = {}


class NameSettings(Settings, frozen=True, kw_only=True):
    """A public name behind which several models stand."""

    models: Annotated[
        dict[str, float],
        Knob(
            "Models, and adapters of models.MODEL.adapters, that answer by this name, each with its weight; a session "
            "stays with one of them, and a new weight moves only the sessions that it has to. Empty is the model of "
            "this name.",
            ge=0,
            live=True,
        ),
    ] = {}
    shadow: Annotated[
        dict[str, float],
        Knob(
            "Models that get a copy of a share of this name's requests, 0 to 1, once each has been answered; their "
            "answers are compared with what the client got, and dropped.",
            unit="ratio",
            ge=0,
            le=1,
            live=True,
        ),
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
    keep_for: Annotated[
        float | None,
        Knob(
            "Run folders last written to longer ago are deleted at the start of a cluster; unset keeps them.",
            unit="s",
            gt=0,
        ),
    ] = None
    keep_bytes: Annotated[
        int | None,
        Knob(
            "Bytes of all run folders together: the oldest are deleted at the start of a cluster until they fit; unset "
            "keeps them.",
            unit="bytes",
            ge=1,
        ),
    ] = None
    journal: Annotated[
        bool,
        Knob("Write down what each router hears and decides, hashes and lengths only, so that it can be replayed."),
    ] = True
    records_bytes: Annotated[
        int,
        Knob(
            "Most bytes kept of each of requests.jsonl, copies.jsonl, decisions.jsonl, shadow.jsonl and planner.jsonl, "
            "in 4 segments of which the oldest goes; the default is about 400,000 requests, and more is a longer past "
            "for reports and explain.",
            unit="bytes",
            ge=1 << 12,
        ),
    ] = 256 << 20


class SuperviseSettings(Settings, frozen=True, kw_only=True):
    """How processes are started, restarted and ended."""

    start_timeout: Annotated[
        float | None,
        Knob(
            "Longest that a process may take to start before it is given up; unset is 60 s, and 10 minutes for engines "
            "that are not simulated, since large checkpoints take minutes.",
            unit="s",
            gt=0,
            live=True,
        ),
    ] = None
    wait: Annotated[
        bool,
        Knob(
            "Start although none of the servers in urls answers yet, and take them in when they come; else that is an "
            "error. Some of them may be away in any case."
        ),
    ] = False
    restart_backoff: Annotated[
        float,
        Knob(
            "Wait before a crashed process is started again; doubles with each crash, up to 30 s.",
            unit="s",
            gt=0,
            le=RESTART_BACKOFF_MAX,
            live=True,
        ),
    ] = 0.5
    stop_grace: Annotated[
        float,
        Knob(
            "How long a process may take to end after it was asked to, before it is killed.", unit="s", gt=0, live=True
        ),
    ] = 5.0
    drain_timeout: Annotated[
        float,
        Knob(
            "How long an engine or a frontend that is drained, by drain, scale, restart or the end of the cluster, may "
            "take to finish its requests before it is ended with what still runs.",
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


def _default_models() -> dict[str, ModelSettings]:
    return {"sim": ModelSettings(tokenizer=BUILTIN_TOKENIZER, pools={"main": PoolSettings()})}


class ClusterSettings(Settings, frozen=True, kw_only=True):
    """A cluster: models, the endpoint before them, and the router between."""

    name: Annotated[
        str,
        Knob(
            "Name of the cluster in status and on the page; clusters that share an etcd or a NATS have different ones."
        ),
    ] = "penstock"
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
    names: Annotated[
        dict[str, NameSettings],
        Knob("Names beside those of models, for canaries (weights between models) and shadows (copies of requests)."),
    ] = {}
    frontend: FrontendSettings = FrontendSettings()
    tenants: Annotated[
        dict[str, TenantSettings],
        Knob("Tenants by name, each with keys of its own; keys of frontend.security.api_keys belong to none."),
    ] = {}
    audit: AuditSettings = AuditSettings()
    picker: PickerSettings = msgspec.field(default_factory=lambda: PickerSettings())
    router: RouterSettings = RouterSettings()
    slo: Slo = Slo()
    discovery: DiscoverySettings = DiscoverySettings()
    logs: LogSettings = LogSettings()
    runs: RunSettings = RunSettings()
    supervise: SuperviseSettings = SuperviseSettings()
    engine_stats: EngineStatsSettings = EngineStatsSettings()
    canary: CanarySettings = CanarySettings()
    planner: PlanningSettings = PlanningSettings()
    extensions: ExtensionSettings = msgspec.field(default_factory=lambda: ExtensionSettings())

    @property
    def routing(self) -> RouterSettings:
        """The router's settings; where the planner may stop all workers, requests wait for as long as a start takes."""
        queue = self.router.queue
        if self.planner.enabled and self.planner.may_be_none and not queue.start_wait:
            return msgspec.structs.replace(
                self.router, queue=msgspec.structs.replace(queue, start_wait=self.planner.start.deadline)
            )
        return self.router
