"""Walks a chain to find how far each worker holds it: from span to span, or block by block to audit that."""

from array import array
from collections.abc import Sequence

from penstock.kernel.values import Tier
from penstock.router.kv_index.span_table import KEY, Span, SpanTable, agreement, position_in
from penstock.router.kv_index.spans import Spans


def walk(table: SpanTable, blocks: Sequence[int], at: int, mask: int) -> list[tuple[int, int]]:
    """Follow a chain from block ``at`` and find where each worker of ``mask`` stops holding it.

    Returns: (depth, workers) with depth > ``at`` rising; those that do not hold ``blocks[at]`` are absent.
    Cost: one look-up per span on the way, plus log2(span) where the chain leaves a span. Reads only.
    """
    ends: list[tuple[int, int]] = []
    find, spans, count, i = table.by_hash.get, table.spans, len(blocks), at
    while i < count:
        block = blocks[i]
        number = find(block & KEY)
        if number is None:
            break
        span = spans[number]
        assert span is not None
        hashes = span.hashes
        start = 0
        if hashes[0] != block:
            # Only a walk that starts below the root can begin inside a span.
            start = position_in(hashes, block) if i == at else -1
            if start < 0:
                break
        held = mask & span.mask
        if held != mask:
            if i > at:
                ends.append((i, mask & ~held))
            mask = held
            if not mask:
                return ends
        reach = min(len(hashes) - start, count - i)
        if hashes[start + reach - 1] != blocks[i + reach - 1]:
            # The chain leaves this span: equal hashes mean equal prefixes, so bisect for the last equal one.
            low, reach = 1, reach - 1
            while low < reach:
                middle = (low + reach + 1) // 2
                if hashes[start + middle - 1] == blocks[i + middle - 1]:
                    low = middle
                else:
                    reach = middle - 1
        i += reach
    if i > at and mask:
        ends.append((i, mask))
    return ends


def walk_linear(table: SpanTable, blocks: Sequence[int], at: int, mask: int) -> list[tuple[int, int]]:
    """Answer as `walk` does, but compare every single block."""
    ends: list[tuple[int, int]] = []
    span: Span | None = None
    position = 0
    for i in range(at, len(blocks)):
        position += 1
        if span is None or position >= len(span.hashes) or span.hashes[position] != blocks[i]:
            number = table.by_hash.get(blocks[i] & KEY)
            span = None if number is None else table.spans[number]
            position = -1 if span is None else position_in(span.hashes, blocks[i])
        held = 0 if span is None or position < 0 else mask & span.mask
        if held != mask and i > at:
            ends.append((i, mask & ~held))
        mask = held
        if not mask:
            return ends
    if mask and len(blocks) > at:
        ends.append((len(blocks), mask))
    return ends


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
        ends: (depth, workers), as `penstock.router.kv_index.span_walk.walk` returns it.
        at: where that walk began.
    Cost: O(blocks) look-ups for each window, and rounds over its runs where windows disagree.
    """
    if not ends or not windows:
        return ends
    chain = array("Q", blocks[: ends[-1][0]])
    runs = [_runs_of_chain(window, chain) for window in windows]
    for _ in range(ROUNDS):  # what one kind of layers cuts, another may have to cut further
        before = ends
        for window, its_runs in zip(windows, runs, strict=True):
            ends = _prefixes_within_runs(window, its_runs, ends, at)
        if ends == before:
            return ends
    return []


def _runs_of_chain(window: AttentionWindow, blocks: "array[int]") -> list[tuple[int, int, int]]:
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


def _prefixes_within_runs(
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
