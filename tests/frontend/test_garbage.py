"""Is a request's memory free when it ends? What hangs in a cycle waits for the collector, and costs its time."""

import gc
from collections import Counter

import pytest

from tests.frontend.stand import stand

REQUESTS = 20


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_leaves_nothing_to_the_collector(stream: bool) -> None:
    async with stand() as s:
        for _ in range(5):  # what is made once is no matter
            await s.chat(stream=stream)
        gc.collect()
        gc.disable()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            for _ in range(REQUESTS):
                await s.chat(stream=stream)
            gc.collect()
            ours = Counter(
                type(left).__qualname__ for left in gc.garbage if type(left).__module__.startswith("penstock")
            )
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
    assert not ours
