"""What is measured, and in which order? The same steps for each index; `ours.py` and `peer.py` say how each is done.

Prints one JSON object: microseconds, except ``remove_worker_ms``, ``apply_longest_ms`` and ``bytes_per_pair``.
"""

import json
import time
from collections.abc import Callable
from typing import Any, Protocol

from workload import BLOCKS, DEPTHS, QUERIES, REMOVALS, SHARED, Sequence, Workload, middle, resident_bytes

BATCH = 100
"""Events made ahead of being timed."""


class Index(Protocol):
    """One index under measurement. ``prepare_*`` is not timed; what it returns is."""

    def prepare_stored(self, sequence: Sequence, first: int, last: int, worker: int) -> Callable[[], Any]: ...
    def prepare_removed(self, sequence: Sequence, first: int) -> Callable[[], Any]: ...
    def prepare_find(self, sequence: Sequence, depth: int) -> tuple[Callable[[], Any], Callable[[Any], int]]: ...
    def prepare_miss(self, hashes: list[int]) -> tuple[Callable[[], Any], Callable[[Any], int]]: ...
    def remove_worker(self, worker: int) -> None: ...


def timed(step: Callable[[], Any]) -> float:
    start = time.perf_counter()
    step()
    return (time.perf_counter() - start) * 1e6


def measure(index: Index, workload: Workload) -> dict[str, float]:
    found: dict[str, float] = {}
    # Make one batch and drop it, so that the memory of making events is not counted as the index's.
    steps = [index.prepare_stored(workload.sequence(number), 0, BLOCKS, 0) for number in range(BATCH)]
    del steps
    before = resident_bytes()
    taken: list[float] = []
    for first in range(0, workload.count, BATCH):
        steps = []
        for number in range(first, min(first + BATCH, workload.count)):
            sequence = workload.sequence(number)
            steps.append(index.prepare_stored(sequence, 0, BLOCKS, sequence.worker))
        taken.extend(map(timed, steps))
        steps.clear()
    found["bytes_per_pair"] = (resident_bytes() - before) / (workload.count * BLOCKS)
    found["apply_256"] = middle(taken)
    found["apply_256_mean"] = sum(taken) / len(taken)
    found["apply_longest_ms"] = max(taken) / 1e3
    deep = workload.deep()
    for worker in range(4):
        index.prepare_stored(deep, 0, 2000 - 400 * worker, worker)()
    sampled = workload.sampled(QUERIES)
    for depth in DEPTHS:
        for kind in ("hit", "miss"):
            quick, named = [], []
            for number in sampled:
                if kind == "miss":
                    find, names = index.prepare_miss(workload.misses(depth))
                else:
                    find, names = index.prepare_find(deep if depth == 2000 else workload.sequence(number), depth)
                start = time.perf_counter()
                result = find()
                done = time.perf_counter()
                matched = names(result)
                quick.append((done - start) * 1e6)
                named.append((time.perf_counter() - start) * 1e6)
                if bool(matched) != (kind == "hit"):
                    raise RuntimeError(f"a look-up of depth {depth} ({kind}) matched {matched} workers")
            found[f"find_{depth}_{kind}"] = middle(quick)
            found[f"find_{depth}_{kind}_named"] = middle(named)
    taken = [timed(index.prepare_removed(workload.sequence(number), SHARED)) for number in workload.sampled(REMOVALS)]
    found["remove_192"] = middle(taken)
    singles = workload.singles()
    taken = [timed(index.prepare_stored(singles, i, i + 1, 3)) for i in range(len(singles.own))]
    found["apply_1"] = middle(taken)
    start = time.perf_counter()
    index.remove_worker(0)
    found["remove_worker_ms"] = (time.perf_counter() - start) * 1e3
    return found


def report(found: dict[str, float]) -> None:
    """Hand the numbers to `run.py`."""
    print(json.dumps(found))
