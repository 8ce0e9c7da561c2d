"""How deep a prefix can be used where some layers of a model read a window of it, or one state, and not all of it.

Such layers have blocks of their own: one kind for all that read the same number of blocks. A prefix that full attention
has is a hit where each kind has the blocks that it reads before the prefix's end.
"""

from array import array
from collections.abc import Sequence

from penstock.kernel.values import Tier
from penstock.router.kv_index.spans.span import KEY, agreement, position_in
from penstock.router.kv_index.spans.spans import Spans

ROUNDS = 64
"""Most cuts of a prefix by each window; beyond them nothing is expected."""


class AttentionWindow:
    """The blocks of one kind of layers in one tier.

    Args:
        blocks: before a token that these layers read; a state is one block.
    """

    def __init__(self, tier: Tier, blocks: int, spans: Spans) -> None:
        self.tier = tier
        self.blocks = blocks
        self.spans = spans
        self.workers = 0
        """Workers that have such layers."""


def usable(
    windows: Sequence[AttentionWindow], blocks: Sequence[int], ends: list[tuple[int, int]], at: int
) -> list[tuple[int, int]]:
    """Cut what workers hold of a prompt for full attention to what they can use.

    Args:
        ends: (depth, workers), as `penstock.router.kv_index.spans.span_walk.walk` returns it.
        at: where that walk began.
    Cost: O(blocks) look-ups for each window, and rounds over its runs where windows disagree.
    """
    if not ends or not windows:
        return ends
    chain = array("Q", blocks[: ends[-1][0]])
    runs = [_runs(window, chain) for window in windows]
    for _ in range(ROUNDS):  # what one kind of layers cuts, another may have to cut further
        before = ends
        for window, its_runs in zip(windows, runs, strict=True):
            ends = _cut(window, its_runs, ends, at)
        if ends == before:
            return ends
    return []


def _runs(window: AttentionWindow, blocks: "array[int]") -> list[tuple[int, int, int]]:
    """Return (start, end, workers) of each run of a chain's blocks that workers hold, the last one first."""
    spans, alive = window.spans, window.spans.alive & window.workers
    runs: list[tuple[int, int, int]] = []
    open_runs: list[tuple[int, int]] = []
    i, count = 0, len(blocks)
    while i < count:
        number = spans.by_hash.get(blocks[i] & KEY)
        position = -1 if number is None else position_in(spans.span(number).hashes, blocks[i])
        holders, length = 0, 1
        if number is not None and position >= 0:
            span = spans.span(number)
            holders = span.mask & alive
            length = agreement(span.hashes, position, blocks, i)
        go_on: list[tuple[int, int]] = []
        fresh = holders
        for start, workers in open_runs:
            fresh &= ~workers
            if workers & holders:
                go_on.append((start, workers & holders))
            if workers & ~holders:
                runs.append((start, i, workers & ~holders))
        if fresh:
            go_on.append((i, fresh))
        open_runs = go_on
        i += length
    runs += [(start, count, workers) for start, workers in open_runs]
    runs.sort(key=_end, reverse=True)
    return runs


def _cut(
    window: AttentionWindow, runs: list[tuple[int, int, int]], ends: list[tuple[int, int]], at: int
) -> list[tuple[int, int]]:
    """Return the deepest prefixes that end within a run, far enough from its start or from the prompt's."""
    found: dict[int, int] = {}
    for depth, workers in ends:
        rest = workers & window.workers
        if workers & ~rest:
            found[depth] = found.get(depth, 0) | workers & ~rest
        for start, end, holders in runs:
            reached = min(depth, end)
            if not rest:
                break
            if rest & holders and reached > at and reached >= (start + window.blocks if start else 1):
                found[reached] = found.get(reached, 0) | rest & holders
                rest &= ~holders
    return sorted(found.items())


def _end(run: tuple[int, int, int]) -> int:
    return run[1]
