"""Whether blocks are worth loading: the one decision of an engine's tiers, and of a router that foresees it.

Loading ``k`` blocks takes the sum over all ways that they come by: of what is before the first block, and of the
seconds of each. Computing them takes the same seconds for each: attention makes late ones dearer, so this is a lower
bound. Where the engine's speed is not measured, all that is there is worth loading.
"""

from collections.abc import Mapping, Sequence
from math import ceil, isfinite, nan
from typing import NamedTuple

import msgspec


class Way(NamedTuple):
    """One edge that blocks come by: seconds before the first one, and of each."""

    name: str
    start: float
    block: float


class BlockRun(NamedTuple):
    """Blocks that follow one another and come by the same ways."""

    blocks: int
    ways: tuple[Way, ...]


def worth_loading(runs: Sequence[BlockRun], compute: float, limit: float | None = None) -> tuple[int, str]:
    """Return how many leading blocks to load, and why not more.

    Args:
        compute: seconds that the engine takes to compute a block; 0 is unknown.
        limit: seconds after which nobody waits for a load.
    """
    best, best_gain, depth = 0, 0.0, 0
    carried: dict[Way, int] = {}
    short = "recompute is cheaper"
    for blocks, ways in runs:  # the gain is linear within a run: its best is at an end of one
        if not blocks:
            continue
        start, depth = depth, depth + blocks
        for way in ways:
            carried[way] = carried.get(way, 0) + blocks
        load = sum(way.start + count * way.block for way, count in carried.items())
        if limit is not None and load > limit:
            per_block = sum(way.block for way in ways)
            dropped = ceil((load - limit) / per_block)
            depth, load, short = max(start, depth - dropped), load - dropped * per_block, "deadline"
        gain = depth * compute - load
        if depth > start and (gain > best_gain or not compute):
            best, best_gain = depth, gain
        if short == "deadline":
            break
    return best, short


class LoadCosts(msgspec.Struct, frozen=True, kw_only=True):
    """What prompts cost an engine with tiers where nothing else is under way, in seconds.

    Of tokens, since tiers may have larger blocks than routers.

    Args:
        compute: of computing a token; 0 where it is not measured.
        host_start, host_token: from host memory into the engine's, before the first token and for each.
        disk_start, disk_token: from what is below host memory into it.
        own_host: the engine loads what is in host memory without asking what that costs.
    """

    compute: float
    host_start: float
    host_token: float
    disk_start: float = 0.0
    disk_token: float = 0.0
    own_host: bool = False

    def worth(self, host: int, disk: int) -> int:
        """Return how many of the tokens in host memory, and of those on disk that follow them, would be loaded."""
        copy, fetch = Way("host", self.host_start, self.host_token), Way("disk", self.disk_start, self.disk_token)
        runs = (BlockRun(host, () if self.own_host else (copy,)), BlockRun(disk, (copy, fetch)))
        return worth_loading(runs, self.compute)[0]


LOAD_METRICS = {
    name: f"penstock_tier_{name}" + ("" if name == "own_host" else "_seconds") for name in LoadCosts.__struct_fields__
}
"""Field -> gauge of an engine's /metrics. Sums over its ranks decide as one rank does: both sides are sums."""


def costs_in(samples: Mapping[str, float]) -> LoadCosts | None:
    """Read the costs that an engine reports among its metrics; None where it reports none."""
    found = {name: samples.get(metric, nan) for name, metric in LOAD_METRICS.items()}
    if not all(map(isfinite, found.values())):
        return None
    return LoadCosts(**{**found, "own_host": found["own_host"] > 0})  # type: ignore[arg-type]


def metrics_of(costs: LoadCosts) -> dict[str, float]:
    """Return the gauges that report costs."""
    return {metric: float(getattr(costs, name)) for name, metric in LOAD_METRICS.items()}
