"""Load of a target where blocks come as runs: `penstock.router.workers.active_sequences.TargetLoad` by runs."""

from collections.abc import Sequence
from typing import Any

from penstock.kernel.block_runs import Chain, Holders, chain_of, depth_in
from penstock.router.workers.active_sequences import TargetLoad


class RunLoad(TargetLoad):
    """One target's load; chains are `penstock.kernel.block_runs.Chain`."""

    __slots__ = ("_holders",)

    def __init__(self) -> None:
        super().__init__()
        self._holders = Holders()

    @staticmethod
    def chain(names: Sequence[int]) -> Chain:
        return names if isinstance(names, Chain) else chain_of(names)

    @property
    def blocks(self) -> int:
        return self._holders.total + self.unhashed_blocks

    def blocks_with(self, blocks: Sequence[int], unhashed_blocks: int) -> int:
        assert isinstance(blocks, Chain)
        holders, count = self._holders, len(blocks)
        return holders.total + self.unhashed_blocks + count + unhashed_blocks - depth_in(holders.reach, blocks, count)

    @staticmethod
    def head(blocks: Sequence[int]) -> int | None:
        assert isinstance(blocks, Chain)
        return blocks.parts[0][0] if blocks.parts else None

    @staticmethod
    def shared(blocks: Sequence[int], loads: Sequence[Any]) -> list[int]:
        assert isinstance(blocks, Chain)
        found = []
        for load in loads:  # `depth_in`, without a call for each of hundreds
            held = load._holders.reach.get
            depth = 0
            for run, count in blocks.parts:
                there = held(run, 0)
                if there < count:
                    depth += there
                    break
                depth += count
            found.append(depth)
        return found

    def use(self, blocks: Sequence[int]) -> None:
        assert isinstance(blocks, Chain)
        for run, count in blocks.parts:
            self._holders.add(run, count)

    def leave(self, blocks: Sequence[int]) -> None:
        assert isinstance(blocks, Chain)
        for run, count in blocks.parts:
            self._holders.drop(run, count)

    def users(self) -> dict[int, int]:
        return self._holders.counts()
