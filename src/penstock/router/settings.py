"""Settings of the router: each knob once, with unit, range, default and what it trades."""

from typing import Annotated, Literal

from penstock.kernel.settings import Knob, Settings

Mode = Literal["kv", "round_robin", "random", "least_loaded", "power_of_two", "direct"]
CostName = Literal["blocks", "latency"]
QueuePolicy = Literal["fcfs", "lcfs", "wspt", "edf"]
AffinityMode = Literal["off", "soft", "hard"]
IndexKind = Literal["auto", "exact", "approximate", "none"]
Preset = Literal["general", "agentic"]
Conditional = Literal["auto", "slo", "thresholds", "off"]

OPEN_MAX = 60.0
"""Longest that an open breaker waits, in seconds: a worker that came back gets no request for a minute at most."""


class CostSettings(Settings, frozen=True):
    """What a placement costs."""

    kind: Annotated[
        CostName,
        Knob(
            "Unit of cost: blocks is the formula of Dynamo's default selector, latency predicts milliseconds of TTFT "
            "and slow-down.",
            live=True,
        ),
    ] = "blocks"
    overlap_credit: Annotated[
        float,
        Knob(
            "Blocks of prefill that one cached device block saves; above 1 it clusters, 0 needs no index.",
            ge=0,
            live=True,
        ),
    ] = 1.0
    host_credit: Annotated[float, Knob("The same for a block in host memory.", ge=0, live=True)] = 0.75
    disk_credit: Annotated[float, Knob("The same for a block on disk.", ge=0, live=True)] = 0.25
    prefill_scale: Annotated[
        float,
        Knob("Weight of prefill against decode blocks; higher favours cache hits and TTFT over ITL.", ge=0, live=True),
    ] = 1.0
    decode_scale: Annotated[
        float,
        Knob("Weight of the KV blocks in use; higher evens the load of decoding out, 0 ignores it.", ge=0, live=True),
    ] = 1.0
    transfer_scale: Annotated[
        float,
        Knob(
            "Blocks of load that a block counts which has to be brought from a prefill worker; higher keeps hand-offs "
            "near and where part of the prompt is cached.",
            ge=0,
            live=True,
        ),
    ] = 0.1
    request_weight: Annotated[
        float,
        Knob(
            "Blocks that each running request counts for beside its KV; spreads many short requests.", ge=0, live=True
        ),
    ] = 0.0
    temperature: Annotated[
        float, Knob("Softmax temperature over normalised costs; 0 takes the cheapest, higher spreads.", ge=0, live=True)
    ] = 0.0


class IndexSettings(Settings, frozen=True):
    """Who holds which block."""

    kind: Annotated[
        IndexKind,
        Knob("Where overlap comes from: auto is exact where a worker announces KV events, else approximate."),
    ] = "auto"
    approximate_ttl: Annotated[
        float, Knob("How long a routing decision counts as cached on a worker without events.", unit="s", gt=0)
    ] = 120.0
    predicted_ttl: Annotated[
        float,
        Knob(
            "How long a decision counts beside the exact index, so that siblings go together; 0 switches it off.",
            unit="s",
            ge=0,
        ),
    ] = 5.0


class QueueSettings(Settings, frozen=True):
    """Waiting before busy workers."""

    threshold: Annotated[
        float | None,
        Knob(
            "Hold requests while every worker's active prefill tokens exceed this share of its max_num_batched_tokens; "
            "unset never holds, 0 holds at the first busy token.",
            unit="ratio",
            ge=0,
            live=True,
        ),
    ] = None
    policy: Annotated[
        QueuePolicy,
        Knob("Order of waiting: fcfs tail TTFT, lcfs newest first, wspt mean TTFT, edf earliest deadline.", live=True),
    ] = "fcfs"
    length_max: Annotated[
        int | None,
        Knob(
            "Most requests waiting per model; the next one is refused with 503. Unset is half of the sequences that "
            "the model's engines take at once, and 1,024 at least.",
            unit="requests",
            ge=0,
            live=True,
        ),
    ] = None
    wait_max: Annotated[
        float, Knob("Longest a request waits before it is refused with 503.", unit="s", gt=0, live=True)
    ] = 60.0
    start_wait: Annotated[
        float,
        Knob(
            "Longest that a request waits while its model has no worker at all, for one to be started; 0 refuses it at "
            "once. A planner that may take every worker away needs it, and sets it where it is 0.",
            unit="s",
            ge=0,
            live=True,
        ),
    ] = 0.0
    age_after: Annotated[
        float,
        Knob(
            "A request that waited for so long has starved: a tenth of the work goes to those of its class, oldest "
            "first, and the rest by the policy.",
            unit="s",
            gt=0,
            live=True,
        ),
    ] = 10.0
    shares: Annotated[
        dict[str, float],
        Knob(
            "Tenants and the weights by which they share the fleet in tokens of prompts and output; those without one "
            "share the weight 1. Empty gives no shares.",
            gt=0,
            live=True,
        ),
    ] = {}


class OverloadSettings(Settings, frozen=True):
    """When a new request is refused with 503 and Retry-After, because every worker is beyond a limit."""

    blocks: Annotated[
        float | None,
        Knob(
            "Share of a worker's KV blocks in use by running requests; unset means no limit.",
            unit="ratio",
            gt=0,
            live=True,
        ),
    ] = None
    prefill_tokens: Annotated[
        int | None,
        Knob("Prompt tokens that a worker still has to prefill; unset means no limit.", unit="tokens", gt=0, live=True),
    ] = None
    queue_time: Annotated[
        float | None,
        Knob(
            "How long the longest waiting request of a class may have waited; unset means no limit.",
            unit="s",
            gt=0,
            live=True,
        ),
    ] = None
    ttft: Annotated[
        float | None,
        Knob(
            "Time to first token, predicted from what was measured of this model; a prompt that an idle worker could "
            "not answer in time either is refused only where others make it wait for longer than this. Unset or 0 "
            "means no limit.",
            unit="s",
            ge=0,
            live=True,
        ),
    ] = None


class BreakerSettings(Settings, frozen=True):
    """When a failing worker leaves the candidates."""

    failures: Annotated[
        int,
        Knob(
            "Failures among a worker's last requests, twice as many, that open its breaker: half of them failed. Lower "
            "reacts faster, trusts less.",
            unit="count",
            gt=0,
            live=True,
        ),
    ] = 5
    open_for: Annotated[
        float,
        Knob(
            "How long an open breaker waits before it lets one request try; doubles with each failed try, up to 60 s.",
            unit="s",
            gt=0,
            le=OPEN_MAX,
            live=True,
        ),
    ] = 5.0


class HedgeSettings(Settings, frozen=True):
    """A second worker for a request whose first token is late."""

    after: Annotated[
        float | None,
        Knob(
            "How long a request waits for its first token before a second worker gets it too, and the faster one's "
            "answer is taken; unset never. Set it above the usual TTFT: each hedge costs a prefill.",
            unit="s",
            gt=0,
            live=True,
        ),
    ] = None
    share: Annotated[
        float,
        Knob("Most hedges per placed request; higher cuts more of the tail and costs more.", ge=0, le=1, live=True),
    ] = 0.05


class MigrationSettings(Settings, frozen=True):
    """Going on elsewhere when an engine is lost in the middle of its answer."""

    limit: Annotated[
        int,
        Knob(
            "How often one answer may go on on another worker; 0 ends a broken answer with an error. What it costs: "
            "the engine is asked for token ids, about 10 bytes more per token.",
            unit="count",
            ge=0,
            live=True,
        ),
    ] = 3
    tokens_max: Annotated[
        int,
        Knob(
            "Longest prompt and output together that goes on elsewhere; longer recomputes more.",
            unit="tokens",
            gt=0,
            live=True,
        ),
    ] = 131_072


class AffinitySettings(Settings, frozen=True):
    """Sessions that stay where they were."""

    mode: Annotated[
        AffinityMode,
        Knob(
            "hard keeps a session on its worker while it lives; soft only as a discount; off ignores sessions.",
            live=True,
        ),
    ] = "off"
    ttl: Annotated[float, Knob("How long an idle session is remembered.", unit="s", gt=0, live=True)] = 600.0


class PrefillSettings(Settings, frozen=True):
    """How the worker of a remote prefill is chosen, where that differs from ``router.mode`` and ``router.cost``."""

    mode: Annotated[Mode | None, Knob("As router.mode, for prefill workers; unset takes that one.", live=True)] = None


class DecodeSettings(Settings, frozen=True):
    """How the worker that goes on after a remote prefill is chosen, where that differs."""

    mode: Annotated[Mode | None, Knob("As router.mode, for decode workers; unset takes that one.", live=True)] = None


class HandoffSettings(Settings, frozen=True):
    """Prefill on one worker, decode on another, where a model has pools of both."""

    conditional: Annotated[
        Conditional,
        Knob(
            "When a request goes straight to a decode worker although a prefill worker is there: auto where little of "
            "it is new, or prefill workers are busier than the decode worker would be slowed; slo compares predicted "
            "milliseconds with the request's SLO for the latter; thresholds only the former; off never.",
            live=True,
        ),
    ] = "auto"
    new_tokens_max: Annotated[
        int,
        Knob(
            "A prompt with fewer tokens than this that are not cached on the decode worker is not handed off, if "
            "they are less than 0.7 of it as well.",
            unit="tokens",
            ge=0,
            live=True,
        ),
    ] = 2048
    embeddings: Annotated[
        int,
        Knob(
            "Encoded media that encode workers keep in the store which they share with the others; more encodes an "
            "image less often, and takes room there.",
            unit="bytes",
            ge=0,
            live=True,
        ),
    ] = 16 * 1024**3
    distance: Annotated[
        dict[str, float],
        Knob(
            "Worker labels and how many times as much a transfer costs where prefill and decode worker differ in them, "
            "such as rack: 2, zone: 8; a label that one of them does not have says nothing.",
            gt=0,
            live=True,
        ),
    ] = {}
    prefill: PrefillSettings = PrefillSettings()
    decode: DecodeSettings = DecodeSettings()


class RouterPluginSettings(Settings, frozen=True):
    """A scorer or filter that an installed extension offers."""

    weight: Annotated[
        float,
        Knob("What a scorer adds to the cost of each candidate, times this; 0 only asks it. Filters have no weight."),
    ] = 1.0
    options: Annotated[
        dict[str, str], Knob("Named arguments of the plug-in; each text is read as JSON where it is JSON.")
    ] = {}


class RouterSettings(Settings, frozen=True):
    """Which worker gets a request."""

    preset: Annotated[
        Preset,
        Knob(
            "Which traffic the defaults of router settings that stand nowhere are for: agentic is agents with long "
            "contexts, many turns and sub-agents; it draws sessions and programs to where their cache is."
        ),
    ] = "general"
    mode: Annotated[
        Mode, Knob("How a worker is chosen: kv weighs cached blocks against load; the others ignore the cache.")
    ] = "kv"
    cost: CostSettings = CostSettings()
    index: IndexSettings = IndexSettings()
    queue: QueueSettings = QueueSettings()
    overload: OverloadSettings = OverloadSettings()
    breaker: BreakerSettings = BreakerSettings()
    affinity: AffinitySettings = AffinitySettings()
    migration: MigrationSettings = MigrationSettings()
    hedge: HedgeSettings = HedgeSettings()
    handoff: HandoffSettings = HandoffSettings()
    plugins: Annotated[
        dict[str, RouterPluginSettings],
        Knob("Scorers and filters of installed extensions by name, as entry points of the group penstock.extensions."),
    ] = {}
    expect_output: Annotated[
        bool,
        Knob(
            "Expect of a request that does not say its output length what answers to its program (or session) were "
            "like, instead of the model's mean; counts in cost.kind latency and with track_output.",
            live=True,
        ),
    ] = False
    prefetch: Annotated[
        bool,
        Knob(
            "Have KV tiers bring a session's blocks up to host memory shortly before its next request is likely, by "
            "the pauses that its program (or itself) made; callers may say the pause themselves, whatever this is.",
            live=True,
        ),
    ] = False
    decisions: Annotated[
        float,
        Knob(
            "Share of the requests whose decisions are written to decisions.jsonl with all of their candidates; the "
            "others have the chosen one, the cheapest and those with most of the prompt.",
            ge=0,
            le=1,
            live=True,
        ),
    ] = 0.0
    track_output: Annotated[
        bool, Knob("Count generated blocks as load while a request decodes; costs one event per block.", live=True)
    ] = False
    attempts_max: Annotated[
        int,
        Knob(
            "Workers that a request may try before its first token, and again after each migration.",
            unit="count",
            ge=1,
            live=True,
        ),
    ] = 3
    inflight_max: Annotated[
        int | None,
        Knob(
            "Most requests running or waiting per model; the next one is refused with 429. Unset is as many as the "
            "model's engines take at once and router.queue.length_max lets wait, and 8,192 at least.",
            unit="requests",
            gt=0,
            live=True,
        ),
    ] = None
    request_timeout: Annotated[
        float, Knob("Deadline of a request from arrival to its last token.", unit="s", gt=0, live=True)
    ] = 600.0

    @property
    def weighs_overlap(self) -> bool:
        """Whether a cached block makes a worker cheaper."""
        return self.mode == "kv" and (self.cost.overlap_credit > 0 or self.cost.host_credit > 0)

    @property
    def indexed(self) -> bool:
        """Whether an index is kept: without a weight on overlap none is, and none is paid for."""
        return self.index.kind in ("exact", "approximate") or (self.index.kind == "auto" and self.weighs_overlap)

    @property
    def hears_engines(self) -> bool:
        """Whether the index is fed by engines' KV events."""
        return self.indexed and self.index.kind != "approximate"
