"""What does a frontend know after it was killed? All that the servers announced meanwhile, by replay."""

import asyncio
import os
import random
import signal
from collections.abc import Iterator
from typing import Any

import aiohttp

from penstock.kernel.hashing import block_hashes
from tests.live.cluster import Served
from tests.vllm.asking import ask, asking, completion
from tests.vllm.attached.conftest import WORKERS
from tests.vllm.attached.heard import all_heard, worker_status
from tests.vllm.load import Prompts, drive
from tests.vllm.observer import Observer
from tests.vllm.server import BLOCK, VllmServer
from tests.vllm.truth import Truth
from tests.vllm.waiting import eventually

BACK_LIMIT = 60.0
PROBES = 24


async def test_what_was_announced_while_it_was_away_is_replayed(
    servers: tuple[VllmServer, VllmServer], front: Served, truths: dict[str, Truth]
) -> None:
    (victim,) = front.children()
    ended = asyncio.Event()
    prompts = [Prompts(seed=20 + i) for i in range(3)]
    async with asking() as http:
        # Others ask the servers directly, so that their caches change while nobody listens.
        around = [
            asyncio.create_task(drive(http, server.url, endless(own, ended), concurrency=4))
            for own, server in zip(prompts, servers)
        ]
        through = asyncio.create_task(until_broken(http, front.url, prompts[2]))
        await eventually(lambda: worker_status(front, WORKERS[0])["active_requests"] > 0)
        before = {worker: worker_status(front, worker)["kv_events"]["applied"] for worker in WORKERS}
        os.kill(victim, signal.SIGKILL)
        await through
        await back(http, front)
        assert victim not in front.children()
        more = await drive(http, front.url, prompts[2].requests(40), concurrency=4)
        assert [a for a in more if a.status != 200] == []
        ended.set()
        for answers in await asyncio.gather(*around):
            assert [a for a in answers if a.status != 200] == []

        for server in servers:
            server.settled()
        await all_heard(front, truths)
        late = Observer(front.run)
        try:
            for worker, truth in truths.items():
                assert truth.total > before[worker], "something happened while it was away"
                assert worker_status(front, worker)["kv_events"]["lost"] == 0
                await eventually(lambda w=worker, t=truth: late.sequence(w) == t.next)
                assert late.held(worker) == truth.held, "a node that came late"
        finally:
            late.close()

        rng = random.Random(9)
        for _ in range(PROBES):
            worker = rng.choice(WORKERS)
            await all_heard(front, truths)
            prompt = rng.choice(prompts).said()
            depth = truths[worker].depth(list(block_hashes(prompt, BLOCK)))
            answer = await ask(http, front.url, completion(prompt, 1), headers={"x-penstock-worker": worker})
            assert answer.expected == answer.cached == min(depth, (len(prompt) - 1) // BLOCK) * BLOCK


def endless(prompts: Prompts, ended: asyncio.Event) -> Iterator[dict[str, Any]]:
    while not ended.is_set():
        yield completion(prompts.next(), prompts.output())


async def until_broken(http: aiohttp.ClientSession, url: str, prompts: Prompts) -> None:
    """Ask one after the other until the frontend is gone."""
    while True:
        try:
            await ask(http, url, completion(prompts.next(), prompts.output()), stream=True)
        except aiohttp.ClientError:
            return


async def back(http: aiohttp.ClientSession, front: Served) -> None:
    """Wait until the frontend takes requests again."""

    async def answers() -> bool:
        try:
            async with http.get(f"{front.url}/health") as response:
                return response.status == 200 and all((await response.json())["models"].values())
        except aiohttp.ClientError:
            return False

    async with asyncio.timeout(BACK_LIMIT):
        while not await answers():
            await asyncio.sleep(0.05)
