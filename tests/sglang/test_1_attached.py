"""Two SGLang servers that somebody else started: the same answers, exact predictions, loads, adapters, one killed."""

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.live.cluster import Served, post, request
from tests.live.test_operate import penstock
from tests.sglang.fronts import announced, errors, exact, heard, whole
from tests.sglang.server import MODEL, PAGE, SglangServer
from tests.vllm.adapters.conftest import write_adapter
from tests.vllm.asking import ask, asking, chat, completion, path_of
from tests.vllm.attached.heard import worker_status
from tests.vllm.load import Prompts, drive
from tests.vllm.server import RANK, counter
from tests.vllm.truth import Truth
from tests.vllm.waiting import comes_back, eventually

HELD = 2
LORA = (
    *("--enable-lora", "--lora-backend", "torch_native", "--lora-target-modules", "q_proj", "v_proj"),
    *("--max-lora-rank", str(RANK), "--max-loras-per-batch", str(HELD), "--max-loaded-loras", str(HELD)),
)
SERVERS = (LORA, ())
NAMES = ("poet", "clerk", "pilot")
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
PROMPTS, CACHED = "dynamo_frontend_input_sequence_tokens_sum", "dynamo_frontend_cached_tokens_sum"
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


async def test_what_is_said_of_a_busy_server_is_what_it_says_itself(
    servers: tuple[SglangServer, SglangServer], front: Served
) -> None:
    worker, url, prompts = "attached-0", servers[0].url, Prompts(11)
    pin = {"x-penstock-worker": worker}

    def theirs(name: str) -> float:
        return counter(url, f"sglang:{name}")

    def ours(name: str) -> float:
        return counter(front.url, name)

    def requests() -> tuple[float, int]:
        return theirs("num_running_reqs") + theirs("num_queue_reqs"), worker_status(front, worker)["active_requests"]

    def blocks() -> tuple[float, int]:
        return theirs("kv_used_tokens") / PAGE, worker_status(front, worker)["active_blocks"]

    async def busy(count: int, output: int, agree: Callable[[], bool]) -> None:
        agreed = asyncio.Event()

        async def client() -> None:
            while not agreed.is_set():  # what it says is as old as its last report, and one answer may see too few
                body = completion(prompts.fresh(40), output)
                assert whole(await ask(http, front.url, body, stream=True, headers=pin))

        async with asyncio.TaskGroup() as clients:
            for _ in range(count):
                clients.create_task(client())
            await eventually(agree, story=lambda: (requests(), blocks()))
            agreed.set()

    async with asking() as http:
        # More than it runs at once: what waits in it is load as well.
        await busy(14, 150, lambda: theirs("num_queue_reqs") > 0 and requests() == (14, 14))
        penstock(front, "set", "router.track_output=true")
        await eventually(lambda: front.get("/admin/settings")[1]["settings"]["router.track_output"] is True)
        # It tells its blocks every 40 passes: 10 blocks of 4 requests; each has a part of a block besides.
        await busy(4, 800, lambda: requests() == (4, 4) and blocks()[1] > 40 and abs(blocks()[0] - blocks()[1]) <= 18)
        for _ in range(2):  # it counts cached tokens from the first on
            assert whole(await ask(http, front.url, completion(IDS, 1), headers=pin))
        told = {name: theirs(name) for name in ("prompt_tokens_total", "cached_tokens_total")}
        seen = {name: ours(name) for name in (PROMPTS, CACHED)}
        for _ in range(2):
            for length in (40, 200, 333):
                assert whole(await ask(http, front.url, completion([*range(700, 700 + length)], 1), headers=pin))
        prompt, cached = (theirs(name) - before for name, before in told.items())
        assert (ours(PROMPTS) - seen[PROMPTS], ours(CACHED) - seen[CACHED]) == (prompt, cached) and cached > 600
    truth = Truth(servers[0]).catch_up()
    await eventually(lambda: worker_status(front, worker)["kv_events"]["applied"] >= truth.total)
    row = worker_status(front, worker)
    assert row["resident_blocks"] == len(truth.held) > 50 and row["active_blocks"] == 0
    assert row["kv_blocks"] == theirs("num_pages") == ours("dynamo_frontend_model_total_kv_blocks")
    held = sum(worker["resident_blocks"] for worker in front.get("/admin/status")[1]["workers"])
    assert ours("penstock_worker_resident_blocks") == held
    async with asking() as http:  # what it says of an idle cache is as old as its last pass
        assert whole(await ask(http, front.url, completion("a", 1), headers=pin))
    assert theirs("kv_evictable_tokens") == PAGE * row["resident_blocks"]
    assert f"{row['resident_blocks']} of {row['kv_blocks']}" in penstock(front, "status", "--wide")


async def test_adapters_are_loaded_by_demand_and_their_blocks_are_no_cache_for_another(
    servers: tuple[SglangServer, SglangServer], front: Served, tmp_path: Path
) -> None:
    worker, truths = "attached-0", {"attached-0": Truth(servers[0])}
    pin = {"x-penstock-worker": worker}
    for seed, name in enumerate(NAMES):
        write_adapter(tmp_path / name, 256, 2, seed)
        status, said, _ = post(
            f"{front.url}/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(tmp_path / name)}
        )
        assert status == 200 and said["workers"] == [worker], said

    def loaded() -> set[str]:
        return {entry["id"] for entry in request(f"{servers[0].url}/v1/models")[1]["data"]} - {MODEL}

    assert len(loaded()) == HELD, "one made room for the third"
    prompt = Prompts(12, families=1).fresh(100)
    texts: dict[str, str] = {}
    async with asking() as http:
        for name in (MODEL, *NAMES):
            for turn in range(2):
                answer = await ask(http, front.url, {**completion(prompt, 8), "model": name}, headers=pin)
                assert (answer.status, answer.cached, answer.expected) == (200, 96 * turn, 96 * turn), (name, answer)
                assert texts.setdefault(name, answer.text) == answer.text
                await announced(front, truths)
        assert len(set(texts.values())) == 1 + len(NAMES) and len(loaded()) == HELD
        (kept, *_) = loaded()
        assert post(f"{servers[0].url}/unload_lora_adapter", {"lora_name": kept})[0] == 200
        answer = await ask(http, front.url, {**completion(prompt, 8), "model": kept}, stream=True)
        assert (answer.status, answer.text) == (200, texts[kept]), "who lost it loads it again"
    status, said, _ = post(f"{front.url}/v1/load_lora_adapter", {"lora_name": "nobody", "lora_path": "/not/there"})
    assert status == 502 and "/not/there" in said["error"]["message"], "in SGLang's own words"


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
