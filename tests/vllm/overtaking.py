"""Does an urgent request overtake those that wait in an engine? How many of these end after it tells."""

import asyncio
from typing import Any

from tests.vllm.asking import ask, asking, completion
from tests.vllm.load import Prompts
from tests.vllm.server import counter
from tests.vllm.waiting import eventually

PLACES = 16
"""Requests that an engine runs at a time."""
LATE = 20


async def overtaken(url: str, engine: str, worker: str, late: dict[str, Any], urgent: dict[str, Any]) -> int:
    """Fill an idle engine, let requests wait behind, send an urgent one; return how many it overtook.

    Args:
        url: the frontend's; ``engine``: the engine's own.
        late, urgent: fields that say how urgent a request is.
    """
    prompts = Prompts(seed=55)
    order: list[str] = []

    async def one(name: str, fields: dict[str, Any], output: int) -> None:
        body = completion(prompts.fresh(40), output, **fields)
        answer = await ask(http, url, body, headers={"x-penstock-worker": worker})
        assert answer.status == 200, answer.error
        order.append(name)

    async with asking() as http:
        full = [asyncio.create_task(one("first", {}, 1900)) for _ in range(PLACES)]
        await eventually(lambda: counter(engine, "vllm:num_requests_running") == PLACES)
        waiting = [asyncio.create_task(one("late", late, 20)) for _ in range(LATE)]
        await eventually(lambda: counter(engine, "vllm:num_requests_waiting") == LATE)
        waiting.append(asyncio.create_task(one("urgent", urgent, 20)))
        await eventually(lambda: counter(engine, "vllm:num_requests_waiting") == LATE + 1)
        for task in full:
            task.cancel()  # their clients hang up: all places are free at once, however quick the engine is
        await asyncio.gather(*waiting)
    return order[order.index("urgent") :].count("late")
