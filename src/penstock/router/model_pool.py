"""`ModelPool`: the router's state of one model, in parts of one concern each; `RouterMemory`: that of the router."""

from typing import Literal, get_args

import msgspec

from penstock.kernel.machine import Nanos, nanos, state_of, take_state
from penstock.kernel.statistics import LineFit
from penstock.kernel.values import USUAL_LIMITS, HandoffProtocol, RequestId, Role, Slo, Target, WorkerCard, WorkerId
from penstock.router.events import Preferences
from penstock.router.fair_queue import FairQueue
from penstock.router.kv_index.index_states import PoolIndexState
from penstock.router.kv_index.pool_index import BLOCKS, PoolIndex, PromptForm
from penstock.router.pool_tables import EmbeddingTable, HabitsState, ProgramHabits, SessionAffinity
from penstock.router.request_queue import QueueState, RequestQueue
from penstock.router.routed_request import HEDGE, STAGE, RoutedRequest
from penstock.router.selection.candidate import Speed
from penstock.router.selection.cost import PREFILL_TOKENS_PER_SECOND, TRANSFER_MS_PER_BLOCK
from penstock.router.settings import CostSettings, Mode, RouterSettings
from penstock.router.stage_graph import FINAL, needs_pair, splits
from penstock.router.status_rows import OUTCOMES
from penstock.router.workers.active import ActiveState
from penstock.router.workers.active_sequences import ActiveSequences
from penstock.router.workers.adapter_residency import AdapterResidency, ResidencyState
from penstock.router.workers.roster import RosterState, RosterWorker

DECODE_MS_PER_BLOCK = 0.002
"""Slow-down of a worker's decode step per KV block in use, until it is measured."""
PREFILL_DECODE_SCALE = 0.0
"""`router.cost.decode_scale` of a prefill worker: its blocks only wait to be fetched."""
DECODE_PREFILL_SCALE = 1.0
"""`router.cost.prefill_scale` of a decode worker: the prefill that it does itself slows it."""
INFLIGHT_LEAST, WAITING_LEAST = 8192, 1024
"""Requests that a router has memory for in any case, however few sequences the engines take."""
WAITING_SHARE = 0.5
"""Requests that may wait for each sequence that the engines take: more would wait for longer than an answer takes."""
FALLBACK_SHARE = 0.1
"""Share of hand-offs whose failed prefill the decode worker may do; beyond it another prefill worker is tried."""
FALLBACK_BURST = 10
"""Most such fallbacks at once, before the share counts."""

HANDOFF_COUNTS = ("remote", "done", "empty", "failed", "fallback", "lost", "released", "local")
"""Counts of hand-offs: prefills that were sent to a worker of their own, that were handed over, that held nothing, that
failed, that the answering worker then did itself, whose KV could not be fetched, that were not needed any more; and
prefills that were not worth one."""

MEDIA_COUNTS = ("cached", "encoded", "failed", "here")
"""Counts of media where a worker's role is to encode: those that were encoded already, that it encoded, that it failed
to encode, and that no such worker could take. The worker that prefills encodes the latter two."""


LINK_FAULTS = 3
"""Hand-offs in a row that must fail: one may be of a request that ended, two of a moment without memory."""


class LinkFault(msgspec.Struct):
    """Hand-offs in a row that failed between two workers that both answer.

    The link between two engines can break while each of them is well (UCX, between idle ones), and is not made anew.
    """

    count: int = 0
    reason: str = ""

    @property
    def broken(self) -> bool:
        return self.count >= LINK_FAULTS


ROLES: tuple[Role, ...] = get_args(Role)


class PoolCounts(msgspec.Struct):
    """What was counted of one model's requests since the start; its own state."""

    inflight: int = 0
    """Requests that run or wait."""
    outcomes: dict[str, int] = msgspec.field(default_factory=lambda: dict.fromkeys(OUTCOMES, 0))
    placements: dict[Role, int] = msgspec.field(default_factory=lambda: dict.fromkeys(ROLES, 0))
    """Requests placed so far, by what they were placed for."""
    handoffs: dict[str, int] = msgspec.field(default_factory=lambda: dict.fromkeys(HANDOFF_COUNTS, 0))
    media: dict[str, int] = msgspec.field(default_factory=lambda: dict.fromkeys(MEDIA_COUNTS, 0))
    hedges: int = 0
    """Requests that were sent to a second worker as well."""
    refused: dict[str, int] = {}
    """Requests refused for load, by the knob of ``router.overload`` that refused them."""
    refused_last: Nanos | None = None
    output_mean: float = 128.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Of requests whose engine reported how much came from its cache."""

    def refuse(self, limit: str, now: Nanos) -> None:
        """A limit of ``router.overload`` refused a request."""
        self.refused[limit] = self.refused.get(limit, 0) + 1
        self.refused_last = now

    @property
    def hit_rate(self) -> float | None:
        """Cached over prompt tokens of the answered requests, or None before an engine reported it."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else None


class PoolRoles(msgspec.Struct):
    """The workers of one model by role, what they take at once, and the hand-offs between them; its own state."""

    workers: dict[Role, int] = {}
    """Workers that are there, by role, whatever state they are in."""
    seats: int = 0
    """Sequences that the workers which answer take at once."""
    waiting_max: int = 0
    inflight_max: int = 0
    """Most requests that may wait, and run or wait."""
    splits: bool = False
    """Whether its workers' roles make stages of requests."""
    plain: bool = True
    """Whether every worker does everything."""
    paired: int = 0
    """Workers that need another one for every request."""
    answers: bool = True
    """Whether a worker is there whose role is to answer clients."""
    wire: tuple[HandoffProtocol, str | None] | None = None
    """(hand-off protocol, layout) of the workers between which KV goes; None while there are none."""
    links: dict[tuple[WorkerId, WorkerId], LinkFault] = {}
    """(prefill, decode) workers -> the hand-offs between them that failed in a row."""
    pending_releases: list[tuple[RequestId, int, WorkerCard]] = []
    """(request, attempt, holder) of KV that is not needed, and that no worker could fetch yet."""
    fallback_tokens: float = msgspec.field(default_factory=lambda: float(FALLBACK_BURST))
    """Fallbacks that are allowed at present."""

    def has(self, role: Role) -> bool:
        """Tell whether a worker has this role."""
        return role in self.workers

    def refusal(self, card: WorkerCard) -> str | None:
        """Take a worker's hand-off as the pool's; return why it can't be, or None.

        What can't be handed over is found here, once, and not request by request.
        """
        staged = card.role in ("prefill", "decode")
        if staged and card.handoff is None:
            return f"its role is {card.role}, but it says no way in which KV could be handed over (handoff)"
        wire = None if card.handoff is None else (card.handoff, card.layout)
        if wire is not None and staged and self.wire is not None and not _kv_compatible(wire, self.wire):
            return (
                f"it hands KV over as {_wire_text(wire)}, "
                f"the other workers of {card.model} as {_wire_text(self.wire)}: "
                "what one writes the other could not read"
            )
        if wire is not None and staged and (self.wire is None or self.wire[1] is None):
            self.wire = wire
        return None

    def count(self, card: WorkerCard, change: int) -> None:
        """A worker with this card came (1) or went (-1)."""
        role = card.role
        if role in FINAL:
            self.seats += change * card.ranks * (card.max_num_seqs or USUAL_LIMITS.max_num_seqs)
        self.paired += change * needs_pair(card)
        self.workers[role] = self.workers.get(role, 0) + change
        if not self.workers[role]:
            del self.workers[role]
        roles = set(self.workers)
        self.splits, self.plain, self.answers = splits(roles), roles <= {"aggregated"}, bool(roles & FINAL)
        if not roles & {"prefill", "decode"}:
            self.wire = None  # the next worker may do it otherwise

    def bound(self, settings: RouterSettings) -> None:
        """Bound what may wait and run, by the settings or by the fleet."""
        waiting, inflight = settings.queue.length_max, settings.inflight_max
        self.waiting_max = max(WAITING_LEAST, int(WAITING_SHARE * self.seats)) if waiting is None else waiting
        self.inflight_max = max(INFLIGHT_LEAST, self.seats + self.waiting_max) if inflight is None else inflight

    def speaks(self, card: WorkerCard) -> bool:
        """Tell whether a worker can go on with what the pool's prefill workers made."""
        if card.role == "aggregated":
            if card.handoff is None or self.wire is None:
                return False
            return _kv_compatible((card.handoff, card.layout), self.wire)
        return card.role == "decode"  # it was let in only because it can

    def earn_fallback(self) -> None:
        """A hand-off was sent: its share of a fallback is allowed."""
        self.fallback_tokens = min(FALLBACK_BURST, self.fallback_tokens + FALLBACK_SHARE)


class WorkerSpeeds:
    """How fast the workers of one model are, as they measure themselves, or as their answers show."""

    def __init__(self) -> None:
        self.fit = LineFit()
        """Seconds to the first token over prefill tokens ahead: the speed of workers that do not measure themselves."""
        self.bring = LineFit()
        """Seconds from a hand-off to the first token, over blocks brought."""

    @property
    def ms_per_block(self) -> float:
        """Milliseconds that a block of a hand-off takes, as measured or as the settings say."""
        line = self.bring.line()
        return TRANSFER_MS_PER_BLOCK if line is None else max(0.0, 1e3 * line[1])

    def speed_of(self, worker: RosterWorker) -> Speed:
        """Return how fast a worker is, by itself, by what was measured of its kind, or by the settings."""
        if worker.speed is not None:
            return self.measured(worker.speed)
        line = self.fit.line()
        if line is None:
            return self.usual("")
        return Speed(max(0.0, line[0]), max(0.0, line[1]), DECODE_MS_PER_BLOCK / 1e3)

    def measured(self, measured: tuple[float, float, float, float]) -> Speed:
        """Return the speed of a worker that measured itself."""
        intercept, slope, _, decode = measured
        return Speed(intercept, slope, decode or DECODE_MS_PER_BLOCK / 1e3)

    def usual(self, unit: str) -> Speed:
        """Return the speed of all other workers."""
        decode = DECODE_MS_PER_BLOCK / 1e3
        line = self.fit.line() if unit == "latency" else None
        if line is not None:
            return Speed(line[0], line[1], decode)
        return Speed(0.0, 1.0 / PREFILL_TOKENS_PER_SECOND, decode)

    def snapshot(self) -> tuple[list[float], list[float]]:
        return self.fit.snapshot(), self.bring.snapshot()

    def restore(self, state: tuple[list[float], list[float]]) -> None:
        self.fit.restore(state[0])
        self.bring.restore(state[1])


class ModelPoolState(msgspec.Struct):
    """State of a `ModelPool`."""

    index: PoolIndexState
    active: ActiveState
    speeds: tuple[list[float], list[float]]
    roles: PoolRoles
    counts: PoolCounts
    queue: QueueState
    affinity: list[tuple[str, tuple[Target, Nanos]]]
    adapters: ResidencyState
    habits: HabitsState
    embeddings: list[tuple[str, int]]
    encoding: dict[RequestId, Target]


class ModelPool:
    """One model's routing state; the router machine owns it and is the only one to change it.

    Args:
        form: in which prompts come.
    """

    def __init__(self, model: str, settings: RouterSettings, form: PromptForm = BLOCKS) -> None:
        self.model = model
        self.settings = settings
        self.index = PoolIndex(settings, form)
        """What its workers' caches hold."""
        self.active = ActiveSequences(form.load)
        """What its workers have to do."""
        self.speeds = WorkerSpeeds()
        self.roles = PoolRoles()
        self.roles.bound(settings)
        self.counts = PoolCounts()
        self.fair = FairQueue(settings.queue) if settings.queue.shares else None
        """The queue, where tenants have shares."""
        self.queue: RequestQueue = RequestQueue(settings.queue) if self.fair is None else self.fair
        self.affinity = SessionAffinity(settings.affinity)
        self.adapters = AdapterResidency(self._runs)
        self.habits = ProgramHabits()
        self.embeddings = EmbeddingTable(settings.handoff.embeddings)
        """Media that encode workers have encoded."""
        self.encoding: dict[RequestId, Target] = {}
        """Requests whose media are being encoded, and where."""
        self.stage_cost, self.stage_mode = _stage_costs(settings), _stage_modes(settings)

    def use(self, settings: RouterSettings) -> None:
        """Go on with other settings. Which index is kept was decided when the pool was made."""
        self.settings = settings
        self.roles.bound(settings)
        self.stage_cost, self.stage_mode = _stage_costs(settings), _stage_modes(settings)
        self.embeddings.bytes_max = settings.handoff.embeddings
        self.embeddings.shrink()
        waiting = self.queue.snapshot()
        self.fair = FairQueue(settings.queue) if settings.queue.shares else None
        self.queue = RequestQueue(settings.queue) if self.fair is None else self.fair
        self.queue.restore(waiting)
        self.affinity.ttl = nanos(settings.affinity.ttl)

    # --- membership -------------------------------------------------------------------------------------------------

    def adopt(self, card: WorkerCard) -> str | None:
        """Take a worker's block size and hand-off as the pool's; return why the worker is refused, or None."""
        size, own = card.block_size, self.index.block_size
        if size is not None and self.index.block_size_known and size != own:
            return (
                f"block_size {size} differs from the {own} tokens of the other workers of "
                f"{self.model}: prefixes could not be compared"
            )
        refusal = self.roles.refusal(card)
        if refusal is None:
            self.index.take_block_size(size)
        return refusal

    def count(self, card: WorkerCard, change: int) -> None:
        """A worker with this card came (1) or went (-1)."""
        self.roles.count(card, change)
        self.roles.bound(self.settings)

    def drop(self, worker: RosterWorker) -> None:
        """A worker is gone: nothing of its cache counts any more."""
        gone = worker.card.id
        self.index.drop(gone, worker.targets)
        self.roles.links = {ends: fault for ends, fault in self.roles.links.items() if gone not in ends}
        self.affinity.drop_worker(gone)
        self.adapters.leave(gone)

    def _runs(self, router: str, request: RequestId) -> bool:
        """Tell whether a request that a router placed, empty for this one, runs under any of its names."""
        owners = (router,) if router else ("", HEDGE, STAGE)
        return any(self.active.runs(request, owner) for owner in owners)

    # --- what it learns ---------------------------------------------------------------------------------------------

    def expected_output(self, preferences: Preferences) -> float | None:
        """Return the output tokens that a request says, or that its program's answers had; None: nobody knows."""
        if preferences.osl is not None:
            return float(preferences.osl)
        program = preferences.program or preferences.session
        return None if program is None else self.habits.output(program)

    def answered(self, isl: int, tokens: int, cached: int | None, preferences: Preferences, now: Nanos) -> None:
        """A request ended well: learn its output length, its hit rate and, where that is wanted, its habits."""
        program = preferences.program or preferences.session
        if program is not None and self.settings.expect_output:
            self.habits.answered(program, tokens)
        if preferences.session is not None and self.settings.prefetch:
            self.habits.ended(preferences.session, now)
        self.counts.output_mean += 0.02 * (tokens - self.counts.output_mean)
        if cached is not None:
            self.counts.prompt_tokens += isl
            self.counts.cached_tokens += cached

    # --- machine duties ---------------------------------------------------------------------------------------------

    def snapshot(self) -> ModelPoolState:
        return state_of(self, ModelPoolState)

    def restore(self, state: ModelPoolState) -> None:
        take_state(self, state)
        self.roles.bound(self.settings)

    def check(self) -> None:
        for part in (self.index, self.active, self.queue, self.affinity, self.adapters, self.embeddings):
            part.check()


def _stage_costs(settings: RouterSettings) -> dict[Role, CostSettings]:
    """Return what a placement costs, by what is to be done there."""
    cost = settings.cost
    before = msgspec.structs.replace(cost, decode_scale=PREFILL_DECODE_SCALE)
    after = msgspec.structs.replace(cost, prefill_scale=DECODE_PREFILL_SCALE)
    return {"aggregated": cost, "encode": before, "prefill": before, "decode": after}


def _stage_modes(settings: RouterSettings) -> dict[Role, Mode]:
    """Return how a worker is chosen, by what is to be done there."""
    usual, handoff = settings.mode, settings.handoff
    before, after = handoff.prefill.mode or usual, handoff.decode.mode or usual
    return {"aggregated": usual, "encode": before, "prefill": before, "decode": after}


def _kv_compatible(one: tuple[str, str | None], other: tuple[str, str | None]) -> bool:
    """Tell whether KV can go between workers; a layout that is not known is taken for the other's."""
    return one[0] == other[0] and (one[1] == other[1] or one[1] is None or other[1] is None)


def _wire_text(wire: tuple[str, str | None]) -> str:
    return wire[0] if wire[1] is None else f"{wire[0]} with layout {wire[1]}"


Timer = Literal["deadline", "wait", "hedge", "kick", "sweep"]


class RouterMemory(msgspec.Struct):
    """All that a router has to know to go on: see `penstock.router.router_state.RouterState`."""

    name: str
    settings: RouterSettings
    slo: Slo
    rng: tuple[int, tuple[int, ...], float | None]
    roster: RosterState
    pools: dict[str, ModelPoolState]
    requests: dict[RequestId, RoutedRequest]
    waiting_for_worker: dict[RequestId, None]
    timers: list[tuple[Nanos, Timer, str]]
    armed: Nanos | None
    replays: dict[int, Target]
    replay_id: int
    dropped: int
    plugins_left_out: dict[str, str]
