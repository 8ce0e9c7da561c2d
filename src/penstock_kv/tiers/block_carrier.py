"""`BlockCarrier`: carries out a `Move` between the engines' rows, the host slab and the stores below it.

Nothing but `HostSlab` copies touch an engine's rows, piece by piece; before each piece, and after each piece that was
read from rows, the engine's connection is looked at: an engine that closed it may use its rows for something else.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

from penstock.kernel.machine import SECOND, Nanos
from penstock_kv.blocks.tiers.tier_events import Move, MoveEnded, TierName
from penstock_kv.transfer.shared_memory import SharedMemory
from penstock_kv.transfer.storage.block_store import BlockIo, BlockResult, BlockStore, Outcome

WRONG: tuple[Outcome, ...] = ("corrupt", "absent", "stale")
"""Outcomes of a block that must never be read again."""
PIECE = 32 << 20
"""Bytes that are copied between two looks at an engine's connection: some 3 ms."""
ROW_BITS = 32
"""The machine's row number is the engine's number above so many bits of the row's own."""
BUSY_LOOK = 0.02
"""Seconds between two looks at whether a hanging system call has ended."""


class SlabStore(BlockStore, Protocol):
    """The host tier: a store whose memory the stores below it read and write directly."""

    stride: int
    """Bytes from one slot to the next."""

    def view(self, slot: int) -> memoryview:
        """Return a slot's memory."""
        ...

    def shared(self) -> SharedMemory:
        """Return all slots, as other processes map them."""
        ...

    def checksum(self, slot: int) -> int | None:
        """Return the checksum that a slot's block had when it came."""
        ...

    def adopt(self, block: BlockIo) -> BlockResult:
        """Take what was written into a slot's view as a block with this checksum."""
        ...


class RowOwner(Protocol):
    """An engine whose rows are lent."""

    @property
    def alive(self) -> bool:
        """Whether its rows may still be touched: asks the kernel, not what was read so far."""
        ...

    def touched(self) -> AbstractContextManager[None]:
        """Count a copy that touches its rows: they stay mapped meanwhile."""
        ...

    def row(self, number: int) -> memoryview:
        """Return a row's memory."""
        ...


class PeerReader(Protocol):
    """The way to other engines' host tiers."""

    async def read(self, peer: str, keys: Sequence[bytes], slots: Sequence[int], seconds: float) -> list[BlockResult]:
        """Read blocks into slots of the slab, with their checksums; nothing touches the slots afterwards."""
        ...


class MovedBlocks(NamedTuple):
    """What came of a move. ``counts``: blocks per outcome, ``ok``, ``lost`` and ``cancelled`` among them."""

    ended: MoveEnded
    counts: Mapping[str, int]
    cause: str


class BlockCarrier:
    """Copies blocks.

    Args:
        slab: the host tier.
        lower: disk and object store.
        peers: other engines' host tiers; None where there are none.
        owner: the engine with a number; None where its connection has ended.
        now: time of the tier machine.
    """

    def __init__(
        self,
        slab: SlabStore,
        lower: Mapping[TierName, BlockStore],
        owner: Callable[[int], RowOwner | None],
        peers: PeerReader | None,
        now: Callable[[], Nanos],
    ) -> None:
        self._slab = slab
        self._lower = lower
        self._owner = owner
        self._peers = peers
        self._now = now

    async def carry(self, move: Move, cancelled: Callable[[], bool]) -> MovedBlocks:
        """Carry out a move; return once nothing of it touches its slots any more.

        Args:
            cancelled: whether nobody wants it any more.
        """
        begun = self._now()
        step = max(1, PIECE // self._slab.block_bytes)
        results: list[BlockResult] = []
        for start in range(0, len(move.keys), step):
            numbers = range(start, min(start + step, len(move.keys)))
            left = (move.deadline - self._now()) / SECOND
            if cancelled():
                results += [BlockResult("failed", "cancelled")] * len(numbers)
            elif left <= 0:
                results += [BlockResult("late", "its time was over before it began")] * len(numbers)
            elif "engine" in (move.source, move.target):
                results += await self._rows(move, numbers, left)
            elif move.source == "peer":
                results += await self._from_peer(move, numbers, left)
            else:
                results += await self._below(move, numbers, left)
        took = (self._now() - begun) / SECOND
        ended = MoveEnded(
            id=move.id,
            done=[result.outcome == "ok" for result in results],
            corrupt=[number for number, result in enumerate(results) if result.outcome in WRONG],
            seconds=took,
        )
        cause = next((result.cause for result in results if result.cause), "")
        return MovedBlocks(ended, Counter(_outcome(result) for result in results), cause)

    async def _rows(self, move: Move, numbers: range, left: float) -> list[BlockResult]:
        """Copy between rows of one engine and the slab."""
        store = move.source == "engine"
        rows, slots = (move.source_slots, move.target_slots) if store else (move.target_slots, move.source_slots)
        engines = {rows[number] >> ROW_BITS for number in numbers}
        owner = self._owner(engines.pop()) if len(engines) == 1 else None
        gone: list[BlockResult] = [BlockResult("failed", "lost")] * len(numbers)
        if owner is None or not owner.alive:
            return gone
        with owner.touched():
            blocks = [
                BlockIo(slots[number], move.keys[number], 0, owner.row(rows[number] & ((1 << ROW_BITS) - 1)))
                for number in numbers
            ]
            try:
                results = await (self._slab.write if store else self._slab.read)(blocks, left)
                await _settled(self._slab, results, blocks)
            finally:
                for block in blocks:
                    block.buffer.release()  # whoever still has it can't touch the row, and the region can be unmapped
        # What an engine closed the connection over may have changed while it was read: such blocks are torn.
        return results if owner.alive or not store else gone

    async def _from_peer(self, move: Move, numbers: range, left: float) -> list[BlockResult]:
        """Copy from another engine's host tier into the slab."""
        keys = [move.keys[n] for n in numbers]
        if self._peers is None:
            return [BlockResult("absent", "there are no peers")] * len(keys)
        slots = [move.target_slots[n] for n in numbers]
        results = await self._peers.read(move.peer, keys, slots, left)
        for slot, key, result in zip(slots, keys, results):
            if result.outcome == "ok":
                self._slab.adopt(BlockIo(slot, key, 0, self._slab.view(slot), None, result.checksum))
        return results

    async def _below(self, move: Move, numbers: range, left: float) -> list[BlockResult]:
        """Copy between the slab and a store below it."""
        write = move.source == "host"
        store = self._lower.get(move.target if write else move.source)  # type: ignore[arg-type]
        if store is None:
            return [BlockResult("absent", "there is no such tier")] * len(numbers)
        slots, hosts = (move.target_slots, move.source_slots) if write else (move.source_slots, move.target_slots)
        blocks = [
            BlockIo(
                slots[n],
                move.keys[n],
                move.generations[n],
                self._slab.view(hosts[n]),
                move.parents[n] if move.parents else None,
                self._slab.checksum(hosts[n]) if write else None,
            )
            for n in numbers
        ]
        results = await (store.write if write else store.read)(blocks, left)
        await _settled(store, results, blocks)
        if not write:
            for n, block, result in zip(numbers, blocks, results):
                if result.outcome == "ok":
                    self._slab.adopt(block._replace(slot=hosts[n], generation=0, checksum=result.checksum))
        return results


async def _settled(store: BlockStore, results: Sequence[BlockResult], blocks: Sequence[BlockIo]) -> None:
    """Return when no hanging call touches the slots of blocks that were late."""
    late = {block.slot for block, result in zip(blocks, results) if result.outcome == "late"}
    while late & store.busy():  # noqa: ASYNC110 - a system call that hangs tells nobody when it returns
        await asyncio.sleep(BUSY_LOOK)


def _outcome(result: BlockResult) -> str:
    return result.cause if result.cause in ("cancelled", "lost") else result.outcome
