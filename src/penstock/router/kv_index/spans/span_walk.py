"""Walks a chain to find how far each worker holds it: from span to span, or block by block to audit that."""

from collections.abc import Sequence

from penstock.router.kv_index.spans.span import KEY, Span, position_in
from penstock.router.kv_index.spans.span_table import SpanTable


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
