"""Threads that carry out a store's blocking calls: in order per slot, with deadlines and a limit of what waits.

Every slot has its thread (the caller says which), so two calls on one slot can't overtake each other: a tombstone that
was queued before a write can't hit the new record. A call whose deadline passes before it began is dropped. One that
hangs in the kernel can't be ended: it is late, and its slot is busy until it returns.
"""

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import NamedTuple

from penstock_kv.transfer.storage.block_store import BlockResult

log = logging.getLogger(__name__)

QUEUE_LIMIT = 1024
"""Calls that wait for one thread at most: seconds of work for a disk, and a bound on what a hanging one piles up."""
CLOSE_PATIENCE = 5.0
"""Seconds until a thread that hangs in a system call is left behind; it is a daemon, and ends with the process."""


class ThreadCall(NamedTuple):
    """One block's call.

    Args:
        thread: which one carries it out; always the same one for a slot.
        call: blocking; an OSError is a failure of this block.
        undo: follows on the same thread where the call ended well but too late.
    """

    thread: int
    slot: int
    call: Callable[[], BlockResult]
    undo: Callable[[], object] | None = None


class _Batch:
    """Calls of one `run`; its lock decides whether a result is in time."""

    def __init__(self, calls: Sequence[ThreadCall], loop: asyncio.AbstractEventLoop) -> None:
        self.calls = calls
        self.results: list[BlockResult | None] = [None] * len(calls)
        self.open = len(calls)
        self.expired = False
        self.lock = threading.Lock()
        self.loop = loop
        self.done: asyncio.Future[None] = loop.create_future()

    def enter(self, position: int, result: BlockResult) -> None:
        """Note a result; the caller has the lock, and the batch is not expired."""
        self.results[position] = result
        self.open -= 1
        if not self.open:
            self.loop.call_soon_threadsafe(self._finish)

    def _finish(self) -> None:
        if not self.done.done():
            self.done.set_result(None)


class IoThreads:
    """A fixed number of named threads with a queue each."""

    def __init__(self, name: str, threads: int) -> None:
        self._queues: list[SimpleQueue[tuple[_Batch, list[int]] | Callable[[], object] | None]] = [
            SimpleQueue() for _ in range(threads)
        ]
        self._waiting = [0] * threads
        self._lock = threading.Lock()
        self._busy: Counter[int] = Counter()
        self._running: dict[int, ThreadCall] = {}
        self._threads = [
            threading.Thread(target=self._work, args=(number,), name=f"{name}-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    async def run(self, calls: Sequence[ThreadCall], deadline: float) -> list[BlockResult]:
        """Carry out calls, each on its thread; what is open after ``deadline`` seconds is late."""
        if deadline <= 0:
            return [BlockResult("late", "the deadline had passed")] * len(calls)
        if not calls:
            return []
        batch = _Batch(calls, asyncio.get_running_loop())
        shares: dict[int, list[int]] = {}
        for position, each in enumerate(calls):
            shares.setdefault(each.thread, []).append(position)
        for thread, positions in shares.items():
            if self._waiting[thread] + len(positions) > QUEUE_LIMIT:
                with batch.lock:
                    for position in positions:
                        batch.enter(position, BlockResult("failed", f"{QUEUE_LIMIT} calls wait already"))
                continue
            with self._lock:
                self._waiting[thread] += len(positions)
            self._queues[thread].put((batch, positions))
        try:
            async with asyncio.timeout(deadline):
                await batch.done
        except TimeoutError:
            pass
        finally:
            with batch.lock:
                batch.expired = True
                late = [position for position, result in enumerate(batch.results) if result is None]
                with self._lock:
                    running = self._running.values()
                    self._busy.update(calls[at].slot for at in late if any(calls[at] is each for each in running))
        return [result or BlockResult("late", f"not done within {deadline:g} s") for result in batch.results]

    def later(self, thread: int, call: Callable[[], object]) -> None:
        """Queue a call that nobody waits for, behind what its thread has to do; ``call`` deals with its own errors."""
        self._queues[thread].put(call)

    def busy(self) -> frozenset[int]:
        """Return slots that a call still touches although it was given up."""
        with self._lock:
            return frozenset(self._busy)

    async def close(self) -> None:
        """Let the threads do what is queued, and end them."""
        for queue in self._queues:
            queue.put(None)
        waits = (asyncio.to_thread(thread.join, CLOSE_PATIENCE) for thread in self._threads)
        await asyncio.gather(*waits)

    def hanging(self) -> bool:
        """Return whether a thread is left behind after `close`."""
        return any(thread.is_alive() for thread in self._threads)

    def _work(self, number: int) -> None:
        while (item := self._queues[number].get()) is not None:
            if callable(item):
                item()
                continue
            batch, positions = item
            for position in positions:
                self._carry_out(number, batch, position)

    def _carry_out(self, number: int, batch: _Batch, position: int) -> None:
        each = batch.calls[position]
        with batch.lock, self._lock:
            self._waiting[number] -= 1
            if batch.expired:
                return
            self._running[number] = each
        try:
            result = each.call()
        except OSError as error:
            result = BlockResult("failed", str(error))
        except Exception as error:  # a thread that dies would make every later call of its slots late
            log.exception("a call on slot %d of a store failed", each.slot)
            result = BlockResult("failed", f"{type(error).__name__}: {error}")
        with batch.lock:
            expired = batch.expired
            if not expired:
                with self._lock:
                    del self._running[number]
                batch.enter(position, result)
        if expired:
            if result.outcome == "ok" and each.undo is not None:
                each.undo()
            with self._lock:
                del self._running[number]
                self._busy[each.slot] -= 1
                self._busy += Counter()
