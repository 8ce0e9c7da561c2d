"""`CopyPlan`: the copies that bring blocks of one layout into another, in as few pieces as both layouts allow.

Writer and reader may have different tensor-parallel sizes: reader rank r of R needs heads [r * H / R, (r + 1) * H / R),
and takes each from one writer that has it. Where heads are replicated (MLA, or more ranks than heads) the readers are
spread over the writers.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock_kv.transfer.layouts.block_layout import BlockLayout
from penstock_kv.transfer.transfer_status import TransferRefused, TransferStatus

Numbers = npt.NDArray[np.int64]


class CopyPlan(NamedTuple):
    """Copies of (source allocation, offset) to (target allocation, offset); arrays of shape (n,), lengths in bytes."""

    source_allocation: Numbers
    source_offset: Numbers
    target_allocation: Numbers
    target_offset: Numbers
    length: Numbers

    @property
    def bytes_total(self) -> int:
        return int(self.length.sum())


class HeadRoute(NamedTuple):
    """Heads that a reader takes from one writer."""

    writer: int
    heads: range


def head_routes(reader: BlockLayout, writers: int) -> Iterator[HeadRoute]:
    """Yield from which of ``writers`` ranks a reader takes which heads: each head once."""
    shape, head = reader.shape, reader.heads.start
    while head < reader.heads.stop:
        holders = [rank for rank in range(writers) if head in shape.heads_of(rank, writers)]
        writer = holders[reader.rank % len(holders)]
        stop = min(reader.heads.stop, shape.heads_of(writer, writers).stop)
        yield HeadRoute(writer, range(head, stop))
        head = stop


def copy_plan(
    source: BlockLayout,
    source_blocks: Sequence[int],
    target: BlockLayout,
    target_blocks: Sequence[int],
    *,
    heads: range | None = None,
    layers: range | None = None,
) -> CopyPlan:
    """Plan the copy of block ``source_blocks[i]`` to ``target_blocks[i]``, for all i.

    Args:
        heads: of the model; default: those that both ranks have.
        layers: default: all; some of them where a transfer goes layer by layer.

    Raises:
        TransferRefused: the shapes differ, a block does not exist, or two copies have the same target.

    Cost: O(blocks x layers x outer), times tokens where a run has more heads than are copied in order NHD, and times
    heads in order HND. Between the two orders every head of every token is a copy: correct, and slow.
    """
    _check_layouts(source, source_blocks, target, target_blocks)
    shape = source.shape
    if heads is None:
        heads = range(max(source.heads.start, target.heads.start), min(source.heads.stop, target.heads.stop))
    elif not all(set(heads) <= set(layout.heads) for layout in (source, target)):
        raise TransferRefused(TransferStatus.INVALID, f"heads {heads} are not on both ranks")
    chosen = np.arange(shape.layers)[slice(None) if layers is None else slice(layers.start, layers.stop)]
    same = source.order == target.order
    whole = same and source.heads == target.heads == heads
    by_token = not whole and not (same and source.order == "HND")
    by_head = not whole and not (same and source.order == "NHD")
    tokens = np.arange(shape.page_tokens if by_token else 1)
    firsts = np.arange(heads.start, heads.stop if by_head else heads.start + 1)[: len(heads)]
    length = shape.head_bytes * (1 if by_token else shape.page_tokens) * (1 if by_head else len(heads))
    source_place = _places_of_pieces(source, source_blocks, chosen, tokens, firsts)
    target_place = _places_of_pieces(target, target_blocks, chosen, tokens, firsts)
    return _join_pieces(*source_place, *target_place, length)


def _check_layouts(
    source: BlockLayout, source_blocks: Sequence[int], target: BlockLayout, target_blocks: Sequence[int]
) -> None:
    if source.shape != target.shape:
        differences = "; ".join(source.shape.differences(target.shape))
        raise TransferRefused(TransferStatus.MISMATCH, f"the blocks have different shapes: {differences}")
    if len(source_blocks) != len(target_blocks):
        raise TransferRefused(
            TransferStatus.INVALID, f"{len(source_blocks)} source blocks and {len(target_blocks)} target blocks"
        )
    for layout, blocks in ((source, source_blocks), (target, target_blocks)):
        bad = [block for block in blocks if not 0 <= block < layout.blocks]
        if bad:
            raise TransferRefused(TransferStatus.INVALID, f"block {bad[0]} is not one of {layout.blocks}")
    if len(set(target_blocks)) < len(target_blocks):
        raise TransferRefused(TransferStatus.INVALID, "a target block is named twice")


def _places_of_pieces(
    layout: BlockLayout, blocks: Sequence[int], layers: Numbers, tokens: Numbers, heads: Numbers
) -> tuple[Numbers, Numbers]:
    """Return allocation and offset of each piece; axes: block, layer, outer, token, head."""
    head_bytes, page_tokens = layout.shape.head_bytes, layout.shape.page_tokens
    token_stride, head_stride = (
        (len(layout.heads) * head_bytes, head_bytes)
        if layout.order == "NHD"
        else (head_bytes, page_tokens * head_bytes)
    )
    axes = np.ix_(
        np.asarray(blocks, np.int64), layers, np.arange(layout.shape.outer), tokens, heads - layout.heads.start
    )
    block, layer, outer, token, head = axes
    offset = block * layout.block_stride + layer * layout.layer_stride + outer * layout.outer_stride
    offset = offset + token * token_stride + head * head_stride
    allocation = np.broadcast_to(layer if layout.kind == "layer_separate" else layer * 0, offset.shape)
    return allocation.ravel(), offset.ravel()


def _join_pieces(
    source_allocation: Numbers, source_offset: Numbers, target_allocation: Numbers, target_offset: Numbers, length: int
) -> CopyPlan:
    """Join pieces that follow each other in both layouts: in the order of the targets these are neighbours."""
    order = np.lexsort((target_offset, target_allocation))
    places = [each[order] for each in (source_allocation, source_offset, target_allocation, target_offset)]
    starts = np.ones(len(order), bool)
    steps = [np.diff(each) for each in places]
    starts[1:] = (steps[0] != 0) | (steps[1] != length) | (steps[2] != 0) | (steps[3] != length)
    first = np.flatnonzero(starts)
    counts = np.diff(np.append(first, len(order)))
    joined = [each[first] for each in places]
    return CopyPlan(joined[0], joined[1], joined[2], joined[3], counts * length)
