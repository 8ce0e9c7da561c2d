"""What is a target busy with, where blocks come as runs? `penstock.router.active.Load`, counted by runs."""

from collections.abc import Sequence

from penstock.kernel.runs import Chain, Holders, chain_of, depth_in
from penstock.router.active import Load


class RunLoad(Load):
    """One target's load; chains are `penstock.kernel.runs.Chain`."""

    __slots__ = ("_holders",)

    def __init__(self) -> None:
        super().__init__()
        self._holders = Holders()

    @staticmethod
    def chain(names: Sequence[int]) -> Chain:
        return names if isinstance(names, Chain) else chain_of(names)

    @property
    def blocks(self) -> int:
        return self._holders.total + self.loose

    def blocks_with(self, blocks: Sequence[int], loose: int) -> int:
        assert isinstance(blocks, Chain)
        holders, count = self._holders, len(blocks)
        return holders.total + self.loose + count + loose - depth_in(holders.reach, blocks, count)

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
