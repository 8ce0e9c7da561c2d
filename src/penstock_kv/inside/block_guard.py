"""`BlockGuard`: sums blocks that a tier has stored, and checks what it gives back, in threads of its own.

It knows nothing of vLLM: blocks are keys and rows of a region. A row must stay as it is until the guard's result for
its job is out.
"""

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

from penstock_kv.inside.block_checksum import checksum
from penstock_kv.inside.guard_index import BlockSum, GuardIndex

log = logging.getLogger("vllm.penstock")


class GuardedJob(NamedTuple):
    """A job that the tier has ended well.

    Args:
        keys, rows: shape (n,) each.
        generations: of a load: per key, as `BlockGuard.generation` said when it began. None for a store.
    """

    job: int
    keys: Sequence[bytes]
    rows: Sequence[int]
    generations: Sequence[int] | None = None


class GuardResult(NamedTuple):
    """What came of a job: keys that are right (stored and recorded, or loaded and proven), and those that are not."""

    job: int
    right: list[bytes]
    wrong: list[bytes]
    load: bool


class BlockGuard:
    """Guard of one tier.

    Args:
        row: gives the bytes of a row, as a flat memoryview.
        discard: has the tier drop a block. A tier that keeps what it has would never store the block again.
    """

    def __init__(
        self, index: GuardIndex, row: Callable[[int], memoryview], discard: Callable[[bytes], None] = lambda key: None
    ) -> None:
        self._index = index
        self._row = row
        self._discard = discard
        self._results: queue.SimpleQueue[GuardResult] = queue.SimpleQueue()
        self.counts = dict.fromkeys(("stored", "served", "corrupt", "stale", "unrecorded"), 0)
        """Blocks since the last `take_counts`; ``unrecorded``: stored by the tier, but its record couldn't be."""
        self._counting = threading.Lock()
        # Loads hold requests up and stores do not, so neither waits for the other.
        self._stores, self._loads = _Thread("penstock-guard-store"), _Thread("penstock-guard-load")

    def generation(self, key: bytes) -> int | None:
        """Return the generation of a block; None where the tier must not be asked for it."""
        record = self._index.get(key)
        return None if record is None else record.generation

    def stored(self, job: GuardedJob) -> None:
        """The tier has these blocks: record their sums. The result is in `finished` later."""
        self._stores.post(lambda: self._record(job))

    def loaded(self, job: GuardedJob) -> None:
        """The tier has written these rows: compare them with their sums. The result is in `finished` later."""
        self._loads.post(lambda: self._verify(job))

    def forget(self, keys: Sequence[bytes]) -> None:
        """The tier couldn't load these: they are misses until they are stored again."""
        self._index.forget(keys)

    def refresh(self) -> None:
        """Read the records of other engines, in the background."""
        self._stores.post(self._refresh)

    def finished(self) -> list[GuardResult]:
        """Return the results since the last call."""
        results = []
        while True:
            try:
                results.append(self._results.get_nowait())
            except queue.Empty:
                return results

    def take_counts(self) -> dict[str, int]:
        """Return the counts since the last call."""
        with self._counting:
            taken, self.counts = self.counts, dict.fromkeys(self.counts, 0)
        return taken

    def wait_idle(self) -> None:
        """Wait until the results of all jobs are out."""
        self._stores.wait_idle()
        self._loads.wait_idle()

    def close(self) -> None:
        """End the threads after what they have to do, and close the index."""
        self._stores.end()
        self._loads.end()
        self._index.close()

    # --- in the threads -----------------------------------------------------------------------------------------------

    def _record(self, job: GuardedJob) -> None:
        right, wrong = list(job.keys), []
        try:
            sums = []
            for key, row in zip(job.keys, job.rows, strict=True):
                data = self._row(row)
                sums.append(BlockSum(key, len(data), checksum(data)))
            self._index.put(sums)
            self._count("stored", len(right))
        except Exception:  # supervision boundary: a block without a record is a miss, and its job must end
            log.exception("blocks of a tier can't be recorded, and will be misses")
            right, wrong = [], right
            self._count("unrecorded", len(wrong))
        self._results.put(GuardResult(job.job, right, wrong, load=False))

    def _verify(self, job: GuardedJob) -> None:
        right: list[bytes] = []
        wrong: list[bytes] = []
        for key, row, generation in zip(job.keys, job.rows, job.generations or (), strict=True):
            try:
                problem = self._problem(key, row, generation)
            except Exception:  # supervision boundary: what can't be checked is not served
                log.exception("a loaded block can't be checked")
                problem = "corrupt"
            (wrong if problem else right).append(key)
            self._count(problem or "served", 1)
        if wrong:
            self._index.forget(wrong)
            self._drop(wrong)
            log.error("%d of %d loaded blocks are not what was stored: computed again", len(wrong), len(job.keys))
        self._results.put(GuardResult(job.job, right, wrong, load=True))

    def _problem(self, key: bytes, row: int, generation: int) -> str | None:
        record = self._index.get(key)
        if record is None:
            return "stale"
        data = self._row(row)
        if len(data) == record.length and checksum(data) == record.checksum:
            return None
        return "corrupt" if record.generation == generation else "stale"

    def _drop(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            try:
                self._discard(key)
            except OSError as error:
                log.warning("a block that is wrong can't be removed from its tier: %s", error)

    def _refresh(self) -> None:
        try:
            self._index.refresh()
        except OSError as error:
            log.warning("the guard's index can't be read: %s", error)

    def _count(self, name: str, blocks: int) -> None:
        with self._counting:
            self.counts[name] += blocks


class _Thread:
    """A thread that does one thing after the other."""

    def __init__(self, name: str) -> None:
        self._todo: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def post(self, work: Callable[[], None]) -> None:
        self._todo.put(work)

    def wait_idle(self) -> None:
        self._todo.join()

    def end(self) -> None:
        self._todo.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (work := self._todo.get()) is not None:
            work()
            self._todo.task_done()
