"""Two plain SGLang servers that somebody else started: the same answers, exact predictions, and one that is killed."""

import asyncio
import random
from typing import Any

import pytest

from tests.live.cluster import Served, post, request
from tests.sglang.fronts import errors, exact, heard, whole
from tests.sglang.server import SglangServer
from tests.vllm.asking import ask, asking, chat, completion, path_of
from tests.vllm.load import Prompts, drive
from tests.vllm.truth import Truth
from tests.vllm.waiting import comes_back, eventually

SERVERS: tuple[tuple[str, ...], ...] = ((), ())
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
IDS = list(range(300, 380))
ASKED: list[dict[str, Any]] = [
    completion("the mill of the river", 5),
    completion(IDS, 5),
    completion(IDS, 5, logprobs=2),
    completion(["the mill", "of the river"], 3),
    completion("the mill", 3, n=2),
    completion("the mill", 3, echo=True),
    completion("the mill", 8, stop=["a", "e"]),
    chat("the mill of the river", 6),
    chat("the mill of the river", 6, logprobs=True, top_logprobs=2),
    chat("the mill of the river", 6, tools=[TOOL]),
    chat("the mill of the river", 6, response_format={"type": "json_object"}),
]
REFUSED: list[dict[str, Any]] = [
    completion("the mill", 3, temperature=-1),
    completion("the mill", 3, top_p=7),
    chat("the mill", 3, tools=[TOOL], tool_choice="sometimes"),
]


def told(answer: dict[str, Any]) -> Any:
    """Return an answer without what differs from one to the next."""
    usage = {**answer["usage"], "prompt_tokens_details": None}
    return answer["choices"], usage, answer["model"], answer["object"]


@pytest.mark.parametrize("body", ASKED, ids=lambda body: "-".join(sorted(body)))
async def test_answers_are_sglangs_own(
    servers: tuple[SglangServer, SglangServer], front: Served, body: dict[str, Any]
) -> None:
    direct, through = (post(url + path_of(body), body) for url in (servers[0].url, front.url))
    assert direct[0] == through[0] == 200, (direct, through)
    assert told(through[1]) == told(direct[1])
    if len(direct[1]["choices"]) > 1:
        return  # whose streams mingle as they come
    async with asking() as http:
        first, second = [await ask(http, url, body, stream=True) for url in (servers[0].url, front.url)]
    assert first.done and second.done
    assert (second.text, second.finish_reason) == (first.text, first.finish_reason)


@pytest.mark.parametrize("body", REFUSED, ids=lambda body: "-".join(sorted(body)))
def test_refusals_are_sglangs_own(
    servers: tuple[SglangServer, SglangServer], front: Served, body: dict[str, Any]
) -> None:
    direct, through = (post(url + path_of(body), body) for url in (servers[0].url, front.url))
    assert direct[0] == through[0] == 400
    assert through[1] == direct[1]


def test_what_is_too_long_has_its_code_in_every_dialect(front: Served) -> None:
    words = [{"role": "user", "content": "the mill"}]
    for path, body in (
        ("/v1/completions", {"prompt": IDS * 30}),
        ("/v1/completions", {"prompt": "the mill", "max_tokens": 9000}),
        ("/v1/chat/completions", {"messages": words, "max_tokens": 9000}),
        ("/v1/responses", {"input": "the mill", "max_output_tokens": 9000}),
        ("/v1/messages", {"messages": words, "max_tokens": 9000}),
    ):
        status, said, _ = post(front.url + path, {"model": "tiny", **body})
        assert status == 400, (path, said)
        assert "context_length_exceeded" in str(said) and "error" in said, (path, said)
    status, said, _ = post(front.url + "/v1/completions", {"model": "nope", "prompt": "a"})
    assert (status, said["error"]["code"]) == (404, "model_not_found"), "SGLang itself answers as if it had it"


def test_doctor_finds_no_error(front: Served) -> None:
    assert errors(front) == []


async def test_predictions_are_exact_while_blocks_are_evicted_and_the_cache_is_flushed(
    servers: tuple[SglangServer, SglangServer], front: Served
) -> None:
    truths = {f"attached-{n}": Truth(server) for n, server in enumerate(servers)}
    prompts = Prompts(5)
    assert await exact(front, truths, prompts, 120) > 5_000
    assert all(truth.events["BlockRemoved"] for truth in truths.values()), [t.events for t in truths.values()]
    assert request(f"{servers[0].url}/flush_cache", b"")[0] == 200
    await eventually(lambda: truths["attached-0"].catch_up().held == set())
    assert await exact(front, truths, prompts, 80) > 3_000
    rows = front.get("/admin/status")[1]["workers"]
    assert [row["index"] for row in rows] == ["exact", "exact"] and sum(row["kv_events"]["lost"] for row in rows) == 0


async def test_a_server_that_is_killed_under_load_costs_no_answer_and_comes_back_exact(
    servers: tuple[SglangServer, SglangServer], front: Served
) -> None:
    worker = "attached-1"
    epoch = next(row["epoch"] for row in front.get("/admin/status")[1]["workers"] if row["id"] == worker)
    prompts, answered = Prompts(6), asyncio.Event()
    requests = ({**body, "max_tokens": 30} for body in prompts.requests(100))
    async with asking() as http:
        count = 0

        def seen(_: object) -> None:
            nonlocal count
            count += 1
            if count == 25:
                answered.set()

        load = asyncio.create_task(drive(http, front.url, requests, concurrency=6, streamed=0.0, seen=seen))
        await answered.wait()
        servers[1].kill()
        answers = await load
    assert len(answers) == 100 and all(map(whole, answers)), [a for a in answers if not whole(a)][:3]
    servers[1].start()
    servers[1].wait_ready()
    await comes_back(front, worker, epoch)
    truths = {f"attached-{n}": Truth(server) for n, server in enumerate(servers)}
    rng = random.Random(8)
    async with asking() as http:
        for _ in range(10):
            prompt = [rng.randrange(300, 2000) for _ in range(100)]
            for turn in range(2):
                pinned = {"x-penstock-worker": worker}
                answer = await ask(http, front.url, completion(prompt, 2), headers=pinned)
                assert (answer.worker, answer.cached, answer.expected) == (worker, 96 * turn, 96 * turn)
                await heard(front, truths, worker, prompt)
