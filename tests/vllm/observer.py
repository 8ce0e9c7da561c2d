"""What does a frontend's router know? A node of our own in the test's process, which follows the same store.

It is made by the very function that a frontend process calls, so it hears, replays and indexes as that does.
"""

import asyncio
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from penstock.config.reading.load import load_resolved
from penstock.kernel.values import Target, WorkerId
from penstock.router.kv_index.exact_index import ExactIndex
from penstock.router.model_pool import ModelPool
from penstock.runtime.node.router_node import RouterNode, open_node
from tests.vllm.server import MODEL

T = TypeVar("T")
ANSWER_LIMIT = 30.0


class Observer:
    """A node on an event loop of its own, in a thread."""

    def __init__(self, run: Path) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        settings = load_resolved(run / "config.yaml", os.environ)
        self.node: RouterNode = asyncio.run_coroutine_threadsafe(open_node(settings, run, 99), self._loop).result(
            ANSWER_LIMIT
        )

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self.node.close(), self._loop).result(ANSWER_LIMIT)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(ANSWER_LIMIT)
        self._loop.close()

    def sequence(self, worker: str) -> int:
        """Return the number of the batch that it expects next, or -1 where it does not hear that worker."""

        def read(pool: ModelPool) -> int:
            stream = pool.index.streams.get(Target(WorkerId(worker)))
            return -1 if stream is None else stream.next

        return self._in_loop(read, -1)

    def state(self, worker: str) -> str:
        return self._in_loop(lambda pool: pool.index.kv_state(Target(WorkerId(worker))), "none")

    def held(self, worker: str) -> set[int]:
        """Return our hashes of the blocks that it believes a worker to hold."""

        def read(pool: ModelPool) -> set[int]:
            assert pool.index.exact is not None
            pool.check()
            return pool.index.exact.blocks_of(Target(WorkerId(worker)))

        return self._in_loop(read, set())

    def index(self, read: Callable[[ExactIndex], T], absent: T) -> T:
        return self._in_loop(lambda pool: absent if pool.index.exact is None else read(pool.index.exact), absent)

    def _in_loop(self, read: Callable[[ModelPool], T], absent: T) -> T:
        async def inside() -> T:
            pool = self.node.router.pools.get(MODEL)
            return absent if pool is None else read(pool)

        return asyncio.run_coroutine_threadsafe(inside(), self._loop).result(ANSWER_LIMIT)
