"""Cost of placing a request on a worker: two cost functions over one record of terms.

``blocks`` is the formula of Dynamo's default worker selection, in blocks:

    prefill = scale * max((queued prefill tokens + isl) / block_size - credit, 0)
    credit  = c * device + host_credit * host + disk_credit * disk        (overlap in blocks)
    c       = overlap_credit / (1 + CREDIT_DECAY * excess)
    excess  = max(queued prefill tokens - the least over all candidates, 0) / block_size / request blocks
    total   = prefill + decode_scale * (blocks in use after adding + request_weight * requests) + transfer

``transfer`` is there where another worker holds the prompt's KV, and none of it is computed here: transfer_scale *
distance for each of its blocks that this worker does not hold.

Blocks on a worker's host memory and disk count where the worker's own tiers would load them, by the costs that it
reports (`penstock.router.kv_index.pool_index`); without a report all count.

``adapter`` is there where a LoRA adapter would have to be loaded first: the prefill that could be done in that time.

``latency`` predicts milliseconds: this request's own prefill, the prefill queued before it, bringing blocks from
lower tiers, and what the worker's KV in use adds to its decode steps over the expected output.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, overload

import msgspec
import numpy as np
import numpy.typing as npt

from penstock.kernel.values import Prompt, Target, WorkerCard
from penstock.router.events import Cost
from penstock.router.kv_index.indexer import NOTHING, SOURCES, Column, HeldBlocks
from penstock.router.selection.candidate import Candidate, RequestDemand, Speed
from penstock.router.selection.router_plugins import Floats, PricedCandidates
from penstock.router.settings import CostSettings

CREDIT_DECAY = 0.0
"""How fast the credit fades on a worker with more queued prefill than the least; Dynamo's default."""
TRANSFER_MS_PER_BLOCK = 0.05
"""What bringing a block from host, disk or a prefill worker takes, until hand-offs have been measured."""

PREFILL_TOKENS_PER_SECOND = 20_000.0
"""Prefill speed that is assumed until it has been measured; the tokens that a second of waiting for an adapter is worth
in blocks."""


CostFunction = Callable[[RequestDemand, Candidate, CostSettings], Cost]


def block_cost(demand: RequestDemand, candidate: Candidate, settings: CostSettings) -> Cost:
    """Dynamo's formula, in blocks. Cost: some 3 us; it is worked out for every candidate of every request."""
    load, overlap, size, prompt = candidate.load, candidate.overlap, demand.block_size, demand.prompt
    isl, blocks = prompt.isl, prompt.blocks
    transfer = 0.0
    if demand.handed:
        transfer = settings.transfer_scale * candidate.distance * _missing_blocks(demand, overlap)
        isl, overlap = 0, NOTHING  # no cached block saves any prefill here
    queued, device = load.prefill_tokens, overlap.device
    excess = (queued - demand.least_prefill) / size / (len(blocks) + demand.unhashed_blocks or 1)
    credit = demand.overlap_credit / (1.0 + CREDIT_DECAY * (excess if excess > 0.0 else 0.0)) * device
    lower = settings.host_credit * overlap.host + settings.disk_credit * overlap.disk
    # Credit saves this request's prefill first; a credit above 1 may eat into what is queued, never below zero.
    queue = queued / size
    work = queue + isl / size - credit - lower
    if work < 0.0:
        work = 0.0
    own = work - queue
    if own < 0.0:
        own = 0.0
    decode = settings.decode_scale * (
        load.blocks_with(blocks, demand.unhashed_blocks) + settings.request_weight * load.requests
    )
    scale = settings.prefill_scale
    adapter = scale * PREFILL_TOKENS_PER_SECOND * candidate.adapter / size
    return Cost(
        target=candidate.target,
        unit="blocks",
        total=scale * work + decode + transfer + adapter,
        prefill=scale * own,
        decode=decode,
        queue=scale * (work - own),
        transfer=transfer,
        overlap_blocks=candidate.overlap.device,
        overlap_tokens=cached_tokens(demand, candidate.overlap),
        costly_blocks=candidate.overlap.costly,
        active_requests=load.requests,
        active_prefill_tokens=queued,
        active_blocks=load.blocks,
        adapter=adapter,
        index=overlap.source,
    )


def latency_cost(demand: RequestDemand, candidate: Candidate, settings: CostSettings) -> Cost:
    """Predicted milliseconds until the first token, and slow-down of the tokens after it."""
    load, overlap, speed = candidate.load, candidate.overlap, candidate.speed
    cached = cached_tokens(demand, overlap)
    new = 0 if demand.handed else demand.prompt.isl - cached
    prefill = 1e3 * (speed.prefill_intercept + speed.prefill_slope * new)
    queue = 1e3 * speed.prefill_slope * load.prefill_tokens
    transfer = TRANSFER_MS_PER_BLOCK * overlap.lower
    if demand.handed:
        transfer = demand.ms_per_block * candidate.distance * _missing_blocks(demand, overlap)
    used = load.blocks_with(demand.prompt.blocks, demand.unhashed_blocks)
    decode = 1e3 * speed.decode_slope * used * demand.osl
    adapter = 1e3 * candidate.adapter
    return Cost(
        target=candidate.target,
        unit="ms",
        total=prefill + queue + transfer + decode + adapter,
        prefill=prefill,
        decode=decode,
        queue=queue,
        transfer=transfer,
        overlap_blocks=overlap.device,
        overlap_tokens=cached,
        costly_blocks=overlap.costly,
        active_requests=load.requests,
        active_prefill_tokens=load.prefill_tokens,
        active_blocks=load.blocks,
        adapter=adapter,
        index=overlap.source,
    )


COSTS: dict[str, CostFunction] = {"blocks": block_cost, "latency": latency_cost}


def _missing_blocks(demand: RequestDemand, overlap: HeldBlocks) -> int:
    """Return how many of a prompt's blocks a worker does not hold on its device."""
    return max(0, len(demand.prompt.blocks) + demand.unhashed_blocks - overlap.device)


def cached_tokens(demand: RequestDemand, overlap: HeldBlocks) -> int:
    """Return the prompt tokens that are expected to come from a target's cache, all tiers."""
    blocks = overlap.device + overlap.host + overlap.disk  # no call on the hot path
    if not blocks:
        return 0
    # An engine computes at least the last token of a prompt that it holds in full, and does so by the block.
    size = demand.block_size
    return min(blocks * size, max(0, demand.prompt.isl - 1) // size * size)


class Candidates(NamedTuple):
    """What a cost function may know of many candidates; see `Candidate`.

    A number stands for a column of that number.
    """

    loads: Column
    """Shape (3, candidates): tokens still to prefill, requests, and blocks in use."""
    shared: Column | int
    """Leading blocks of the prompt among those in use."""
    device: Column | int
    lower: Sequence[Column]
    """Blocks in host memory, on disk, and costly ones, as `HeldBlocks` has them; the ends are left out where no
    candidate has any."""
    source: Column | int
    """Index that says so, by its number in `SOURCES`."""
    speed: Sequence[Column | float]
    distance: Column | float
    adapter: Column | float = 0.0
    """Seconds until each would hold the request's LoRA adapter."""


class _Load(NamedTuple):
    """A candidate's load, with what its blocks in use would be."""

    prefill_tokens: int
    requests: int
    blocks: int
    after: int

    def blocks_with(self, blocks: Sequence[int], unhashed_blocks: int) -> int:
        return self.after


class CostTable(Sequence[Cost]):
    """What candidates would cost, in their order.

    Args:
        targets: the candidates, each with anything behind it.
        place: of each in ``targets``.
    Cost: some 15 us, and 4 us for each row that is read.
    """

    def __init__(
        self,
        demand: RequestDemand,
        settings: CostSettings,
        targets: Sequence[tuple[Target, Any]],
        place: Mapping[Target, int],
        candidates: Candidates,
    ) -> None:
        blocks = len(demand.prompt.blocks)
        if CREDIT_DECAY:
            demand = msgspec.structs.replace(demand, least_prefill=int(candidates.loads[0].min()))
        after = candidates.loads[2] + (blocks + demand.unhashed_blocks)
        if not isinstance(candidates.shared, int):
            after -= candidates.shared
        self.total: Column = TOTALS[settings.kind](demand, candidates, after, settings)
        """What is compared; lower wins."""
        # A table may be kept for long: of the prompt's blocks it keeps how many there are.
        self._demand = msgspec.structs.replace(demand, prompt=Prompt(demand.prompt.isl, range(blocks)))
        self._settings, self._of, self._after = settings, candidates, after
        self._targets, self._place = targets, place
        self._discounts: dict[int, float] = {}
        self._most_cached: int | None = None
        self._least_places: npt.NDArray[np.intp] | None = None
        self._added: Mapping[str, Floats] = {}
        same = not any(isinstance(one, np.ndarray) for one in candidates.speed)
        self._speed = Speed(*candidates.speed) if same else None  # type: ignore[arg-type]
        self._rows: dict[int, Cost] = {}
        """Those that were asked for one by one: the chosen one is, again and again."""

    def __len__(self) -> int:
        return len(self._targets)

    @overload
    def __getitem__(self, index: int) -> Cost: ...
    @overload
    def __getitem__(self, index: slice) -> list[Cost]: ...
    def __getitem__(self, index: int | slice) -> Cost | list[Cost]:
        if isinstance(index, slice):
            return [self._row(place) for place in range(len(self))[index]]
        place = range(len(self))[index]
        row = self._rows.get(place)
        if row is None:
            row = self._rows[place] = self._row(place)
        return row

    def _row(self, place: int) -> Cost:
        of = self._of
        queued, requests, blocks = of.loads[:, place].tolist()
        host, disk, costly = (*[column.item(place) for column in of.lower], 0, 0, 0)[:3] if of.lower else (0, 0, 0)
        row = COSTS[self._settings.kind](
            self._demand,
            Candidate(
                self._targets[place][0],
                HeldBlocks(
                    _column_value(of.device, place), host, disk, SOURCES[_column_value(of.source, place)], costly
                ),
                _Load(queued, requests, blocks, self._after.item(place)),
                self._speed or Speed(*[_column_value(column, place) for column in of.speed]),
                _column_value(of.distance, place),
                _column_value(of.adapter, place),
            ),
            self._settings,
        )
        if self._added:
            row = _with_plugins(row, {name: column.item(place) for name, column in self._added.items()})
        left = self._discounts.get(place)
        return row if left is None else msgspec.structs.replace(row, total=row.total * left, discount=left)

    def __iter__(self) -> Iterator[Cost]:
        return map(self._row, range(len(self)))  # kept by nobody: a table may be, with thousands

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    def discounted(self, home: Target, left: float) -> "CostTable":
        """Let a target, if it is a candidate, cost only so much of its total; return the table."""
        if (place := self._place.get(home)) is not None:
            self.total[place] *= left
            self._discounts[place] = left
            self._forget()
        return self

    def scored(self, added: Mapping[str, Floats]) -> "CostTable":
        """Add to the totals what scorers say; return the table."""
        self._added = added
        for column in added.values():
            self.total += column
        self._forget()
        return self

    def _forget(self) -> None:
        """The totals have changed."""
        self._rows.clear()
        self._least_places = None

    def candidates(self, card_of: Callable[[Target], WorkerCard]) -> PricedCandidates:
        """Return what scorers may know of the candidates."""
        of = self._of
        cached = self._cached_blocks() * self._demand.block_size + np.zeros(len(self), dtype=np.int64)
        targets = [target for target, _ in self._targets]
        cards = [card_of(target) for target in targets]
        return PricedCandidates(targets, cards, lambda: list(of.loads), self.total, cached)

    @property
    def least_places(self) -> npt.NDArray[np.intp]:
        """The places with the least total, rising: all of an idle fleet may be."""
        if self._least_places is None:
            total = self.total
            self._least_places = (total == total[total.argmin()]).nonzero()[0]
        return self._least_places

    def ranked(self, count: int) -> list[int]:
        """Return what `ranked` does."""
        places: list[int] = self.least_places[:count].tolist()
        if len(places) < min(count, len(self)):
            left = self.total.copy()
            left[places] = math.inf
            while len(places) < min(count, len(self)):  # a few passes cost less than any order of thousands
                places.append(int(left.argmin()))
                left[places[-1]] = math.inf
        return places

    def most_cached(self) -> int:
        """Return the place of the first candidate with the most tokens in its cache."""
        if self._most_cached is None:
            self._most_cached = 0 if self.evenly_cached else int(self._cached_blocks().argmax())
        return self._most_cached

    @property
    def evenly_cached(self) -> bool:
        """Whether all candidates have the same of the prompt, such as nothing."""
        return isinstance(self._of.device, int) and not self._of.lower

    @property
    def content(self) -> list[bytes | memoryview]:
        """All that rows are made of but their targets: equal tables have equal bytes."""
        return [_column_bytes(one) if isinstance(one, np.ndarray) else repr(one).encode() for one in self._columns()]

    @property
    def nbytes(self) -> int:
        """About the bytes of the columns."""
        return self.total.nbytes * (7 + len(self._of.lower) + len(self._added))

    def second(self, first: int) -> tuple[Target, float]:
        """Return what `second_of` does, without a row."""
        total = self.total
        least = total[first]
        total[first] = math.inf
        second = int(total.argmin())
        total[first] = least
        return self._targets[second][0], total.item(second)

    def _cached_blocks(self) -> Any:
        """Return the blocks that `cached_tokens` counts of each candidate, or one number for all."""
        held: Any = sum(self._of.lower[:2], self._of.device)
        return np.minimum(held, max(0, self._demand.prompt.isl - 1) // self._demand.block_size)

    def _columns(self) -> Sequence[Any]:
        """Return columns, and numbers that stand for one as they are: of `float` mypyc would make a 0 to 0.0."""
        of = self._of
        known = (of.device, *of.lower, of.source, *of.speed, of.distance, of.adapter)
        return [self.total, *self._added.values(), *of.loads, self._after, *known]


def _column_bytes(column: Column) -> bytes | memoryview:
    return column.data if column.flags.c_contiguous else column.tobytes()


def _column_value(column: Any, place: int) -> Any:
    return column.item(place) if isinstance(column, np.ndarray) else column


def _block_totals(demand: RequestDemand, of: Candidates, after: Column, settings: CostSettings) -> Column:
    """Return the totals that `block_cost` has. What a number makes needless is left out: each pass counts."""
    size, isl, lower = demand.block_size, demand.prompt.isl, of.lower
    saved: Column | int = of.device
    transfer: Column | float = 0.0
    if demand.handed:
        transfer = settings.transfer_scale * of.distance * _missing_columns(demand, of)
        isl, saved, lower = 0, 0, ()
    queued, requests, _ = of.loads
    work: Column = queued / size
    work += isl / size
    if not isinstance(saved, int):
        worth: Any = demand.overlap_credit
        if CREDIT_DECAY:
            excess = (queued - demand.least_prefill) / size
            excess /= len(demand.prompt.blocks) + demand.unhashed_blocks or 1
            worth = worth / (1.0 + CREDIT_DECAY * np.maximum(excess, 0.0))
        work -= worth * saved
    if lower:
        work -= settings.host_credit * lower[0] + settings.disk_credit * lower[1]
    if lower or not isinstance(saved, int):
        np.maximum(work, 0.0, out=work)
    scale = settings.prefill_scale
    if scale != 1.0:
        work *= scale
    decode = settings.request_weight * requests
    decode += after
    if settings.decode_scale != 1.0:
        decode *= settings.decode_scale
    work += decode
    if demand.handed:
        work += transfer
    if isinstance(of.adapter, np.ndarray):
        work += scale * PREFILL_TOKENS_PER_SECOND * of.adapter / size
    return work


def _latency_totals(demand: RequestDemand, of: Candidates, after: Column, settings: CostSettings) -> Column:
    """Return the totals that `latency_cost` has."""
    intercept, slope, decode_slope = of.speed
    size, isl = demand.block_size, demand.prompt.isl
    lower = of.lower[0] + of.lower[1] if of.lower else 0
    new = 0 if demand.handed else isl - np.minimum((of.device + lower) * size, max(0, isl - 1) // size * size)
    prefill = 1e3 * (intercept + slope * new)
    transfer: Any = TRANSFER_MS_PER_BLOCK * lower
    if demand.handed:
        transfer = demand.ms_per_block * of.distance * _missing_columns(demand, of)
    decode = 1e3 * decode_slope * after * demand.osl
    totals: Column = prefill + 1e3 * slope * of.loads[0] + transfer + decode + 1e3 * of.adapter
    return totals


TOTALS: dict[str, Callable[[RequestDemand, Candidates, Column, CostSettings], Column]] = {
    "blocks": _block_totals,
    "latency": _latency_totals,
}
"""The column twin of each of `COSTS`."""


def _missing_columns(demand: RequestDemand, of: Candidates) -> Any:
    return np.maximum(len(demand.prompt.blocks) + demand.unhashed_blocks - of.device, 0)


def with_scores(costs: Sequence[Cost], added: Mapping[str, Floats]) -> Sequence[Cost]:
    """Add to the totals of a table or of a list of costs what scorers say: name -> a column of numbers."""
    if not added:
        return costs
    if isinstance(costs, CostTable):
        return costs.scored(added)
    columns = {name: column.tolist() for name, column in added.items()}
    return [
        _with_plugins(row, {name: column[place] for name, column in columns.items()}) for place, row in enumerate(costs)
    ]


def candidates_of(costs: Sequence[Cost], card_of: Callable[[Target], WorkerCard]) -> PricedCandidates:
    """Return what scorers may know of the candidates of a table or of a list of costs."""
    if isinstance(costs, CostTable):
        return costs.candidates(card_of)
    targets = [row.target for row in costs]
    return PricedCandidates(
        targets,
        [card_of(target) for target in targets],
        lambda: [
            np.array([getattr(row, name) for row in costs], dtype=np.int64)
            for name in ("active_prefill_tokens", "active_requests", "active_blocks")
        ],
        np.array([row.total for row in costs], dtype=np.float64),
        np.array([row.overlap_tokens for row in costs], dtype=np.int64),
    )


def _with_plugins(row: Cost, plugins: dict[str, float]) -> Cost:
    total = row.total
    for added in plugins.values():  # in this order, as the columns are added: a sum depends on it in its last bit
        total += added
    return msgspec.structs.replace(row, total=total, plugins=plugins)


def totals_of(costs: Sequence[Cost]) -> list[float]:
    """Return the totals of a table or of a list of costs."""
    return costs.total.tolist() if isinstance(costs, CostTable) else [one.total for one in costs]


def active_requests_of(costs: Sequence[Cost]) -> list[int]:
    """Return the running requests of the candidates of a table or of a list of costs."""
    return costs._of.loads[1].tolist() if isinstance(costs, CostTable) else [one.active_requests for one in costs]


def cheapest_of(costs: Sequence[Cost]) -> Any:
    """Return the places with the least total, rising: numbers of numpy where the costs are a table."""
    if isinstance(costs, CostTable):
        return costs.least_places  # hundreds may be: none is looked at but by place
    places: list[int] = []
    least = math.inf
    for place, one in enumerate(costs):
        if one.total <= least:
            if one.total < least:
                least, places = one.total, []
            places.append(place)
    return places


def second_of(costs: Sequence[Cost], first: int) -> tuple[Target, float]:
    """Return the first candidate with the least total of all but the one at a place, and its total."""
    if isinstance(costs, CostTable):
        return costs.second(first)
    second: Cost | None = None
    for place, one in enumerate(costs):
        if place != first and (second is None or one.total < second.total):
            second = one
    assert second is not None, "one candidate has no runner-up"
    return second.target, second.total


def place_of(costs: Sequence[Cost], target: Target) -> int | None:
    """Return the place of a candidate; None where it is none."""
    if isinstance(costs, CostTable):
        return costs._place.get(target)
    for place, one in enumerate(costs):
        if one.target == target:
            return place
    return None


def ranked(costs: Sequence[Cost], count: int) -> list[int]:
    """Return the places of the lowest totals, the best first; equal ones by place."""
    if isinstance(costs, CostTable):
        return costs.ranked(count)
    return sorted(range(len(costs)), key=lambda place: costs[place].total)[:count]


def most_cached(costs: Sequence[Cost]) -> int:
    """Return the place of the first candidate with the most cached tokens."""
    if isinstance(costs, CostTable):
        return costs.most_cached()
    best, most = 0, -1
    for place, one in enumerate(costs):
        if one.overlap_tokens > most:
            best, most = place, one.overlap_tokens
    return best


def cached_beside_most(costs: Sequence[Cost], chosen: Target) -> tuple[Cost, Cost] | None:
    """Return the chosen candidate and the one with most cached tokens, the same where none has more.

    None where what was chosen is no candidate.
    """
    here: Cost | None = None
    most: Cost | None = None
    if isinstance(costs, CostTable):
        if (place := costs._place.get(chosen)) is not None:
            here = costs[place]
            most = here if costs.evenly_cached else costs[costs.most_cached()]
    else:
        for one in costs:
            if one.target == chosen:
                here = one
            if most is None or one.overlap_tokens > most.overlap_tokens:
                most = one
    if here is None or most is None:
        return None
    return here, most if most.overlap_tokens > here.overlap_tokens else here


def cheapest(costs: Sequence[Cost], count: int) -> list[Target]:
    """Return the targets of the lowest totals, best first; of a table no row is made for it."""
    if isinstance(costs, CostTable):
        return [costs._targets[place][0] for place in ranked(costs, count)]
    return [costs[place].target for place in ranked(costs, count)]
