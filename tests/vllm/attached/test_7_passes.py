"""What is known of vLLM's forward passes? From the plug-in exactly, from /metrics in part; never a made-up number."""

import asyncio
import time

import aiohttp

from penstock.adapters.engines.describe import describe
from penstock.adapters.engines.stats.step_stats_plugin import PassSubscriber
from penstock.adapters.engines.stats.step_stats_source import EngineSteps
from penstock.kernel.values import StepStats, WorkerCard, WorkerId
from tests.live.cluster import Served
from tests.vllm.asking import ask, asking, completion
from tests.vllm.load import Prompts
from tests.vllm.server import BLOCK, VllmServer
from tests.vllm.waiting import eventually

Servers = tuple[VllmServer, VllmServer]

PROMPTS, OUTPUT = 5, 12


async def card_of(http: aiohttp.ClientSession, server: VllmServer) -> WorkerCard:
    known = {"stats": server.stats}
    return await describe(http, server.url, worker=WorkerId("w"), epoch=1, overrides=known)


async def window(http: aiohttp.ClientSession, server: VllmServer, steps: EngineSteps) -> tuple[StepStats, int, float]:
    """Let a server work with nobody else around; return what was told of that, the prompt tokens, and the seconds."""
    server.settled()
    await steps.take(busy=False)
    heard = steps.passes
    before = 0 if heard is None else heard.passes
    prompts = Prompts(seed=time.monotonic_ns())
    sent, began = 0, time.monotonic()
    for _ in range(PROMPTS):
        prompt = prompts.fresh(2 * BLOCK + 7)
        answer = await ask(http, server.url, completion(prompt, OUTPUT))
        assert answer.status == 200 and answer.cached == 0
        sent += len(prompt)
    if heard is not None:  # on a way of their own, the last may come after the answer
        await eventually(lambda: heard.passes - before >= PROMPTS * OUTPUT)
    took = time.monotonic() - began
    found = await steps.take(busy=True)
    assert found is not None
    return found, sent, took


async def connected(http: aiohttp.ClientSession, server: VllmServer, passes: PassSubscriber) -> None:
    """Return when what the server tells arrives, and all that it told has arrived: a subscription takes a moment."""
    while not passes.passes:
        await ask(http, server.url, completion("Hello", 2))
        await asyncio.sleep(0.05)
    for _ in range(2):  # they come in order, so those of the first of these are behind us when the second's come
        before = passes.passes
        await ask(http, server.url, completion("Hello", 2))
        await eventually(lambda: passes.passes - before >= 2)  # noqa: B023 - it is awaited before the next turn


async def test_the_plug_in_tells_every_pass(servers: Servers) -> None:
    async with asking() as http:
        steps = EngineSteps(await card_of(http, servers[0]), http)
        try:
            assert steps.passes is not None
            heard = steps.passes
            await connected(http, servers[0], heard)
            found, sent, took = await window(http, servers[0], steps)
        finally:
            steps.close()
    assert steps.source == "plug-in" and heard.lost == 0 and heard.malformed == 0
    assert found.estimated == ()
    assert found.prefill_tokens == sent, "what was sent, and nothing of it was cached"
    assert found.prefill_requests == PROMPTS
    assert found.decode_seqs == PROMPTS * (OUTPUT - 1), "the first token of each comes from its prefill"
    assert found.passes == PROMPTS * OUTPUT
    assert 0 < found.wall < took
    assert found.decode_kv is None and found.queued_prefill_tokens is None, "vLLM does not tell these"


async def test_without_the_plug_in_metrics_tell_what_they_can(servers: Servers) -> None:
    assert servers[1].stats is None
    async with asking() as http:
        steps = EngineSteps(await card_of(http, servers[1]), http)
        try:
            found, sent, took = await window(http, servers[1], steps)
        finally:
            steps.close()
    assert steps.source == "metrics"
    assert {"prefill_tokens", "decode_seqs", "prefill_requests"} <= set(found.estimated)
    assert found.prefill_tokens == sent and found.prefill_requests == PROMPTS
    assert found.decode_seqs == PROMPTS * (OUTPUT - 1)
    assert found.passes >= PROMPTS * OUTPUT and found.passes <= PROMPTS * (OUTPUT + 2)
    assert found.wall is not None and 0 < found.wall < took
    assert found.decode_kv is None and found.prefill_tokens_sq is None


async def test_status_says_who_told(front: Served) -> None:
    def sources() -> dict[str, str | None]:
        workers = front.get("/admin/status")[1]["workers"]
        return {worker["id"]: (worker.get("steps") or {}).get("source") for worker in workers}

    async with asking() as http:
        for worker in ("attached-0", "attached-1"):
            await ask(http, front.url, completion("Hello", 20), headers={"x-penstock-worker": worker})
    await eventually(
        lambda: sources() == {"attached-0": "plug-in", "attached-1": "metrics"}, story=lambda: str(sources())
    )
