"""An event loop whose clock jumps to the next timer: asyncio code with long waits runs at once, and always the same."""

import asyncio
import selectors
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


class _NoWait(selectors.SelectSelector):
    loop: "JumpingLoop"

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout:
            self.loop.jumped += timeout
        return super().select(0)


class JumpingLoop(asyncio.SelectorEventLoop):
    """Time passes only where nothing is ready to run."""

    def __init__(self) -> None:
        selector = _NoWait()
        selector.loop = self
        self.jumped = 0.0
        super().__init__(selector)

    def time(self) -> float:
        return self.jumped


def run(work: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine, in a loop of its own."""
    loop = JumpingLoop()
    try:
        return loop.run_until_complete(work)
    finally:
        loop.run_until_complete(_end(asyncio.all_tasks(loop)))
        loop.close()


async def _end(tasks: Iterable[asyncio.Task[Any]]) -> None:
    for task in (pending := list(tasks)):
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)
