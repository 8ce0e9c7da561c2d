"""Does a real vLLM get its adapters by demand, keep no more than it may hold, and keep their blocks apart?"""

from pathlib import Path
from typing import Any

from tests.live.cluster import Served, post, request
from tests.vllm.adapters.conftest import ALIAS, HELD, NAMES, SHARED
from tests.vllm.asking import ask, asking, completion
from tests.vllm.load import Prompts
from tests.vllm.server import BLOCK, MODEL
from tests.vllm.waiting import eventually

PROMPT = "The captain of the small boat"


def engine(cluster: Served) -> str:
    (worker,) = cluster.get("/admin/status")[1]["workers"]
    url: str = worker["url"]
    return url


def loaded(cluster: Served) -> set[str]:
    """Return the adapters that the engine itself lists."""
    status, listed = request(f"{engine(cluster)}/v1/models")
    assert status == 200
    return {entry["id"] for entry in listed["data"] if entry.get("parent")}


def decision(cluster: Served, request_id: str) -> dict[str, Any]:
    found: dict[str, Any] = cluster.get(f"/admin/explain/{request_id}")[1]["decisions"][-1]
    return found


def test_every_adapter_is_listed_and_none_is_loaded(cluster: Served, adapters: Path) -> None:
    status, listed = cluster.get("/v1/models")
    assert status == 200
    parents = {entry["id"]: entry["parent"] for entry in listed["data"]}
    assert parents == {MODEL: None, ALIAS: None, SHARED: None, **dict.fromkeys(NAMES, MODEL)}
    roots = {entry["id"]: entry["root"] for entry in listed["data"]}
    assert roots["poet"] == str(adapters / "poet")
    assert loaded(cluster) == set()


async def test_adapters_are_loaded_by_demand_and_the_least_recently_used_makes_room(cluster: Served) -> None:
    texts: dict[str, str] = {}
    async with asking() as http:
        for name in (MODEL, "poet", "clerk"):
            answer = await ask(http, cluster.url, {**completion(PROMPT, 12), "model": name})
            assert answer.status == 200, answer.raw
            texts[name] = answer.text
        assert loaded(cluster) == {"poet", "clerk"}
        again = await ask(http, cluster.url, {**completion(PROMPT, 12), "model": "poet"})
        assert decision(cluster, again.headers["x-request-id"])["adapter"] == "adapter poet is resident"
        third = await ask(http, cluster.url, {**completion(PROMPT, 12), "model": "pilot"})
        texts["pilot"] = third.text
        why = decision(cluster, third.headers["x-request-id"])["adapter"]
        assert why == "adapter pilot is loaded in place of clerk"
        assert loaded(cluster) == {"poet", "pilot"} and len(loaded(cluster)) == HELD
        back = await ask(http, cluster.url, {**completion(PROMPT, 12), "model": "clerk"})
    assert len(set(texts.values())) == 4, "an adapter says what another one says"
    assert (again.text, back.text) == (texts["poet"], texts["clerk"])


async def test_blocks_of_one_adapter_are_no_cache_for_another(cluster: Served) -> None:
    prompt = Prompts(seed=71, families=1).fresh(4 * BLOCK + 5)

    async def asked(name: str) -> tuple[int, int]:
        answer = await ask(http, cluster.url, {**completion(prompt, 2), "model": name})
        assert answer.status == 200, answer.raw
        return answer.cached, answer.expected

    async with asking() as http:
        assert await asked("poet") == (0, 0)
        assert await asked("pilot") == (0, 0)
        assert await asked(MODEL) == (0, 0)
        for name in ("poet", "pilot", MODEL):
            # What vLLM announced of each adapter's blocks is what the router looks up for the same adapter.
            assert await asked(name) == (4 * BLOCK, 4 * BLOCK)


async def test_an_adapter_that_somebody_unloaded_is_loaded_again(cluster: Served) -> None:
    async with asking() as http:
        body = {**completion(PROMPT, 6), "model": "poet"}
        before = await ask(http, cluster.url, body)
        async with http.post(f"{engine(cluster)}/v1/unload_lora_adapter", json={"lora_name": "poet"}) as answer:
            assert answer.status == 200
        assert "poet" not in loaded(cluster)
        after = await ask(http, cluster.url, body, stream=True)
    assert (after.status, after.text) == (200, before.text)
    assert "poet" in loaded(cluster)


async def test_operators_load_and_unload(cluster: Served, adapters: Path) -> None:
    wrong, problem, _ = post(f"{cluster.url}/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "/not/there"})
    assert wrong == 404 and problem["error"]["code"] == "adapter_not_loaded", problem
    named = {"lora_name": "second-poet", "lora_path": str(adapters / "poet")}
    status, state, _ = post(f"{cluster.url}/v1/load_lora_adapter", named)
    assert (status, state["workers"]) == (200, ["main-0"])
    assert "second-poet" in loaded(cluster)
    async with asking() as http:
        ours = await ask(http, cluster.url, {**completion(PROMPT, 12), "model": "second-poet"})
        theirs = await ask(http, cluster.url, {**completion(PROMPT, 12), "model": "poet"})
        assert ours.text == theirs.text
        status, _, _ = post(f"{cluster.url}/v1/unload_lora_adapter", {"lora_name": "second-poet"})
        assert status == 200
        await eventually(lambda: "second-poet" not in loaded(cluster))
        gone = await ask(http, cluster.url, {**completion(PROMPT, 12), "model": "second-poet"})
    assert gone.status == 404 and len(loaded(cluster)) <= HELD


async def test_an_adapter_that_is_wanted_is_there_before_anybody_asks_and_makes_room_for_no_other(
    cluster: Served,
) -> None:
    status, state, _ = post(f"{cluster.url}/admin/adapters", {"name": "pilot", "workers": 1})
    assert (status, state["wanted"]) == (200, 1)
    await eventually(lambda: "pilot" in loaded(cluster))
    async with asking() as http:
        for name in ("poet", "clerk", "poet", "clerk"):
            assert (await ask(http, cluster.url, {**completion(PROMPT, 4), "model": name})).status == 200
            assert loaded(cluster) == {"pilot", name}
    await eventually(lambda: [each["workers"] for each in cluster.get("/admin/status")[1]["adapters"]] == [["main-0"]])
    assert post(f"{cluster.url}/admin/adapters", {"name": "pilot", "workers": None})[0] == 200
    await eventually(lambda: "pilot" not in loaded(cluster))
