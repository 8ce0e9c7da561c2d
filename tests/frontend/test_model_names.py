"""Do names lead to the models that the settings say, and do models put into requests what the settings say?"""

import asyncio
import itertools
import json
import random
from collections import Counter
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web

from penstock.adapters.sources.prometheus_source import queries
from penstock.config.settings.cluster_settings import ClusterSettings, ModelSettings, NameSettings, PoolSettings
from penstock.config.settings.frontend_settings import PROXIED_ROUTES
from penstock.config.settings.tenant_settings import TenantSettings
from penstock.frontend.frontend_process import tune
from penstock.frontend.http.http_exchange import NamedAnswer, WholeAnswer
from penstock.frontend.prompt.model_names import ModelNames
from penstock.frontend.prompt.prompt_tokenizer import load_tokenizer
from penstock.frontend.prompt.request_body import PATHS
from penstock.kernel.values import Slo
from penstock.router.settings import QueueSettings, RouterSettings
from tests.frontend.stand import Engine, Stand, answer_well, eventually, stand

POOLS = {"main": PoolSettings()}


def cluster(shared: NameSettings | None = None, **old: Any) -> ClusterSettings:
    models = {"old": ModelSettings(pools=POOLS, **old), "new": ModelSettings(pools=POOLS)}
    return ClusterSettings(models=models, names={} if shared is None else {"chat": shared})


async def ask(s: Stand, model: str, text: str = "hi", headers: dict[str, str] | None = None, **more: Any) -> Any:
    body = {"model": model, "messages": [{"role": "user", "content": text}], **more}
    return await s.http.post("/v1/chat/completions", json=body, headers=headers or {})


async def named(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """Answer as vLLM does: with the model's name."""
    model = body.get("model", "old")  # that of a form is not read
    said = {"role": "assistant", "content": f'{model}, and "model":"x"'}
    choice = {"index": 0, "message": said, "finish_reason": "stop"}
    answer = {
        "id": "a",
        "model": model,
        "choices": [choice],
        "usage": {"prompt_tokens": 1, "completion_tokens": 2},
    }
    return web.json_response(answer)


def joined(s: Stand) -> tuple[Engine, Engine]:
    """Have the stand's two engines serve one model each."""
    old, new = s.engines
    s.join(old, model="old", epoch=2)
    s.join(new, model="new", epoch=2)
    return old, new


def test_weights_hold_and_a_new_weight_moves_no_session_that_it_need_not():
    names = ModelNames(cluster(NameSettings(models={"old": 80.0, "new": 20.0})))
    rng = random.Random(7)
    sessions = [f"{rng.getrandbits(64):x}" for _ in range(500)]
    before = {session: names.model("chat", session, lambda model: 1) for session in sessions}
    # Four standard deviations of a binomial of 500 at 0.2 are 36.
    assert abs(Counter(before.values())["new"] - 100) < 36
    assert before == {session: names.model("chat", session, lambda model: 3) for session in sessions}
    names.use(cluster(NameSettings(models={"old": 50.0, "new": 50.0})))
    after = {session: names.model("chat", session, lambda model: 1) for session in sessions}
    assert abs(Counter(after.values())["new"] - 250) < 45
    assert all(after[session] == "new" for session in sessions if before[session] == "new")


def test_a_model_without_workers_is_left_out_while_another_has_some():
    names = ModelNames(cluster(NameSettings(models={"old": 1.0, "new": 1.0})))
    sessions = [str(number) for number in range(50)]
    assert {names.model("chat", each, lambda model: int(model == "old")) for each in sessions} == {"old"}
    assert {names.model("chat", each, lambda model: 0) for each in sessions} == {"old", "new"}


async def test_a_session_sticks_and_its_answers_say_the_name_it_asked_for():
    async with stand(2, settings=cluster(NameSettings(models={"old": 50.0, "new": 50.0}))) as s:
        engines = joined(s)
        for engine in engines:
            engine.reply = named
        chosen: dict[str, set[str]] = {}
        for number in range(24):
            session = f"s{number % 6}"
            answer = await ask(s, "chat", headers={"x-penstock-session-id": session})
            body = await answer.json()
            assert body["model"] == "chat" and body["choices"][0]["message"]["content"].endswith('"model":"x"')
            chosen.setdefault(session, set()).add(answer.headers["x-penstock-model"])
        assert all(len(models) == 1 for models in chosen.values())
        assert {next(iter(models)) for models in chosen.values()} == {"old", "new"}
        assert {json.loads(raw)["model"] for raw in engines[0].bodies} == {"old"}
        records = s.records
        assert {record.name for record in records} == {"chat"} and {record.model for record in records} == {
            "old",
            "new",
        }
        explained = s.service.history.explain(records[0].id)
        assert explained is not None and explained.request is not None and explained.request.name == "chat"
        text = await (await s.http.get("/metrics")).text()
        assert 'penstock_name_requests_total{model="old",name="chat"}' in text
        direct = await ask(s, "old")
        assert "x-penstock-model" not in direct.headers and (await direct.json())["model"] == "old"
        status = await (await s.http.get("/admin/status")).json()
        assert sum(status["names"][0]["requests"].values()) == 24


async def test_a_refusal_after_its_name_was_found_passes_no_filter():
    settings = msgspec.structs.replace(
        cluster(NameSettings(models={"old": 1.0})), tenants={"acme": TenantSettings(keys=("k",), models=("new",))}
    )
    async with stand(2, settings=settings) as s:
        joined(s)
        refused = await ask(s, "chat", headers={"authorization": "Bearer k"})
        assert refused.status == 403 and "x-penstock-model" not in refused.headers


async def test_weights_change_while_it_runs():
    start = cluster(NameSettings(models={"old": 1.0, "new": 0.0}))
    async with stand(2, settings=start) as s:
        old, new = joined(s)
        for number in range(8):
            await ask(s, "chat", headers={"x-penstock-session-id": str(number)})
        assert (len(old.bodies), len(new.bodies)) == (8, 0)
        tune(s.service, cluster(NameSettings(models={"old": 0.0, "new": 1.0})))
        for number in range(8):
            await ask(s, "chat", headers={"x-penstock-session-id": str(number)})
        assert (len(old.bodies), len(new.bodies)) == (8, 8)


async def test_an_alias_is_listed_and_streams_under_its_own_name():
    async with stand(2, settings=cluster(aliases=("gpt-4.1",))) as s:
        old, _ = joined(s)

        async def streamed(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            response = web.StreamResponse(headers={"content-type": "text/event-stream"})
            await response.prepare(request)
            for delta in ({"content": "a"}, {"content": 'say "model":"old"'}):
                event = {"id": "a", "model": body["model"], "choices": [{"index": 0, "delta": delta}]}
                await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            await response.write(b"data: [DONE]\n\n")
            return response

        old.reply = streamed
        answer = await ask(s, "gpt-4.1", stream=True)
        events = [line[6:] for line in (await answer.text()).splitlines() if line.startswith("data: {")]
        assert {json.loads(event)["model"] for event in events} == {"gpt-4.1"}
        assert json.loads(events[1])["choices"][0]["delta"]["content"] == 'say "model":"old"'
        assert answer.headers["x-penstock-model"] == "old"
        listed = (await (await s.http.get("/v1/models")).json())["data"]
        cards = {entry["id"]: entry for entry in listed}
        assert cards.keys() == {"gpt-4.1", "old", "new"}
        assert cards["gpt-4.1"]["root"] == "old" and cards["gpt-4.1"]["parent"] is None
        assert cards["old"]["created"] > 1_600_000_000 and "chat" in cards["old"]["capabilities"]
        one = await s.http.get("/v1/models/gpt-4.1")
        assert (await one.json())["root"] == "old"
        embedded = await s.http.post("/v1/embeddings", json={"model": "gpt-4.1", "input": "x"})
        assert embedded.status == 200 and json.loads(old.bodies[-1])["model"] == "old"
        messages = {"model": "gpt-4.1", "max_tokens": 5, "messages": [{"role": "user", "content": "x"}]}
        old.reply = answer_well
        said = await (await s.http.post("/v1/messages", json=messages)).json()
        assert said["model"] == "gpt-4.1" and json.loads(old.bodies[-1])["model"] == "old"


@pytest.mark.parametrize("route", [*PROXIED_ROUTES, *PATHS.values()])
async def test_every_route_answers_by_the_name_that_was_asked_for(route: str):
    async with stand(2, settings=cluster(aliases=("gpt-4.1",))) as s:
        old, _ = joined(s)
        old.reply = named
        form = route.startswith("/v1/audio/") or route == "/v1/images/edits"
        for model in ("gpt-4.1", "old"):
            body = {"model": model, "prompt": "x", "messages": [{"role": "user", "content": "x"}], "tokens": [1]}
            sent = {"data": aiohttp.FormData({"model": model}, default_to_multipart=True)} if form else {"json": body}
            answer = await s.http.post(route, **sent)
            assert answer.status == 200, await answer.text()
            told = await answer.json()
            assert told["model"] == model and told["choices"][0]["message"]["content"].endswith('"model":"x"')
            assert answer.headers.get("x-penstock-model") == (None if model == "old" else "old")
            assert ('name="model"' if form else '"model":"old"') in old.bodies[-1].decode().replace(": ", ":")
        assert {record.name for record in s.records} == {"gpt-4.1", None}


async def test_a_text_that_looks_like_the_field_is_left_alone():
    said = b'1\n00:00 --> 00:02\nthe field "model": "old" of an answer\n'
    answer = WholeAnswer(200, said, {"content-type": "text/plain"})
    assert (await NamedAnswer("old", "gpt-4.1").whole(answer)).body == said


@pytest.mark.parametrize("end", [b"", b"\n\n"])
def test_the_name_is_changed_in_a_stream_that_is_cut_anywhere(end: bytes):
    event = b'data: {"model": "o\\"l\\\\d", "text": "a \\"model\\": \\"x\\" and more"}' + end
    wanted = NamedAnswer("old", "new").piece(event + b"\n")[:-1]
    assert b'"model":"new"' in wanted and b'x\\" and more' in wanted
    for first, second in itertools.combinations(range(len(event)), 2):
        answer = NamedAnswer("old", "new")
        answer.head({"content-type": "text/event-stream"})
        pieces = (event[:first], event[first:second], event[second:])
        assert b"".join(map(answer.piece, pieces)) == wanted


async def test_defaults_reach_the_engine_where_the_client_left_them_out():
    given = {"temperature": "0.2", "max_tokens": "64", "chat_template_kwargs": '{"enable_thinking": false}'}
    async with stand(2, settings=cluster(defaults=given, system_prompt="Be brief.")) as s:
        old, new = joined(s)

        async def sent(path: str, body: dict[str, Any]) -> dict[str, Any]:
            answer = await s.http.post(path, json={"model": "old", **body})
            assert answer.status == 200, await answer.text()
            found: dict[str, Any] = json.loads(old.bodies[-1])
            return found

        user = {"role": "user", "content": "x"}
        chat = await sent("/v1/chat/completions", {"messages": [user]})
        assert (chat["temperature"], chat["max_tokens"]) == (0.2, 64)
        assert chat["chat_template_kwargs"] == {"enable_thinking": False}
        assert chat["messages"] == [{"role": "system", "content": "Be brief."}, user]
        system = {"role": "developer", "content": "mine"}
        own = await sent(
            "/v1/chat/completions", {"messages": [system, user], "temperature": 1, "max_completion_tokens": 3}
        )
        assert own["temperature"] == 1 and "max_tokens" not in own and own["messages"] == [system, user]
        text = await sent("/v1/completions", {"prompt": "x"})
        assert (text["temperature"], text["max_tokens"]) == (0.2, 64) and "chat_template_kwargs" not in text
        responses = await sent("/v1/responses", {"input": "x"})
        assert responses["temperature"] == 0.2 and responses["messages"][0]["content"] == "Be brief."
        messages = await sent("/v1/messages", {"messages": [user], "max_tokens": 9})
        assert (messages["temperature"], messages["max_tokens"]) == (0.2, 9)
        assert messages["messages"][0]["role"] == "system"
        await ask(s, "new")
        assert json.loads(new.bodies[-1]).keys() == {"model", "messages"}


async def test_shadows_are_compared_and_change_nothing_for_clients():
    shared = NameSettings(models={"old": 1.0}, shadow={"new": 1.0})
    async with stand(2, settings=cluster(shared, defaults={"temperature": "0"})) as s:
        _, new = joined(s)
        kept: list[Any] = []
        s.service.shadows._records = type("Sink", (), {"write": lambda self, record: kept.append(record)})()
        blocked = asyncio.Event()

        async def slow(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            await blocked.wait()
            return await answer_well(request, body)

        new.reply = slow
        for stream in (False, True):
            answer = await asyncio.wait_for(ask(s, "chat", stream=stream), 5)
            assert answer.status == 200 and answer.headers["x-penstock-model"] == "old"
            await answer.read()
        blocked.set()
        await s.service.shadows.settled()
        assert [record.result for record in kept] == ["same", "same"]
        assert kept[0].shadow.model == "new" and kept[0].answered.tokens == 5
        assert kept[1].shadow.ttft is not None and kept[1].answered.ttft is not None
        assert {json.loads(raw)["model"] for raw in new.bodies} == {"new"}
        assert "temperature" not in json.loads(new.bodies[0]), "defaults are of the model that answers"

        new.reply = named
        await ask(s, "chat")
        await s.service.shadows.settled()
        assert kept[-1].result == "different" and kept[-1].differs == ("text", "length")

        await new.stop()
        answer = await asyncio.wait_for(ask(s, "chat"), 5)
        assert answer.status == 200 and len((await answer.json())["choices"]) == 1
        await s.service.shadows.settled()
        assert kept[-1].result in ("failed", "skipped") and kept[-1].reason
        text = await (await s.http.get("/metrics")).text()
        assert 'penstock_shadow_answers_total{model="new",name="chat",result="same"} 2' in text
        (status,) = (await (await s.http.get("/admin/status")).json())["names"]
        (shadow,) = status["shadows"]
        assert (shadow["same"], shadow["different"], shadow["failed"] + shadow["skipped"]) == (2, 1, 1)


def counted(text: str, name: str, **labels: str) -> float:
    """Return the sum of a metric's series that have these labels."""
    lines = [line for line in text.splitlines() if line.startswith((f"{name}{{", f"{name} "))]
    wanted = [f'{label}="{value}"' for label, value in labels.items()]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if all(each in line for each in wanted))


async def test_copies_are_load_for_the_planner_and_count_in_no_service_level():
    shared = NameSettings(models={"old": 1.0}, shadow={"new": 1.0})
    settings = msgspec.structs.replace(cluster(shared), slo=Slo(ttft=5.0, itl=5.0))
    async with stand(2, settings=settings) as s:
        _, new = joined(s)
        for stream in (True, True, False):
            await (await ask(s, "chat", stream=stream)).read()
        await s.service.shadows.settled()

        async def fails(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            return web.json_response({"error": {"message": "broken"}}, status=500)

        new.reply = fails
        await (await ask(s, "chat", stream=True)).read()
        await s.service.shadows.settled()

        assert [record.model for record in s.records] == ["old"] * 4
        assert [record.model for record in s.copies] == ["new"] * 4
        # Copies follow their answers at once, so one may overtake another.
        assert sorted(record.copy_of or "" for record in s.copies) == sorted(record.id for record in s.records)
        assert {record.copy_of for record in s.records} == {None}
        listed = (await (await s.http.get("/admin/requests")).json())["requests"]
        assert {each["model"] for each in listed} == {"old"} and len(listed) == 4
        explained = await (await s.http.get(f"/admin/explain/{s.copies[0].id}")).json()
        assert explained["request"]["copy_of"] == s.copies[0].copy_of and len(explained["decisions"]) == 1

        counts = s.service.counts.totals()
        assert (counts["old"].judged, counts["old"].in_slo, counts["old"].ttft_count) == (3, 3, 3)
        copies = counts["new"]
        assert (copies.arrived, copies.answered, copies.output_tokens) == (4, 3, 15), "engines did that work"
        assert sum(copies.shapes.values()) == 3 and copies.duration_sum > 0
        assert (copies.judged, copies.lost, copies.ttft_count, copies.itl_count) == (0, 0, 0, 0)
        assert s.service.counts.copies == {}
        minute = s.service.timeline_store.last_minute()
        assert (minute.arrived, minute.judged, sum(minute.ttft.values())) == (4, 3, 3)
        assert minute.ended == {"ok": 4}

        text = await (await s.http.get("/metrics")).text()
        assert counted(text, "dynamo_frontend_time_to_first_token_seconds_count", model="old") == 3
        assert counted(text, "dynamo_frontend_time_to_first_token_seconds_count", model="new") == 0
        assert counted(text, "dynamo_frontend_inter_token_latency_seconds_count", model="new") == 0
        assert counted(text, "penstock_requests_total", model="new") == 0
        assert counted(text, "dynamo_frontend_requests_total", model="new", endpoint="shadow", status="error") == 1
        assert counted(text, "dynamo_frontend_output_sequence_tokens_sum", model="new") == 15
        lost = next(query for query in queries("frontend", 60.0, None).numbers if query.name == "lost")
        assert 'endpoint!="shadow"' in lost.selector


async def test_copies_that_wait_for_a_worker_are_no_waiting_clients():
    shared = NameSettings(models={"old": 1.0}, shadow={"new": 1.0})
    waits = RouterSettings(queue=QueueSettings(threshold=0.0))
    async with stand(2, settings=msgspec.structs.replace(cluster(shared), router=waits)) as s:
        s.join(s.engines[0], model="old", epoch=2)
        s.join(s.engines[1], model="new", epoch=2, max_num_batched_tokens=8)
        blocked = asyncio.Event()

        async def slow(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            await blocked.wait()
            return await answer_well(request, body)

        s.engines[1].reply = slow
        export = s.service.cluster.export_counters
        direct = [asyncio.create_task(ask(s, "new")) for _ in range(2)]
        await eventually(lambda: s.router.waiting("new") >= 1)
        clients = s.router.waiting("new")
        for _ in range(3):
            assert (await ask(s, "chat")).status == 200
        await eventually(lambda: s.router.waiting("new") == clients + 3)
        s.service.bookkeeping.enter()
        assert export(s.service.counts).models["new"].queued == clients
        blocked.set()
        await asyncio.gather(*direct)
        await s.service.shadows.settled()


async def test_no_more_copies_run_at_once_than_their_limit():
    shared = NameSettings(models={"old": 1.0}, shadow={"new": 1.0})
    async with stand(2, settings=cluster(shared)) as s:
        _, new = joined(s)
        blocked = asyncio.Event()

        async def slow(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            await blocked.wait()
            return await answer_well(request, body)

        new.reply = slow
        for _ in range(12):
            assert (await ask(s, "chat")).status == 200
        counts = s.service.shadows.counts["chat", "new"]
        assert counts.skipped == 4
        blocked.set()
        await s.service.shadows.settled()
        assert counts.same == 8


def test_a_share_copies_sessions_as_a_whole():
    names = ModelNames(cluster(NameSettings(models={"old": 1.0}, shadow={"new": 0.1})))
    copied = [names.copied_to("chat", str(number), "old") for number in range(1000)]
    assert abs(copied.count(("new",)) - 100) < 38
    assert copied == [names.copied_to("chat", str(number), "old") for number in range(1000)]
    assert not any(names.copied_to("chat", str(number), "new") for number in range(100))


@pytest.mark.parametrize("hint", ["request", "flag"])
async def test_a_template_goes_along_only_where_the_engine_takes_it(tmp_path, hint):
    file = tmp_path / "plain.jinja"
    file.write_text("{% for m in messages %}{{ m.content }} {% endfor %}")
    tokenizer = load_tokenizer("builtin:sim", template=file.read_text())
    assert tokenizer.template is not None and tokenizer.template.render([{"role": "user", "content": "a"}]) == "a "
    async with stand(1, settings=cluster(chat_template=str(file)), tokenizer=tokenizer) as s:
        s.join(s.engines[0], model="old", epoch=2, labels={"chat_template": hint})
        await ask(s, "old")
        sent = json.loads(s.engines[0].bodies[-1])
        assert sent.get("chat_template") == (file.read_text() if hint == "request" else None)
