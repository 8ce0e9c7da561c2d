"""Layouts of KV blocks, the copies between them, and their serialised form."""

import itertools
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.kernel.errors import ConfigError
from penstock_kv.transfer.descriptors import RegionInfo
from penstock_kv.transfer.layouts.block_layout import BlockLayout, fully_contiguous, layer_separate
from penstock_kv.transfer.layouts.block_set import BlockSet, RegionStart, import_block_set, plan_descriptors
from penstock_kv.transfer.layouts.copy_plan import CopyPlan, copy_plan, head_routes
from penstock_kv.transfer.layouts.kv_shape import KvShape
from penstock_kv.transfer.transfer_status import TransferRefused
from tests.depth import deep

BLOCKS = 5
ANY = {"model": "m", "layers": 2, "page_tokens": 4, "heads": 8, "head_dim": 3, "dtype": "bfloat16"}


class Rank:
    """Memory of one rank, and its KV read and written element by element: the naive twin of a copy plan."""

    def __init__(self, layout: BlockLayout) -> None:
        self.layout = layout
        self.memory = [np.zeros(layout.allocation_bytes, np.uint8) for _ in range(layout.allocations)]

    def run(self, block: int, layer: int, outer: int) -> np.ndarray:
        """Return a view of a run with axes token, head, byte of head."""
        allocation, offset, length = self.layout.extent(block, layer, outer)
        shape = self.layout.shape
        flat = self.memory[allocation][offset : offset + length]
        if self.layout.order == "NHD":
            return flat.reshape(shape.page_tokens, len(self.layout.heads), shape.head_bytes)
        return flat.reshape(len(self.layout.heads), shape.page_tokens, shape.head_bytes).transpose(1, 0, 2)

    def runs(self) -> Iterator[tuple[int, ...]]:
        shape = self.layout.shape
        return itertools.product(range(self.layout.blocks), range(shape.layers), range(shape.outer))

    def fill(self, model: np.ndarray) -> "Rank":
        """Take this rank's heads of the KV of the model, axes block, layer, outer, token, head, byte."""
        for place in self.runs():
            self.run(*place)[:] = model[place][:, list(self.layout.heads)]
        return self

    def apply(self, plan: CopyPlan, source: "Rank") -> None:
        for a, b, c, d, n in zip(*(each.tolist() for each in plan)):
            self.memory[c][d : d + n] = source.memory[a][b : b + n]


def model_kv(shape: KvShape, seed: int = 0) -> np.ndarray:
    axes = (BLOCKS, shape.layers, shape.outer, shape.page_tokens, shape.heads, shape.head_bytes)
    return np.random.default_rng(seed).integers(1, 256, axes, dtype=np.uint8)


shapes = st.builds(
    KvShape,
    model=st.just("m"),
    layers=st.integers(1, 3),
    page_tokens=st.sampled_from([1, 2, 4]),
    heads=st.sampled_from([1, 2, 4, 8]),
    head_dim=st.integers(1, 3),
    dtype=st.sampled_from(["bfloat16", "fp8_e4m3"]),
    outer=st.sampled_from([1, 2]),
)
sizes = st.sampled_from([1, 2, 4, 8])


@st.composite
def makers(draw: st.DrawFn) -> "Maker":
    kind = draw(st.sampled_from(["contiguous", "block first", "outer first"]))
    return Maker(kind, draw(st.sampled_from(["NHD", "HND"])), draw(st.sampled_from([1, 16, 64])))


class Maker(msgspec.Struct, frozen=True):
    """Makes the layout of any rank, with everything else equal."""

    kind: str
    order: str
    alignment: int

    def layout(self, shape: KvShape, rank: int, size: int) -> BlockLayout:
        rest = {"rank": rank, "size": size, "order": self.order, "alignment": self.alignment}
        if self.kind == "contiguous":
            return fully_contiguous(shape, BLOCKS, **rest)  # type: ignore[arg-type]
        return layer_separate(shape, BLOCKS, outer_first=self.kind == "outer first", **rest)  # type: ignore[arg-type]


def gather(reader: Rank, writers: Sequence[Rank], there: Sequence[int], here: Sequence[int]) -> int:
    """Bring blocks from all writers to a reader; returns how many copies it took."""
    copies = 0
    for route in head_routes(reader.layout, len(writers)):
        plan = copy_plan(writers[route.writer].layout, there, reader.layout, here, heads=route.heads)
        reader.apply(plan, writers[route.writer])
        copies += len(plan.length)
    return copies


@settings(max_examples=deep(300), deadline=None)
@given(shapes, sizes, sizes, makers(), makers(), st.permutations(range(BLOCKS)), st.integers(1, BLOCKS))
def test_scatter_then_gather_is_the_identity(
    shape: KvShape, writers: int, readers: int, ours: Maker, theirs: Maker, order: list[int], count: int
) -> None:
    model = model_kv(shape)
    whole = Rank(ours.layout(shape, 0, 1)).fill(model)
    everything = list(range(BLOCKS))
    scattered = [Rank(ours.layout(shape, rank, writers)) for rank in range(writers)]
    for each in scattered:
        gather(each, [whole], everything, everything)
    for rank in range(readers):
        reader = Rank(theirs.layout(shape, rank, readers))
        gather(reader, scattered, order[:count], everything[:count])
        expected = Rank(reader.layout)
        for block, layer, outer in expected.runs():
            if block < count:
                expected.run(block, layer, outer)[:] = model[order[block], layer, outer][:, list(reader.layout.heads)]
        for mine, right in zip(reader.memory, expected.memory):
            assert (mine == right).all(), "a byte is wrong, or one outside the runs was touched"
    back = Rank(theirs.layout(shape, 0, 1))
    gather(back, scattered, everything, everything)
    for place in back.runs():
        assert (back.run(*place) == model[place]).all()


@settings(max_examples=deep(150), deadline=None)
@given(shapes, sizes, sizes, makers(), makers(), st.permutations(range(BLOCKS)))
def test_a_plan_has_as_few_copies_as_the_layouts_allow(
    shape: KvShape, writers: int, readers: int, ours: Maker, theirs: Maker, order: list[int]
) -> None:
    source, target = Rank(ours.layout(shape, 0, writers)), Rank(theirs.layout(shape, readers - 1, readers))
    plan = copy_plan(source.layout, order, target.layout, list(range(BLOCKS)))
    bytewise = {(c, d + i): (a, b + i) for a, b, c, d, n in zip(*(each.tolist() for each in plan)) for i in range(n)}
    assert len(bytewise) == plan.bytes_total, "no byte is written twice"
    joints = sum(bytewise.get((c, d - 1)) == (a, b - 1) for (c, d), (a, b) in bytewise.items())
    assert len(plan.length) == len(bytewise) - joints


def test_equal_layouts_move_a_block_in_one_copy_and_neighbours_together() -> None:
    shape = KvShape(**ANY)
    layout = fully_contiguous(shape, 100, rank=1, size=4)
    plan = copy_plan(layout, [7, 8, 9, 20], layout, [1, 2, 3, 4])
    assert plan.length.tolist() == [3 * layout.block_stride, layout.block_stride]
    padded = fully_contiguous(shape, 100, rank=1, size=4, alignment=4096)
    assert len(copy_plan(padded, [7, 8, 9, 20], padded, [1, 2, 3, 4]).length) == 4, "padding is not copied"
    separate = layer_separate(shape, 100, rank=1, size=4)
    assert len(copy_plan(separate, [7, 8, 9, 20], separate, [1, 2, 3, 4]).length) == 2 * shape.layers


@pytest.mark.parametrize(("order", "copies"), [("NHD", 2 * 2 * 4), ("HND", 2 * 2)])
def test_half_of_the_heads_costs_a_copy_per_token_only_in_order_nhd(order: str, copies: int) -> None:
    shape = KvShape(**ANY)
    writer = fully_contiguous(shape, 1, size=1, order=order)  # type: ignore[arg-type]
    reader = fully_contiguous(shape, 1, rank=1, size=2, order=order)  # type: ignore[arg-type]
    assert len(copy_plan(writer, [0], reader, [0]).length) == copies


def test_one_layer_of_a_transfer_is_only_that_layer() -> None:
    shape = KvShape(**ANY)
    source, target = Rank(fully_contiguous(shape, BLOCKS)).fill(model_kv(shape)), Rank(layer_separate(shape, BLOCKS))
    target.apply(copy_plan(source.layout, [0, 1], target.layout, [0, 1], layers=range(1, 2)), source)
    assert not target.memory[0].any()
    assert (target.run(1, 1, 1) == source.run(1, 1, 1)).all()


def test_readers_of_replicated_heads_are_spread_over_the_writers() -> None:
    latent = KvShape(model="mla", layers=1, page_tokens=4, heads=1, head_dim=576, dtype="bfloat16", outer=1)
    taken = [list(head_routes(fully_contiguous(latent, 1, rank=rank, size=4), 2)) for rank in range(4)]
    assert [[route.writer for route in routes] for routes in taken] == [[0], [1], [0], [1]]
    wide = KvShape(**ANY)
    assert [route.writer for route in head_routes(fully_contiguous(wide, 1), 4)] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"page_tokens": 32}, "page_tokens 4 here, 32 there"),
        ({"dtype": "fp8_e4m3"}, "dtype 'bfloat16' here"),
        ({"model": "other"}, "model 'm' here, 'other' there"),
    ],
)
def test_blocks_of_another_shape_are_refused_with_what_differs(change: dict[str, object], message: str) -> None:
    shape, other = KvShape(**ANY), KvShape(**{**ANY, **change})
    assert shape.digest != other.digest
    with pytest.raises(TransferRefused, match=message):
        copy_plan(fully_contiguous(shape, 2), [0], fully_contiguous(other, 2), [0])


def test_impossible_shapes_layouts_and_blocks_are_refused() -> None:
    shape = KvShape(**ANY)
    layout = fully_contiguous(shape, 2)
    for change in ({"layers": 0}, {"dtype": "int3"}):
        with pytest.raises(ConfigError):
            KvShape(**{**ANY, **change})
    for rank, size in ((0, 3), (2, 2), (-1, 2)):
        with pytest.raises(ConfigError):
            fully_contiguous(shape, 2, rank=rank, size=size)
    for name in ("outer_stride", "layer_stride", "block_stride"):
        with pytest.raises(ConfigError, match="steps over"):
            msgspec.structs.replace(layout, **{name: getattr(layout, name) - 1})
    for here, there in (([0], [2]), ([-1], [0]), ([0, 1], [1, 1]), ([0], [0, 1])):
        with pytest.raises(TransferRefused):
            copy_plan(layout, here, layout, there)
    with pytest.raises(TransferRefused, match="both ranks"):
        copy_plan(layout, [0], fully_contiguous(shape, 2, rank=1, size=2), [0], heads=range(8))


@settings(max_examples=deep(150), deadline=None)
@given(shapes, sizes, makers(), st.data())
def test_a_block_set_is_the_same_after_export_and_import(
    shape: KvShape, size: int, maker: Maker, data: st.DataObject
) -> None:
    layout = maker.layout(shape, data.draw(st.integers(0, size - 1)), size)
    starts = [RegionStart(index, 64 * index) for index in range(layout.allocations)]
    blocks = BlockSet(id=3, agent="a", epoch=9, layout=layout, starts=starts, kind="vram", device=1)
    again = import_block_set(blocks.encode())
    assert msgspec.structs.replace(again, digest="") == blocks
    ours, theirs = list(range(BLOCKS)), list(reversed(range(BLOCKS)))
    plan = copy_plan(layout, ours, again.layout, theirs)
    source, target = plan_descriptors(plan, blocks, again)
    assert (
        sum(part.length for part in source)
        == sum(part.length for part in target)
        == BLOCKS * shape.layers * shape.outer * layout.run_bytes
    )
    sizes_of = {start.region: start.offset + layout.allocation_bytes for start in starts}
    assert all(part.offset + part.length <= sizes_of[part.region] for part in [*source, *target])
    regions = {id: RegionInfo(id, "vram", length) for id, length in sizes_of.items()}
    again.check(regions)
    with pytest.raises(TransferRefused, match="not within"):
        again.check({id: RegionInfo(id, "vram", info.size - 1) for id, info in regions.items()})
    with pytest.raises(TransferRefused, match="no region"):
        again.check({id: RegionInfo(id, "dram", info.size) for id, info in regions.items()})


def test_a_damaged_or_newer_block_set_is_refused() -> None:
    layout = fully_contiguous(KvShape(**ANY), 2)
    blocks = BlockSet(id=1, agent="a", epoch=1, layout=layout, starts=[RegionStart(1)])
    good = blocks.encode()
    fields = msgspec.msgpack.decode(good)
    bad_layout = {**fields["layout"], "outer_stride": 1}
    changes = [{"version": 2}, {"digest": "0" * 32}, {"starts": []}, {"layout": bad_layout}, {"layout": 7}]
    for data in (b"", good[:-1], b"\xc1", *(msgspec.msgpack.encode({**fields, **change}) for change in changes)):
        with pytest.raises(TransferRefused):
            import_block_set(data)
