"""Values that all rooms share: ids, cards, pools, replicas, requests, sums of passes and traffic, SLO, KV events."""

from collections.abc import Sequence
from typing import Annotated, Any, Generic, Literal, NamedTuple, NewType, TypeVar

import msgspec

from penstock.kernel.latency_bins import Bins, join
from penstock.kernel.settings import Knob, Settings

RequestId = NewType("RequestId", str)
WorkerId = NewType("WorkerId", str)
BlockHash = NewType("BlockHash", int)
"""64-bit routing hash: chained, so it stands for a whole prefix (`penstock.kernel.hashing`)."""

JsonObject = dict[str, Any]
"""A JSON object in the format of another party, passed on or read field by field; what is ours is a struct."""
Role = Literal["aggregated", "prefill", "decode", "encode"]
ReplicaState = Literal["starting", "ready", "draining", "stopping", "failed"]
HandoffProtocol = Literal["completed", "push", "bootstrap"]
"""How KV goes from a prefill worker to a decode worker: see `penstock.router.stage_graph`."""
Tier = Literal["device", "host", "disk"]
TIERS: tuple[Tier, ...] = ("device", "host", "disk")
TIERS_LABEL = "kv_tiers"
"""Label of the card of a worker below which there are KV tiers; its value is their eviction order."""

S = TypeVar("S", bound=msgspec.Struct)
Tokens_co = TypeVar("Tokens_co", bound=float | None, covariant=True)
"""Tokens: int of one request, float of a mean, with None where they may be unknown."""


class Target(NamedTuple):
    """What a request is routed to: one data-parallel rank of one worker."""

    worker: WorkerId
    rank: int = 0

    def __str__(self) -> str:
        return self.worker if self.rank == 0 else f"{self.worker}/{self.rank}"


class PoolKey(msgspec.Struct, frozen=True, order=True):
    """Names a pool of workers that can replace each other. Pools are a mapping from this, never fields."""

    model: str
    role: Role = "aggregated"
    variant: str = ""

    def __str__(self) -> str:
        return ":".join(part for part in (self.model, self.role, self.variant) if part)


class PartlyKnown(msgspec.Struct, frozen=True):
    """Values of which some may be unknown: None."""

    def filled(self, weaker: S) -> S:
        """Return these values, with unknown ones taken from others of the same kind."""
        known = {name: getattr(self, name) for name in self.__struct_fields__ if getattr(self, name) is not None}
        return msgspec.structs.replace(weaker, **known)


class EngineLimits(PartlyKnown, Generic[Tokens_co], frozen=True, kw_only=True):
    """What one rank of an engine has room for; None is unknown.

    Units: tokens of a pass, sequences at once, tokens of KV. ``max_model_len``: tokens of a request.
    """

    max_num_batched_tokens: Tokens_co
    max_num_seqs: Tokens_co
    kv_tokens: Tokens_co
    max_model_len: int | None = None

    @property
    def none(self) -> bool:
        """True where an engine with these limits could run nothing."""
        return any(
            limit is not None and limit <= 0
            for limit in (self.max_num_batched_tokens, self.max_num_seqs, self.kv_tokens)
        )


UNKNOWN_LIMITS: EngineLimits[int | None] = EngineLimits(max_num_batched_tokens=None, max_num_seqs=None, kv_tokens=None)
USUAL_LIMITS = EngineLimits(max_num_batched_tokens=8192, max_num_seqs=256, kv_tokens=2_000_000)
"""Limits of an engine that reports none: vLLM's defaults, and the KV of a model of 8B on a GPU of 320 GB: no bound."""


class WorkerCard(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's description of itself. What is not known is None: unknown is not zero.

    Units: block_size, max_model_len, max_num_batched_tokens tokens; kv_blocks blocks; epoch grows with each restart.
    kv_blocks, max_num_seqs and max_num_batched_tokens are those of one data-parallel rank.
    """

    id: WorkerId
    epoch: int
    started_epoch: int | None = None
    """Epoch at which this engine joined, where the same engine goes on under a newer epoch."""
    model: str
    url: str
    role: Role = "aggregated"
    variant: str = ""
    engine: str = "openai"
    adapters: tuple[str, ...] = ()
    """LoRA adapters that it listed when it was described."""
    adapter_slots: int | None = None
    """LoRA adapters that it holds at once; None where it loads none while it runs."""
    block_size: int | None = None
    kv_blocks: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_model_len: int | None = None
    ranks: int = 1
    tokenizer: str | None = None
    hash_scheme: str | None = None
    events: tuple[str, ...] = ()
    """KV event endpoint per rank (ZMQ); empty where the engine announces none."""
    replay: tuple[str, ...] = ()
    """Replay endpoint per rank, or empty."""
    events_security: str | None = None
    """``curve`` where both require the cluster's secret; None where they are not encrypted, as in stock engines."""
    topic: str = ""
    stats: str | None = None
    """Endpoint (ZMQ) at which the engine reports every forward pass; None where it reports none."""
    handoff: HandoffProtocol | None = None
    """How its KV can go to, or come from, another worker; None where it can't."""
    fixed_role: bool = False
    """It does its role and nothing else: one that prefills, or decodes, refuses a request without the other."""
    layout: str | None = None
    """Digest of all that two workers must have alike for a hand-off, as far as it is known."""
    bootstrap: str | None = None
    """``host:port`` at which a prefill worker of protocol bootstrap, or push, meets the decode worker."""
    labels: dict[str, str] = {}
    access: str | None = None
    """Pool of its model whose settings say how it lets others in; None where it serves everybody."""
    pid: int | None = None

    @property
    def incarnation(self) -> int:
        """The epoch at which this engine joined: as long as it stays, its cache is what it was."""
        return self.epoch if self.started_epoch is None else self.started_epoch

    @property
    def pool(self) -> PoolKey:
        return PoolKey(self.model, self.role, self.variant)

    @property
    def limits(self) -> EngineLimits[int | None]:
        kv = None if self.kv_blocks is None or self.block_size is None else self.kv_blocks * self.block_size
        return EngineLimits(
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_seqs=self.max_num_seqs,
            kv_tokens=kv,
            max_model_len=self.max_model_len,
        )


class StartRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Where the seconds of a replica's start went.

    Args:
        seconds: from the decision to start its process, or to wake it, until every frontend knew it.
        phases: their seconds, in order; one that its engine does not tell is None.
        woken: it was asleep, and no process was started.
    """

    seconds: float
    phases: dict[str, float | None]
    woken: bool = False

    @property
    def other(self) -> float:
        """Seconds that belong to no known phase."""
        return max(0.0, self.seconds - sum(spent for spent in self.phases.values() if spent is not None))


class Replica(msgspec.Struct, frozen=True, kw_only=True):
    """One replica of a pool.

    Args:
        reason: why it does not serve, where that is known.
        gpus: indices of its own.
        role: its role for requests; None where it does not serve or its role is unknown.
        start: its last start; None where it is not over, or was not seen.
        asleep: it is drained, has no GPUs, and can be woken; earlier releases read that as draining.
        host_memory: bytes that it takes of its machine while it is asleep; None where that is unknown.
        outdated: what its successor waits for, where it does not run as its spec wants.
    """

    id: str
    state: ReplicaState
    reason: str | None = None
    pid: int | None = None
    gpus: tuple[int, ...] = ()
    role: Role | None = None
    start: StartRecord | None = None
    asleep: bool = False
    host_memory: int | None = None
    outdated: str | None = None


class Pool(msgspec.Struct, frozen=True, kw_only=True):
    """Interchangeable replicas of one model.

    Args:
        role: of its replicas that have no other.
        gpus: of one replica, as capacity limits count them.
        desired: replicas that are worked towards.
        acknowledged: False while whoever runs the replicas has not taken ``desired`` up.
        limit: most replicas that there can be; None where only an attempt would show it.
        problem: why ``desired`` can't be reached.
        replicas: those that there are, on their way in or out and asleep included; None where they are only counted.
    """

    model: str
    role: Role = "aggregated"
    variant: str = ""
    gpus: int = 1
    desired: int
    acknowledged: bool = True
    limit: int | None = None
    problem: str | None = None
    replicas: tuple[Replica, ...] | None = None

    @property
    def ids(self) -> list[str]:
        return [replica.id for replica in self.replicas or ()]

    @property
    def ready(self) -> int:
        return self.count("ready")

    @property
    def settled(self) -> bool:
        """True where the replicas that are not asleep are those desired, and all serve."""
        return self.ready == self.desired == len(self.ids) - self.asleep

    def count(self, *states: ReplicaState) -> int:
        """Return how many replicas that are not asleep are in one of these states."""
        return sum(replica.state in states and not replica.asleep for replica in self.replicas or ())

    @property
    def asleep(self) -> int:
        return sum(replica.asleep for replica in self.replicas or ())


class RequestShape(PartlyKnown, Generic[Tokens_co], frozen=True):
    """One request, or the mean of many: tokens of prompt (``isl``) and output (``osl``), share of the prompt from cache
    (0..1), tokens per speculated step. None is unknown."""

    isl: Tokens_co
    osl: Tokens_co
    hit_rate: float | None = None
    accept_length: float | None = None


UNKNOWN_SHAPE: RequestShape[float | None] = RequestShape(None, None)


class MediaItem(msgspec.Struct, frozen=True):
    """An image or the like in a prompt.

    Args:
        id: of its content; None where only an engine knows it.
        tokens: that stand for it; 0 where it is not known how many.
    """

    id: str | None = None
    tokens: int = 0


class Prompt(msgspec.Struct, frozen=True):
    """A prompt as routing and engines know it: without its words.

    Args:
        isl: its tokens.
        blocks: chained hashes of its full blocks, as many as are known, or their short form
            (`penstock_lab.runs.block_runs.Chain`).
        estimated: no tokenizer of the model was at hand: ``isl`` is an estimate, and the blocks name text and no KV.
    """

    isl: int
    blocks: Sequence[int] = ()
    estimated: bool = False


class StepStats(msgspec.Struct, frozen=True, kw_only=True):
    """What one window of an engine's forward passes did; sums, so that windows add up.

    A sum that the engine does not expose is None; one that we estimated is named in ``estimated``.
    Units: wall seconds; tokens; sequences; ``*_sq`` are sums of squares over passes. What is queued is summed over
    passes too, so that a mean is a sum divided by ``passes``.
    """

    passes: int
    wall: float | None
    prefill_tokens: int | None = None
    prefill_tokens_sq: int | None = None
    prefill_requests: int | None = None
    decode_seqs: int | None = None
    decode_seqs_sq: int | None = None
    decode_kv: int | None = None
    decode_kv_sq: int | None = None
    queued_requests: int | None = None
    queued_prefill_tokens: int | None = None
    queued_decode_kv: int | None = None
    preemptions: int | None = None
    estimated: tuple[str, ...] = ()

    def __add__(self, other: "StepStats") -> "StepStats":
        """Join two windows: sums add; a sum unknown in either is unknown in both."""
        added: dict[str, object] = {}
        for name in STEP_SUMS:
            mine, theirs = getattr(self, name), getattr(other, name)
            added[name] = None if mine is None or theirs is None else mine + theirs
        names = tuple(sorted({*self.estimated, *other.estimated}))
        return msgspec.convert({**added, "estimated": names}, StepStats)


STEP_SUMS = tuple(name for name in StepStats.__struct_fields__ if name != "estimated")
"""Names of the sums of a `StepStats`."""


class Traffic(msgspec.Struct, kw_only=True):
    """One model's requests in ``seconds``. Counts of requests and tokens; latencies in seconds.

    Only `penstock.planner.sizing.request_counts.RequestCounts` changes one, before anyone else has it.

    Demand counts at arrival: ``arrived`` and ``prompt_tokens`` are of requests that arrived in the window, all others
    are of those that ended in it. A source that counts at the end only (``at_end``) puts the same numbers in both.

    Args:
        prompts: prompt tokens of those that arrived, in the bins of `penstock.planner.sizing.workload_mix`.
        shapes: joint bins of prompt, output and share of cache, of those that were answered.
        classes: answers by the class that their requests named.
        judged, in_slo: requests of which it is known whether they kept the service level, and those that did.
        lost: failed, refused and expired.
        cache_reported_tokens: prompt tokens of answers that report their cached tokens: ``cached_tokens`` of these.
        ttft, itl: each answer's, in `penstock.kernel.latency_bins`; empty where the source knows only sums.
        accept_length: tokens per speculated step; None without speculation.
    """

    seconds: float
    arrived: int
    prompt_tokens: int
    answered: int = 0
    answered_prompt_tokens: int = 0
    output_tokens: int = 0
    lost: int = 0
    judged: int = 0
    in_slo: int = 0
    cached_tokens: int = 0
    cache_reported_tokens: int = 0
    ttft_sum: float = 0.0
    ttft_count: int = 0
    itl_sum: float = 0.0
    itl_count: int = 0
    duration_sum: float = 0.0
    ttft: Bins = {}
    itl: Bins = {}
    prompts: Bins = {}
    shapes: Bins = {}
    classes: dict[str, int] = {}
    accept_length: float | None = None
    at_end: bool = False

    def __add__(self, later: "Traffic") -> "Traffic":
        """Return both windows as one; ``accept_length`` is the later one's, where it has one."""
        added: dict[str, object] = {}
        for name in self.__struct_fields__:
            mine, theirs = getattr(self, name), getattr(later, name)
            if name == "accept_length":
                added[name] = mine if theirs is None else theirs
            elif name == "at_end":
                added[name] = mine or theirs
            elif isinstance(mine, dict):
                both = dict(mine)
                join(both, theirs)
                added[name] = both
            else:
                added[name] = mine + theirs
        return Traffic(**added)  # type: ignore[arg-type]

    @property
    def rate(self) -> float:
        """Requests per second that arrived."""
        return self.arrived / self.seconds if self.seconds else 0.0

    @property
    def shape(self) -> RequestShape[float | None]:
        """Mean request: prompt of those that arrived, output of those that were answered, token-weighted share of cache
        of the answers that report it."""
        return RequestShape(
            isl=self.prompt_tokens / self.arrived if self.arrived else None,
            osl=self.output_tokens / self.answered if self.answered else None,
            hit_rate=self.cached_tokens / self.cache_reported_tokens if self.cache_reported_tokens else None,
            accept_length=self.accept_length,
        )

    @property
    def ttft_mean(self) -> float | None:
        return self.ttft_sum / self.ttft_count if self.ttft_count else None

    @property
    def itl_mean(self) -> float | None:
        return self.itl_sum / self.itl_count if self.itl_count else None


USUAL_TTFT, USUAL_ITL = 0.5, 0.05
"""Seconds that the planner keeps where nothing is promised."""


class LatencyTargets(NamedTuple):
    """Latency targets of one request, in seconds; None is no target.

    ``ttft``: time to first token, queueing included; ``itl``: mean gap between its output tokens.
    """

    ttft: float | None
    itl: float | None


NOTHING_PROMISED = LatencyTargets(None, None)


class SloClass(Settings, frozen=True, kw_only=True):
    """What is promised to requests of one class."""

    ttft: Annotated[float | None, Knob("Time to first token; unset is slo.ttft.", unit="s", gt=0)] = None
    itl: Annotated[float | None, Knob("Mean gap between output tokens; unset is slo.itl.", unit="s", gt=0)] = None
    weight: Annotated[
        float,
        Knob("What a miss of this class costs, as a multiple of planner.slo.miss_cost; 0 is best effort.", ge=0),
    ] = 1.0


class Slo(Settings, frozen=True, kw_only=True):
    """What users are promised: it is measured and planned for; only ``router.overload`` refuses requests."""

    ttft: Annotated[
        float | None,
        Knob(
            "Time to first token, queueing included; unset promises nothing, and the planner keeps 0.5 s.",
            unit="s",
            gt=0,
            live=True,
        ),
    ] = None
    itl: Annotated[
        float | None,
        Knob(
            "Mean gap between output tokens of a request; unset promises nothing, and the planner keeps 50 ms.",
            unit="s",
            gt=0,
            live=True,
        ),
    ] = None
    classes: Annotated[
        dict[str, SloClass],
        Knob("Other targets by a request's class, which it names as nvext.agent_context.context_type."),
    ] = {}

    def of(self, service_class: str | None) -> LatencyTargets:
        """Return the targets of a request, by the class that it names."""
        own = self.classes.get(service_class or "")
        if own is None:
            return LatencyTargets(self.ttft, self.itl)
        return LatencyTargets(self.ttft if own.ttft is None else own.ttft, self.itl if own.itl is None else own.itl)

    @property
    def planned(self) -> tuple[float, float]:
        """TTFT and ITL that the planner keeps, in seconds: the promised ones, or the usual where there are none."""
        return self.ttft or USUAL_TTFT, self.itl or USUAL_ITL

    def otherwise(self, ttft: float | None, itl: float | None) -> "Slo":
        """Return this SLO with other targets where a number is given."""
        return Slo(ttft=self.ttft if ttft is None else ttft, itl=self.itl if itl is None else itl, classes=self.classes)


class KvStored(msgspec.Struct, frozen=True, kw_only=True, tag="stored", tag_field="type"):
    """An engine holds new blocks, one after the other.

    ``hashes`` are the engine's own; they are our `BlockHash` where the card's ``hash_scheme`` is ours. ``tokens``
    (len(hashes) * block_size of them) serve to translate opaque ones and may be empty where none are needed; ``local``
    (`penstock.kernel.hashing.local_hashes` of tokens and extras, one per block) does the same and reveals no text.
    ``window``: blocks before a token that the layers of these blocks read, 0 for all. Those of a window have the names
    that the same tokens have for full attention, and come without tokens; they need not follow one another.
    ``blocks``: our hashes of the same blocks, as another frontend knows them; ``parent`` then is ours, too.
    """

    hashes: Sequence[int]
    parent: int | None = None
    tokens: list[int] = []
    block_size: int = 0
    extras: list[bytes] | None = None
    tier: Tier = "device"
    local: list[int] | None = None
    window: int = 0
    blocks: list[int] | None = None


class KvRemoved(msgspec.Struct, frozen=True, kw_only=True, tag="removed", tag_field="type"):
    """An engine dropped blocks from one tier."""

    hashes: Sequence[int]
    tier: Tier = "device"
    window: int = 0


class KvCleared(msgspec.Struct, frozen=True, kw_only=True, tag="cleared", tag_field="type"):
    """An engine dropped everything, or all that it had in one tier."""

    tier: Tier | None = None


KvEvent = KvStored | KvRemoved | KvCleared


def plain(value: object) -> list[Any]:
    """Write a sequence that is kept in another form as a list: what `msgspec` asks for a type that it does not know.

    Raises:
        TypeError: it is something else.
    """
    if isinstance(value, Sequence):
        return list(value)
    raise TypeError(f"a {type(value).__name__} is not plain data")
