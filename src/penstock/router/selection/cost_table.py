"""Cost table of many candidates: `penstock.router.selection.cost` over numpy columns, to the last bit the same.

A row is made when it is read. In a simulation most decisions are never read.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, overload

import msgspec
import numpy as np

from penstock.kernel.values import Prompt, Target
from penstock.router.events import Cost
from penstock.router.kv_index.indexer import SOURCES, Column, HeldBlocks
from penstock.router.selection import cost
from penstock.router.selection.candidate import RequestDemand
from penstock.router.selection.cost import cached_tokens
from penstock.router.settings import CostSettings


class Candidates(NamedTuple):
    """What a cost function may know of many candidates; see `penstock.router.selection.cost.Candidate`."""

    queued: Column
    """Tokens still to prefill."""
    requests: Column
    blocks: Column
    """In use."""
    shared: Column
    """Leading blocks of the prompt among those in use."""
    device: Column
    lower: Sequence[Column]
    """Blocks in host memory, on disk, and costly ones, as `HeldBlocks` has them; the ends are left out where no
    candidate has any."""
    source: Column
    """Index that says so, by its number in `SOURCES`."""
    speed: Sequence[Column | float]
    distance: Column | float
    adapter: Column | float = 0.0
    """Seconds until each would hold the request's LoRA adapter."""


class CostTable(Sequence[Cost]):
    """What candidates would cost, in their order.

    Args:
        targets: the candidates, each with anything behind it.
        place: of each in ``targets``.
    Cost: some 15 us, and 1 us for each row that is read.
    """

    def __init__(
        self,
        demand: RequestDemand,
        settings: CostSettings,
        targets: Sequence[tuple[Target, Any]],
        place: Mapping[Target, int],
        candidates: Candidates,
    ) -> None:
        price = _latency_terms if settings.kind == "latency" else _block_terms
        total, *terms = price(demand, candidates, settings)
        self.total: Column = total
        """What is compared; lower wins."""
        self.active_requests: Column = candidates.requests
        """Requests running on each candidate."""
        lower = (*candidates.lower, 0, 0, 0)[:3]
        held = (candidates.device, *lower, candidates.source)
        self._columns = [total, *terms, candidates.queued, candidates.requests, candidates.blocks, *held]
        # A table may be kept for long: the prompt's blocks are not, which no row has.
        self._demand = msgspec.structs.replace(demand, prompt=Prompt(demand.prompt.isl))
        self._in_blocks = settings.kind == "blocks"
        self._targets, self._place = targets, place
        self._discounts: dict[int, float] = {}

    def __len__(self) -> int:
        return len(self._targets)

    @overload
    def __getitem__(self, index: int) -> Cost: ...
    @overload
    def __getitem__(self, index: slice) -> list[Cost]: ...
    def __getitem__(self, index: int | slice) -> Cost | list[Cost]:
        if isinstance(index, slice):
            return list(self)[index]
        return self._row(index, [one.item(index) if isinstance(one, np.ndarray) else one for one in self._columns])

    def __iter__(self) -> Iterator[Cost]:
        columns = [one.tolist() if isinstance(one, np.ndarray) else [one] * len(self) for one in self._columns]
        return map(self._row, range(len(self)), zip(*columns, strict=True))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    def discounted(self, home: Target, left: float) -> "CostTable":
        """Let a target, if it is a candidate, cost only so much of its total; return the table."""
        if (place := self._place.get(home)) is not None:
            self.total[place] *= left
            self._discounts[place] = left
        return self

    @property
    def cached(self) -> Column:
        """Prompt tokens that are expected to come from each candidate's cache, as `cost.cached_tokens` has them."""
        demand = self._demand
        device, host, disk = self._columns[-5:-2]
        most = max(0, demand.prompt.isl - 1) // demand.block_size * demand.block_size
        found: Column = np.minimum((device + host + disk) * demand.block_size, most)
        return found

    @property
    def content(self) -> list[bytes]:
        """All that rows are made of but their targets: equal tables have equal bytes."""
        return [one.tobytes() if isinstance(one, np.ndarray) else repr(one).encode() for one in self._columns]

    @property
    def nbytes(self) -> int:
        """Bytes of the columns."""
        return sum(one.nbytes for one in self._columns if isinstance(one, np.ndarray))

    def second(self, first: int) -> tuple[Target, float]:
        """Return what `second_of` does, without a row."""
        total = self.total
        least = total[first]
        total[first] = math.inf
        second = int(total.argmin())
        total[first] = least
        return self._targets[second][0], total.item(second)

    def _row(self, place: int, numbers: Sequence[Any]) -> Cost:
        total, prefill, decode, queue, transfer, adapter, queued, requests, blocks, *holding = numbers
        device, host, disk, costly, source = holding
        overlap = HeldBlocks(device, host, disk, SOURCES[source], costly)
        return Cost(
            target=self._targets[place][0],
            unit="blocks" if self._in_blocks else "ms",
            total=total,
            prefill=prefill,
            decode=decode,
            queue=queue,
            transfer=transfer,
            overlap_blocks=overlap.device,
            overlap_tokens=cached_tokens(self._demand, overlap),
            costly_blocks=overlap.costly,
            active_requests=requests,
            active_prefill_tokens=queued,
            active_blocks=blocks,
            adapter=adapter,
            discount=self._discounts.get(place, 1.0),
            index="none" if self._in_blocks and self._demand.handed else overlap.source,
        )


def _block_terms(demand: RequestDemand, of: Candidates, settings: CostSettings) -> Sequence[Any]:
    """Return total, prefill, decode, queue, transfer and adapter, as `cost.block_cost` does."""
    size, prompt, blocks = demand.block_size, demand.prompt, len(demand.prompt.blocks)
    isl, lower = prompt.isl, of.lower
    saved: Column | int = of.device
    transfer: Column | float = 0.0
    if demand.handed:
        transfer = settings.transfer_scale * of.distance * _missing(demand, of)
        isl, saved, lower = 0, 0, ()
    worth: Any = demand.overlap_credit
    if cost.CREDIT_DECAY:
        excess = (of.queued - of.queued.min()) / size / (blocks + demand.unhashed_blocks or 1)
        worth = worth / (1.0 + cost.CREDIT_DECAY * np.maximum(excess, 0.0))
    queue = of.queued / size
    work = queue + isl / size - worth * saved
    if lower:
        work = work - (settings.host_credit * lower[0] + settings.disk_credit * lower[1])
    work = np.maximum(work, 0.0)
    own = np.maximum(work - queue, 0.0)
    in_use = of.blocks + (blocks + demand.unhashed_blocks) - of.shared
    decode = settings.decode_scale * (in_use + settings.request_weight * of.requests)
    scale = settings.prefill_scale
    adapter = scale * cost.PREFILL_TOKENS_PER_SECOND * of.adapter / size
    return scale * work + decode + transfer + adapter, scale * own, decode, scale * (work - own), transfer, adapter


def _latency_terms(demand: RequestDemand, of: Candidates, settings: CostSettings) -> Sequence[Any]:
    """Return the same as `penstock.router.selection.cost.latency_cost` does."""
    intercept, slope, decode_slope = of.speed
    size, isl = demand.block_size, demand.prompt.isl
    lower = of.lower[0] + of.lower[1] if of.lower else 0
    new = 0 if demand.handed else isl - np.minimum((of.device + lower) * size, max(0, isl - 1) // size * size)
    prefill = 1e3 * (intercept + slope * new)
    queue = 1e3 * slope * of.queued
    transfer = cost.TRANSFER_MS_PER_BLOCK * lower
    if demand.handed:
        transfer = demand.ms_per_block * of.distance * _missing(demand, of)
    in_use = of.blocks + (len(demand.prompt.blocks) + demand.unhashed_blocks) - of.shared
    decode = 1e3 * decode_slope * in_use * demand.osl
    adapter = 1e3 * of.adapter
    return prefill + queue + transfer + decode + adapter, prefill, decode, queue, transfer, adapter


def _missing(demand: RequestDemand, of: Candidates) -> Any:
    return np.maximum(len(demand.prompt.blocks) + demand.unhashed_blocks - of.device, 0)


def totals_of(costs: Sequence[Cost]) -> list[float]:
    """Return the totals of a table or of a list of costs."""
    return costs.total.tolist() if isinstance(costs, CostTable) else [one.total for one in costs]


def active_requests_of(costs: Sequence[Cost]) -> list[int]:
    """Return the running requests of the candidates of a table or of a list of costs."""
    return costs.active_requests.tolist() if isinstance(costs, CostTable) else [one.active_requests for one in costs]


def cheapest_of(costs: Sequence[Cost]) -> Sequence[int]:
    """Return the places of the candidates with the least total, rising."""
    if isinstance(costs, CostTable):
        total = costs.total
        equal: list[int] = (total == total[total.argmin()]).nonzero()[0].tolist()
        return equal
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
        total: Column = costs.total
        places: Sequence[int] = range(len(costs))
        if count < len(costs):  # hundreds may be equal: only so many of them are ordered
            last = np.partition(total, count - 1)[count - 1]
            less, equal = (total < last).nonzero()[0].tolist(), (total == last).nonzero()[0]
            places = [*less, *equal[: count - len(less)].tolist()]
        return sorted(places, key=total.__getitem__)
    return sorted(range(len(costs)), key=lambda place: costs[place].total)[:count]


def most_cached(costs: Sequence[Cost]) -> int:
    """Return the place of the first candidate with the most cached tokens."""
    if isinstance(costs, CostTable):
        return int(costs.cached.argmax())
    best, most = 0, -1
    for place, one in enumerate(costs):
        if one.overlap_tokens > most:
            best, most = place, one.overlap_tokens
    return best


def cheapest(costs: Sequence[Cost], count: int) -> list[Target]:
    """Return the targets of the lowest totals, best first; of a table no row is made for it."""
    if isinstance(costs, CostTable):
        return [costs._targets[place][0] for place in ranked(costs, count)]
    return [costs[place].target for place in ranked(costs, count)]
