"""Does an urgent request overtake those that wait in an engine? How many of these end after it tells."""

import asyncio
from collections.abc import Mapping
from typing import Any

from tests.vllm.asking import ask, asking, completion
from tests.vllm.load import Prompts
from tests.vllm.server import counter
from tests.vllm.waiting import eventually

PLACES = 16
"""Requests that an engine runs at a time."""
LATE = 20


async def overtaken(
    url: str,
    engine: str,
    pin: Mapping[str, str],
    late: dict[str, Any],
    urgent: dict[str, Any],
    *,
    places: int = PLACES,
    output: int = 1900,
    running: str = "vllm:num_requests_running",
    waits: str = "vllm:num_requests_waiting",
    times: int = 1,
) -> int:
    """Fill an idle engine, let requests wait behind, send an urgent one; return how many it overtook.

    Args:
        url: the frontend's; ``engine``: the engine's own.
        pin: headers that have requests placed there.
        late, urgent: fields that say how urgent a request is.
        output: tokens of those that fill it.
        running, waits: the engine's gauges, which count each request so many ``times``.
    """
    prompts = Prompts(seed=55)
    order: list[str] = []

    async def one(name: str, fields: dict[str, Any], output: int) -> None:
        body = completion(prompts.fresh(40), output, **fields)
        answer = await ask(http, url, body, headers=pin)
        assert answer.status == 200, answer.error
        order.append(name)

    async with asking() as http:
        full = [asyncio.create_task(one("first", {}, output)) for _ in range(places)]
        await eventually(lambda: counter(engine, running) == times * places)
        waiting = [asyncio.create_task(one("late", late, 20)) for _ in range(LATE)]
        await eventually(lambda: counter(engine, waits) == times * LATE)
        waiting.append(asyncio.create_task(one("urgent", urgent, 20)))
        await eventually(lambda: counter(engine, waits) == times * (LATE + 1))
        for task in full:
            task.cancel()  # their clients hang up: all places are free at once, however quick the engine is
        await asyncio.gather(*waiting)
    return order[order.index("urgent") :].count("late")
