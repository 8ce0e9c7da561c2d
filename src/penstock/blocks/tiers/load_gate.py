"""`LoadGate`: how many leading blocks of a prompt are worth loading, by measured cost."""

from collections.abc import Sequence
from math import ceil

from penstock.blocks.block_key import BlockKey
from penstock.blocks.tiers.edge import Edge
from penstock.blocks.tiers.fetches import Fetches
from penstock.blocks.tiers.tier_events import BlockHints
from penstock.blocks.tiers.tier_moves import TierMoves
from penstock.kernel.machine import Nanos


class LoadGate:
    """Compares loading with computing.

    Loading ``k`` blocks takes the sum over all edges on their ways: of latency, and of bytes (those under way before
    them, too) by rate. Copies into the engine overlap with fetches, so this is an upper bound. Computing them takes
    tokens times the engine's seconds per token, the same for each: attention makes late tokens dearer, so this is a
    lower bound. Until the engine's speed is measured, all that is there is worth loading.
    """

    def __init__(self, moves: TierMoves, fetches: Fetches) -> None:
        self._moves = moves
        self._fetches = fetches
        self._copy = moves.edge("host", "engine")[1]

    def worth(self, now: Nanos, keys: Sequence[BlockKey], hints: BlockHints) -> tuple[int, str]:
        """Return how many leading blocks to load, and why not more."""
        there, reason, runs = self.there(now, keys)
        settings, per_token = self._moves.settings, self._moves.state.seconds_per_token
        if not there or (not per_token and hints.deadline is None):
            return there, reason
        best, best_gain, depth = 0, 0.0, 0
        sizes: dict[str, int] = {}
        size, limit = settings.block_bytes, hints.deadline
        short = "recompute is cheaper"
        for name, edge, count in runs:  # the gain is linear within a run: its best is at an end of one
            start, depth = depth, depth + count
            if edge is not None:
                sizes[name] = sizes.get(name, 0) + count * size
            load = self._copy.seconds(now, depth * size)
            load += sum(self._moves.state.edges[each].seconds(now, total) for each, total in sizes.items())
            if limit is not None and load > limit:
                rates = [each.speed(now).rate for each in (self._copy, edge) if each is not None]
                per_block = sum(size / rate for rate in rates)
                dropped = ceil((load - limit) / per_block)
                depth, load, short = max(start, depth - dropped), load - dropped * per_block, "deadline"
            gain = depth * settings.block_tokens * per_token - load
            if depth > start and (gain > best_gain or not per_token):
                best, best_gain = depth, gain
            if short == "deadline":
                break
        return best, reason if best == there else short

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
