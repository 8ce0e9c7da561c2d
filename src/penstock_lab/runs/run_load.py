"""Load of a target where blocks come as runs: `penstock.router.workers.active_sequences.TargetLoad` by runs."""

from collections.abc import Mapping, Sequence

from penstock.kernel.values import Target
from penstock.router.kv_index.indexer import Column
from penstock.router.workers.active_sequences import PrefixUsers, TargetLoad
from penstock_lab.runs.block_runs import Chain, Holders, chain_of, depth_in
from penstock_lab.runs.run_reach import RunReach


class RunLoad(TargetLoad):
    """One target's load; chains are `penstock_lab.runs.block_runs.Chain`."""

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
    def users_of_blocks() -> PrefixUsers:
        return RunUsers()

    def shared(self, blocks: Sequence[int]) -> int:
        assert isinstance(blocks, Chain)
        return depth_in(self._holders.reach, blocks, len(blocks))

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


class RunUsers:
    """How far each target has each run in use."""

    def __init__(self) -> None:
        self._reach = RunReach()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RunUsers) and self._reach == other._reach

    def used(self, target: Target, blocks: Chain, load: RunLoad) -> None:
        for run, _ in blocks.parts:
            self._reach.put(target, run, load._holders.reach.get(run, 0))

    def left(self, target: Target, blocks: Chain, load: RunLoad) -> None:
        self.used(target, blocks, load)

    def shared(self, blocks: Chain, place: Mapping[Target, int], loads: Mapping[Target, RunLoad]) -> Column:
        return self._reach.column(blocks, place)
