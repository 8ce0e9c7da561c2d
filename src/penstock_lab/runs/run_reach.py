"""`RunReach`: how far each target holds each run of blocks, for the indexes of block runs and for the load by runs.

Of a run that many targets hold there is a row of numbers beside the dict, so that the depths of all targets in a prompt
are a few calls of numpy (`RunReach.column`).
"""

from collections.abc import Iterator, Mapping

import numpy as np

from penstock.kernel.errors import InvariantError
from penstock.kernel.values import Target
from penstock.router.kv_index.indexer import Column
from penstock_lab.runs.block_runs import RUN_BITS, Chain
from penstock_lab.runs.run_states import ReachState

ROW_MIN = 24
"""Holders from which on a run has a row, which goes at half as many: with fewer, numpy's calls cost more."""
ORDERS_MAX = 8
"""Orders of targets that are kept: there are as many as stages of requests."""


class RunReach:
    """Targets by the beginnings of runs that they hold; one that holds some of a run holds all before it in a chain."""

    __slots__ = ("_orders", "_rows", "_runs", "_slots", "_width", "pairs", "total")

    def __init__(self) -> None:
        self.total = 0
        """(target, block) pairs."""
        self.pairs: dict[Target, int] = {}
        """Blocks of each target that was ever given some, until it is forgotten."""
        self._runs: dict[int, dict[Target, int]] = {}
        self._rows: dict[int, Column] = {}
        """run -> blocks that each target holds, by slot, of runs with many holders"""
        self._slots: dict[Target, int] = {}
        self._width = 64
        """Numbers in a row."""
        self._orders: dict[int, tuple[Mapping[Target, int], Column | slice]] = {}
        """id of what was asked for -> (that, the slots of its targets)"""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RunReach) and self._runs == other._runs

    def at(self, target: Target, run: int) -> int:
        """Return how many blocks of a run a target holds."""
        held = self._runs.get(run)
        return 0 if held is None else held.get(target, 0)

    def put(self, target: Target, run: int, blocks: int) -> None:
        """Set how many blocks (0: none) of a run a target holds from now on."""
        held = self._runs.get(run)
        if held is None:
            if not blocks:
                return
            held = self._runs[run] = {}
        pairs = self.pairs.get(target)
        if pairs is None:
            pairs = 0
            self._slot(target)
        more = blocks - held.get(target, 0)
        if blocks:
            held[target] = blocks
        elif held.pop(target, 0) and not held:
            del self._runs[run]
        row = self._rows.get(run)
        if row is not None:
            row[self._slots[target]] = blocks
            if len(held) <= ROW_MIN // 2:
                del self._rows[run]
        elif len(held) >= ROW_MIN:
            row = self._rows[run] = np.zeros(self._width, dtype=np.int64)
            row[[self._slots[one] for one in held]] = list(held.values())
        self.total += more
        self.pairs[target] = pairs + more

    def forget(self, target: Target) -> None:
        """A target holds nothing any more. Cost: O(runs)."""
        self.total -= self.pairs.pop(target, 0)
        for run in [run for run, held in self._runs.items() if target in held]:
            held = self._runs[run]
            del held[target]
            if not held:
                del self._runs[run]
            if run in self._rows:
                self._rows[run][self._slots[target]] = 0
                if len(held) <= ROW_MIN // 2:
                    del self._rows[run]

    def overlap(self, chain: Chain) -> dict[Target, int]:
        """Return how many leading blocks each target holds; those that hold none are absent.

        Cost: O(targets that hold it) per run of the chain.
        """
        found: dict[Target, int] = {}
        for run, count in chain.parts:
            held = self._runs.get(run)
            if held is None:
                break
            if not found:
                found = {target: blocks if blocks < count else count for target, blocks in held.items()}
                continue
            for target, blocks in held.items():
                found[target] += blocks if blocks < count else count
        return found

    def column(self, chain: Chain, place: Mapping[Target, int]) -> Column:
        """Return the same for many targets, shape (targets,): 0 for those that hold none.

        Args:
            place: the targets, in the order of their places; the same object for the same targets.
        Cost: a few us per run of the chain, and O(holders) of a run with few of them.
        """
        known = self._orders.get(id(place))
        if known is None:
            if len(self._orders) >= ORDERS_MAX:
                self._orders.clear()
            slots = [self._slot(target) for target in place]
            straight = slots == list(range(len(place)))
            known = self._orders[id(place)] = (
                place,
                slice(len(place)) if straight else np.array(slots, dtype=np.int64),
            )
        depths = np.zeros(self._width, dtype=np.int64)
        for run, count in chain.parts:
            row = self._rows.get(run)
            if row is not None:
                depths += np.minimum(row, count)
                continue
            held = self._runs.get(run)
            if held is None:
                break
            for target, blocks in held.items():
                depths[self._slots[target]] += min(blocks, count)
        found: Column = depths[known[1]]
        return found

    def _slot(self, target: Target) -> int:
        """Return the place of a target in all rows, which it keeps when it is forgotten."""
        slot = self._slots.get(target)
        if slot is None:
            slot = self._slots[target] = len(self._slots)
            if slot >= self._width:
                rows = self._rows
                for run, row in rows.items():
                    rows[run] = np.concatenate([row, np.zeros_like(row)])
                self._width *= 2
        return slot

    def items(self) -> Iterator[tuple[Target, int, int]]:
        """Yield (target, run, blocks)."""
        for run, held in self._runs.items():
            for target, blocks in held.items():
                yield target, run, blocks

    def names(self, target: Target) -> set[int]:
        """Return every block of a target. Cost: walks everything."""
        return {
            name
            for run, held in self._runs.items()
            for name in range(run << RUN_BITS, (run << RUN_BITS) + held.get(target, 0))
        }

    def snapshot(self) -> ReachState:
        """Return the state."""
        return ReachState(list(self.pairs), list(self.items()))

    def restore(self, state: ReachState) -> None:
        """Become the reach of a state."""
        self.__init__()  # type: ignore[misc]
        self.pairs = dict.fromkeys(state.targets, 0)
        for target in self.pairs:
            self._slot(target)
        for target, run, blocks in state.runs:
            self.put(target, run, blocks)

    def check(self) -> None:
        """Raise `InvariantError` where the sums are off."""
        counted: dict[Target, int] = {}
        for target, _, blocks in self.items():
            counted[target] = counted.get(target, 0) + blocks
        if {target: blocks for target, blocks in self.pairs.items() if blocks} != counted:
            raise InvariantError("the blocks of targets are miscounted")
        if self.total != sum(counted.values()):
            raise InvariantError(f"{self.total} pairs are said to be held, runs say {sum(counted.values())}")
        for run, row in self._rows.items():
            held = self._runs[run]
            if len(row) != self._width or row.tolist() != [held.get(target, 0) for target in self._slots] + [0] * (
                self._width - len(self._slots)
            ):
                raise InvariantError(f"the row of run {run} is not what targets hold of it")
