"""`LoadGate`: how many leading blocks of a prompt are worth loading, by measured cost."""

from collections.abc import Sequence

from penstock.blocks.block_key import BlockKey
from penstock.blocks.tiers.edge import Edge
from penstock.blocks.tiers.fetches import Fetches
from penstock.blocks.tiers.tier_events import BlockHints
from penstock.blocks.tiers.tier_moves import TierMoves
from penstock.blocks.tiers.tier_state import LOWER_TIERS
from penstock.kernel.machine import Nanos
from penstock.kernel.tiers.load_worth import BlockRun, LoadCosts, Way, worth_loading


class LoadGate:
    """Compares loading with computing (`penstock.kernel.tiers.load_worth`), by what edges and the engine measured.

    Bytes that are under way on an edge go before a block's own. Copies into the engine overlap with fetches, so a load
    takes this long at most.
    """

    def __init__(self, moves: TierMoves, fetches: Fetches) -> None:
        self._moves = moves
        self._fetches = fetches
        self._copy = moves.edge("host", "engine")[1]
        self._below = next((moves.edge(tier, "host")[1] for tier in LOWER_TIERS if tier in moves.tiers), None)

    def worth(self, now: Nanos, keys: Sequence[BlockKey], hints: BlockHints) -> tuple[int, str]:
        """Return how many leading blocks to load, and why not more."""
        there, reason, runs = self.there(now, keys)
        if not there or (not self._compute and hints.deadline is None):
            return there, reason
        copy = self._way(now, "", self._copy)
        found = [
            BlockRun(count, (copy,) if edge is None else (copy, self._way(now, name, edge)))
            for name, edge, count in runs
        ]
        blocks, short = worth_loading(found, self._compute, hints.deadline)
        return blocks, reason if blocks == there else short

    def costs(self, now: Nanos) -> LoadCosts:
        """Return what a load costs while nothing else is under way."""
        copy = self._way(now, "", self._copy, idle=True)
        tokens = self._moves.settings.block_tokens
        fetch = Way("", 0.0, 0.0) if self._below is None else self._way(now, "", self._below, idle=True)
        return LoadCosts(
            compute=self._moves.state.seconds_per_token,
            host_start=copy.start,
            host_token=copy.block / tokens,
            disk_start=fetch.start,
            disk_token=fetch.block / tokens,
        )

    @property
    def _compute(self) -> float:
        """Seconds that the engine takes for a block; 0 until that is measured."""
        return self._moves.settings.block_tokens * self._moves.state.seconds_per_token

    def _way(self, now: Nanos, name: str, edge: Edge, *, idle: bool = False) -> Way:
        speed = edge.speed(now)
        before = 0.0 if idle else (edge.in_flight + edge.queued) / speed.rate
        return Way(name, speed.latency + before, self._moves.settings.block_bytes / speed.rate)

    def depth(self, now: Nanos, keys: Sequence[BlockKey]) -> int:
        """Return how many leading blocks are there, at whatever cost."""
        return self.there(now, keys)[0] if self._moves.state.peers else 0

    def there(self, now: Nanos, keys: Sequence[BlockKey]) -> tuple[int, str, list[tuple[str, Edge | None, int]]]:
        """Return how many leading blocks are there, why not more, and the way of each run of them."""
        index, source_of, moves = self._moves.host.index, self._fetches.source, self._moves
        runs: list[tuple[str, Edge | None, int]] = []
        name: str | None = None
        edge: Edge | None = None
        start, reason = 0, ""
        depth = len(keys)
        for position, key in enumerate(keys):
            if key in index:
                way, its_edge = "", None
            else:
                source = source_of(now, key)
                if isinstance(source, str):
                    depth, reason = position, source
                    break
                way, its_edge = moves.edge(source.tier, "host", source.peer)
            if way != name:
                if name is not None:
                    runs.append((name, edge, position - start))
                name, edge, start = way, its_edge, position
        if name is not None:
            runs.append((name, edge, depth - start))
        return depth, reason, runs
