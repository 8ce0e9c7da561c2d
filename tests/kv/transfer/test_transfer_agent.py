"""Agents: what they tell their peers, whom they refuse, which backend they take, and how handles end."""

import asyncio
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock_kv.transfer import transfer_agent
from penstock_kv.transfer.agent_metadata import decode_metadata
from penstock_kv.transfer.backends.memcpy_backend import MemcpyBackend
from penstock_kv.transfer.backends.shm_backend import ShmBackend
from penstock_kv.transfer.descriptors import MemoryRegion, RegionInfo
from penstock_kv.transfer.layouts.block_layout import fully_contiguous, layer_separate
from penstock_kv.transfer.layouts.block_set import BlockSet, RegionStart, import_block_set, plan_descriptors
from penstock_kv.transfer.layouts.copy_plan import copy_plan, head_routes
from penstock_kv.transfer.layouts.kv_shape import KvShape
from penstock_kv.transfer.shared_memory import SharedMemory
from penstock_kv.transfer.transfer_agent import TransferAgent
from penstock_kv.transfer.transfer_backend import BackendBase, Capabilities, RemoteAgent, TransferOrder
from penstock_kv.transfer.transfer_status import (
    STATE_CHANGES,
    PieceFailed,
    TransferFailed,
    TransferRefused,
    TransferState,
    TransferStatus,
    causes,
)
from tests.depth import deep

SHAPE = KvShape(model="m", layers=2, page_tokens=16, heads=8, head_dim=4, dtype="bfloat16")


class FolderBackend(BackendBase):
    """Storage of the agent itself, which moves nothing."""

    name = "folder"
    capabilities = Capabilities(kinds=frozenset({("dram", "file")}), reach="storage", notifications=False, rank=20)

    async def move(self, order: TransferOrder) -> None:
        raise NotImplementedError


class Scripted(MemcpyBackend):
    """Moves as a test says, over the memory of this process."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.fault: BaseException | None = None
        self.silent: set[int] = set()
        self.stubborn = False
        self.refused: str | None = None

    def refusal(self, peer: RemoteAgent, local: Sequence[MemoryRegion], remote: Sequence[RegionInfo]) -> str | None:
        return self.refused

    async def move(self, order: TransferOrder) -> None:
        while not self.gate.is_set():
            try:
                await self.gate.wait()
            except asyncio.CancelledError:
                if not self.stubborn:
                    raise
        if self.fault is not None:
            raise self.fault
        for index in range(len(order.pieces)):
            if index not in self.silent:
                order.succeeded(index)


class Two:
    """Two agents with a region each; ``backend`` carries what ``a`` begins."""

    def __init__(self) -> None:
        self.backend = Scripted()
        self.a = TransferAgent("a", [self.backend], epoch=1)
        self.b = TransferAgent("b", [MemcpyBackend()], epoch=1)

    async def __aenter__(self) -> "Two":
        await self.a.start()
        await self.b.start()
        self.here = self.a.register_memory(np.zeros(64, np.uint8))
        self.there = self.b.register_memory(np.zeros(64, np.uint8))
        self.a.add_remote(self.b.metadata())
        return self

    async def __aexit__(self, *_: object) -> None:
        self.backend.gate.set()
        await self.a.close()
        await self.b.close()

    def prepare(self, **options: object) -> transfer_agent.TransferHandle:
        parts = self.here.blocks(range(4), 16), self.there.blocks(range(4), 16)
        return self.a.prepare("write", *parts, "b", **options)  # type: ignore[arg-type]


def test_the_table_of_states_has_each_step_once_and_ends() -> None:
    steps = [(change.before, change.trigger) for change in STATE_CHANGES]
    assert len(set(steps)) == len(steps)
    assert not any(change.before is TransferState.RELEASED for change in STATE_CHANGES)
    assert {change.after for change in STATE_CHANGES} == set(TransferState) - {TransferState.NEW}


async def test_metadata_tells_what_a_peer_needs_and_no_address() -> None:
    async with TransferAgent("a", [MemcpyBackend(), FolderBackend()], shape=SHAPE, epoch=7) as agent:
        region = agent.register_memory(bytearray(100), label="rows")
        metadata = decode_metadata(agent.metadata())
        assert (metadata.name, metadata.epoch, metadata.digest) == ("a", 7, SHAPE.digest)
        assert metadata.regions == [RegionInfo(region.id, "dram", 100, "rows")]
        assert set(metadata.parts) == {"memcpy", "folder"}
        assert decode_metadata(metadata.encode()) == metadata


async def test_a_peer_with_blocks_of_another_shape_is_refused_and_what_differs_is_named() -> None:
    other = msgspec.structs.replace(SHAPE, page_tokens=32)
    async with TransferAgent("a", [], shape=SHAPE) as a:
        with pytest.raises(TransferRefused, match="page_tokens 16 here, 32 there") as refused:
            a.add_remote(TransferAgent("b", [], shape=other).metadata())
        assert refused.value.status is TransferStatus.MISMATCH
        a.add_remote(TransferAgent("b", [], shape=SHAPE).metadata())
        a.add_remote(TransferAgent("store", []).metadata())  # says nothing of blocks


async def test_damaged_newer_and_own_metadata_is_refused() -> None:
    a, b = TransferAgent("a", [], shape=SHAPE), TransferAgent("b", [], shape=SHAPE)
    fields = msgspec.msgpack.decode(b.metadata())
    changes = [{"version": 9}, {"digest": "00"}, {"name": 3}, {"shape": {**fields["shape"], "layers": 0}}]
    for data in (b"", b.metadata()[:-2], *(msgspec.msgpack.encode({**fields, **change}) for change in changes)):
        with pytest.raises(TransferRefused):
            a.add_remote(data)
    with pytest.raises(TransferRefused, match="own name"):
        a.add_remote(a.metadata())
    a.add_remote(msgspec.msgpack.encode({**fields, "of_a_later_release": 1}))


async def test_backends_are_tried_by_rank_and_each_says_why_not() -> None:
    async with (
        TransferAgent("a", [FolderBackend(), ShmBackend(), MemcpyBackend()]) as a,
        TransferAgent("b", [ShmBackend(), MemcpyBackend()]) as b,
        TransferAgent("c", [ShmBackend()]) as c,
    ):
        here = a.register_memory(bytearray(64)).descriptor()
        shared, private = b.register_shared(SharedMemory.create(64)), c.register_memory(bytearray(64))
        a.add_remote(b.metadata())
        a.add_remote(c.metadata())
        assert a.prepare("write", [here], [shared.descriptor()], "b").backend.name == "memcpy"
        assert a.prepare("write", [here], [shared.descriptor()], "b", backend="shm").backend.name == "shm"
        with pytest.raises(TransferRefused) as refused:
            a.prepare("write", [here], [private.descriptor()], "c")
        for reason in (
            "memcpy: 'c' does not have it",
            "shm: regions 1 are not in shared memory",
            "folder: it can't move",
        ):
            assert reason in str(refused.value)


async def test_a_part_of_the_metadata_that_a_backend_can_not_read_is_a_reason() -> None:
    async with TransferAgent("a", [ShmBackend()]) as a, TransferAgent("b", [ShmBackend()]) as b:
        here, there = a.register_memory(bytearray(8)), b.register_shared(SharedMemory.create(8))
        a.add_remote(b.metadata()).parts["shm"] = b"noise"
        with pytest.raises(TransferRefused, match="shm: its part of the metadata can't be read"):
            a.prepare("write", [here.descriptor()], [there.descriptor()], "b")


class Walk:
    """One handle, and what a naive model of it says: which state it is in, and whether the backend has the memory."""

    def __init__(self, two: Two) -> None:
        self.two = two
        self.handle = two.prepare(deadline=3600.0)
        self.state, self.busy = TransferState.NEW, False

    async def step(self, action: str) -> None:
        running = self.state is TransferState.POSTED
        match action:
            case "post":
                able = not running and not self.busy and self.state is not TransferState.RELEASED
                if able:
                    self.two.backend.gate.clear()
                    self.handle.post()
                    self.state, self.busy = TransferState.POSTED, True
                else:
                    with pytest.raises(TransferRefused):
                        self.handle.post()
                await asyncio.sleep(0)
            case "finish" | "break":
                self.two.backend.fault = OSError("broken") if action == "break" else None
                self.two.backend.gate.set()
                await self.handle.settle()
                if running:
                    self.state = TransferState.FAILED if action == "break" else TransferState.DONE
                self.busy = False
            case "cancel":
                self.handle.cancel()
                self.state = TransferState.CANCELLED if running else self.state
            case "late":
                self.handle._expire()
                self.state = TransferState.FAILED if running else self.state
            case "release":
                self.handle.release()
                self.state = TransferState.RELEASED
        self.check()

    def check(self) -> None:
        assert (self.handle.state, self.handle.busy) == (self.state, self.busy)
        assert self.two.here.pins == self.busy
        assert len(self.handle.results()) == 4
        if self.state is TransferState.DONE:
            assert {result.status for result in self.handle.results()} == {TransferStatus.SUCCESS}
        if self.state in (TransferState.FAILED, TransferState.CANCELLED):
            assert TransferStatus.IN_PROGRESS not in {result.status for result in self.handle.results()}


@settings(max_examples=deep(200), deadline=None)
@given(st.lists(st.sampled_from(["post", "finish", "break", "cancel", "late", "release"]), max_size=12))
def test_any_walk_of_a_handle_agrees_with_a_naive_model(actions: list[str]) -> None:
    async def main() -> None:
        async with Two() as two:
            two.backend.stubborn = True
            walk = Walk(two)
            for action in actions:
                await walk.step(action)

    asyncio.run(main())


async def test_a_backend_that_raises_fails_all_descriptors_with_the_whole_chain() -> None:
    async with Two() as two:
        two.backend.gate.set()
        try:
            try:
                raise OSError(104, "Connection reset by peer")
            except OSError as error:
                raise PieceFailed(TransferStatus.DISCONNECTED, "the link to b broke") from error
        except PieceFailed as error:
            two.backend.fault = error
        handle = two.prepare()
        handle.post()
        assert await handle.wait() is TransferState.FAILED
        assert {result.status for result in handle.results()} == {TransferStatus.DISCONNECTED}
        assert handle.results()[3].cause == (
            "the link to b broke; from ConnectionResetError: [Errno 104] Connection reset by peer"
        )
        with pytest.raises(TransferFailed, match="4 descriptors failed, first 0: the link to b broke") as failed:
            handle.raise_for_failure()
        assert list(causes(failed.value))[1:] == list(causes(two.backend.fault))


async def test_a_descriptor_without_a_report_has_failed() -> None:
    async with Two() as two:
        two.backend.gate.set()
        two.backend.silent = {2}
        handle = two.prepare(notification=b"never")
        handle.post()
        assert await handle.wait() is TransferState.FAILED
        assert [result.status.name for result in handle.results()] == ["SUCCESS", "SUCCESS", "UNKNOWN", "SUCCESS"]
        assert two.b.take_notifications() == []


async def test_a_notification_that_does_not_arrive_fails_the_transfer_though_all_bytes_did() -> None:
    async with Two() as two:
        two.backend.gate.set()
        await two.b.close()
        handle = two.prepare(notification=b"n")
        handle.post()
        assert await handle.wait() is TransferState.FAILED
        assert {result.status for result in handle.results()} == {TransferStatus.SUCCESS}
        with pytest.raises(TransferFailed, match="was closed"):
            handle.raise_for_failure()


async def test_memory_stays_busy_until_a_hanging_backend_lets_go() -> None:
    async with Two() as two:
        two.backend.stubborn = True
        handle = two.prepare(deadline=0.01)
        handle.post()
        assert await handle.wait() is TransferState.FAILED
        assert handle.busy
        for refused in (handle.post, lambda: two.a.deregister(two.here)):
            with pytest.raises(TransferRefused) as error:
                refused()
            assert error.value.status in (TransferStatus.REPOST_ACTIVE, TransferStatus.NOT_ALLOWED)
        handle.release()  # at once
        two.backend.gate.set()
        await handle.settle()
        two.a.deregister(two.here)


async def test_a_prepared_transfer_of_a_region_that_is_gone_is_not_posted() -> None:
    async with Two() as two:
        handle = two.prepare()
        two.a.deregister(two.here)
        with pytest.raises(TransferRefused, match="deregistered"):
            handle.post()
        with pytest.raises(TransferRefused, match="not registered"):
            two.a.deregister(two.here)


async def test_results_before_and_during_a_transfer() -> None:
    async with Two() as two:
        handle = two.prepare()
        with pytest.raises(TransferRefused, match="not posted"):
            await handle.wait()
        assert {result.status for result in handle.results()} == {TransferStatus.NOT_POSTED}
        handle.post()
        assert {result.status for result in handle.results()} == {TransferStatus.IN_PROGRESS}
        two.a.remove_remote("b")
        assert {result.status for result in handle.results()} == {TransferStatus.DISCONNECTED}
        with pytest.raises(TransferRefused, match="no peer"):
            two.a.remove_remote("b")


async def test_notifications_are_bounded_while_the_event_loop_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer_agent, "NOTIFICATION_BYTES_LIMIT", 3000)
    async with Two() as two:
        sizes = [1000] * 5 + [3001, 1000, 2000]
        for size in sizes:  # without a turn of the loop
            two.b.deliver("a", 1, bytes(size))
        assert [len(each.payload) for each in await two.b.wait_for_notifications()] == [1000, 2000]
        assert two.b.notifications_dropped == 6
        assert two.b.take_notifications() == []


async def test_a_notification_of_a_peers_earlier_life_is_not_taken() -> None:
    async with Two() as two:
        two.b.add_remote(TransferAgent("a", [], epoch=2).metadata())
        await two.a.notify("b", b"of epoch 1")
        await asyncio.sleep(0)
        assert two.b.take_notifications() == []


async def test_two_agents_of_one_name_and_epoch_do_not_start_in_one_process() -> None:
    async with TransferAgent("a", [MemcpyBackend()], epoch=1):
        with pytest.raises(TransferRefused, match="same epoch"):
            await TransferAgent("a", [MemcpyBackend()], epoch=1).start()
        async with TransferAgent("a", [MemcpyBackend()], epoch=2):
            pass
    with pytest.raises(TransferRefused, match="same name"):
        TransferAgent("a", [MemcpyBackend(), MemcpyBackend()])


async def test_buffers_and_tensors_that_can_not_be_registered() -> None:
    async with TransferAgent("a", []) as agent:
        for buffer in (np.zeros((4, 4), np.uint8)[:, 1], bytearray()):
            with pytest.raises(TransferRefused):
                agent.register_memory(buffer)
        assert not agent.register_memory(b"constant").info.writable
        assert agent.register_memory(np.zeros((4, 4), np.float32)).info.size == 64


async def test_a_writer_of_four_ranks_fills_a_reader_of_two() -> None:
    model = np.random.default_rng(1)
    writer_layouts = [fully_contiguous(SHAPE, 8, rank=rank, size=4, order="HND", alignment=256) for rank in range(4)]
    reader_layouts = [layer_separate(SHAPE, 8, rank=rank, size=2, order="HND") for rank in range(2)]
    agents: list[TransferAgent] = []
    exported = []
    for rank, layout in enumerate(writer_layouts):
        agent = TransferAgent(f"prefill-{rank}", [MemcpyBackend()], shape=SHAPE)
        await agent.start()
        region = agent.register_memory(model.integers(0, 256, layout.allocation_bytes, dtype=np.uint8))
        blocks = BlockSet(id=1, agent=agent.name, epoch=agent.epoch, layout=layout, starts=[RegionStart(region.id)])
        exported.append((agent.metadata(), blocks.encode(), region.bytes_of()))
        agents.append(agent)
    for rank, layout in enumerate(reader_layouts):
        agent = TransferAgent(f"decode-{rank}", [MemcpyBackend()], shape=SHAPE)
        await agent.start()
        agents.append(agent)
        memory = [np.zeros(layout.allocation_bytes, np.uint8) for _ in range(layout.allocations)]
        starts = [RegionStart(agent.register_memory(each).id) for each in memory]
        mine = BlockSet(id=1, agent=agent.name, epoch=agent.epoch, layout=layout, starts=starts)
        for route in head_routes(layout, 4):
            metadata, data, _ = exported[route.writer]
            peer, theirs = agent.add_remote(metadata), import_block_set(data)
            theirs.check(peer.regions)
            plan = copy_plan(theirs.layout, [6, 7], layout, [0, 3], heads=route.heads)
            there, here = plan_descriptors(plan, theirs, mine)
            handle = agent.prepare("read", here, there, peer.name)
            handle.post()
            assert await handle.wait() is TransferState.DONE
        for head in layout.heads:
            writer = writer_layouts[head // 2]
            for (source, target), layer, outer in (
                (pair, layer, outer) for pair in ((6, 0), (7, 3)) for layer in range(2) for outer in range(2)
            ):
                size = SHAPE.page_tokens * SHAPE.head_bytes
                at = writer.extent(source, layer, outer).offset + (head - writer.heads.start) * size
                to = layout.extent(target, layer, outer)
                begin = to.offset + (head - layout.heads.start) * size
                written = exported[head // 2][2][at : at + size]
                assert (memory[to.allocation][begin : begin + size] == written).all()
    for agent in agents:
        await agent.close()
