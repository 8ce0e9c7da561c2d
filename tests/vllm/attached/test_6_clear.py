"""When is a cleared cache known? vLLM announces it only with its next step; through us it is made to take one."""

from tests.live.cluster import Served, request
from tests.vllm.asking import ask, asking, completion
from tests.vllm.attached.conftest import WORKERS
from tests.vllm.attached.heard import all_heard
from tests.vllm.load import Prompts
from tests.vllm.server import BLOCK, VllmServer
from tests.vllm.truth import Truth

Servers = tuple[VllmServer, VllmServer]
PIN = {"x-penstock-worker": WORKERS[0]}


async def test_a_clear_behind_our_back_is_announced_with_the_next_step(
    servers: Servers, front: Served, truths: dict[str, Truth]
) -> None:
    prompts = Prompts(seed=61)
    prompt = prompts.fresh(5 * BLOCK + 3)
    truth = truths[WORKERS[0]]
    async with asking() as http:
        await ask(http, front.url, completion(prompt, 1), headers=PIN)
        await all_heard(front, truths)
        cleared = truth.events["AllBlocksCleared"]
        servers[0].clear()
        assert truth.catch_up().events["AllBlocksCleared"] == cleared, "an idle engine keeps it to itself"
        late = await ask(http, front.url, completion(prompt, 1), headers=PIN)
        assert (late.expected, late.cached) == (5 * BLOCK, 0), "one request is expected wrongly"
        await all_heard(front, truths)
        assert truth.events["AllBlocksCleared"] == cleared + 1
        again = await ask(http, front.url, completion(prompt, 1), headers=PIN)
        assert (again.expected, again.cached) == (5 * BLOCK, 5 * BLOCK)


async def test_a_clear_through_us_is_known_at_once(servers: Servers, front: Served, truths: dict[str, Truth]) -> None:
    prompts = Prompts(seed=62)
    prompt = prompts.fresh(5 * BLOCK + 3)
    async with asking() as http:
        for worker in WORKERS:
            await ask(http, front.url, completion(prompt, 1), headers={"x-penstock-worker": worker})
        for server in servers:
            server.settled()
        status, found = request(f"{front.url}/clear_kv_blocks", b"")
        assert status == 200 and found["cleared"] == 2, found
        await all_heard(front, truths)
        assert [len(truths[worker].held) for worker in WORKERS] == [0, 0]
        for worker in WORKERS:
            answer = await ask(http, front.url, completion(prompt, 1), headers={"x-penstock-worker": worker})
            assert (answer.expected, answer.cached) == (0, 0)
