"""Are priority, salt, adapter names, request ids and aborts carried through to vLLM as it means them?"""

import asyncio
import random
from typing import Any

import pytest

from tests.live.cluster import Served
from tests.vllm.asking import ask, asking, chat, completion, events, path_of
from tests.vllm.attached.conftest import WORKERS
from tests.vllm.attached.heard import all_heard
from tests.vllm.load import HIGH, LOW
from tests.vllm.overtaking import LATE, overtaken
from tests.vllm.server import ADAPTER, BLOCK, MODEL, VllmServer
from tests.vllm.truth import Truth
from tests.vllm.waiting import eventually

Servers = tuple[VllmServer, VllmServer]

PIN = {"x-penstock-worker": WORKERS[0]}


def tokens(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(LOW, HIGH) for _ in range(count)]


@pytest.mark.parametrize("way", ["body", "header", "nvext"])
async def test_a_salt_keeps_caches_apart(front: Served, truths: dict[str, Truth], way: str) -> None:
    prompt = tokens(hash_of(way), 6 * BLOCK + 5)

    async def salted(salt: str | None) -> tuple[int, int]:
        body: dict[str, Any] = completion(prompt, 1)
        headers = dict(PIN)
        if salt is not None and way == "body":
            body["cache_salt"] = salt
        elif salt is not None and way == "header":
            headers["x-penstock-cache-salt"] = salt
        elif salt is not None:
            body["nvext"] = {"cache_salt": salt}
        answer = await ask(http, front.url, body, headers=headers)
        assert answer.status == 200, answer.error
        await all_heard(front, truths)
        return answer.cached, answer.expected

    whole = 6 * BLOCK
    async with asking() as http:
        assert await salted("tenant-a") == (0, 0)
        assert await salted("tenant-a") == (whole, whole)
        assert await salted("tenant-b") == (0, 0)
        assert await salted(None) == (0, 0)
        assert await salted(None) == (whole, whole)
        assert await salted("tenant-a") == (whole, whole)


async def test_an_adapter_is_served_where_it_is_loaded_with_a_cache_of_its_own(
    servers: Servers, front: Served, truths: dict[str, Truth]
) -> None:
    prompt = tokens(77, 5 * BLOCK + 9)
    status, listed = front.get("/v1/models")
    assert status == 200 and {entry["id"] for entry in listed["data"]} == {MODEL, ADAPTER}
    adapted = {**completion(prompt, 12), "model": ADAPTER}
    async with asking() as http:
        plain = await ask(http, front.url, completion(prompt, 12), headers=PIN)
        await all_heard(front, truths)
        first = await ask(http, front.url, adapted)
        await all_heard(front, truths)
        again = await ask(http, front.url, adapted, stream=True)
        own = await ask(http, servers[0].url, adapted)
    assert [answer.status for answer in (plain, first, again, own)] == [200] * 4
    assert first.worker == again.worker == WORKERS[0], "the only server that has it"
    assert first.text == again.text == own.text != plain.text
    assert (first.cached, first.expected) == (0, 0), "the model's own blocks are of no use to it"
    assert (again.cached, again.expected) == (5 * BLOCK, 5 * BLOCK)


async def test_an_adapter_that_nobody_has_is_not_found(servers: Servers, front: Served) -> None:
    async with asking() as http:
        for body in (completion("Hello", 1), chat("Hello", 1)):
            answer = await ask(http, front.url, {**body, "model": "tiny-lora"})
            assert answer.status == 404
            assert answer.error is not None and "tiny-lora" in answer.error["message"]
    assert servers[0].counter("vllm:num_requests_running") == 0


async def test_the_request_id_is_the_same_here_and_in_the_engine(front: Served) -> None:
    async with asking() as http:
        named = await ask(http, front.url, completion("Hello", 1), headers={"x-request-id": "order-66"})
        unnamed = await ask(http, front.url, completion("Hello", 1))
        streamed = await ask(http, front.url, completion("Hello", 1), stream=True, headers={"x-request-id": "order-67"})
    assert named.headers["x-penstock-request-id"] == "order-66" and "order-66" in named.raw["id"]
    assert unnamed.headers["x-penstock-request-id"] in unnamed.raw["id"]
    assert streamed.headers["x-penstock-request-id"] == "order-67" and streamed.done
    status, found = front.get("/admin/explain/order-66")
    assert status == 200 and found["request"]["outcome"] == "ok"


async def observed_running(server: VllmServer) -> bool:
    """Return whether a server is seen to run one request within a second."""
    for _ in range(50):
        if server.counter("vllm:num_requests_running") == 1:
            return True
        await asyncio.sleep(0.02)
    return False


async def test_a_client_that_hangs_up_ends_its_request_in_the_engine(servers: Servers, front: Served) -> None:
    body = {**completion("Tell me everything", 1900), "stream": True}
    # On a busy machine the engine may be done before its API server has passed the first token on: then again.
    for _ in range(5):
        for server in servers:
            server.settled()
        made = [server.counter("vllm:generation_tokens_total") for server in servers]
        async with asking() as http, http.post(front.url + path_of(body), json=body, headers=PIN) as response:
            assert response.status == 200, await response.text()
            async for _ in events(response):
                break  # the first token is here
            running = await observed_running(servers[0])
            response.close()
        await eventually(lambda: servers[0].counter("vllm:num_requests_running") == 0)
        now = [server.counter("vllm:generation_tokens_total") for server in servers]
        if running and now[0] - made[0] < 1900:
            break
    assert running and 0 < now[0] - made[0] < 1900 and now[1] == made[1], "it stopped long before its end"
    await eventually(lambda: front.get("/admin/status")[1]["requests"]["inflight"] == 0)


async def test_the_more_urgent_request_goes_first(servers: Servers, front: Served) -> None:
    """vLLM takes the lowest number first, and what a client writes in vLLM's own field arrives as it is."""
    servers[0].settled()
    behind = await overtaken(front.url, servers[0].url, PIN, {"priority": 10}, {"priority": -10})
    assert behind >= LATE // 2


async def test_health_is_that_of_the_workers(servers: Servers, front: Served) -> None:
    assert servers[0].get("/health") == ""
    status, found = front.get("/health")
    assert status == 200 and found["models"] == {"tiny": 2}


def hash_of(text: str) -> int:
    return sum(text.encode()) + len(text)
