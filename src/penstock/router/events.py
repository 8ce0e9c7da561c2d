"""Events and effects of the router machine: what it receives and what it wants done.

Token bytes never pass here: the router receives a request's milestones and the state of workers and their caches.
Times are kernel nanoseconds; token and block counts as in `penstock.kernel.values`.
"""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from penstock.kernel.machine import Effect, Event, Nanos
from penstock.kernel.tiers.load_worth import LoadCosts
from penstock.kernel.values import (
    HandoffProtocol,
    KvEvent,
    MediaItem,
    Prompt,
    RequestId,
    Role,
    Slo,
    Target,
    WorkerCard,
    WorkerId,
)
from penstock.router.settings import RouterSettings

Outcome = Literal["ok", "rejected", "failed", "cancelled", "expired"]
Fault = Literal["none", "client", "engine", "overloaded", "deadline"]


class Preferences(msgspec.Struct, frozen=True, kw_only=True):
    """A caller's preferences for routing; every field is optional and None means the cluster's setting.

    ``worker`` and ``rank`` pin the request; ``allowed`` limits the candidates; ``priority`` moves it forward in the
    queue by so many seconds; ``strict`` is a class that goes before every lower one; ``osl`` is the expected output
    length in tokens; ``overlap_credit`` and ``temperature`` override the cost for this request. ``prefill`` pins the
    remote prefill, while ``worker`` pins the worker that answers. ``service_class`` is its class in the cluster's SLO.
    """

    worker: WorkerId | None = None
    prefill: WorkerId | None = None
    rank: int | None = None
    allowed: tuple[WorkerId, ...] | None = None
    priority: int = 0
    strict: int = 0
    osl: int | None = None
    session: str | None = None
    program: str | None = None
    service_class: str | None = None
    overlap_credit: float | None = None
    temperature: float | None = None
    next_in: float | None = None
    """Seconds after the answer at which the session's next request is likely, as the caller says."""
    if_cached: bool = False
    """Refuse it with 412 where its prompt would have to be computed: somebody else has a better place for it."""


# --- requests -------------------------------------------------------------------------------------------------------


class Arrived(Event, frozen=True, kw_only=True):
    """A request is here.

    ``prompt``: where it is an estimate, its blocks are found in routing history alone. ``media``: images and the like
    in it, for which an encode worker may be used first. ``whole``: it is not split into stages where one worker can do
    all of it; ``undivided``: nowhere. ``tenant``: whose share of the fleet it is of.
    """

    id: RequestId
    model: str
    prompt: Prompt
    media: tuple[MediaItem, ...] = ()
    whole: bool = False
    undivided: bool = False
    adapter: str | None = None
    deadline: Nanos | None = None
    preferences: Preferences = Preferences()
    tenant: str | None = None


class FirstToken(Event, frozen=True, kw_only=True):
    """The engine of this attempt sent its first output token."""

    id: RequestId
    attempt: int


class Staged(Event, frozen=True, kw_only=True):
    """The engine of this attempt has done its stage, which is not the last one.

    ``kv_retained``: it holds what the next stage needs until that has fetched it; False where it holds nothing, so that
    the next one has to do that work itself. ``cached``: prompt tokens that it took from its cache, if it reports them.
    """

    id: RequestId
    attempt: int
    kv_retained: bool = True
    cached: int | None = None


class Grown(Event, frozen=True, kw_only=True):
    """The output reached ``tokens``; posted once a block, only where ``track_output`` is on."""

    id: RequestId
    attempt: int
    tokens: int


class Finished(Event, frozen=True, kw_only=True):
    """The engine of this attempt answered in full. ``cached``: prompt tokens from its cache, if it reports them.

    ``tokens``: None where a gateway carried the answer past us.
    """

    id: RequestId
    attempt: int
    tokens: int | None
    cached: int | None = None


class Resume(msgspec.Struct, frozen=True, kw_only=True):
    """What another worker would have to go on from: the prompt and the output so far, as one prompt.

    ``tokens``: output tokens that the client has had.
    """

    prompt: Prompt
    tokens: int


class Failed(Event, frozen=True, kw_only=True):
    """This attempt broke. ``retryable``: it had no output that the client got, and another worker may do better.

    ``resume``: where another worker can go on after such output; None where it can't.
    ``worker_at_fault`` counts against the worker's breaker; ``status`` is the engine's HTTP status, if it gave one, and
    ``retry_after`` the seconds after which it wants to be asked again.
    """

    id: RequestId
    attempt: int
    reason: str
    retryable: bool
    worker_at_fault: bool = True
    status: int | None = None
    retry_after: float | None = None
    resume: Resume | None = None
    leaving: bool = False
    """The engine refuses work because it is ending, whatever its health says."""
    received: bool = True
    """The engine had the request, which may be what broke it; False where no connection to it came about."""
    served_by: WorkerId | None = None
    """The worker to which a gateway sent the request after this one did not take it."""


class Cancelled(Event, frozen=True, kw_only=True):
    """The client went away."""

    id: RequestId


# --- workers --------------------------------------------------------------------------------------------------------


class WorkerJoined(Event, frozen=True, kw_only=True):
    """A worker announced itself, or did so again with a newer epoch. ``ready``: it may be sent requests."""

    card: WorkerCard
    ready: bool = True


class WorkerReady(Event, frozen=True, kw_only=True):
    """A worker that had joined can take requests."""

    worker: WorkerId
    epoch: int


class WorkerLeft(Event, frozen=True, kw_only=True):
    """A worker is gone. Its running requests will fail by themselves, and its blocks no longer count."""

    worker: WorkerId
    epoch: int
    reason: str


class WorkerDraining(Event, frozen=True, kw_only=True):
    """A worker takes no new requests and finishes what it has."""

    worker: WorkerId
    epoch: int


class WorkerCordoned(Event, frozen=True, kw_only=True):
    """Take a worker out of the candidates (``on``) or put it back, by an operator or a failed health check.

    ``doubt``: it stays a candidate where no other worker is left.
    """

    worker: WorkerId
    on: bool
    reason: str
    doubt: bool = False


class WorkerMeasured(Event, frozen=True, kw_only=True):
    """A worker reported its own speed: seconds = intercept + slope * tokens for prefill; per KV block for decode."""

    worker: WorkerId
    prefill_intercept: float
    prefill_slope: float
    decode_base: float
    decode_slope: float


class TiersMeasured(Event, frozen=True, kw_only=True):
    """A worker reported what it costs to load blocks from the tiers below it, and to compute them."""

    worker: WorkerId
    costs: LoadCosts


# --- LoRA adapters --------------------------------------------------------------------------------------------------


class AdapterLoaded(Event, frozen=True, kw_only=True):
    """A worker has loaded an adapter. ``epoch``: at which its engine joined, here and below; ``seconds``: it took."""

    worker: WorkerId
    epoch: int
    adapter: str
    seconds: float


class AdapterFailed(Event, frozen=True, kw_only=True):
    """A worker could not load an adapter."""

    worker: WorkerId
    epoch: int
    adapter: str
    reason: str


class AdapterMissing(Event, frozen=True, kw_only=True):
    """An engine answered that it does not hold an adapter with which a request was sent to it."""

    worker: WorkerId
    epoch: int
    adapter: str


class AdaptersListed(Event, frozen=True, kw_only=True):
    """What a worker holds, as its list of models says. ``pinned``: those that nobody could load again."""

    worker: WorkerId
    epoch: int
    names: tuple[str, ...]
    pinned: tuple[str, ...] = ()


class AdapterDesired(Event, frozen=True, kw_only=True):
    """An operator wants an adapter in the memory of at least one worker."""

    model: str
    adapter: str


class AdaptersWanted(Event, frozen=True, kw_only=True):
    """How many workers of a model are to hold each adapter at any time, those that are missing here on none.

    ``decides``: this router has the missing ones loaded; False where another one does, and this one only keeps them.
    """

    model: str
    workers: dict[str, int]
    decides: bool = True


class AdapterDropped(Event, frozen=True, kw_only=True):
    """No worker is to hold an adapter. ``unload``: False where another router has the workers unload it."""

    model: str
    adapter: str
    unload: bool = True


# --- settings -------------------------------------------------------------------------------------------------------


class SettingsChanged(Event, frozen=True, kw_only=True):
    """An operator changed knobs; ``settings`` and ``slo`` are all of them as they are from now on, ``keys``
    those that changed."""

    settings: RouterSettings
    slo: Slo
    keys: tuple[str, ...]
    by: str = ""


class PluginLeftOut(Event, frozen=True, kw_only=True):
    """A plug-in of ``router.plugins`` takes too long: go on without it. One that raises is left out without this."""

    name: str
    reason: str


# --- caches ---------------------------------------------------------------------------------------------------------


class KvObserved(Event, frozen=True, kw_only=True):
    """KV events of one engine step, numbered by their publisher.

    ``whole``: they are everything that the target held after that number, and what came before does not matter.
    """

    worker: WorkerId
    rank: int
    epoch: int
    sequence: int
    events: list[KvEvent]
    whole: bool = False


class ReplayEnded(Event, frozen=True, kw_only=True):
    """The answer to `ReplayWanted` ``id``: all that the engine still had, or None where it could not be reached.

    ``more``: it is the next part of one that begins with the first batch wanted, and another part follows.
    """

    id: int
    batches: list[KvObserved] | None
    more: bool = False


class KvSourceJoining(Event, frozen=True, kw_only=True):
    """What a worker's rank cached before its events were heard is being asked for, or, with ``on`` false, was."""

    worker: WorkerId
    rank: int
    on: bool


class KvSourceLost(Event, frozen=True, kw_only=True):
    """A worker's source of KV events is lost: its cache is known only approximately from here."""

    worker: WorkerId
    rank: int
    reason: str


# --- other routers --------------------------------------------------------------------------------------------------


class PeerUpdate(Event, frozen=True, kw_only=True):
    """Another router placed, advanced or ended a request: the same `Placement` that we publish."""

    router: str
    placement: "Placement"


class PeerGone(Event, frozen=True, kw_only=True):
    """Another router is gone: its requests no longer count as load."""

    router: str


class Placement(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What routers publish to each other of a request, on topic ``active``."""

    version: int = msgspec.field(default_factory=lambda: 2)
    """Written though it is the default: a factory's values are not left out."""
    step: Literal["placed", "first", "grown", "ended"]
    id: RequestId
    model: str
    target: Target
    prompt: Prompt = Prompt(0)
    """Given where it is placed."""
    cached: int = 0
    tokens: int = 0
    osl: int = 0
    """Output tokens that its caller expects; 0 is not known."""
    session: str | None = None
    adapter: str | None = None
    """Its LoRA adapter, which the target holds or loads."""
    unloaded: tuple[str, ...] = ()
    """Adapters that the target unloads for it."""
    tenant: str | None = None
    work: int = 0
    """Tokens that count in its tenant's share, where there are shares; given once in a request's life."""


# --- what the router wants done -------------------------------------------------------------------------------------


class Cost(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What one candidate would cost, term by term, in ``unit``; ``total`` is what is compared, lower wins."""

    target: Target
    unit: Literal["blocks", "ms"]
    total: float
    prefill: float
    decode: float
    queue: float
    transfer: float
    overlap_blocks: int
    """Leading device blocks that it holds."""
    overlap_tokens: int
    """Prompt tokens expected to come from its cache, of lower tiers those that it would load."""
    active_requests: int
    active_prefill_tokens: int
    active_blocks: int
    costly_blocks: int = 0
    """Blocks of its lower tiers that do not count: it would compute them, since loading them takes longer."""
    adapter: float = 0.0
    """What waiting for its LoRA adapter would cost."""
    discount: float = 1.0
    index: Literal["exact", "approximate", "predicted", "none"] = "none"
    plugins: dict[str, float] | msgspec.UnsetType = msgspec.UNSET
    """What each scorer of ``router.plugins`` added to the total, its weight included."""


class Excluded(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A worker that was no candidate, and why."""

    target: Target
    reason: str
    others: int = 0
    """Further workers that were none for the same reason, where a summary names one of them."""


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """Where a request went and why: what ``explain``, the log, ``decisions.jsonl`` and the page read."""

    request: RequestId
    attempt: int
    at: Nanos
    model: str
    mode: str
    chosen: Target
    reason: str
    isl: int
    blocks: int
    queued: float
    """Seconds that it waited for a worker."""
    candidates: Sequence[Cost]
    """Columns of many, of which rows are made where they are read: see `penstock.router.selection.cost`."""
    excluded: list[Excluded] = []
    left_out: int = 0
    """Further candidates, which a summary does not list: see `penstock.router.selection.decision_summary`."""
    table: str = ""
    """All of them, packed, where a summary was written with them."""
    expected_cached_tokens: int = 0
    resumed: int = 0
    """Output tokens that another worker had made before, which ``isl`` counts as well."""
    temperature: float = 0.0
    stage: Role = "aggregated"
    """What the worker does: ``aggregated`` is all that is left to do."""
    again: bool = False
    """Another attempt has failed, broken off or been too slow."""
    flow: str = ""
    """Why this stage comes now: why the prefill is remote, or is not; empty where the model has no such pools."""
    adapter: str = ""
    """Whether the worker holds its LoRA adapter or has to load it; empty where the request has none."""


class Handoff(msgspec.Struct, frozen=True, kw_only=True):
    """Which two attempts belong together, and how KV goes from one to the other.

    ``key``: below 2^63, and unlike all others' that are under way in the cluster; ``source``, ``source_attempt``: the
    worker whose KV a ``decode`` leg takes and its attempt; None on the leg that makes it.
    """

    protocol: HandoffProtocol
    key: int
    source: WorkerCard | None = None
    source_attempt: int = 0


class Dispatch(Effect, frozen=True, kw_only=True):
    """Send the request to this worker; the answer comes back under (``id``, ``attempt``).

    ``stage``: what the worker is to do. ``encode`` and ``prefill`` are answered by `Staged` and send nothing to the
    client; ``aggregated`` and ``decode`` answer it.
    """

    id: RequestId
    attempt: int
    target: Target
    card: WorkerCard
    decision: Decision
    stage: Role = "aggregated"
    handoff: Handoff | None = None
    encode: tuple[int, ...] = ()
    """For stage ``encode``: the places of the media that it is for, among the request's."""
    prefetch_after: float | None = None
    """Seconds after the answer at which KV tiers are to bring its blocks up, since the session's next request is
    likely then; None: never."""


class Release(Effect, frozen=True, kw_only=True):
    """No worker needs any more what an attempt holds, or will hold once it is done.

    ``target`` takes it over and drops it, which is the only way in which engines release it; None where there is no
    such worker, and then the engine's own time-out has to do it.
    """

    id: RequestId
    attempt: int
    source: WorkerCard
    target: WorkerCard | None


class Abort(Effect, frozen=True, kw_only=True):
    """Stop an attempt that is running on a worker; its answer is not needed any more."""

    id: RequestId
    attempt: int
    target: Target
    reason: str


class Closed(Effect, frozen=True, kw_only=True):
    """The one terminal effect of every request that arrived.

    ``status`` is the HTTP status that the caller should see if nothing was sent yet; ``retry_after`` seconds.
    """

    id: RequestId
    model: str
    outcome: Outcome
    fault: Fault
    status: int
    reason: str
    arrived: Nanos
    closed: Nanos
    isl: int
    osl: int = 0
    cached: int | None = None
    expected_cached: int = 0
    queued: float = 0.0
    first: Nanos | None = None
    attempts: int = 0
    """Not counting the stages that were done."""
    migrations: int = 0
    """How often another worker went on with what one had begun."""
    legs: list["StageLeg"] = []
    retry_after: float | None = None
    session: str | None = None
    program: str | None = None
    media: int = 0
    """Images and the like in its prompt..."""
    media_cached: int | None = None
    """... and those of them that did not have to be encoded; None where no worker's role is to encode."""
    code: str | None = None
    """One word for why it was refused, where several reasons have one status."""


class StageLeg(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt of a request on one worker."""

    role: str
    """The stage that it did."""
    target: Target
    dispatched: Nanos
    first: Nanos | None = None
    last: Nanos | None = None
    failure: str | None = None


class ReplayWanted(Effect, frozen=True, kw_only=True):
    """Ask a worker's replay socket for events from ``first`` on; answered by `ReplayEnded` with the same id."""

    id: int
    worker: WorkerId
    rank: int
    first: int


class AdapterChange(Effect, frozen=True, kw_only=True):
    """Have a worker unload adapters, then load one; requests that need it are sent once it is there.

    A load is answered by `AdapterLoaded` or `AdapterFailed`.
    """

    card: WorkerCard
    load: str | None = None
    unload: tuple[str, ...] = ()


class Publish(Effect, frozen=True, kw_only=True):
    """Send a placement to the other routers."""

    placement: Placement


class OperatorNote(Effect, frozen=True, kw_only=True):
    """Something that an operator should see: one line of the log, and a count under its ``kind``."""

    kind: str
    text: str
    fields: dict[str, Any] = {}
