"""How fast is Dynamo's RadixTree, as a Python caller gets it? usage: peer.py WORKERS PAIRS (run by the peer's Python)

The binding takes an event as JSON and reads it inside `apply_event`; making the JSON is not timed. It looks up by
local hashes, as it does in its own router.
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

from dynamo.llm import RadixTree, compute_block_hash_for_seq
from measure import measure, report
from workload import BLOCK, Sequence, Workload, middle


class Peer:
    def __init__(self) -> None:
        self.tree = RadixTree()
        self.events: dict[int, int] = {}
        """Worker -> events made for it; the tree does not ask that they be without gaps."""

    def prepare_stored(self, sequence: Sequence, first: int, last: int, worker: int) -> Callable[[], Any]:
        blocks = [
            {"block_hash": engine, "tokens_hash": local}
            for engine, local in zip(sequence.engine[first:last], sequence.local[first:last])
        ]
        parent = sequence.engine[first - 1] if first else None
        return self._event(worker, {"stored": {"parent_hash": parent, "blocks": blocks}})

    def prepare_removed(self, sequence: Sequence, first: int) -> Callable[[], Any]:
        return self._event(sequence.worker, {"removed": {"block_hashes": sequence.engine[: first - 1 : -1]}})

    def prepare_find(self, sequence: Sequence, depth: int) -> tuple[Callable[[], Any], Callable[[Any], int]]:
        return self.prepare_miss(sequence.local[:depth])

    def prepare_miss(self, hashes: list[int]) -> tuple[Callable[[], Any], Callable[[Any], int]]:
        return lambda: self.tree.find_matches(hashes), lambda found: len(found.scores)

    def remove_worker(self, worker: int) -> None:
        self.tree.remove_worker(worker)

    def _event(self, worker: int, data: dict[str, Any]) -> Callable[[], Any]:
        number = self.events.get(worker, 0)
        self.events[worker] = number + 1
        raw = json.dumps({"event_id": number, "data": data}).encode()
        return lambda: self.tree.apply_event(worker, raw)


def main() -> None:
    workers, pairs = int(sys.argv[1]), int(sys.argv[2])
    found = measure(Peer(), Workload(workers, pairs, tokens=False))
    # What its publisher does before the event: hash the tokens of 256 blocks.
    taken = []
    tokens = Workload(1, 256, tokens=True)
    for number in range(300):
        sequence = tokens.sequence(number)
        start = time.perf_counter()
        compute_block_hash_for_seq(sequence.tokens, BLOCK)
        taken.append((time.perf_counter() - start) * 1e6)
    found["hash_256"] = middle(taken)
    report(found)


if __name__ == "__main__":
    main()
