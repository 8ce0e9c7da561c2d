"""Exact KV index of block runs, from the KV events of simulated engines.

`penstock.router.kv_index.exact_index` for chains of `penstock_lab.runs.block_runs`, which only a simulation has: an
engine drops the end of a run first, so what a target holds of one is a number. The block-by-block index is the
yardstick that it is tested against.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from penstock.kernel.errors import InvariantError
from penstock.kernel.machine import Nanos
from penstock.kernel.values import KvEvent, KvRemoved, KvStored, Target
from penstock.router.kv_index.indexer import Column, HeldBlocks, IndexCounters
from penstock_lab.runs.block_runs import Chain, stretches_of
from penstock_lab.runs.run_reach import RunReach
from penstock_lab.runs.run_states import RunIndexState


class RunIndex:
    """An index fed by KV events whose hashes are names of runs.

    Args:
        block_size: tokens per block of the pool.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.counters = IndexCounters()
        self._reach = RunReach()

    def __len__(self) -> int:
        return self._reach.total

    def overlap(self, blocks: Chain, now: Nanos = 0) -> dict[Target, HeldBlocks]:
        """Count, per target, how many leading blocks of a prompt it holds; those that hold nothing are absent."""
        self.counters.finds += 1
        depths = self._reach.overlap(blocks)
        held = {depth: HeldBlocks(depth) for depth in set(depths.values())}
        return {target: held[depth] for target, depth in depths.items()}

    def columns(self, blocks: Chain, place: Mapping[Target, int]) -> tuple[Column, Sequence[Column]]:
        """Return the same for many targets; see `penstock.router.kv_index.indexer.EventIndexer.columns`."""
        self.counters.finds += 1
        return self._reach.column(blocks, place), ()

    def join(self, target: Target, *, native: bool, alike: str | None = None, copies: bool = False) -> None:
        """Names of runs are the same everywhere: there is nothing to know beforehand."""

    def apply(self, target: Target, event: KvEvent) -> None:
        """Take in one KV event of a target, in the order in which the engine sent them.

        Raises:
            InvariantError: it leaves a hole in a run.
        """
        counters, reach = self.counters, self._reach
        if isinstance(event, KvStored):
            counters.events_stored += 1
            for run, start, end in stretches_of(event.hashes):
                if reach.at(target, run) != start:
                    raise InvariantError(f"{target} stored run {run} from {start}, but has {reach.at(target, run)}")
                reach.put(target, run, end)
                counters.stored += end - start
        elif isinstance(event, KvRemoved):
            counters.events_removed += 1
            for run, start, end in stretches_of(event.hashes):
                if reach.at(target, run) != end:
                    raise InvariantError(f"{target} dropped run {run} to {end}, but has {reach.at(target, run)}")
                reach.put(target, run, start)
                counters.removed += end - start
        else:
            counters.events_cleared += 1
            self.clear(target)

    def clear(self, target: Target) -> None:
        """Forget all that a target holds."""
        self._reach.forget(target)

    def remove(self, target: Target) -> None:
        """A target is gone."""
        self._reach.forget(target)

    def resident(self, target: Target) -> int:
        """Return how many blocks a target holds."""
        return self._reach.pairs.get(target, 0)

    def windowed(self, target: Target | None = None) -> bool:
        """Return False: simulated engines have full attention, whatever their timing says."""
        return False

    def blocks_of(self, target: Target) -> set[int]:
        """Return every block that a target holds. Cost: walks everything."""
        return self._reach.names(target)

    def snapshot(self) -> RunIndexState:
        """Return the state."""
        return RunIndexState(self.block_size, self._reach.snapshot(), self.counters.as_dict())

    def restore(self, plain: Any) -> None:
        """Become the index of a state, or of one as plain data."""
        state = msgspec.convert(plain, RunIndexState)
        self.block_size, self.counters = state.block_size, IndexCounters(**state.counters)
        self._reach.restore(state.reach)

    def check(self) -> None:
        """Raise `InvariantError` where the state contradicts itself. Cost: walks everything."""
        self._reach.check()
