"""`ModelPool`: the router's state of one model: KV indexes, load, queue, sessions and running sums."""

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np

from penstock.kernel.hashing import BYTES_PER_TOKEN, TEXT_BLOCK_BYTES
from penstock.kernel.machine import Nanos, nanos, state_of, take_state
from penstock.kernel.statistics import LineFit
from penstock.kernel.tiers.load_worth import LoadCosts
from penstock.kernel.values import USUAL_LIMITS, HandoffProtocol, Prompt, RequestId, Role, Target, WorkerCard, WorkerId
from penstock.router.adapters.adapter_residency import AdapterResidency, ResidencyState
from penstock.router.events import Cost, Preferences
from penstock.router.kv_index.index_states import EventStreamState
from penstock.router.kv_index.indexer import SOURCES, Column, EventIndexer, HeldBlocks, HistoryIndexer
from penstock.router.kv_index.kv_event_stream import KvEventStream
from penstock.router.kv_index.tier_costs import TierCosts
from penstock.router.prompt_forms import BLOCKS, PromptForm
from penstock.router.requests.embedding_table import EmbeddingTable
from penstock.router.requests.fair_queue import FairQueue
from penstock.router.requests.program_habits import HabitsState, ProgramHabits
from penstock.router.requests.request_queue import QueueState, RequestQueue
from penstock.router.requests.routed_request import HEDGE, STAGE, RoutedRequest
from penstock.router.requests.stage_graph import FINAL, needs_pair, splits
from penstock.router.selection.candidate import Candidate, RequestDemand, Speed
from penstock.router.selection.cost import COSTS, NOTHING, PREFILL_TOKENS_PER_SECOND, TRANSFER_MS_PER_BLOCK
from penstock.router.selection.cost_table import Candidates, CostTable
from penstock.router.selection.session_affinity import SessionAffinity
from penstock.router.settings import CostSettings, RouterSettings
from penstock.router.workers.active import ActiveState
from penstock.router.workers.active_sequences import ActiveSequences
from penstock.router.workers.roster import RosterWorker

DEFAULT_BLOCK_SIZE = 64
"""Tokens per block where no worker of the model reports its own: only routing history is kept by it."""

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

COLUMNS_MIN = 24
"""Candidates from which on they are priced in columns: below, numpy's calls cost more than the candidates."""

Targets = Sequence[tuple[Target, RosterWorker]]

HANDOFF_COUNTS = ("remote", "done", "empty", "failed", "fallback", "lost", "released", "local")
"""Counts of hand-offs: prefills that were sent to a worker of their own, that were handed over, that held nothing, that
failed, that the answering worker then did itself, whose KV could not be fetched, that were not needed any more; and
prefills that were not worth one."""

MEDIA_COUNTS = ("cached", "encoded", "failed", "here")
"""Counts of media where a worker's role is to encode: those that were encoded already, that it encoded, that it failed
to encode, and that no such worker could take. The worker that prefills encodes the latter two."""


HEARD = ("exact", "late")
APPROXIMATE, PREDICTED = np.int8(SOURCES.index("approximate")), np.int8(SOURCES.index("predicted"))
"""States of a target whose events, since its router listens, are all known: there, history has nothing to add."""
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


class ModelPoolState(msgspec.Struct):
    """State of a `ModelPool`."""

    block_size: int
    block_size_known: bool
    active: ActiveState
    queue: QueueState
    affinity: list[tuple[str, tuple[Target, Nanos]]]
    adapters: ResidencyState
    habits: HabitsState
    tier_costs: dict[WorkerId, LoadCosts]
    placements: dict[Role, int]
    streams: dict[Target, EventStreamState]
    exact: Any
    history: Any
    predicted: Any
    """Of the indexes that are kept; None of the others. Each prompt form has its own."""
    roles: dict[Role, int]
    seats: int
    paired: int
    wire: tuple[HandoffProtocol, str | None] | None
    handoffs: dict[str, int]
    pending_releases: list[tuple[RequestId, int, WorkerCard]]
    links: dict[tuple[WorkerId, WorkerId], LinkFault]
    fallback_tokens: float
    embeddings: list[tuple[str, int]]
    encoding: dict[RequestId, Target]
    media: dict[str, int]
    bring: list[float]
    fit: list[float]
    hedges: int
    output_mean: float
    prompt_tokens: int
    cached_tokens: int
    counts: dict[str, int]
    inflight: int
    refused: dict[str, int]
    refused_last: Nanos | None


class ModelPool:
    """One model's routing state; the router machine owns it and is the only one to change it.

    Args:
        form: in which prompts come.
    """

    def __init__(self, model: str, settings: RouterSettings, rng: random.Random, form: PromptForm = BLOCKS) -> None:
        self.model = model
        self.settings = settings
        self.rng = rng
        self.block_size = DEFAULT_BLOCK_SIZE
        self.block_size_known = False
        self.active = ActiveSequences(form.load)
        self.fair = FairQueue(settings.queue) if settings.queue.shares else None
        """The queue, where tenants have shares."""
        self.queue: RequestQueue = RequestQueue(settings.queue) if self.fair is None else self.fair
        self.affinity = SessionAffinity(settings.affinity)
        self.adapters = AdapterResidency(self._runs)
        self.habits = ProgramHabits()
        self.tier_costs = TierCosts()
        """What loading blocks from lower tiers costs the workers that report it."""
        self.placements: Counter[Role] = Counter()
        """Requests placed so far, by what they were placed for."""
        self.streams: dict[Target, KvEventStream] = {}
        """KV event streams of the targets that announce one; the others are known by routing history alone."""
        index = settings.index
        self.indexed = settings.indexed
        """Without a weight on overlap no index is kept, and none is paid for."""
        self.exact: EventIndexer | None = None
        self.history: HistoryIndexer | None = None
        self.predicted: HistoryIndexer | None = None
        if settings.hears_engines:
            self.exact = form.exact(self.block_size)
            if index.predicted_ttl > 0:
                self.predicted = form.history(nanos(index.predicted_ttl))
        if self.indexed and index.kind != "exact":
            self.history = form.history(nanos(index.approximate_ttl))
        self.roles: Counter[Role] = Counter()
        """Workers that are there, by role, whatever state they are in."""
        self.seats = 0
        """Sequences that the workers which answer take at once."""
        self.splits = False
        """Whether its workers' roles make stages of requests."""
        self.plain = True
        """Whether every worker does everything."""
        self.paired = 0
        """Workers that need another one for every request."""
        self.answers = True
        """Whether a worker is there whose role is to answer clients."""
        self.wire: tuple[HandoffProtocol, str | None] | None = None
        """(hand-off protocol, layout) of the workers between which KV goes; None while there are none."""
        self.handoffs = dict.fromkeys(HANDOFF_COUNTS, 0)
        self.pending_releases: list[tuple[RequestId, int, WorkerCard]] = []
        """(request, attempt, holder) of KV that is not needed, and that no worker could fetch yet."""
        self.links: dict[tuple[WorkerId, WorkerId], LinkFault] = {}
        """(prefill, decode) workers -> the hand-offs between them that failed in a row."""
        self.fallback_tokens = float(FALLBACK_BURST)
        """Fallbacks that are allowed at present."""
        self.embeddings = EmbeddingTable(settings.handoff.embeddings)
        """Media that encode workers have encoded."""
        self.encoding: dict[RequestId, Target] = {}
        """Requests whose media are being encoded, and where."""
        self.media = dict.fromkeys(MEDIA_COUNTS, 0)
        self.bring = LineFit()
        """Seconds from a hand-off to the first token, over blocks brought."""
        self._stage_cost = _stage_costs(settings)
        self.fit = LineFit()
        """Seconds to the first token over prefill tokens ahead: the speed of workers that do not measure themselves."""
        self.hedges = 0
        """Requests that were sent to a second worker as well."""
        self.output_mean = 128.0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        """Of requests whose engine reported how much came from its cache."""
        self.counts = dict.fromkeys(("ok", "rejected", "failed", "cancelled", "expired"), 0)
        self.inflight = 0
        self.waiting_max = self.inflight_max = 0
        """Most requests that may wait, and run or wait."""
        self._set_limits()
        self.refused: dict[str, int] = {}
        """Requests refused for load, by the knob of ``router.overload`` that refused them."""
        self.refused_last: Nanos | None = None

    def use(self, settings: RouterSettings) -> None:
        """Go on with other settings. Which index is kept was decided when the pool was made."""
        self.settings = settings
        self._set_limits()
        self._stage_cost = _stage_costs(settings)
        self.embeddings.bytes_max = settings.handoff.embeddings
        self.embeddings.shrink()
        waiting = self.queue.snapshot()
        self.fair = FairQueue(settings.queue) if settings.queue.shares else None
        self.queue = RequestQueue(settings.queue) if self.fair is None else self.fair
        self.queue.restore(waiting)
        self.affinity.ttl = nanos(settings.affinity.ttl)

    # --- membership -------------------------------------------------------------------------------------------------

    def adopt(self, card: WorkerCard) -> str | None:
        """Take a worker's block size and hand-off as the pool's; return why the worker is refused, or None.

        What can't be handed over is found here, once, and not request by request.
        """
        if card.block_size is not None and self.block_size_known and card.block_size != self.block_size:
            return (
                f"block_size {card.block_size} differs from the {self.block_size} tokens of the other workers of "
                f"{self.model}: prefixes could not be compared"
            )
        staged = card.role in ("prefill", "decode")
        if staged and card.handoff is None:
            return f"its role is {card.role}, but it says no way in which KV could be handed over (handoff)"
        wire = None if card.handoff is None else (card.handoff, card.layout)
        if wire is not None and staged and self.wire is not None and not _alike(wire, self.wire):
            return (
                f"it hands KV over as {_wire_text(wire)}, "
                f"the other workers of {self.model} as {_wire_text(self.wire)}: "
                "what one writes the other could not read"
            )
        if wire is not None and staged and (self.wire is None or self.wire[1] is None):
            self.wire = wire
        if card.block_size is not None and not self.block_size_known:
            self.block_size = card.block_size
            self.block_size_known = True
            if self.exact is not None:
                self.exact.block_size = card.block_size
        return None

    def count(self, card: WorkerCard, change: int) -> None:
        """A worker with this card came (1) or went (-1)."""
        role = card.role
        if role in FINAL:
            self.seats += change * card.ranks * (card.max_num_seqs or USUAL_LIMITS.max_num_seqs)
        self.roles[role] += change
        self.paired += change * needs_pair(card)
        if not self.roles[role]:
            del self.roles[role]
        self._weigh_roles()
        self._set_limits()
        if not self.roles["prefill"] and not self.roles["decode"]:
            self.wire = None  # the next worker may do it otherwise

    def _set_limits(self) -> None:
        """Bound what may wait and run, by the settings or by the fleet."""
        waiting, inflight = self.settings.queue.length_max, self.settings.inflight_max
        self.waiting_max = max(WAITING_LEAST, int(WAITING_SHARE * self.seats)) if waiting is None else waiting
        self.inflight_max = max(INFLIGHT_LEAST, self.seats + self.waiting_max) if inflight is None else inflight

    def _weigh_roles(self) -> None:
        roles = set(self.roles)
        self.splits = splits(roles)
        self.plain = roles <= {"aggregated"}
        self.answers = bool(roles & FINAL)

    def speaks(self, card: WorkerCard) -> bool:
        """Tell whether a worker can go on with what the pool's prefill workers made."""
        if card.role == "aggregated":
            return card.handoff is not None and self.wire is not None and _alike((card.handoff, card.layout), self.wire)
        return card.role == "decode"  # it was let in only because it can

    def drop(self, worker: RosterWorker) -> None:
        """A worker is gone: nothing of its cache counts any more."""
        for target in worker.targets:
            self.streams.pop(target, None)
            for index in (self.exact, self.history, self.predicted):
                if index is not None:
                    index.remove(target)
        self.links = {ends: fault for ends, fault in self.links.items() if worker.card.id not in ends}
        self.affinity.drop_worker(worker.card.id)
        self.tier_costs.drop(worker.card.id)
        self.adapters.leave(worker.card.id)

    def _runs(self, router: str, request: RequestId) -> bool:
        """Tell whether a request that a router placed, empty for this one, runs under any of its names."""
        owners = (router,) if router else ("", HEDGE, STAGE)
        return any(self.active.runs(request, owner) for owner in owners)

    # --- overlap and cost -------------------------------------------------------------------------------------------

    def overlaps(self, prompt: Prompt, now: Nanos) -> dict[Target, HeldBlocks]:
        """Return how many leading blocks each target holds, by the best source that is known for it.

        Those in lower tiers count where the target would load them.
        """
        blocks, text = prompt.blocks, prompt.estimated
        if not self.indexed or not blocks:
            return {}
        found: dict[Target, HeldBlocks] = {}
        if self.history is not None:
            for target, depth in self.history.overlap(blocks, now).items():
                if text or self.kv_state(target) not in HEARD:
                    found[target] = HeldBlocks(depth, source="approximate")
        if text or self.exact is None:
            return found
        exact = self.exact.overlap(self._reachable(prompt)).items()
        found.update(
            [(target, held) for target, held in exact if target not in found or held.device >= found[target].device]
            if found
            else exact
        )
        if self.predicted is not None:
            for target, depth in self.predicted.overlap(blocks, now).items():
                known = found.get(target, NOTHING)
                if depth > known.device and not self.exact.windowed(target):  # of its windows, not all will stay
                    beyond = max(0, known.device + known.host - depth)
                    disk = min(known.disk, max(0, known.total - depth))
                    found[target] = HeldBlocks(depth, beyond, disk, "predicted")
        if self.tier_costs.costs:
            most, size, counted = self._cacheable(prompt), self.block_size, self.tier_costs.counted
            found.update([(to, counted(to, held, most, size)) for to, held in found.items() if held.lower])
        return found

    def _cacheable(self, prompt: Prompt) -> int:
        """Return how many blocks of a prompt an engine looks for: it computes the last token anyway."""
        return max(0, prompt.isl - 1) // self.block_size

    def _reachable(self, prompt: Prompt) -> Sequence[int]:
        """Return a prompt's blocks for the exact index. The last token is computed: a window has to end before it."""
        if self.exact is None or not self.exact.windowed():
            return prompt.blocks
        return prompt.blocks[: self._cacheable(prompt)]

    def overlap_columns(
        self, prompt: Prompt, place: Mapping[Target, int], now: Nanos
    ) -> tuple[Column | int, Sequence[Column], Column | int]:
        """Return what `overlaps` does for many targets: device blocks, those of lower tiers, and who says so.

        The tiers are host, disk and, where a worker reports its costs, costly blocks. Where nobody holds any it is 0.
        """
        blocks, text = prompt.blocks, prompt.estimated
        if not self.indexed or not blocks:
            return 0, [], 0
        guessed = None if self.history is None else self.history.column(blocks, place, now)
        if guessed is not None and not text and self.streams:
            targets = list(place)
            for held in guessed.nonzero()[0].tolist():
                if self.kv_state(targets[held]) in HEARD:
                    guessed[held] = 0
        if guessed is not None and not np.count_nonzero(guessed):
            guessed = None
        if self.exact is None or text:  # the guess is all there is
            return (0, [], 0) if guessed is None else (guessed, [], (guessed > 0) * APPROXIMATE)
        device, tiers = self.exact.columns(self._reachable(prompt), place)
        lower: list[Column] = list(tiers)
        source = (sum(lower, device) > 0).view(np.int8)  # the exact index is number 1 of `SOURCES`
        if guessed is not None:
            more = guessed > device
            device, lower = np.maximum(guessed, device), [np.where(more, 0, tier) for tier in lower]
            source = np.where(more, APPROXIMATE, source)
        if self.predicted is not None:
            depth = self.predicted.column(blocks, place, now)
            more = depth > device
            if self.exact.windowed():
                more &= np.array([not self.exact.windowed(target) for target in place], dtype=bool)
            if np.count_nonzero(more):
                if lower:
                    left = np.maximum(0, device + lower[0] + lower[1] - depth)
                    lower[0] = np.where(more, np.maximum(0, device + lower[0] - depth), lower[0])
                    lower[1] = np.where(more, np.minimum(lower[1], left), lower[1])
                device = np.where(more, depth, device)
                source = np.where(more, PREDICTED, source)
        if lower and self.tier_costs.costs:
            most, size = self._cacheable(prompt), self.block_size
            lower = list(self.tier_costs.counted_columns(place, device, lower, most, size))
        return (device, lower, source) if lower or np.count_nonzero(device) else (0, [], 0)

    def kv_state(self, target: Target) -> str:
        """Return how well a target's cache is known: a stream's state, or none where it has no event source."""
        stream = self.streams.get(target)
        return "none" if stream is None else stream.state

    def routed(self, target: Target, prompt: Prompt, now: Nanos) -> None:
        """Remember that a target is about to hold these blocks."""
        blocks, text = prompt.blocks, prompt.estimated
        if not blocks:
            return
        if self.history is not None and (text or self.kv_state(target) not in HEARD):
            self.history.routed(target, blocks, now)
        elif self.predicted is not None and not text:
            self.predicted.routed(target, blocks, now)

    def costs(
        self,
        request: RoutedRequest,
        targets: Targets,
        now: Nanos,
        stage: Role = "aggregated",
        source: WorkerCard | None = None,
    ) -> tuple[Sequence[Cost], int]:
        """Price every candidate; return the costs and the request's blocks without a hash.

        Args:
            stage: what the candidates would do.
            source: the worker that holds the prompt's KV, for stage ``decode``.
        """
        prompt, preferences = request.prompt, request.event.preferences
        settings = self._stage_cost[stage]
        size = TEXT_BLOCK_BYTES // BYTES_PER_TOKEN if prompt.estimated else self.block_size
        unhashed_blocks = max(0, -(-prompt.isl // size) - len(prompt.blocks))
        many, load = len(targets) >= COLUMNS_MIN, self.active.load
        priced = [] if many else [(target, worker, load(target)) for target, worker in targets]
        expected = self.expected_output(preferences) if self.settings.expect_output else preferences.osl
        demand = RequestDemand(
            prompt=prompt,
            unhashed_blocks=unhashed_blocks,
            block_size=size,
            osl=self.output_mean if expected is None else float(expected),
            least_prefill=min([used.prefill_tokens for _, _, used in priced], default=0),
            overlap_credit=(
                settings.overlap_credit if preferences.overlap_credit is None else preferences.overlap_credit
            ),
            handed=source is not None,
            ms_per_block=self.ms_per_block if source is not None else 0.0,
        )
        adapter = request.event.adapter if self.adapters.workers else None
        usual = self._usual_speed()
        far = partial(distance, self.settings.handoff.distance, source) if source is not None else None
        if many:
            place, columns = self._columns(prompt, targets, now, stage, usual, far)
            if adapter is not None:
                seconds = [self.adapters.seconds(target.worker, adapter) for target, _ in targets]
                columns = columns._replace(adapter=np.array(seconds))
            return CostTable(demand, settings, targets, place, columns), unhashed_blocks
        price, overlaps = COSTS[settings.kind], self.overlaps(prompt, now)
        return [
            price(
                demand,
                Candidate(
                    target,
                    overlaps.get(target, NOTHING),
                    used,
                    usual if worker.speed is None else self._speed(worker.speed),
                    1.0 if far is None else far(worker.card),
                    0.0 if adapter is None else self.adapters.seconds(target.worker, adapter),
                ),
                settings,
            )
            for target, worker, used in priced
        ], unhashed_blocks

    def _columns(
        self,
        prompt: Prompt,
        targets: Targets,
        now: Nanos,
        stage: Role,
        usual: Speed,
        far: Callable[[WorkerCard], float] | None,
    ) -> tuple[Mapping[Target, int], Candidates]:
        """Return the place of each of many candidates, and what is known of them in columns."""
        columns = self.active.columns(stage, targets)
        device, lower, source = self.overlap_columns(prompt, columns.place, now)
        speeds = msgspec.structs.astuple(usual)
        if self.settings.cost.kind == "latency":
            own = [usual if worker.speed is None else self._speed(worker.speed) for _, worker in targets]
            speeds = tuple(np.array([msgspec.structs.astuple(speed) for speed in own]).T)
        queued, requests, in_use = columns.numbers.copy()
        return columns.place, Candidates(
            queued,
            requests,
            in_use,
            self.active.shared(columns, prompt.blocks),
            device,
            lower,
            source,
            speeds,
            1.0 if far is None else np.array([far(worker.card) for _, worker in targets]),
        )

    @property
    def ms_per_block(self) -> float:
        """Milliseconds that a block of a hand-off takes, as measured or as the settings say."""
        line = self.bring.line()
        return TRANSFER_MS_PER_BLOCK if line is None else max(0.0, 1e3 * line[1])

    def speed_of(self, worker: RosterWorker) -> Speed:
        """Return how fast a worker is, by itself, by what was measured of its kind, or by the settings."""
        if worker.speed is not None:
            return self._speed(worker.speed)
        line = self.fit.line()
        if line is None:
            return self._usual_speed()
        return Speed(max(0.0, line[0]), max(0.0, line[1]), DECODE_MS_PER_BLOCK / 1e3)

    def _speed(self, measured: tuple[float, float, float, float]) -> Speed:
        """Return the speed of a worker that measured itself."""
        intercept, slope, _, decode = measured
        return Speed(intercept, slope, decode or DECODE_MS_PER_BLOCK / 1e3)

    def _usual_speed(self) -> Speed:
        """Return the speed of all other workers."""
        decode = DECODE_MS_PER_BLOCK / 1e3
        line = self.fit.line() if self.settings.cost.kind == "latency" else None
        if line is not None:
            return Speed(line[0], line[1], decode)
        return Speed(0.0, 1.0 / PREFILL_TOKENS_PER_SECOND, decode)

    def earn_fallback(self) -> None:
        """A hand-off was sent: its share of a fallback is allowed."""
        self.fallback_tokens = min(FALLBACK_BURST, self.fallback_tokens + FALLBACK_SHARE)

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
        self.output_mean += 0.02 * (tokens - self.output_mean)
        if cached is not None:
            self.prompt_tokens += isl
            self.cached_tokens += cached

    def refuse(self, limit: str, now: Nanos) -> None:
        """A limit of ``router.overload`` refused a request."""
        self.refused[limit] = self.refused.get(limit, 0) + 1
        self.refused_last = now

    @property
    def hit_rate(self) -> float | None:
        """Cached over prompt tokens of the answered requests, or None before an engine reported it."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else None

    # --- machine duties ---------------------------------------------------------------------------------------------

    def snapshot(self) -> ModelPoolState:
        state = state_of(self, ModelPoolState)
        state.streams = {target: stream.snapshot() for target, stream in self.streams.items()}
        return state

    def restore(self, state: ModelPoolState) -> None:
        streams, state.streams = state.streams, {}
        take_state(self, state)
        self.placements, self.roles = Counter(state.placements), Counter(state.roles)
        for target, stream in streams.items():
            self.streams[target] = KvEventStream()
            self.streams[target].restore(stream)
        if self.exact is not None:
            self.exact.block_size = self.block_size
        self._set_limits()
        self._weigh_roles()

    def check(self) -> None:
        self.active.check()
        self.queue.check()
        self.affinity.check()
        self.adapters.check()
        self.embeddings.check()
        for index in (self.exact, self.history, self.predicted):
            if index is not None:
                index.check()


def distance(weights: Mapping[str, float], one: WorkerCard, other: WorkerCard) -> float:
    """Return how many times as much a transfer between two workers costs, by the labels in which they differ."""
    found = 1.0
    for label, weight in weights.items():
        here, there = one.labels.get(label), other.labels.get(label)
        if here is not None and there is not None and here != there:
            found *= weight
    return found


def _stage_costs(settings: RouterSettings) -> dict[Role, CostSettings]:
    """Return what a placement costs, by what is to be done there."""
    cost = settings.cost
    before = msgspec.structs.replace(cost, decode_scale=PREFILL_DECODE_SCALE)
    after = msgspec.structs.replace(cost, prefill_scale=DECODE_PREFILL_SCALE)
    return {"aggregated": cost, "encode": before, "prefill": before, "decode": after}


def _alike(one: tuple[str, str | None], other: tuple[str, str | None]) -> bool:
    """Tell whether KV can go between workers; a layout that is not known is taken for the other's."""
    return one[0] == other[0] and (one[1] == other[1] or one[1] is None or other[1] is None)


def _wire_text(wire: tuple[str, str | None]) -> str:
    return wire[0] if wire[1] is None else f"{wire[0]} with layout {wire[1]}"
