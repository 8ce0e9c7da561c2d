"""Does a checkpoint that is served with vLLM answer, with every engine known to the router for what it is?"""

import json
from pathlib import Path

from tests.live.cluster import Served, until
from tests.vllm.asking import ask, asking, chat, completion
from tests.vllm.children.conftest import WORKERS
from tests.vllm.load import Prompts
from tests.vllm.overtaking import LATE, overtaken
from tests.vllm.server import BLOCK, BLOCKS, MODEL, counter
from tests.vllm.waiting import eventually


def test_every_engine_is_known_for_what_it_is(cluster: Served) -> None:
    until(lambda: {each["index"] for each in cluster.get("/admin/status")[1]["workers"]} == {"exact"}, 60)
    status, found = cluster.get("/admin/status")
    assert status == 200
    assert {worker["id"] for worker in found["workers"]} == set(WORKERS)
    for worker in found["workers"]:
        assert worker["engine"] == "vllm" and worker["state"] == "ready"
        assert (worker["block_size"], worker["kv_blocks"]) == (BLOCK, BLOCKS)
        assert worker["index"] == "exact"
        assert worker["pid"] in cluster.children()
    (model,) = found["models"]
    assert model["name"] == MODEL and model["max_model_len"] == 2048 and model["index"] == "exact"
    assert [f for f in found["findings"] if f["level"] == "error"] == []


def test_their_logs_are_kept_in_the_run_folder(cluster: Served) -> None:
    for worker in WORKERS:
        log = Path(cluster.run) / "logs" / f"{worker}.log"
        assert "Application startup complete" in log.read_text(errors="replace")


async def test_it_says_what_each_of_its_engines_says(cluster: Served) -> None:
    urls = {w["id"]: w["url"] for w in cluster.get("/admin/status")[1]["workers"]}
    async with asking() as http:
        for body in (completion("Once upon a time", 16), chat("Hello", 16, ignore_eos=True)):
            for worker, url in urls.items():
                own = await ask(http, url, body)
                for stream in (False, True):
                    ours = await ask(http, cluster.url, body, stream=stream, headers={"x-penstock-worker": worker})
                    assert ours.worker == worker
                    assert (ours.text, ours.finish_reason) == (own.text, own.finish_reason)
                    assert (ours.prompt_tokens, ours.output_tokens) == (own.prompt_tokens, own.output_tokens)


async def test_a_shared_prefix_has_one_home_and_its_counter_shows_the_hits(cluster: Served) -> None:
    urls = {w["id"]: w["url"] for w in cluster.get("/admin/status")[1]["workers"]}
    prompts = Prompts(seed=31, families=1)
    prefix = prompts.fresh(6 * BLOCK)
    async with asking() as http:
        first = await ask(http, cluster.url, completion([*prefix, *prompts.fresh(9)], 2))
        before = {worker: counter(url, "vllm:prefix_cache_hits_total") for worker, url in urls.items()}
        others = [await ask(http, cluster.url, completion([*prefix, *prompts.fresh(9)], 2)) for _ in range(4)]
    assert {answer.worker for answer in others} == {first.worker}
    assert [answer.cached for answer in others] == [6 * BLOCK] * 4
    for worker, url in urls.items():
        hits = counter(url, "vllm:prefix_cache_hits_total") - before[worker]
        assert hits == (4 * 6 * BLOCK if worker == first.worker else 0)


async def test_a_priority_in_the_fields_own_words_reaches_the_engine_in_its(cluster: Served) -> None:
    """With us, as in the field, higher is more urgent; vLLM, which was started to schedule by it, counts downwards."""
    url = next(w["url"] for w in cluster.get("/admin/status")[1]["workers"] if w["id"] == WORKERS[0])
    behind = await overtaken(
        cluster.url,
        url,
        {"x-penstock-worker": WORKERS[0]},
        {"nvext": {"agent_hints": {"priority": 1}}},
        {"nvext": {"agent_hints": {"priority": 7}}},
    )
    assert behind >= LATE // 2


async def test_its_own_passes_are_told(cluster: Served) -> None:
    """The plug-in is installed in vLLM's environment, so the status has exact sums of what the engines did."""

    def sources() -> list[str | None]:
        found = cluster.get("/admin/status")[1]["workers"]
        return [(worker.get("steps") or {}).get("source") for worker in found]

    async with asking() as http:
        await ask(http, cluster.url, completion("Hello", 20), headers={"x-penstock-worker": WORKERS[0]})
    await eventually(lambda: "plug-in" in sources(), story=lambda: json.dumps(sources()))
