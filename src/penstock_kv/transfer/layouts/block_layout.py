"""`BlockLayout`: where the KV of one tensor-parallel rank lies: blocks, layers, keys and values, with their strides.

Axes, from the outside: block, layer, outer (keys, values), then a run of bytes with the tokens and heads of one block.
A run is in order NHD (token, head, dimension) or HND (head, token, dimension).
"""

from typing import Literal, NamedTuple

import msgspec

from penstock.kernel.errors import ConfigError
from penstock_kv.transfer.layouts.kv_shape import KvShape

LayoutKind = Literal["fully_contiguous", "layer_separate"]
RunOrder = Literal["NHD", "HND"]


class BlockExtent(NamedTuple):
    """A run of bytes: which allocation, from where, how long."""

    allocation: int
    offset: int
    length: int


class BlockLayout(msgspec.Struct, frozen=True, kw_only=True):
    """Made by `fully_contiguous` or `layer_separate`, or of an engine's own strides.

    Args:
        blocks: how many there is room for.
        rank, size: of tensor parallelism; they say which heads a run has.
        alignment: bytes that ``block_stride`` is a multiple of.
        block_stride, layer_stride, outer_stride: bytes from one to the next; ``layer_stride`` is 0 where each layer has
            an allocation of its own.

    Raises:
        ConfigError: strides are below what they step over, so that two runs would overlap.
    """

    kind: LayoutKind
    shape: KvShape
    blocks: int
    rank: int
    size: int
    order: RunOrder
    alignment: int
    block_stride: int
    layer_stride: int
    outer_stride: int

    def __post_init__(self) -> None:
        if self.blocks < 1 or self.alignment < 1 or self.block_stride % self.alignment:
            raise ConfigError(
                f"a layout of {self.blocks} blocks with stride {self.block_stride} and alignment {self.alignment}",
                hint="all are at least 1, and the stride is a multiple of the alignment",
            )
        axes = [("block", self.block_stride, self.blocks), ("outer", self.outer_stride, self.shape.outer)]
        if self.kind == "fully_contiguous":
            axes.append(("layer", self.layer_stride, self.shape.layers))
        end = self.run_bytes
        for name, stride, count in sorted(axes, key=lambda axis: (axis[1], axis[2])):
            if stride < end and count > 1:
                raise ConfigError(f"{name}_stride {stride} is below the {end} bytes that it steps over")
            end += (count - 1) * stride

    @property
    def heads(self) -> range:
        """Return the heads of the model that this rank has."""
        return self.shape.heads_of(self.rank, self.size)

    @property
    def run_bytes(self) -> int:
        """Return the length of a run: one block, one layer, keys or values."""
        return self.shape.page_tokens * len(self.heads) * self.shape.head_bytes

    @property
    def allocations(self) -> int:
        """Return how many pieces of memory there are."""
        return 1 if self.kind == "fully_contiguous" else self.shape.layers

    @property
    def allocation_bytes(self) -> int:
        """Return the size of each."""
        shape = self.shape
        strides = (self.blocks * self.block_stride, shape.layers * self.layer_stride, shape.outer * self.outer_stride)
        return max(strides)

    def extent(self, block: int, layer: int, outer: int) -> BlockExtent:
        """Return where a run lies."""
        separate = self.kind == "layer_separate"
        offset = block * self.block_stride + layer * self.layer_stride + outer * self.outer_stride
        return BlockExtent(layer if separate else 0, offset, self.run_bytes)


def align_up(size: int, alignment: int) -> int:
    """Return the next multiple of ``alignment``."""
    return -(-size // alignment) * alignment


def fully_contiguous(
    shape: KvShape, blocks: int, *, rank: int = 0, size: int = 1, order: RunOrder = "NHD", alignment: int = 1
) -> BlockLayout:
    """Return the layout in which a block is one piece: all its layers, each with keys and values."""
    run = shape.page_tokens * len(shape.heads_of(rank, size)) * shape.head_bytes
    layer_stride = shape.outer * run
    return BlockLayout(
        kind="fully_contiguous",
        shape=shape,
        blocks=blocks,
        rank=rank,
        size=size,
        order=order,
        alignment=alignment,
        block_stride=align_up(shape.layers * layer_stride, alignment),
        layer_stride=layer_stride,
        outer_stride=run,
    )


def layer_separate(
    shape: KvShape,
    blocks: int,
    *,
    rank: int = 0,
    size: int = 1,
    order: RunOrder = "NHD",
    alignment: int = 1,
    outer_first: bool = False,
) -> BlockLayout:
    """Return the layout with an allocation per layer, as engines have.

    Args:
        outer_first: all keys, then all values, of shape (outer, blocks, ...); else (blocks, outer, ...).
    """
    run = shape.page_tokens * len(shape.heads_of(rank, size)) * shape.head_bytes
    block_stride = align_up(run if outer_first else shape.outer * run, alignment)
    return BlockLayout(
        kind="layer_separate",
        shape=shape,
        blocks=blocks,
        rank=rank,
        size=size,
        order=order,
        alignment=alignment,
        block_stride=block_stride,
        layer_stride=0,
        outer_stride=blocks * block_stride if outer_first else run,
    )
