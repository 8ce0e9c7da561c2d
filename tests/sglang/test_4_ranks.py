"""One SGLang server of two data-parallel ranks, which schedules by priority and takes adapters, told only its URL."""

from pathlib import Path

import pytest

from tests.live.cluster import Served, post, request
from tests.sglang.fronts import announced, errors, exact
from tests.sglang.server import MODEL, PAGE, RANKED, TOKENS, SglangServer
from tests.vllm.adapters.conftest import write_adapter
from tests.vllm.asking import ask, asking, completion
from tests.vllm.attached.heard import worker_status
from tests.vllm.load import Prompts
from tests.vllm.overtaking import LATE, overtaken
from tests.vllm.server import RANK
from tests.vllm.truth import Truth

HELD = 2
LORA = (
    *("--enable-lora", "--lora-backend", "torch_native", "--lora-target-modules", "q_proj", "v_proj"),
    *("--max-lora-rank", str(RANK), "--max-loras-per-batch", str(HELD), "--max-loaded-loras", str(HELD)),
)
SERVERS = ((*RANKED, "--enable-priority-scheduling", *LORA),)
WORKER = "attached-0"
NAMES = ("poet", "clerk", "pilot")


@pytest.fixture(scope="module")
def truths(servers: tuple[SglangServer]) -> dict[str, Truth]:
    return {WORKER: Truth(servers[0].rank(0)), f"{WORKER}/1": Truth(servers[0].rank(1))}


async def test_both_ranks_are_heard_and_known_exactly(front: Served, truths: dict[str, Truth]) -> None:
    assert await exact(front, truths, Prompts(9), 80) > 3_000
    assert all(truth.events["BlockStored"] > 20 for truth in truths.values()), "both ranks were asked"
    row = worker_status(front, WORKER)
    assert (row["index"], row["kv_events"]["lost"], row["kv_blocks"]) == ("exact", 0, 2 * TOKENS // PAGE)
    assert row["resident_blocks"] == sum(len(truth.held) for truth in truths.values())


def test_doctor_finds_no_error(front: Served) -> None:
    assert errors(front) == []


async def test_the_more_urgent_request_goes_first(servers: tuple[SglangServer], front: Served) -> None:
    """The server says itself that it schedules by priority; those that name none are not last of all."""
    pin = {"x-penstock-worker": WORKER, "x-penstock-dp-rank": "0"}

    async def behind(late: int | None, urgent: int | None) -> int:
        fields = [{} if said is None else {"nvext": {"agent_hints": {"priority": said}}} for said in (late, urgent)]
        gauges = {"running": "sglang:num_running_reqs", "waits": "sglang:num_queue_reqs"}
        return await overtaken(front.url, servers[0].url, pin, *fields, places=2, output=1500, **gauges)

    assert await behind(-3, 4) >= LATE // 2
    assert await behind(-3, None) >= LATE // 2


async def test_adapters_are_loaded_by_demand_and_their_blocks_are_no_cache_for_another(
    servers: tuple[SglangServer], front: Served, truths: dict[str, Truth], tmp_path: Path
) -> None:
    for seed, name in enumerate(NAMES):
        write_adapter(tmp_path / name, 256, 2, seed)
        status, said, _ = post(
            f"{front.url}/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(tmp_path / name)}
        )
        assert (status, said["workers"]) == (200, [WORKER]), said

    def loaded() -> set[str]:
        return {entry["id"] for entry in request(f"{servers[0].url}/v1/models")[1]["data"]} - {MODEL}

    assert len(loaded()) == HELD, "one made room for the third"
    prompt = Prompts(12, families=1).fresh(100)
    texts: dict[str, str] = {}
    async with asking() as http:
        for name in (MODEL, *NAMES):
            for turn in range(2):
                answer = await ask(http, front.url, {**completion(prompt, 8), "model": name})
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
