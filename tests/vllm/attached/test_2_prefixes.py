"""Do requests that share a prefix go to the server that holds it, and do its own counters show the hits?"""

import random

from tests.live.cluster import Served
from tests.vllm.asking import Answer, ask, asking, completion
from tests.vllm.attached.conftest import WORKERS
from tests.vllm.attached.heard import all_heard
from tests.vllm.server import BLOCK, VllmServer
from tests.vllm.truth import Truth

GROUPS, EACH = 6, 5
SHARED = 8 * BLOCK


async def test_each_prefix_stays_on_one_server_whose_counters_show_its_hits(
    servers: tuple[VllmServer, VllmServer], front: Served, truths: dict[str, Truth]
) -> None:
    rng = random.Random(11)
    for server in servers:
        server.clear()
    hits = [server.counter("vllm:prefix_cache_hits_total") for server in servers]
    asked = [server.counter("vllm:prefix_cache_queries_total") for server in servers]
    prefixes = [[rng.randrange(300, 2000) for _ in range(SHARED)] for _ in range(GROUPS)]
    answers: list[list[Answer]] = [[] for _ in prefixes]
    async with asking() as http:
        for _ in range(EACH):
            await all_heard(front, truths)
            for group, prefix in enumerate(prefixes):
                own = [rng.randrange(300, 2000) for _ in range(rng.randrange(5, 60))]
                answers[group].append(await ask(http, front.url, completion([*prefix, *own], 4)))

    for same in answers:
        assert {answer.worker for answer in same} == {same[0].worker}, "a prefix has one home"
        assert same[0].cached == 0
        assert [answer.cached for answer in same[1:]] == [SHARED] * (EACH - 1)
        assert [answer.expected for answer in same[1:]] == [SHARED] * (EACH - 1)
    assert {group[0].worker for group in answers} == set(WORKERS), "the groups are spread over both servers"

    for worker, server, hits_before, asked_before in zip(WORKERS, servers, hits, asked, strict=True):
        mine = [answer for group in answers for answer in group if answer.worker == worker]
        assert server.counter("vllm:prefix_cache_hits_total") - hits_before == sum(a.cached for a in mine)
        assert server.counter("vllm:prefix_cache_queries_total") - asked_before == sum(a.prompt_tokens for a in mine)


async def test_a_conversation_goes_on_where_it_began(front: Served) -> None:
    rng = random.Random(12)
    messages = [{"role": "user", "content": " ".join(str(rng.randrange(10**6)) for _ in range(60))}]
    homes, cached = set(), []
    async with asking() as http:
        for turn in range(4):
            body = {"model": "tiny", "messages": messages, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
            answer = await ask(http, front.url, body, stream=turn % 2 == 1)
            homes.add(answer.worker)
            cached.append(answer.cached)
            assert answer.cached == answer.expected
            messages += [
                {"role": "assistant", "content": answer.text},
                {"role": "user", "content": f"and then, {turn}?"},
            ]
    assert len(homes) == 1
    assert cached == sorted(cached) and cached[1] > 0, "each turn finds more of the conversation in the cache"
