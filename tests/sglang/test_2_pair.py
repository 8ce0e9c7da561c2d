"""A pair of SGLang servers, one of which prefills and one decodes, that is told nothing but two URLs."""

import asyncio
import random

import pytest

from penstock.adapters.listen_address import free_port
from tests.live.cluster import Served, post
from tests.sglang.fronts import errors, heard, whole
from tests.sglang.server import SglangServer, pair_flags
from tests.vllm.asking import Answer, ask, asking, chat, completion, events
from tests.vllm.attached.heard import worker_status
from tests.vllm.load import drive
from tests.vllm.server import counter
from tests.vllm.truth import Truth
from tests.vllm.waiting import comes_back, eventually

SERVERS = (pair_flags("prefill", free_port()), pair_flags("decode"))
PREFILL, DECODE = "attached-0", "attached-1"
WORDS = [f"{word} {n}" for n, word in enumerate(("mill", "river", "gate", "wheel", "stone", "bridge") * 4)]


def test_the_servers_tell_their_roles(front: Served) -> None:
    rows = {row["id"]: row["role"] for row in front.get("/admin/status")[1]["workers"]}
    assert rows == {PREFILL: "prefill", DECODE: "decode"}
    assert front.get("/admin/status")[1]["findings"] == []
    status, said, _ = post(f"{front.url}/admin/flip", {"name": DECODE, "role": "prefill"})
    assert (status, said["error"]["code"]) == (409, "no_handoff")


async def test_every_request_is_handed_over_and_its_cached_tokens_are_those_predicted(
    servers: tuple[SglangServer, SglangServer], front: Served
) -> None:
    truths, rng = {PREFILL: Truth(servers[0])}, random.Random(4)
    async with asking() as http:
        for length in (1, 15, 16, 17, 80, 300, 700):
            prompt = [rng.randrange(300, 2000) for _ in range(length)]
            texts = []
            for stream in (False, True):
                answer = await ask(http, front.url, completion(prompt, 12), stream=stream)
                assert whole(answer) and answer.output_tokens == 12
                assert (answer.worker, answer.headers["x-penstock-prefill-worker"]) == (DECODE, PREFILL)
                assert answer.cached == answer.expected == (max(0, (length - 1) // 16 * 16) if stream else 0)
                texts.append(answer.text)
                await heard(front, truths, PREFILL, prompt)
            if length > 1:
                assert texts[0] == texts[1]


async def test_lists_and_echoes_are_handed_over_and_what_can_not_be_is_refused_once(front: Served) -> None:
    async with asking() as http:
        single = [await ask(http, front.url, completion(text, 6)) for text in ("the mill", "of the river")]
    status, both, _ = post(f"{front.url}/v1/completions", completion(["the mill", "of the river"], 6))
    assert status == 200, both
    texts = [choice["text"] for choice in both["choices"]]
    assert all(map(whole, single)) and len(texts) == 2 and all(texts)
    status, echo, _ = post(f"{front.url}/v1/completions", completion("the mill", 6, echo=True))
    assert status == 200 and echo["choices"][0]["text"].startswith("the mill")
    for body in (completion("the mill", 3, n=2), completion("the mill", 3, echo=True, logprobs=1)):
        status, said, _ = post(f"{front.url}/v1/completions", body)
        assert status == 400 and "one answer to each prompt" in said["error"]["message"], said
    assert {row["failures"] for row in front.get("/admin/status")[1]["workers"]} == {0}


async def test_a_client_that_leaves_leaves_nothing_running(
    servers: tuple[SglangServer, SglangServer], front: Served
) -> None:
    async with asking() as http:
        body = {**chat("the mill of the river", 1500, ignore_eos=True), "stream": True}
        for _ in range(4):
            async with http.post(f"{front.url}/v1/chat/completions", json=body) as response:
                async for _ in events(response):
                    break
        for server in servers:
            await eventually(lambda: counter(server.url, "sglang:num_running_reqs") == 0)  # noqa: B023
        assert whole(await ask(http, front.url, chat("and then?", 4)))


def test_doctor_finds_no_error(front: Served) -> None:
    assert errors(front) == []


@pytest.mark.parametrize("killed", [DECODE, PREFILL])
async def test_a_side_that_is_killed_under_load_lets_each_answer_be_whole_or_refused_once(
    servers: tuple[SglangServer, SglangServer], front: Served, killed: str
) -> None:
    server, epoch = servers[killed == DECODE], worker_status(front, killed)["epoch"]
    ended: list[Answer] = []
    some = asyncio.Event()

    def seen(answer: Answer) -> None:
        ended.append(answer)
        if len(ended) == 8:
            some.set()

    bodies = (chat(f"{word}: the mill of the river", 60, ignore_eos=True) for word in WORDS)
    async with asking() as http:
        load = asyncio.create_task(drive(http, front.url, bodies, concurrency=4, streamed=0.5, seen=seen))
        await some.wait()
        server.kill()
        await load
    good = [answer for answer in ended if whole(answer)]
    refused = [answer for answer in ended if answer.status in (500, 502, 503, 504) and answer.error]
    broken = [answer for answer in ended if answer.status == 200 and answer.error is not None]
    assert len(good) + len(refused) + len(broken) == len(ended) == len(WORDS), ended
    assert len(good) >= 8 and len(broken) <= 4, "only what ran at the moment may end in the middle, with an error"
    assert all(answer.output_tokens == 60 for answer in good)
    server.start()
    server.wait_ready()
    await comes_back(front, killed, epoch)
    async with asking() as http:

        async def answers() -> bool:
            return whole(await ask(http, front.url, chat("and then?", 4)))

        for _ in range(40):  # the other side has to notice that its peer is another one: by a request that fails
            if await answers():
                break
        assert [await answers() for _ in range(6)] == [True] * 6
