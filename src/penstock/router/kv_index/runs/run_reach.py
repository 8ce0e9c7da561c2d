"""`RunReach`: how far each target holds each run of blocks, which both indexes of block runs use."""

from collections.abc import Iterator

from penstock.kernel.block_runs import RUN_BITS, Chain
from penstock.kernel.errors import InvariantError
from penstock.kernel.machine import Snapshot
from penstock.kernel.values import Target, WorkerId


class RunReach:
    """Targets by the beginnings of runs that they hold."""

    __slots__ = ("_runs", "pairs", "total")

    def __init__(self) -> None:
        self.total = 0
        """(target, block) pairs."""
        self.pairs: dict[Target, int] = {}
        """Blocks of each target that was ever given some, until it is forgotten."""
        self._runs: dict[int, dict[Target, int]] = {}

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
        more = blocks - held.get(target, 0)
        if blocks:
            held[target] = blocks
        elif held.pop(target, 0) and not held:
            del self._runs[run]
        self.total += more
        self.pairs[target] = self.pairs.get(target, 0) + more

    def forget(self, target: Target) -> None:
        """A target holds nothing any more. Cost: O(runs)."""
        self.total -= self.pairs.pop(target, 0)
        for run in [run for run, held in self._runs.items() if target in held]:
            held = self._runs[run]
            del held[target]
            if not held:
                del self._runs[run]

    def overlap(self, chain: Chain) -> dict[Target, int]:
        """Return how many leading blocks each target holds; those that hold none are absent.

        Cost: O(targets that hold it) per run of the chain.
        """
        found: dict[Target, int] = {}
        before = 0
        on: dict[Target, int] | None = None
        for run, count in chain.parts:
            held = self._runs.get(run)
            if held is None:
                break
            here = held if on is None else {target: held[target] for target in on if target in held}
            on = {target: blocks for target, blocks in here.items() if blocks >= count}
            found.update(dict.fromkeys(on, before + count))
            if len(on) < len(here):
                found.update([(target, before + blocks) for target, blocks in here.items() if blocks < count])
            if not on:
                break
            before += count
        return found

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

    def snapshot(self) -> Snapshot:
        """Return the state as plain data."""
        return {
            "targets": [[target.worker, target.rank] for target in self.pairs],
            "runs": [[target.worker, target.rank, run, blocks] for target, run, blocks in self.items()],
        }

    def restore(self, state: Snapshot) -> None:
        """Become what `snapshot` wrote."""
        self.__init__()  # type: ignore[misc]
        self.pairs = {Target(WorkerId(worker), rank): 0 for worker, rank in state["targets"]}
        for worker, rank, run, blocks in state["runs"]:
            self.put(Target(WorkerId(worker), rank), run, blocks)

    def check(self) -> None:
        """Raise `InvariantError` where the sums are off."""
        counted: dict[Target, int] = {}
        for target, _, blocks in self.items():
            counted[target] = counted.get(target, 0) + blocks
        if {target: blocks for target, blocks in self.pairs.items() if blocks} != counted:
            raise InvariantError("the blocks of targets are miscounted")
        if self.total != sum(counted.values()):
            raise InvariantError(f"{self.total} pairs are said to be held, runs say {sum(counted.values())}")
