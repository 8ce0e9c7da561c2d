"""What do clients see while a vLLM server ends? Its health stays 200 while it refuses work with 500; they see neither.

The last file: it ends one of the two servers.
"""

import asyncio
from collections.abc import Iterator
from typing import Any

from tests.live.cluster import Served, request
from tests.vllm.asking import ask, asking, completion
from tests.vllm.attached.conftest import SHUTDOWN_TIMEOUT, WORKERS
from tests.vllm.load import Prompts, drive
from tests.vllm.server import VllmServer
from tests.vllm.waiting import eventually

LONG = 300


async def test_a_server_that_ends_is_left_without_a_failed_request(
    servers: tuple[VllmServer, VllmServer], front: Served
) -> None:
    ending = servers[1]
    ended = asyncio.Event()
    prompts = Prompts(seed=91, families=12)

    def endless() -> Iterator[dict[str, Any]]:
        while not ended.is_set():
            yield completion(prompts.next(), prompts.output())

    async with asking() as http:
        for server in servers:
            server.settled()
        load = asyncio.create_task(drive(http, front.url, endless(), concurrency=4, pause=0.05))
        # This one is to finish on the server that ends: it lets what runs run.
        pin = {"x-penstock-worker": WORKERS[1]}
        running = asyncio.create_task(ask(http, front.url, completion("On and on", LONG), stream=True, headers=pin))
        await eventually(lambda: ending.counter("vllm:num_requests_running") > 0)
        ending.terminate()
        # Asked directly, it shows what must not reach a client.
        seen: list[tuple[int, int]] = []
        while not running.done() and (500 not in {status for _, status in seen}):
            health = (await asyncio.to_thread(request, f"{ending.url}/health"))[0]
            seen.append((health, (await ask(http, ending.url, completion("Anybody?", 1))).status))
            await asyncio.sleep(0.05)
        long = await running
        await eventually(lambda: WORKERS[1] not in ready(front), SHUTDOWN_TIMEOUT + 30.0)
        more = await drive(http, front.url, iter([completion(f"After {i}", 2) for i in range(20)]), concurrency=2)
        ended.set()
        answers = await load
    assert (200, 500) in seen, f"its health is good while it refuses work: {seen}"
    assert long.status == 200 and long.done and long.output_tokens == LONG and long.error is None
    assert [a for a in [*answers, *more] if a.status != 200 or a.error or a.finish_reason is None] == []
    assert {a.worker for a in more} == {WORKERS[0]}
    # What it forgot while its engine ended was given up, so that its own shutdown ends as well: it waits for that.
    await eventually(lambda: ending.process.poll() is not None, SHUTDOWN_TIMEOUT + 30.0)


def ready(front: Served) -> set[str]:
    """Return the workers that take requests."""
    return {worker["id"] for worker in front.get("/admin/status")[1]["workers"] if worker["state"] == "ready"}
