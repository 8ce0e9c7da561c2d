"""How fast is our index? usage: ours.py WORKERS PAIRS own|translated"""

import sys
from collections.abc import Callable
from typing import Any

from measure import measure, report
from workload import BLOCK, Sequence, Workload

from penstock.kernel.values import KvRemoved, KvStored, Target, WorkerId
from penstock.router.kv_index.exact_index import ExactIndex


class Ours:
    """Events come as the structs that the wire decoder makes."""

    def __init__(self, workers: int, translated: bool) -> None:
        self.index = ExactIndex(BLOCK, blocks_max=1 << 40)
        self.translated = translated
        self.targets = [Target(WorkerId(f"worker-{i}")) for i in range(workers)]
        for target in self.targets:
            self.index.join(target, native=not translated, alike="sha256" if translated else None)

    def prepare_stored(self, sequence: Sequence, first: int, last: int, worker: int) -> Callable[[], Any]:
        hashes = sequence.engine if self.translated else sequence.own
        event = KvStored(
            hashes=hashes[first:last],
            parent=hashes[first - 1] if first else None,
            tokens=sequence.tokens[first * BLOCK : last * BLOCK] if self.translated else [],
            block_size=BLOCK,
        )
        return lambda: self.index.apply(self.targets[worker], event)

    def prepare_removed(self, sequence: Sequence, first: int) -> Callable[[], Any]:
        hashes = sequence.engine if self.translated else sequence.own
        event = KvRemoved(hashes=hashes[: first - 1 : -1])
        return lambda: self.index.apply(self.targets[sequence.worker], event)

    def prepare_find(self, sequence: Sequence, depth: int) -> tuple[Callable[[], Any], Callable[[Any], int]]:
        return self.prepare_miss(sequence.own[:depth])

    def prepare_miss(self, hashes: list[int]) -> tuple[Callable[[], Any], Callable[[Any], int]]:
        return lambda: self.index.overlap(hashes), lambda overlap: len(overlap.by_target)

    def remove_worker(self, worker: int) -> None:
        self.index.remove(self.targets[worker])


def main() -> None:
    workers, pairs, kind = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    ours = Ours(workers, kind == "translated")
    found = measure(ours, Workload(workers, pairs, kind == "translated"))
    if ours.index.counters.audit_disagreements:
        raise RuntimeError("the index disagreed with its audit")
    report(found)


if __name__ == "__main__":
    main()
