"""Snapshot, restore and invariant check of one tier of the exact KV index."""

from array import array
from collections import Counter, OrderedDict
from itertools import repeat

from penstock.kernel.errors import InvariantError
from penstock.router.kv_index.index_states import SpanState, SpanTableState
from penstock.router.kv_index.span_table import KEY, Span, SpanTable, filed_keys
from penstock.router.kv_index.worker_bitmap import bits, mask_bytes, mask_of


def snapshot(table: SpanTable) -> SpanTableState:
    """Return the state of a tier."""
    return SpanTableState(
        spans=[None if span is None else _span_state(span) for span in table.spans],
        by_engine=table.by_engine,
        aliases={bit.bit_length() - 1: names for bit, names in table.aliases.items()},
        copies=table.copies.snapshot(),
        alive=mask_bytes(table.alive),
        unfiled=table.unfiled,
        free=table.free,
        age=list(table.age),
        released=table.released,
        cursor=table.cursor,
    )


def restore(table: SpanTable, state: SpanTableState) -> None:
    """Become the tier of a state."""
    table.spans, table.by_hash, table.filed = [], {}, {}
    table.blocks = table.blocks_unfiled = 0
    for number, saved in enumerate(state.spans):
        if saved is None:
            table.spans.append(None)
            continue
        engine = None if saved.engine is None else _column(saved.engine)
        span = Span(_column(saved.hashes), engine, mask_of(saved.mask), saved.parent)
        span.odd, span.filed = saved.odd, saved.filed
        table.spans.append(span)
        table.by_hash.update(zip(filed_keys(span), repeat(number)))
        table.blocks += len(span.hashes)
        table.blocks_unfiled += 0 if span.filed else len(span.hashes)
        if span.filed:
            table.filed[number] = None
    table.by_engine = state.by_engine
    table.aliases = {1 << slot: names for slot, names in state.aliases.items()}
    table.copies.restore(state.copies)
    table.alive = mask_of(state.alive)
    table.counts = _blocks_per_worker(table)
    table.unfiled, table.free = state.unfiled, state.free
    table.age = OrderedDict.fromkeys(state.age)
    table.released, table.cursor = state.released, state.cursor


def check(table: SpanTable, pairs: list[int]) -> None:
    """Add this tier's pairs per slot to ``pairs`` and raise where the maps and the spans disagree."""
    blocks = filed = unfiled = 0
    every: set[int] = set()
    for number, span in table.numbered():
        blocks += len(span.hashes)
        filed += len(filed_keys(span))
        every.update(span.hashes)
        if not span.filed:
            unfiled += len(span.hashes)
            if any(number not in table.unfiled.get(slot, {}) for slot in bits(span.mask & table.alive)):
                raise InvariantError(f"a worker can't find span {number}, which is not filed")
        if not span.hashes or (span.engine is not None and len(span.engine) != len(span.hashes)):
            raise InvariantError(f"span {number} is empty or its columns differ in length")
        if any(table.by_hash.get(key) != number for key in filed_keys(span)):
            raise InvariantError(f"a block of span {number} is filed elsewhere")
    counts = _blocks_per_worker(table)
    for bit, count in counts.items():
        pairs[bit.bit_length() - 1] += count
    if counts != table.counts:
        raise InvariantError(f"workers hold {counts} blocks, and {table.counts} are counted")
    if (blocks, unfiled, filed) != (table.blocks, table.blocks_unfiled, len(table.by_hash)) or blocks != len(every):
        raise InvariantError(f"{blocks} blocks ({len(every)} different), {unfiled} of them not filed, are miscounted")
    for slot, numbers in table.unfiled.items():
        for number in numbers:
            span = table.span(number)
            if span.filed or not span.mask >> slot & 1:
                raise InvariantError(f"span {number} is not an unfiled one of slot {slot}")
    for slot in bits(table.copies.bits):
        held = {block for _, span in table.numbered() if span.mask >> slot & 1 for block in span.hashes}
        copies = table.copies.of(1 << slot)
        if not held.issuperset(copies) or min(copies.values(), default=1) < 1:
            raise InvariantError("further copies are counted of a block that is not held")
    for key, number in table.by_engine.items():
        engine = table.span(number).engine
        if engine is None or all(name & KEY != key for name in engine):
            raise InvariantError(f"an engine hash points to span {number}, which does not have it")
    for number, span in table.numbered():
        if span.engine is not None and span.mask & table.alive and not span.odd:
            ends = array("Q", [span.engine[0], span.engine[-1]])
            if any(name & KEY not in table.by_engine for name in (span.engine if span.filed else ends)):
                raise InvariantError(f"an engine hash of span {number} leads nowhere")
    if set(table.filed) != {number for number, span in table.numbered() if span.filed}:
        raise InvariantError("the spans that are filed and their numbers differ")
    if set(table.age) != {number for number, _ in table.numbered()}:
        raise InvariantError("the spans' ages and the spans differ")


def _blocks_per_worker(table: SpanTable) -> Counter[int]:
    """Count what each worker that is there holds. Cost: walks everything."""
    counts: Counter[int] = Counter()
    for _, span in table.numbered():
        for slot in bits(span.mask & table.alive):
            counts[1 << slot] += len(span.hashes)
    return counts


def _span_state(span: Span) -> SpanState:
    engine = None if span.engine is None else span.engine.tobytes()
    return SpanState(span.hashes.tobytes(), engine, mask_bytes(span.mask), span.parent, span.odd, span.filed)


def _column(hashes: bytes) -> "array[int]":
    column = array("Q")
    column.frombytes(hashes)
    return column
