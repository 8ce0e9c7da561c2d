"""LoRA adapters at the front door: what a request waits for, and what its client is told where that fails."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web

from penstock.adapters.stores.memory_store import MemoryStore
from penstock.config.settings.cluster_settings import ClusterSettings, ModelSettings, NameSettings, PoolSettings
from penstock.config.settings.tenant_settings import TenantSettings
from penstock.frontend.frontend_process import tune
from penstock.frontend.prompt.prompt_tokenizer import load_tokenizer
from penstock.kernel.values import WorkerId
from penstock.router.settings import RouterSettings
from penstock.runtime.cluster_state.adapter_registry import AdapterRegistry
from penstock.runtime.cluster_state.desired_state import AdapterSpec, AdapterWorkersSpec
from penstock.runtime.node.adapter_loads import AdapterLoads
from penstock.runtime.records.usage_table import summed
from tests.frontend.stand import ENGINE, Stand, answer_well, eventually, stand


class Loading:
    """What scripted engines hold, and how their loads go."""

    def __init__(self) -> None:
        self.held: dict[str, set[str]] = {}
        self.loads: list[tuple[str, str, str]] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.answer: Callable[[str], web.Response | None] = lambda engine: None

    async def reply(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        engine = request[ENGINE].name
        held = self.held.setdefault(engine, set())
        if request.path == "/v1/load_lora_adapter":
            self.loads.append((engine, body["lora_name"], body["lora_path"]))
            await self.gate.wait()
            refused = self.answer(engine)
            if refused is not None:
                return refused
            held.add(body["lora_name"])
            return web.Response(text="Success")
        if request.path == "/v1/models":
            listed = [{"id": "m", "parent": None}, *({"id": name, "parent": "m"} for name in held)]
            return web.json_response({"object": "list", "data": listed})
        if request.path == "/v1/unload_lora_adapter":
            held.discard(body["lora_name"])
            return web.Response(text="Success")
        if body["model"] not in ("m", *held):
            error = {"message": f"The model `{body['model']}` does not exist.", "type": "NotFoundError", "code": 404}
            return web.json_response({"error": error}, status=404)
        return await answer_well(request, body)


class SglangLoading(Loading):
    """The same of SGLang 0.5.23, in its words; it names adapters in a field of their own."""

    async def reply(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        held = self.held.setdefault(request[ENGINE].name, set())
        name = body.get("lora_path") if "messages" in body else body.get("lora_name")
        if request.path == "/load_lora_adapter":
            self.loads.append((request[ENGINE].name, body["lora_name"], body["lora_path"]))
            if name in held:
                return self.said(f"Failed to load LoRA adapter {name} because it is already loaded")
            held.add(body["lora_name"])
        elif request.path == "/unload_lora_adapter":
            if name not in held:
                return self.said(f"LoRA with name {name} does not exist. Loaded LoRAs: odict_keys([])")
            held.discard(body["lora_name"])
        elif request.path != "/v1/models" and (name is None or name in held):
            return await answer_well(request, body)
        elif request.path != "/v1/models":
            text = f"Got LoRA adapter that has never been loaded: {name}\nAll loaded adapters: dict_keys([])."
            error = {"object": "error", "message": text, "type": "BadRequestError", "param": None, "code": 400}
            return web.json_response(error, status=400)
        else:
            return await super().reply(request, body)
        return web.json_response({"success": True, "error_message": ""})

    @staticmethod
    def said(text: str) -> web.Response:
        return web.json_response({"success": False, "error_message": text}, status=400)


@asynccontextmanager
async def adapted(
    count: int = 1, slots: int = 1, engine: str = "vllm", **more: Any
) -> AsyncIterator[tuple[Stand, Loading]]:
    model = ModelSettings(
        adapters={"sql": "/adapters/sql", "chat": "/adapters/chat"}, pools={"main": PoolSettings()}, **more
    )
    settings = ClusterSettings(models={"m": model}, router=RouterSettings(mode="kv"))
    loading = Loading() if engine == "vllm" else SglangLoading()
    async with stand(count, settings=settings, card={"adapter_slots": slots, "engine": engine}) as found:
        node: Any = found.service.cluster._node  # type: ignore[attr-defined]
        node.adapters = AdapterLoads(found.live, found.router, AdapterRegistry(settings))
        node.store = MemoryStore()
        for engine in found.engines:
            engine.reply = engine.lists = loading.reply
        yield found, loading
        await node.adapters.close()


def shared(weights: dict[str, float]) -> ClusterSettings:
    """A tenant whose key is bound to a name that a model and another model's adapter share."""
    pools = {"main": PoolSettings()}
    models = {"m": ModelSettings(adapters={"sql": "/adapters/sql"}, pools=pools), "other": ModelSettings(pools=pools)}
    return ClusterSettings(
        models=models,
        names={"chat": NameSettings(models=weights)},
        tenants={"acme": TenantSettings(keys=("acme-key",), models=("chat",), tokens_per_minute=1_000_000)},
        router=RouterSettings(mode="kv"),
    )


async def test_a_tenants_name_leads_by_weights_to_a_model_and_to_an_adapter_of_another() -> None:
    key, loading = {"authorization": "Bearer acme-key"}, Loading()
    async with stand(2, settings=shared({"other": 1.0, "sql": 1.0}), card={"adapter_slots": 1, "engine": "vllm"}) as s:
        node: Any = s.service.cluster._node  # type: ignore[attr-defined]
        node.adapters = AdapterLoads(s.live, s.router, AdapterRegistry(s.service.settings))
        node.store = MemoryStore()
        for engine in s.engines:
            engine.reply = loading.reply
        s.join(s.engines[1], model="other", epoch=2)
        other = s.engines[1]
        other.reply = answer_well

        async def served(session: int) -> str:
            headers = {**key, "x-penstock-session-id": str(session)}
            answer = await s.chat(model="chat", headers=headers)
            assert answer.status == 200, await answer.text()
            assert int(answer.headers["x-ratelimit-remaining-tokens"]) < 1_000_000
            name: str = answer.headers["x-penstock-model"]
            return name

        before = [await served(session) for session in range(16)]
        assert set(before) == {"sql", "other"} and [await served(session) for session in range(16)] == before
        assert loading.loads == [("e0", "sql", "/adapters/sql")], "one load serves all that the name sends there"
        assert {msgspec.json.decode(raw)["model"] for raw in other.bodies} == {"other"}
        records = s.records
        assert {(each.tenant, each.name) for each in records} == {("acme", "chat")}
        assert sum(each.model == "m" for each in records) == 2 * before.count("sql")
        (row,) = summed(map(msgspec.json.encode, records))
        assert (row.tenant, row.requests, row.ok, row.output_tokens) == ("acme", 32, 32, 160)
        assert s.service.named == {("chat", name): 2 * before.count(name) for name in ("sql", "other")}

        for name in ("m", "other", "sql"):
            assert (await s.chat(model=name, headers=key)).status == 403, "the key is bound to the name alone"
        listed = (await (await s.http.get("/v1/models", headers=key)).json())["data"]
        assert [each["id"] for each in listed] == ["chat"]

        tune(s.service, shared({"other": 0.0, "sql": 1.0}))
        assert {await served(session) for session in range(16)} == {"sql"}
        tune(s.service, shared({"other": 1.0, "sql": 9.0}))
        node.adapters.registry.set("sql", AdapterSpec(model="m", path=None, by="test"))
        assert {await served(session) for session in range(16)} == {"other"}, "an adapter out of service answers nobody"
        await node.adapters.close()


ROUTES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}),
    "completions": ("/v1/completions", {"prompt": "hi", "max_tokens": 4}),
    "embeddings": ("/v1/embeddings", {"input": "hi"}),
    "responses": ("/v1/responses", {"input": "hi", "max_output_tokens": 4}),
    "messages": ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}),
    "count_tokens": ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "hi"}]}),
    "tokenize": ("/tokenize", {"prompt": "hi"}),
    "detokenize": ("/detokenize", {"tokens": [1]}),
}


@pytest.mark.parametrize(
    ("own", "may"),
    [
        ((), {"m", "nick", "sql", "chat", "mixed"}),
        (("m",), {"m", "nick"}),
        (("nick",), {"nick"}),
        (("sql",), {"sql"}),
        (("m", "sql"), {"m", "nick", "sql", "mixed"}),
        (("*",), {"m", "nick", "sql", "chat", "mixed"}),
        (("s*", "mixed"), {"sql", "mixed"}),
    ],
)
@pytest.mark.parametrize("route", ROUTES)
async def test_what_a_tenant_may_use_is_the_same_on_every_route(
    own: tuple[str, ...], may: set[str], route: str
) -> None:
    """A model's adapters do not come with it, its aliases do; a shared name does where all behind it may be used."""
    pools = {"main": PoolSettings()}
    model = ModelSettings(adapters={"sql": "/adapters/sql", "chat": "/adapters/chat"}, aliases=("nick",), pools=pools)
    settings = ClusterSettings(
        models={"m": model},
        names={"mixed": NameSettings(models={"m": 1.0, "sql": 1.0})},
        tenants={"acme": TenantSettings(keys=("acme-key",), models=own)},
    )
    key, loading = {"authorization": "Bearer acme-key"}, Loading()
    tokenizer = load_tokenizer("builtin:sim")
    async with stand(settings=settings, tokenizer=tokenizer, card={"adapter_slots": 4, "engine": "vllm"}) as s:
        node: Any = s.service.cluster._node  # type: ignore[attr-defined]
        node.adapters = AdapterLoads(s.live, s.router, AdapterRegistry(settings))
        node.store = MemoryStore()
        for engine in s.engines:
            engine.reply = loading.reply
        listed = (await (await s.http.get("/v1/models", headers=key)).json())["data"]
        assert {each["id"] for each in listed} == may
        path, body = ROUTES[route]
        for name in ("m", "nick", "sql", "chat", "mixed"):
            answer = await s.http.post(path, json={**body, "model": name}, headers=key)
            assert (answer.status != 403) == (name in may), (name, await answer.text())
            assert answer.status == 403 or answer.status == 200, (name, await answer.text())
            assert (await s.http.get(f"/v1/models/{name}", headers=key)).status == (200 if name in may else 404)
        await node.adapters.close()


async def text_of(answer: Any) -> tuple[int, Any]:
    return answer.status, msgspec.json.decode(await answer.read())


async def test_one_load_serves_all_that_wait_for_it() -> None:
    async with adapted() as (found, loading):
        loading.gate.clear()
        asked = [asyncio.create_task(found.chat(f"hello {n}", model="sql", stream=n % 2 == 0)) for n in range(6)]
        await eventually(lambda: loading.loads)
        assert not any(path.endswith("completions") for path in found.engines[0].paths)
        loading.gate.set()
        assert [answer.status for answer in await asyncio.gather(*asked)] == [200] * 6
        assert loading.loads == [("e0", "sql", "/adapters/sql")]
        assert msgspec.json.decode(found.engines[0].bodies[-1])["model"] == "sql"


async def test_the_next_worker_is_tried_where_one_can_not_load_it() -> None:
    async with adapted(2) as (found, loading):
        loading.answer = lambda engine: web.Response(status=400, text="rank 64 is too high") if engine == "e0" else None
        for number in range(3):
            answer = await found.chat(f"hello {number}", model="sql")
            assert answer.status == 200 and answer.headers["x-penstock-worker"] == "e1"
        assert len([load for load in loading.loads if load[0] == "e0"]) <= 1


async def test_an_adapter_that_is_not_there_is_a_404_and_a_refused_one_a_502() -> None:
    async with adapted() as (found, loading):
        loading.answer = lambda engine: web.json_response({"error": {"message": "No adapter found"}}, status=404)
        status, body = await text_of(await found.chat(model="sql"))
        assert status == 404 and "/adapters/sql" in body["error"]["message"]
        status, body = await text_of(await found.chat(model="sql"))  # it is not tried with every request
        assert status == 503 and "could not load adapter sql" in body["error"]["message"] and len(loading.loads) == 1
        loading.answer = lambda engine: web.Response(status=400, text="rank 64 is too high")
        status, body = await text_of(await found.chat(model="chat"))
        assert status == 502 and "rank 64 is too high" in body["error"]["message"]
        assert (await found.chat()).status == 200  # the worker is not at fault


async def test_an_engine_without_the_routes_says_what_it_needs() -> None:
    async with adapted() as (found, loading):
        loading.answer = lambda engine: web.json_response({"detail": "Not Found"}, status=404)
        status, body = await text_of(await found.chat(model="sql"))
        assert status == 503 and "VLLM_ALLOW_RUNTIME_LORA_UPDATING" in body["error"]["message"]


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
async def test_what_an_engine_has_already_is_loaded_and_what_it_has_no_more_is_unloaded(
    engine: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with adapted(engine=engine) as (found, loading):
        loading.held["e0"] = {"sql"}
        assert (await found.chat(model="sql")).status == 200, "somebody else had it loaded"
        loading.held["e0"].clear()
        assert (await found.chat(model="chat")).status == 200
        assert loading.held["e0"] == {"chat"} and "did not unload" not in caplog.text


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
async def test_what_an_engine_lost_is_loaded_again_once(engine: str) -> None:
    async with adapted(engine=engine) as (found, loading):
        assert (await found.chat(model="sql")).status == 200
        loading.held["e0"].clear()
        assert (await found.chat(model="sql", stream=True)).status == 200
        assert len(loading.loads) == 2

        async def forgets(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            loading.held["e0"] = set()
            return await loading.reply(request, body)

        found.engines[0].reply = forgets
        assert (await found.chat(model="sql")).status in (404, 502)
        assert len(loading.loads) == 3


async def test_a_request_whose_deadline_passes_while_it_waits_is_ended_then() -> None:
    async with adapted() as (found, loading):
        loading.gate.clear()
        answer = await found.chat(model="sql", headers={"x-penstock-timeout": "0.2"})
        assert answer.status == 504
        loading.gate.set()
        assert (await found.chat(model="sql")).status == 200
        assert len(loading.loads) == 1  # the load went on for those who came later


async def test_folders_are_looked_up_by_name_and_nothing_else(tmp_path: Path) -> None:
    inside = tmp_path / "adapters"
    for folder in (inside / "poet", tmp_path / "secret"):
        folder.mkdir(parents=True)
        (folder / "adapter_config.json").write_text("{}")
    (inside / "half").mkdir()
    async with adapted(adapter_folder=str(inside)) as (found, loading):
        assert (await found.chat(model="poet")).status == 200
        assert loading.loads == [("e0", "poet", str(inside / "poet"))]
        for name in ("half", "../secret", "..", ".", "poet/../poet", "po\0et"):
            assert (await found.chat(model=name)).status == 404, name
        status, listed = await text_of(await found.http.get("/v1/models"))
        parents = {entry["id"]: entry["parent"] for entry in listed["data"]}
        assert status == 200 and parents == {"m": None, "chat": "m", "poet": "m", "sql": "m"}
        assert (await found.http.get("/v1/models/poet")).status == 200


async def test_operators_load_and_unload_by_vllms_own_routes() -> None:
    async with adapted(2) as (found, loading):

        async def post(path: str, **body: str) -> tuple[int, Any]:
            return await text_of(await found.http.post(path, json=body))

        load, unload = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
        status, state = await post(load, lora_name="new", lora_path="/adapters/new")
        assert (status, state["model"], len(state["workers"])) == (200, "m", 1)
        assert (await found.chat(model="new")).status == 200 and len(loading.loads) == 1
        assert (await post(load, lora_name="new", lora_path="/adapters/other"))[0] == 409
        assert (await post(load, lora_name="m", lora_path="/x"))[0] == 400
        assert (await post(load, lora_name="a/b", lora_path="/x"))[0] == 400
        status, gone = await post(unload, lora_name="new")
        assert status == 200 and gone["workers"] == state["workers"]
        assert all("new" not in held for held in loading.held.values())
        assert (await found.chat(model="new")).status == 404
        assert (await post(unload, lora_name="new"))[0] == 404
        loading.answer = lambda engine: web.json_response({"error": {"message": "No adapter found"}}, status=404)
        status, problem = await post(load, lora_name="wrong", lora_path="/nowhere")
        assert status == 404 and problem["error"]["code"] == "adapter_not_loaded"
        assert (await found.chat(model="wrong")).status == 404
        status, listed = await text_of(await found.http.get("/admin/adapters"))
        assert {adapter["name"] for adapter in listed["adapters"]} == {"sql", "chat"}


async def test_an_adapter_is_kept_on_as_many_workers_as_operators_want() -> None:
    async with adapted(3, slots=2) as (s, loading):
        loads = s.service.cluster.adapters
        assert loads is not None
        loading.held["e2"] = {"sql"}  # another frontend had it loaded: the engines know, our table does not
        task = asyncio.create_task(loads.run(lambda: True))

        def holding() -> set[str]:
            return {engine for engine, held in loading.held.items() if "sql" in held}

        answer = await s.http.post("/admin/adapters", json={"name": "sql", "workers": 2})
        assert answer.status == 200 and (await answer.json())["wanted"] == 2
        await eventually(lambda: len(holding()) == 2)
        assert "e2" in holding() and len(loading.loads) == 1
        await eventually(lambda: not any(loads.pending(engine, "sql") for engine in holding()))
        (status,) = (await (await s.http.get("/admin/status")).json())["adapters"]
        assert (status["name"], status["wanted"], set(status["workers"])) == ("sql", 2, holding()) and not status["why"]

        gone = next(engine for engine in sorted(holding()))
        card = next(card for card in s.service.cluster.cards() if card.id == gone)
        loading.held[gone] = set()
        s.leave(gone)
        loads.stop(card)
        await eventually(lambda: len(holding()) == 2)
        assert gone not in holding()
        s.join(next(engine for engine in s.engines if engine.name == gone), epoch=2, adapter_slots=2, engine="vllm")
        listed = (await (await s.http.get("/admin/adapters")).json())["adapters"]
        assert {each["name"]: each["wanted"] for each in listed} == {"sql": 2, "chat": 0}

        answer = await s.http.post("/admin/adapters", json={"name": "sql", "workers": 9})
        await eventually(lambda: len(holding()) == 3)
        await eventually(lambda: loads.lacking("m", "sql") == "m has no other worker")
        answer = await s.http.post("/admin/adapters", json={"name": "sql", "workers": None})
        assert answer.status == 200 and (await answer.json())["wanted"] == 0
        await eventually(lambda: holding() == set())
        assert (await s.http.get("/admin/status")).status == 200
        for body, status in (({"name": "no", "workers": 1}, 404), ({"name": "sql", "workers": -1}, 400)):
            assert (await s.http.post("/admin/adapters", json=body)).status == status
        task.cancel()


async def test_a_frontend_that_does_not_decide_follows_what_engines_list() -> None:
    async with adapted(1) as (s, loading):
        loads = s.service.cluster.adapters
        assert loads is not None
        task = asyncio.create_task(loads.run(lambda: False))
        loads.registry.set_workers("sql", AdapterWorkersSpec(workers=1))
        await eventually(lambda: loads.lacking("m", "sql") != "")
        assert loading.loads == []
        loading.held["e0"] = {"sql"}
        loads.registry.set_workers("sql", AdapterWorkersSpec(workers=1))
        await eventually(lambda: list(loads.holders("m", "sql")) == ["e0"])
        assert loading.loads == [] and loads.lacking("m", "sql") == ""
        task.cancel()


async def test_the_metrics_count_what_came_of_it() -> None:
    async with adapted() as (found, loading):
        for name in ("sql", "sql", "chat"):
            assert (await found.chat(model=name)).status == 200
        text = await (await found.http.get("/metrics")).text()
        for event, count in (("hit", 1), ("load", 2), ("unload", 1), ("failed", 0)):
            assert f'penstock_adapter_events_total{{event="{event}",model="m"}} {count}' in text
        assert [msgspec.json.decode(decision)["adapter"] for decision in found.decisions] == [
            "adapter sql is loaded",
            "adapter sql is resident",
            "adapter chat is loaded in place of sql",
        ]
        assert loading.held["e0"] == {"chat"}
        assert found.router.pools["m"].adapters.holders("chat") == [WorkerId("e0")]
