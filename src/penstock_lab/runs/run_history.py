"""Approximate KV index of block runs: guesses what each target holds from where requests went.

`penstock.router.kv_index.approximate_index` for chains of `penstock_lab.runs.block_runs`, tested against it: a
placement counts for ``ttl``, and within one placement the last block is the first to go.
"""

from collections import deque
from collections.abc import Mapping
from typing import Any

import msgspec

from penstock.kernel.errors import InvariantError
from penstock.kernel.machine import Nanos
from penstock.kernel.values import Target
from penstock.router.kv_index.approximate_index import KEEP
from penstock.router.kv_index.indexer import Column
from penstock_lab.runs.block_runs import Aged, Chain, Stretch
from penstock_lab.runs.run_reach import RunReach
from penstock_lab.runs.run_states import RunHistoryState


class RunHistory:
    """An index fed by our own decisions.

    Args:
        ttl: kernel nanoseconds that a placement counts for.
        blocks_max: most (target, block) pairs; beyond it the oldest placements go, each from its end, down to 80 %.
    """

    def __init__(self, *, ttl: Nanos, blocks_max: int = 1 << 20) -> None:
        self.ttl = ttl
        self.blocks_max = blocks_max
        self.expired = 0
        """Pairs forgotten because their time was over."""
        self.pruned = 0
        """Pairs forgotten to stay within the bound."""
        self._reach = RunReach()
        self._aged: dict[Target, Aged] = {}
        self._due: deque[tuple[Nanos, Target]] = deque()
        """(end of a placement's time, its target), one for each placement, rising."""
        self._now: Nanos = 0

    def __len__(self) -> int:
        return self._reach.total

    def routed(self, target: Target, blocks: Chain, now: Nanos) -> None:
        """Remember that a prompt goes to a target. Cost: O(runs of the prompt)."""
        self._advance(now)
        aged = self._aged.get(target)
        if aged is None:
            aged = self._aged[target] = Aged()
        until = self._now + self.ttl
        reach = self._reach
        for run, count in reversed(blocks.parts):
            aged.take(run, count)
            aged.use(run, 0, count, until)
            if count > reach.at(target, run):
                reach.put(target, run, count)
        self._due.append((until, target))
        if reach.total > self.blocks_max:
            self._prune()

    def overlap(self, blocks: Chain, now: Nanos = 0) -> dict[Target, int]:
        """Return how many leading blocks each target probably holds; targets that hold none are absent."""
        self._advance(now)
        return self._reach.overlap(blocks)

    def column(self, blocks: Chain, place: Mapping[Target, int], now: Nanos) -> Column:
        """Return the same for many targets; see `penstock.router.kv_index.indexer.HistoryIndexer.column`."""
        self._advance(now)
        return self._reach.column(blocks, place)

    def clear(self, target: Target) -> None:
        """A target's cache is empty."""
        self._aged.pop(target, None)
        self._reach.forget(target)

    def remove(self, target: Target) -> None:
        """A target is gone."""
        self.clear(target)

    def _advance(self, now: Nanos) -> None:
        """Forget what expired."""
        now = self._now = max(self._now, now)
        due = self._due
        while due and due[0][0] <= now:
            _, target = due.popleft()
            aged = self._aged.get(target)
            if aged is not None:
                self.expired += self._forget(target, aged.pop_until(now))

    def _prune(self) -> None:
        """Forget the oldest until the bound is kept with some room."""
        goal = int(self.blocks_max * KEEP)
        while self._reach.total > goal:
            _, target = min((aged.oldest, target) for target, aged in self._aged.items() if aged.oldest is not None)
            oldest = self._aged[target].pop_oldest(self._reach.total - goal)
            self.pruned += self._forget(target, oldest)

    def _forget(self, target: Target, stretches: list[Stretch]) -> int:
        before = self._reach.total
        for run, start, _ in stretches:
            self._reach.put(target, run, start)
        return before - self._reach.total

    def snapshot(self) -> RunHistoryState:
        """Return the state."""
        aged = {target: list(aged.stretches()) for target, aged in self._aged.items()}
        return RunHistoryState(self._now, aged, list(self._due), self.expired, self.pruned)

    def restore(self, plain: Any) -> None:
        """Become the index of a state, or of one as plain data."""
        state = msgspec.convert(plain, RunHistoryState)
        self.__init__(ttl=self.ttl, blocks_max=self.blocks_max)  # type: ignore[misc]
        self._now, self.expired, self.pruned = state.now, state.expired, state.pruned
        self._due = deque(state.due)
        for target, stretches in state.aged.items():
            aged = self._aged[target] = Aged()
            aged.restore(stretches)
            for run, _, end, _ in stretches:
                self._reach.put(target, run, max(end, self._reach.at(target, run)))

    def check(self) -> None:
        """Raise `InvariantError` where the state contradicts itself. Cost: walks everything."""
        self._reach.check()
        for target, aged in self._aged.items():
            aged.check()
            if aged.total != self._reach.pairs.get(target, 0):
                raise InvariantError(f"{target}: {aged.total} blocks have a time, {self._reach.pairs} are marked")
