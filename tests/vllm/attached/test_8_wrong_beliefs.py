"""An engine that announces blocks once more, which nobody counts as another copy, is it found out and learnt anew?

Whoever may ask vLLM itself makes it repeat what it has (`kv_cache_report_mode`). Each removal then takes one of two,
and the router believes in blocks that are gone.
"""

from tests.live.cluster import Served
from tests.vllm.asking import ask, asking, completion
from tests.vllm.attached.conftest import WORKERS
from tests.vllm.attached.heard import all_heard, worker_status
from tests.vllm.load import Prompts
from tests.vllm.server import BLOCK, BLOCKS, VllmServer
from tests.vllm.truth import Truth

Servers = tuple[VllmServer, VllmServer]
PIN = {"x-penstock-worker": WORKERS[1]}
GHOSTS, SIZE = 40, 5
"""Prompts, and blocks of each."""


async def test_an_engine_that_has_less_than_it_announced_is_a_finding(
    servers: Servers, front: Served, truths: dict[str, Truth]
) -> None:
    prompts = Prompts(seed=73)
    ghosts = [prompts.fresh(SIZE * BLOCK + 3) for _ in range(GHOSTS)]
    async with asking() as http:
        for prompt in ghosts:
            for mode in ("incremental", "full"):
                body = completion(prompt, 1, vllm_xargs={"kv_cache_report_mode": mode})
                answer = await ask(http, servers[1].url, body)
                assert answer.status == 200, answer.error
        for _ in range(2 * BLOCKS // 20):
            await ask(http, servers[1].url, completion(prompts.fresh(20 * BLOCK), 1))
        await all_heard(front, truths)
        wrong = 0
        for prompt in ghosts:
            answer = await ask(http, front.url, completion(prompt, 1), headers=PIN)
            assert answer.cached == 0
            wrong += answer.expected > 0
            if "less cached" in str(front.get("/admin/status")[1]["findings"]):
                break
        else:
            raise AssertionError(f"no finding after {wrong} wrong expectations")
        assert wrong >= 8, "that many of sixteen"
        assert worker_status(front, WORKERS[1])["state"] == "ready"
