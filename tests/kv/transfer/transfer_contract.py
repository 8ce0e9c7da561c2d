"""Contract suite of a `TransferBackend`: what users of a transfer rely on, whichever backend carries it.

A test module imports all names and has a fixture ``transfers``, a `TransferHarness` over the backend under test:

    from tests.kv.transfer.transfer_contract import *

Tests that need something a backend does not have (a peer, notifications) are skipped by name.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, asynccontextmanager
from typing import NamedTuple, Protocol

import numpy as np
import pytest
from xxhash import xxh3_64_intdigest

from penstock_kv.transfer import transfer_agent
from penstock_kv.transfer.descriptors import ByteArray, Descriptor, MemoryRegion
from penstock_kv.transfer.transfer_agent import TransferAgent
from penstock_kv.transfer.transfer_backend import Capabilities, Direction
from penstock_kv.transfer.transfer_handle import TransferHandle
from penstock_kv.transfer.transfer_status import TransferFailed, TransferRefused, TransferState, TransferStatus

PATIENCE = 30.0
"""Seconds after which a wait is given up; only a broken backend meets it."""
BLOCK = 4096
BLOCKS = 64


class TransferHarness(Protocol):
    """Two agents over the backend under test, or one and its storage. Every agent has it as its only backend."""

    capabilities: Capabilities

    async def agent(self, name: str, epoch: int) -> TransferAgent:
        """Return a started agent; the harness closes it at the end, unless it was closed before."""
        ...

    async def local_region(self, agent: TransferAgent, size: int) -> MemoryRegion:
        """Register ``size`` bytes of the kind that a transfer begins at."""
        ...

    async def target_region(self, agent: TransferAgent, size: int, *, writable: bool = True) -> MemoryRegion:
        """Register ``size`` bytes of the kind that a transfer ends at, all zero: of a peer, or own storage."""
        ...

    async def put(self, region: MemoryRegion, data: bytes) -> None:
        """Write all bytes of a region of either kind behind the library's back."""
        ...

    async def get(self, region: MemoryRegion) -> bytes:
        """Read them."""
        ...

    async def lose(self, agent: TransferAgent, region: MemoryRegion) -> None:
        """Make one target region unreachable after its metadata was exchanged: deregister it, delete the object."""
        ...

    def stalled(self) -> AbstractContextManager[None]:
        """Let no byte move inside the block; what waited goes on, or fails, after it."""
        ...


class Pair(NamedTuple):
    """Where transfers go from and to; ``target`` is the same agent where the backend is storage."""

    origin: TransferAgent
    target: TransferAgent
    local: MemoryRegion
    remote: MemoryRegion

    @property
    def peer(self) -> str:
        return self.target.name

    def parts(self, indices: list[int] | None = None) -> tuple[list[Descriptor], list[Descriptor]]:
        """Return descriptors of blocks here, and of the same blocks in reverse order there."""
        chosen = list(range(BLOCKS)) if indices is None else indices
        return self.local.blocks(chosen, BLOCK), self.remote.blocks([BLOCKS - 1 - index for index in chosen], BLOCK)


def needs_peer(harness: TransferHarness) -> None:
    if harness.capabilities.reach == "storage":
        pytest.skip("storage has no peer")


def random_bytes(seed: int, size: int = BLOCK * BLOCKS) -> bytes:
    return np.random.default_rng(seed).bytes(size)


def reversed_blocks(data: bytes) -> bytes:
    return b"".join(data[at : at + BLOCK] for at in reversed(range(0, len(data), BLOCK)))


@asynccontextmanager
async def pair_of(harness: TransferHarness) -> AsyncIterator[Pair]:
    origin = await harness.agent("origin", 1)
    target = origin if harness.capabilities.reach == "storage" else await harness.agent("target", 1)
    local = await harness.local_region(origin, BLOCK * BLOCKS)
    remote = await harness.target_region(target, BLOCK * BLOCKS)
    if target is not origin:
        origin.add_remote(target.metadata())
        target.add_remote(origin.metadata())
    yield Pair(origin, target, local, remote)


async def finish(handle: TransferHandle) -> TransferState:
    handle.post()
    return await asyncio.wait_for(handle.wait(), PATIENCE)


async def test_what_is_written_is_there_and_what_is_read_is_here(transfers: TransferHarness) -> None:
    async with pair_of(transfers) as pair:
        data = random_bytes(1)
        await transfers.put(pair.local, data)
        write = pair.origin.prepare("write", *pair.parts(), pair.peer)
        assert write.state is TransferState.NEW
        assert await finish(write) is TransferState.DONE
        assert {result.status for result in write.results()} == {TransferStatus.SUCCESS}
        assert await transfers.get(pair.remote) == reversed_blocks(data)

        other = random_bytes(2)
        await transfers.put(pair.remote, other)
        read = pair.origin.prepare("read", *pair.parts(), pair.peer)
        assert await finish(read) is TransferState.DONE
        assert await transfers.get(pair.local) == reversed_blocks(other)


async def test_a_piece_of_a_read_that_has_another_checksum_than_is_said_failed(transfers: TransferHarness) -> None:
    async with pair_of(transfers) as pair:
        data = random_bytes(3)
        await transfers.put(pair.remote, data)
        sums = [xxh3_64_intdigest(data[at : at + BLOCK]) for at in reversed(range(0, len(data), BLOCK))]
        sums[1] += 1
        read = pair.origin.prepare("read", *pair.parts(), pair.peer, checksums=sums)
        assert await finish(read) is TransferState.FAILED
        assert [result.status is TransferStatus.SUCCESS for result in read.results()] == [
            at != 1 for at in range(BLOCKS)
        ]
        assert read.results()[1].status is TransferStatus.MISMATCH
        sums[1] -= 1
        again = pair.origin.prepare("read", *pair.parts(), pair.peer, checksums=sums)
        assert await finish(again) is TransferState.DONE
        for direction, given in (("write", sums), ("read", sums[1:])):
            with pytest.raises(TransferRefused) as refused:
                pair.origin.prepare(direction, *pair.parts(), pair.peer, checksums=given)  # type: ignore[arg-type]
            assert refused.value.status is TransferStatus.INVALID


async def test_only_the_bytes_of_the_descriptors_change(transfers: TransferHarness) -> None:
    async with pair_of(transfers) as pair:
        before, data = random_bytes(3), random_bytes(4)
        await transfers.put(pair.local, before)
        await transfers.put(pair.remote, data)
        odd = [Descriptor(pair.local.id, 5, 3001), Descriptor(pair.local.id, BLOCK * 9 + 1, 1)]
        there = [Descriptor(pair.remote.id, BLOCK * 3 + 7, 3001), Descriptor(pair.remote.id, BLOCK * BLOCKS - 1, 1)]
        handle = pair.origin.prepare("read", odd, there, pair.peer)
        assert await finish(handle) is TransferState.DONE
        expected = bytearray(before)
        for mine, theirs in zip(odd, there):
            expected[mine.offset : mine.offset + mine.length] = data[theirs.offset : theirs.offset + theirs.length]
        assert await transfers.get(pair.local) == bytes(expected)


async def test_a_large_transfer_of_uneven_descriptors_arrives_whole(transfers: TransferHarness) -> None:
    async with pair_of(transfers) as pair:
        lengths = [3 << 20, 1, (1 << 20) + 13, 65_536, 777_777]
        local = await transfers.local_region(pair.origin, sum(lengths))
        remote = await transfers.target_region(pair.target, sum(lengths))
        if pair.target is not pair.origin:
            pair.origin.add_remote(pair.target.metadata())
        starts = [sum(lengths[:index]) for index in range(len(lengths))]
        here, there = ([region.descriptor(*each) for each in zip(starts, lengths)] for region in (local, remote))
        data = random_bytes(14, sum(lengths))
        await transfers.put(local, data)
        assert await finish(pair.origin.prepare("write", here, there, pair.peer)) is TransferState.DONE
        assert await transfers.get(remote) == data
        await transfers.put(local, bytes(sum(lengths)))
        assert await finish(pair.origin.prepare("read", here, there, pair.peer)) is TransferState.DONE
        assert await transfers.get(local) == data


async def test_a_handle_is_posted_again_after_its_end(transfers: TransferHarness) -> None:
    async with pair_of(transfers) as pair:
        handle = pair.origin.prepare("read", *pair.parts([0, 7]), pair.peer)
        for seed in (5, 6):
            data = random_bytes(seed)
            await transfers.put(pair.remote, data)
            assert await finish(handle) is TransferState.DONE
            await handle.settle()
            assert (await transfers.get(pair.local))[:BLOCK] == data[-BLOCK:]
        handle.release()
        with pytest.raises(TransferRefused, match="released"):
            handle.post()


async def test_an_active_handle_is_not_posted_twice_and_released_at_once(transfers: TransferHarness) -> None:
    async with pair_of(transfers) as pair:
        handle = pair.origin.prepare("read", *pair.parts(), pair.peer)
        with transfers.stalled():
            handle.post()
            with pytest.raises(TransferRefused) as refused:
                handle.post()
            assert refused.value.status is TransferStatus.REPOST_ACTIVE
            with pytest.raises(TransferRefused) as pinned:
                pair.origin.deregister(pair.local)
            assert pinned.value.status is TransferStatus.NOT_ALLOWED
            handle.release()
            assert handle.state is TransferState.RELEASED
        await asyncio.wait_for(handle.settle(), PATIENCE)
        pair.origin.deregister(pair.local)


@pytest.mark.parametrize("direction", ["read", "write"])
async def test_what_can_not_be_right_is_refused_before_anything_moves(
    transfers: TransferHarness, direction: str
) -> None:
    way: Direction = "read" if direction == "read" else "write"
    async with pair_of(transfers) as pair:
        mine, theirs = random_bytes(7), random_bytes(8)
        await transfers.put(pair.local, mine)
        await transfers.put(pair.remote, theirs)
        good, there = pair.local.descriptor(0, BLOCK), pair.remote.descriptor(0, BLOCK)
        local, remote, end = pair.local.id, pair.remote.id, BLOCK * BLOCKS
        bad = [
            ("zero bytes", Descriptor(local, 0, 0), Descriptor(remote, 0, 0)),
            ("a negative length", Descriptor(local, 0, -1), Descriptor(remote, 0, -1)),
            ("past the end here", Descriptor(local, end - 1, BLOCK), there),
            ("past the end there", good, Descriptor(remote, end - 1, BLOCK)),
            ("before the start here", Descriptor(local, -1, BLOCK), there),
            ("before the start there", good, Descriptor(remote, -1, BLOCK)),
            ("unequal lengths", good, Descriptor(remote, 0, BLOCK - 1)),
            ("an unknown region here", Descriptor(999, 0, BLOCK), there),
            ("an unknown region there", good, Descriptor(999, 0, BLOCK)),
        ]
        for what, here, other in bad:
            with pytest.raises(TransferRefused) as refused:
                pair.origin.prepare(way, [good, here], [there, other], pair.peer)
            assert refused.value.status in (TransferStatus.INVALID, TransferStatus.NOT_FOUND), what
        for here_list, there_list in (([], []), ([good], []), ([good, good], [there])):
            with pytest.raises(TransferRefused, match="descriptors"):
                pair.origin.prepare(way, here_list, there_list, pair.peer)
        with pytest.raises(TransferRefused, match="deadline"):
            pair.origin.prepare("read", [good], [there], pair.peer, deadline=0)
        with pytest.raises(TransferRefused, match="nobody"):
            pair.origin.prepare("read", [good], [there], "nobody")
        assert (await transfers.get(pair.local), await transfers.get(pair.remote)) == (mine, theirs)


async def test_a_read_only_region_is_not_written(transfers: TransferHarness) -> None:
    async with pair_of(transfers) as pair:
        region = await transfers.target_region(pair.target, BLOCK, writable=False)
        if pair.target is not pair.origin:
            pair.origin.add_remote(pair.target.metadata())
        parts = [pair.local.descriptor(0, BLOCK)], [region.descriptor()]
        with pytest.raises(TransferRefused) as refused:
            pair.origin.prepare("write", *parts, pair.peer)
        assert refused.value.status is TransferStatus.NOT_ALLOWED
        assert await finish(pair.origin.prepare("read", *parts, pair.peer)) is TransferState.DONE


@pytest.mark.parametrize("direction", ["read", "write"])
async def test_of_many_descriptors_the_one_that_failed_is_named(transfers: TransferHarness, direction: str) -> None:
    async with pair_of(transfers) as pair:
        lost = await transfers.target_region(pair.target, BLOCK)
        if pair.target is not pair.origin:
            pair.origin.add_remote(pair.target.metadata())
        data, theirs = random_bytes(9), random_bytes(10)
        await transfers.put(pair.local, data)
        await transfers.put(pair.remote, theirs)
        local, remote = pair.parts()
        remote[17] = lost.descriptor()
        way: Direction = "read" if direction == "read" else "write"
        handle = pair.origin.prepare(way, local, remote, pair.peer)
        await transfers.lose(pair.target, lost)
        assert await finish(handle) is TransferState.FAILED
        results = handle.results()
        bad = [index for index, result in enumerate(results) if result.status is not TransferStatus.SUCCESS]
        assert bad == [17]
        assert results[17].cause
        with pytest.raises(TransferFailed, match="1 descriptors failed, first 17") as failed:
            handle.raise_for_failure()
        assert failed.value.__cause__ is not None
        if direction == "read":
            assert (await transfers.get(pair.local))[: 17 * BLOCK] == reversed_blocks(theirs)[: 17 * BLOCK]
        else:
            assert (await transfers.get(pair.remote))[-17 * BLOCK :] == reversed_blocks(data)[-17 * BLOCK :]


async def test_a_transfer_past_its_deadline_fails_and_its_bytes_are_undefined(transfers: TransferHarness) -> None:
    async with pair_of(transfers) as pair:
        handle = pair.origin.prepare("read", *pair.parts(), pair.peer, deadline=0.05)
        with transfers.stalled():
            assert await finish(handle) is TransferState.FAILED
            assert {result.status for result in handle.results()} == {TransferStatus.LATE}
            with pytest.raises(TransferFailed, match="deadline"):
                handle.raise_for_failure()
        results = handle.results()
        await asyncio.wait_for(handle.settle(), PATIENCE)
        assert not handle.busy
        assert handle.results() == results, "what arrives after the deadline changes nothing"
        assert await finish(pair.origin.prepare("read", *pair.parts(), pair.peer)) is TransferState.DONE


async def test_a_cancelled_transfer_ends_at_once_and_lets_go(transfers: TransferHarness) -> None:
    async with pair_of(transfers) as pair:
        handle = pair.origin.prepare("write", *pair.parts(), pair.peer)
        with transfers.stalled():
            handle.post()
            await asyncio.sleep(0)
            handle.cancel()
            assert handle.state is TransferState.CANCELLED
            assert await handle.wait() is TransferState.CANCELLED
            assert {result.status for result in handle.results()} == {TransferStatus.CANCELLED}
        await asyncio.wait_for(handle.settle(), PATIENCE)
        handle.cancel()  # of an ended one: no effect
        assert await finish(handle) is TransferState.DONE


async def test_a_notification_comes_after_all_bytes_and_in_order(transfers: TransferHarness) -> None:
    async with pair_of(transfers) as pair:
        if not transfers.capabilities.notifications:
            with pytest.raises(TransferRefused, match="notify"):
                pair.origin.prepare("write", *pair.parts(), pair.peer, notification=b"n")
            pytest.skip("no notifications")
        payloads = []
        for seed in range(20, 25):
            data = random_bytes(seed)
            await transfers.put(pair.local, data)
            handle = pair.origin.prepare("write", *pair.parts(), pair.peer, notification=bytes([seed]))
            handle.post()
            notifications = await asyncio.wait_for(pair.target.wait_for_notifications(), PATIENCE)
            assert await transfers.get(pair.remote) == reversed_blocks(data)
            assert await asyncio.wait_for(handle.wait(), PATIENCE) is TransferState.DONE
            payloads += [(each.peer, each.epoch, each.payload) for each in notifications]
        assert payloads == [("origin", 1, bytes([seed])) for seed in range(20, 25)]
        for payload in (b"", b"first", b"second" * 1000):
            await pair.origin.notify(pair.peer, payload)
        received: list[bytes] = []
        async with asyncio.timeout(PATIENCE):
            while len(received) < 3:
                received += [each.payload for each in await pair.target.wait_for_notifications()]
        assert received == [b"", b"first", b"second" * 1000]


@pytest.mark.parametrize("limit", ["NOTIFICATIONS_LIMIT", "NOTIFICATION_BYTES_LIMIT"])
async def test_notifications_that_nobody_takes_are_bounded_by_count_and_by_bytes(
    transfers: TransferHarness, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    if not transfers.capabilities.notifications:
        pytest.skip("no notifications")
    payloads = [bytes([number]) * 1000 for number in range(8)]
    monkeypatch.setattr(transfer_agent, limit, 3 if limit == "NOTIFICATIONS_LIMIT" else 3999)
    async with pair_of(transfers) as pair:
        for payload in payloads:
            await pair.origin.notify(pair.peer, payload)
        async with asyncio.timeout(PATIENCE):
            while pair.target.notifications_dropped < 5:
                await asyncio.sleep(0.001)
        assert [each.payload for each in pair.target.take_notifications()] == payloads[5:]
        await pair.origin.notify(pair.peer, b"after them")
        (notification,) = await asyncio.wait_for(pair.target.wait_for_notifications(), PATIENCE)
        assert notification.payload == b"after them" and pair.target.notifications_dropped == 5


async def test_no_notification_of_a_transfer_that_failed(transfers: TransferHarness) -> None:
    if not transfers.capabilities.notifications:
        pytest.skip("no notifications")
    async with pair_of(transfers) as pair:
        lost = await transfers.target_region(pair.target, BLOCK)
        pair.origin.add_remote(pair.target.metadata())
        parts = [pair.local.descriptor(0, BLOCK)], [lost.descriptor()]
        handle = pair.origin.prepare("write", *parts, pair.peer, notification=b"never")
        await transfers.lose(pair.target, lost)
        assert await finish(handle) is TransferState.FAILED
        await pair.origin.notify(pair.peer, b"after it")
        notifications = await asyncio.wait_for(pair.target.wait_for_notifications(), PATIENCE)
        assert [each.payload for each in notifications] == [b"after it"]


async def test_after_a_restart_of_the_peer_old_metadata_is_refused_and_new_works(transfers: TransferHarness) -> None:
    needs_peer(transfers)
    async with pair_of(transfers) as pair:
        old_metadata = pair.target.metadata()
        old = pair.origin.prepare("write", *pair.parts(), pair.peer)
        assert await finish(old) is TransferState.DONE
        await pair.target.close()

        assert await finish(old) is TransferState.FAILED, "the peer is gone"
        assert {result.status for result in old.results()} == {TransferStatus.DISCONNECTED}

        again = await transfers.agent("target", 2)
        region = await transfers.target_region(again, BLOCK * BLOCKS)
        before = await transfers.get(region)
        assert await finish(old) is TransferState.FAILED, "the peer's new life has other memory"
        assert await transfers.get(region) == before

        pair.origin.add_remote(again.metadata())
        with pytest.raises(TransferRefused, match="restarted") as refused:
            old.post()
        assert refused.value.status is TransferStatus.MISMATCH
        with pytest.raises(TransferRefused, match="restarted"):
            pair.origin.add_remote(old_metadata)
        fresh = Pair(pair.origin, again, pair.local, region)
        data = random_bytes(11)
        await transfers.put(pair.local, data)
        assert await finish(fresh.origin.prepare("write", *fresh.parts(), fresh.peer)) is TransferState.DONE
        assert await transfers.get(region) == reversed_blocks(data)


async def test_a_transfer_that_is_active_fails_when_its_peer_is_known_to_be_restarted(
    transfers: TransferHarness,
) -> None:
    needs_peer(transfers)
    async with pair_of(transfers) as pair:
        handle = pair.origin.prepare("read", *pair.parts(), pair.peer)
        with transfers.stalled():
            handle.post()
            pair.origin.remove_remote(pair.peer)
            assert handle.state is TransferState.FAILED
            assert {result.status for result in handle.results()} == {TransferStatus.DISCONNECTED}
        await asyncio.wait_for(handle.settle(), PATIENCE)


async def test_a_region_of_later_is_reached_after_new_metadata(transfers: TransferHarness) -> None:
    async with pair_of(transfers) as pair:
        first = pair.origin.prepare("write", *pair.parts([0]), pair.peer)
        assert await finish(first) is TransferState.DONE
        later = await transfers.target_region(pair.target, BLOCK)
        parts = [pair.local.descriptor(0, BLOCK)], [later.descriptor()]
        if pair.target is not pair.origin:
            with pytest.raises(TransferRefused, match="no region"):
                pair.origin.prepare("write", *parts, pair.peer)
            pair.origin.add_remote(pair.target.metadata())
        data = random_bytes(12)
        await transfers.put(pair.local, data)
        assert await finish(pair.origin.prepare("write", *parts, pair.peer)) is TransferState.DONE
        assert await transfers.get(later) == data[:BLOCK]
        assert await finish(first) is TransferState.DONE, "what was prepared before goes on"


async def test_parts_of_unknown_backends_are_ignored(transfers: TransferHarness) -> None:
    needs_peer(transfers)
    async with pair_of(transfers) as pair:
        remote = pair.origin.remote(pair.peer)
        assert set(remote.parts) == {pair.origin.prepare("read", *pair.parts(), pair.peer).backend.name}
        remote.parts["carrier-pigeon"] = b"\x00 coop 7"
        assert await finish(pair.origin.prepare("read", *pair.parts(), pair.peer)) is TransferState.DONE
        with pytest.raises(TransferRefused, match="carrier-pigeon") as refused:
            pair.origin.prepare("read", *pair.parts(), pair.peer, backend="carrier-pigeon")
        assert refused.value.status is TransferStatus.NOT_SUPPORTED


async def test_many_transfers_at_once_all_end_right(transfers: TransferHarness) -> None:
    async with pair_of(transfers) as pair:
        data = random_bytes(13)
        await transfers.put(pair.local, data)
        handles = [pair.origin.prepare("write", *pair.parts([index]), pair.peer) for index in range(BLOCKS)]
        for handle in handles:
            handle.post()
        async with asyncio.timeout(PATIENCE):
            states = [await handle.wait() for handle in handles]
        assert set(states) == {TransferState.DONE}
        assert await transfers.get(pair.remote) == reversed_blocks(data)


def fill(array: ByteArray, data: bytes) -> None:
    """Copy bytes into an array: `TransferHarness.put` of memory."""
    array[:] = np.frombuffer(data, np.uint8)
