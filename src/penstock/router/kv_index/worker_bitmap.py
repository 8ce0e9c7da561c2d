"""`WorkerBits`: the bit that stands for each worker in a mask, given back once nothing refers to it."""

from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import numpy.typing as npt

from penstock.kernel.errors import InvariantError
from penstock.kernel.values import Target, WorkerId
from penstock.router.kv_index.index_states import SlotsState

GONE = Target(WorkerId(""), -1)
"""Stands where a slot has no target."""
_FEW = 24
"""Bits that are cheaper to name one by one than to unpack together."""
_PLACES_MAX = 8
"""Lists of targets whose slots are remembered: one for each stage of each kind of request."""


class BitLedger:
    """Counts (worker, block) pairs: per slot, and in all."""

    __slots__ = ("pairs", "total")

    def __init__(self) -> None:
        self.pairs: list[int] = []
        self.total = 0

    def add(self, slot: int, blocks: int) -> None:
        """Count ``blocks`` more (or, below 0, fewer) for a slot."""
        self.pairs[slot] += blocks
        self.total += blocks

    def close(self, slot: int) -> int:
        """Count nothing any more for a slot; return how many pairs it had."""
        had = self.pairs[slot]
        self.total -= had
        self.pairs[slot] = 0
        return had


class WorkerBits:
    """Bits of targets. One joining gets a free bit; one leaving only loses it from ``alive``: constant time.

    The bit of one that left stays marked on what it held, where it means nothing, until a sweep has passed over
    everything that was there when it left. Bits that go while a sweep is under way wait for the next one. So a bit
    never means two targets, and each join is a generation of its own.
    """

    def __init__(self, ledger: BitLedger) -> None:
        self.names: list[Target] = []
        """Slot -> target; replaced, not changed, when a slot is given out, so that the old list stays right."""
        self.alive = 0
        self.swept = 0
        """Bits taken off what they marked since the start."""
        self._slot_of: dict[Target, int] = {}
        self._ledger = ledger
        self._free: list[int] = []
        self._sweeping: list[int] = []
        self._waiting: list[int] = []
        self._places: dict[int, tuple[Mapping[Target, int], npt.NDArray[np.intp]]] = {}

    def __contains__(self, target: object) -> bool:
        return target in self._slot_of

    def __iter__(self) -> Iterator[Target]:
        return iter(self._slot_of)

    def __len__(self) -> int:
        return len(self._slot_of)

    def bit(self, target: Target) -> int:
        """Return a target's bit, 0 where it has none."""
        slot = self._slot_of.get(target)
        return 0 if slot is None else 1 << slot

    def column(self, masks: Iterable[tuple[int, int]], place: Mapping[Target, int]) -> npt.NDArray[np.int64]:
        """Return a number for each of many targets, shape (targets,); 0 for those in no mask.

        Args:
            masks: of bits that are alive, each with its number; no bit is in two.
            place: target -> its place; the same object for the same targets.
        Cost: some 4 us at a thousand targets for each mask of many bits.
        """
        count = len(self.names)
        by_slot = np.zeros(count + 1, dtype=np.int64)  # the last is of targets without a slot, -1
        for number, mask in masks:
            if mask.bit_count() <= _FEW:
                for slot in bits(mask):
                    by_slot[slot] = number
            else:
                raw = np.frombuffer(mask.to_bytes((count + 8) // 8, "little"), dtype=np.uint8)
                by_slot[np.unpackbits(raw, count=count + 1, bitorder="little").view(bool)] = number
        found: npt.NDArray[np.int64] = by_slot[self._slots_of(place)]
        return found

    def _slots_of(self, place: Mapping[Target, int]) -> npt.NDArray[np.intp]:
        """Return the slot of each of many targets, -1 where it has none; kept, and changed with the targets."""
        known = self._places.get(id(place))
        if known is None or known[0] is not place:
            if len(self._places) >= _PLACES_MAX:
                self._places.clear()
            slots = np.array([self._slot_of.get(target, -1) for target in place], dtype=np.intp)
            known = self._places[id(place)] = place, slots
        return known[1]

    def _moved(self, target: Target, slot: int) -> None:
        for place, slots in self._places.values():
            if (at := place.get(target)) is not None:
                slots[at] = slot

    def join(self, target: Target) -> int:
        """Return a target's bit, a new one where it has none."""
        slot = self._slot_of.get(target)
        if slot is None:
            names = list(self.names)
            if self._free:
                slot = self._free.pop()
                names[slot] = target
            else:
                slot = len(names)
                names.append(target)
                self._ledger.pairs.append(0)
            self.names = names
            self._slot_of[target] = slot
            self.alive |= 1 << slot
            self._moved(target, slot)
        return 1 << slot

    def leave(self, target: Target) -> tuple[int, int]:
        """Take a target's bit away. Return (bit, the pairs that it had), (0, 0) where it has none."""
        slot = self._slot_of.pop(target, None)
        if slot is None:
            return 0, 0
        self.names[slot] = GONE
        self._moved(target, -1)
        self.alive &= ~(1 << slot)
        had = self._ledger.close(slot)
        if had:
            self._waiting.append(slot)
        else:
            self._free.append(slot)  # it marks nothing
        return 1 << slot, had

    @property
    def sweep_due(self) -> bool:
        """Whether bits of targets that are gone wait to be taken off what they marked."""
        if not self._sweeping and self._waiting:
            self._sweeping, self._waiting = self._waiting, []
        return bool(self._sweeping)

    def sweep_done(self) -> None:
        """A sweep passed over everything: its bits may be given out again."""
        self.swept += len(self._sweeping)
        self._free.extend(self._sweeping)
        self._sweeping = []

    def snapshot(self) -> SlotsState:
        """Return the state, the ledger's included."""
        return SlotsState(
            slot_of=self._slot_of,
            count=len(self.names),
            free=self._free,
            sweeping=self._sweeping,
            waiting=self._waiting,
            swept=self.swept,
            pairs=self._ledger.pairs,
        )

    def restore(self, state: SlotsState) -> None:
        """Become the slots of a state, the ledger included."""
        self._slot_of, self.names, self.alive = state.slot_of, [GONE] * state.count, 0
        for target, slot in self._slot_of.items():
            self.names[slot] = target
            self.alive |= 1 << slot
        self._places.clear()
        self._free, self._sweeping, self._waiting = state.free, state.sweeping, state.waiting
        self.swept, self._ledger.pairs, self._ledger.total = state.swept, state.pairs, sum(state.pairs)

    def check(self) -> None:
        """Raise where a slot is lost or stands for two things."""
        every = sorted([*self._slot_of.values(), *self._free, *self._sweeping, *self._waiting])
        if every != list(range(len(self.names))):
            raise InvariantError(f"slots {every} are not each of the {len(self.names)} once")
        if sum(self._ledger.pairs) != self._ledger.total:
            raise InvariantError("the ledger's total is not the sum of its slots")


def bits(mask: int) -> Iterator[int]:
    """Yield the slots that are set in a mask, rising."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def mask_bytes(mask: int) -> bytes:
    """Write a mask of any width as little-endian bytes."""
    return mask.to_bytes((mask.bit_length() + 7) // 8, "little")


def mask_of(raw: bytes) -> int:
    """Read what `mask_bytes` wrote."""
    return int.from_bytes(raw, "little")
