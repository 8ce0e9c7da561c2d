"""An engine is lost in the middle of its answer: does the client see one whole stream, or a typed error?"""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from aiohttp import web

from penstock.config.settings.cluster_settings import ClusterSettings, ModelSettings, PoolSettings
from penstock.config.settings.frontend_settings import FrontendSettings, UpstreamSettings
from penstock.frontend.exchange.migration import obstacle
from penstock.frontend.exchange.open_attempts import OpenAttempts
from penstock.frontend.exchange.upstream_request import UpstreamRequest
from penstock.frontend.prompt.prompt_tokenizer import load_tokenizer
from penstock.frontend.prompt.request_body import parse
from penstock.kernel.values import WorkerCard, WorkerId
from penstock.router.events import WorkerJoined, WorkerLeft
from penstock.router.settings import HedgeSettings, MigrationSettings, QueueSettings, RouterSettings
from penstock_lab.engine.settings import SimSettings, TimingSettings
from penstock_lab.sim.sim_server import RunningServer, start
from tests.frontend.stand import ENGINE, Stand, answer_well, chunk, eventually, stand

PACED = SimSettings(
    block_size=16,
    kv_blocks=512,
    max_model_len=4096,
    timing=TimingSettings(prefill=(0.0, 0.02, 5.0), decode=(0.0, 0.0, 2.0)),
)
TOKENIZER = load_tokenizer("builtin:sim")


@asynccontextmanager
async def engines(
    count: int = 2, sim: SimSettings = PACED, router: RouterSettings | None = None, **frontend: Any
) -> AsyncIterator[tuple[Stand, list[RunningServer]]]:
    """A frontend before simulated engines that can be made to cut a stream."""
    settings = ClusterSettings(
        models={"sim": ModelSettings(tokenizer="builtin:sim", pools={"main": PoolSettings()})},
        router=router or RouterSettings(),
    )
    servers = [await start(sim, faults=True, kv_events=False) for _ in range(count)]
    async with stand(0, settings=settings, tokenizer=TOKENIZER, frontend=FrontendSettings(**frontend)) as s:
        for number, server in enumerate(servers):
            join(s, number, server)
        try:
            yield s, servers
        finally:
            for server in servers:
                await server.stop()


def join(s: Stand, number: int, server: RunningServer, epoch: int = 1) -> None:
    card = WorkerCard(
        id=WorkerId(f"e{number}"),
        epoch=epoch,
        model="sim",
        url=server.url,
        engine="sim",
        block_size=16,
        max_model_len=4096,
    )
    s.live.post("router", WorkerJoined(card=card))


def cut(servers: list[RunningServer], after: int, times: int = 1) -> None:
    """The next streams, wherever they go, break after so many tokens; afterwards all is well."""
    left = [after] * times

    def broken() -> int | None:
        return left.pop() if left else None

    for server in servers:
        server.server.faults.broken = broken  # type: ignore[method-assign]


async def events(s: Stand, path: str, body: dict[str, Any]) -> list[Any]:
    """Return the chunks of a stream; the last one is the text [DONE] where it ended in order."""
    answer = await s.http.post(path, json={**body, "model": "sim", "stream": True})
    assert answer.status == 200, await answer.text()
    found = [line[6:] for line in (await answer.read()).decode().split("\n\n") if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in found]


def text_of(chunks: list[Any]) -> str:
    out = ""
    for found in chunks:
        for choice in found["choices"] if isinstance(found, dict) else ():
            out += choice.get("text") or (choice.get("delta") or {}).get("content") or ""
    return out


CHAT = {"messages": [{"role": "user", "content": "How does the water come to the wheel?"}], "temperature": 0}
TEXT = {"prompt": "The water comes from the", "temperature": 0}
CASES = {
    "chat, limited": ("/v1/chat/completions", {**CHAT, "max_tokens": 60, "ignore_eos": True}),
    "chat, to its own end": ("/v1/chat/completions", {**CHAT}),
    "chat, max_completion_tokens": ("/v1/chat/completions", {**CHAT, "max_completion_tokens": 25}),
    "completion": ("/v1/completions", {**TEXT, "max_tokens": 60}),
    "completion, no limit named": ("/v1/completions", {**TEXT}),
    "completion, token ids": ("/v1/completions", {"prompt": [5, 6, 7, 8] * 12, "max_tokens": 40}),
    "chat, stop text": ("/v1/chat/completions", {**CHAT, "max_tokens": 90, "stop": ["."], "min_tokens": 20}),
}
SIM = msgspec.structs.replace(PACED, reply_tokens=48)


@pytest.mark.parametrize("after", [1, 7, 15])
@pytest.mark.parametrize("case", list(CASES))
async def test_text_and_usage_equal_an_undisturbed_run(case: str, after: int) -> None:
    path, body = CASES[case]
    body = {**body, "stream_options": {"include_usage": True}}
    async with engines(sim=SIM) as (s, servers):
        whole = await events(s, path, body)
        for _ in range(
            8
        ):  # on a busy machine all tokens may be out before the cut: then there is nothing to go on with
            cut(servers, after)
            broken = await events(s, path, body)
            assert text_of(broken) == text_of(whole)
            if len(s.records[-1].legs) == 2:
                break
        assert broken[-1] == whole[-1] == "[DONE]"
        for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert broken[-2]["usage"][name] == whole[-2]["usage"][name], name
        finish = [c["finish_reason"] for e in broken[:-1] for c in e["choices"] if c["finish_reason"]]
        assert finish == [c["finish_reason"] for e in whole[:-1] for c in e["choices"] if c["finish_reason"]]
        said = {(e["id"], e["object"], e["model"], e["created"]) for e in broken[:-1]}
        assert len(said) == 1, f"one stream must speak with one voice: {said}"
        assert not any("token_ids" in json.dumps(e) for e in broken)
        first, second = s.records[0], s.records[-1]
        assert (second.outcome, second.isl, second.osl) == ("ok", first.isl, first.osl)
        # Of a short answer all may be out before the cut: then only its last words were missing.
        assert (len(second.legs) == 2 and second.legs[0].failure) or second.osl == 16


@pytest.mark.parametrize("case", ["chat, limited", "completion"])
async def test_running_usage_goes_on_counting_over_a_loss(case: str) -> None:
    path, body = CASES[case]
    body = {**body, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    async with engines(sim=SIM) as (s, servers):
        for _ in range(8):  # as above
            cut(servers, 7)
            broken = await events(s, path, body)
            if len(s.records[-1].legs) == 2:
                break
        usages = [e["usage"] for e in broken[:-1] if e["choices"] and text_of([e])]
        counts = [usage["completion_tokens"] for usage in usages]
        assert counts == sorted(counts) and counts[-1] == broken[-2]["usage"]["completion_tokens"] == 60
        assert len({usage["prompt_tokens"] for usage in usages}) == 1
        assert all(usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] for usage in usages)


async def test_two_losses_in_one_answer_and_no_usage_for_a_client_that_did_not_ask() -> None:
    path, body = CASES["chat, limited"]
    async with engines(3) as (s, servers):
        whole = await events(s, path, body)
        cut(servers, 9, times=2)
        broken = await events(s, path, body)
        assert text_of(broken) == text_of(whole)
        assert not any(isinstance(e, dict) and e.get("usage") for e in broken)
        assert len(s.records[1].legs) == 3 and s.records[1].osl == 60
        counted = 'dynamo_frontend_model_migration_total{migration_type="ongoing_request",model="sim"} 2'
        assert counted in s.service.metrics.render()


async def test_a_client_that_asked_for_token_ids_gets_each_once() -> None:
    path, body = CASES["completion"]
    body = {**body, "return_token_ids": True}

    def ids(chunks: list[Any]) -> list[int]:
        return [t for e in chunks if isinstance(e, dict) for c in e["choices"] for t in c.get("token_ids") or ()]

    async with engines() as (s, servers):
        whole = await events(s, path, body)
        cut(servers, 11)
        broken = await events(s, path, body)
        assert ids(broken) == ids(whole) and len(ids(broken)) == 60


async def test_the_only_engine_comes_back_and_goes_on() -> None:
    path, body = CASES["chat, limited"]
    async with engines(1) as (s, servers):
        whole = await events(s, path, body)
        cut(servers, 9)
        running = asyncio.create_task(events(s, path, body))
        async with asyncio.timeout(10):
            while not s.router.waiting_for_worker:
                await asyncio.sleep(0.005)
        join(s, 0, servers[0], epoch=2)
        assert text_of(await running) == text_of(whole)


async def test_nobody_comes_back_ends_with_a_typed_error_and_no_end_mark() -> None:
    path, body = CASES["chat, limited"]
    router = RouterSettings(queue=QueueSettings(wait_max=0.1))
    async with engines(1, router=router) as (s, servers):
        cut(servers, 9)
        found = await events(s, path, body)
        assert found[-1]["error"]["code"] == "engine_error" and "0.1 s" in found[-1]["error"]["message"]
        assert s.records[0].outcome == "failed"


REFUSED = {
    "logprobs": ({"logprobs": True}, "log-probabilities"),
    "several": ({"n": 2}, "several answers"),
    "guided": ({"response_format": {"type": "json_object"}}, "guided"),
    "penalty": ({"frequency_penalty": 0.5}, "penalties"),
    "seed": ({"seed": 5, "temperature": 0.7}, "seed"),
    "tools": ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    "image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]},
        "not only text",
    ),
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_what_can_not_be_taken_up_says_why(case: str) -> None:
    more, why = REFUSED[case]
    raw = msgspec.json.encode({"model": "m", **CHAT, "stream": True, **more})
    parsed = parse("chat_completions", raw)
    assert why in (obstacle(UpstreamRequest("/x", raw, "application/json", "chat", True, parsed)) or "")


async def test_an_answer_that_can_not_be_taken_up_ends_with_the_reason() -> None:
    path, body = CASES["chat, limited"]
    async with engines() as (s, servers):
        cut(servers, 9)
        found = await events(s, path, {**body, "frequency_penalty": 0.5})
        assert "penalties depend on its output" in found[-1]["error"]["message"]
        assert found[-1]["error"]["type"] == "engine_error"


async def test_migration_can_be_switched_off_and_then_no_ids_are_asked_for() -> None:
    path, body = CASES["chat, limited"]
    router = RouterSettings(migration=MigrationSettings(limit=0))
    async with engines(router=router) as (s, servers):
        cut(servers, 9)
        found = await events(s, path, body)
        assert "router.migration.limit is 0" in found[-1]["error"]["message"]


# --- engines whose every byte the test says ---------------------------------------------------------------------------


async def test_an_abort_by_the_engine_is_not_passed_on_and_another_goes_on() -> None:
    async def aborts(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await said(request, [chunk({"content": "a "}), chunk({"content": ""}, finish="abort"), DONE])

    async def goes_on(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await said(request, [chunk({"content": "b"}, finish="stop"), DONE])

    async with stand(2, card={"engine": "sglang"}) as s:
        _in_turn(s, aborts, goes_on)
        body = await (await s.chat(stream=True)).read()
        assert b"abort" not in body and b"[DONE]" in body
        sent = [json.loads(raw) for engine in s.engines for raw in engine.bodies if b"continue_final" in raw]
        assert sent[0]["messages"][-1] == {"role": "assistant", "content": "a "}


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
@pytest.mark.parametrize(
    "odd", [[None], ["x"], 5, {"a": 1}, [{"index": 0, "delta": "x"}], [{"text": 5}], [{"delta": {"content": 5}}]]
)
async def test_an_odd_chunk_of_a_lost_engine_is_the_engines_fault(odd: Any, path: str, engine: str) -> None:
    router = RouterSettings(queue=QueueSettings(wait_max=0.1))
    settings = ClusterSettings(models={"m": ModelSettings(pools={"main": PoolSettings()})}, router=router)
    async with stand(2, card={"engine": engine}, settings=settings) as s:

        async def breaking(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            response = web.StreamResponse(headers={"content-type": "text/event-stream"})
            await response.prepare(request)
            await response.write(chunk({"content": "a"}))
            await response.write(b"data: " + json.dumps({"choices": odd}).encode() + b"\n\n")
            assert request.transport is not None
            request.transport.close()
            return response

        for each in s.engines:
            each.reply = breaking
        body = {"model": "m", "max_tokens": 9, "stream": True, "messages": [{"role": "user", "content": "x"}]}
        async with s.http.post(path, json=body) as answer:
            assert answer.status == 200 and b'"error"' in await answer.read()
        assert (s.records[0].outcome, s.records[0].fault) == ("failed", "engine")


async def test_an_error_in_the_stream_is_the_engines_end_not_the_clients() -> None:
    async def breaks(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        broken = b'data: {"error":{"message":"engine core died","code":500}}\n\n'
        return await said(request, [chunk({"content": "a "}), broken, DONE])

    async def goes_on(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await said(request, [chunk({"content": "b"}, finish="stop"), DONE])

    async with stand(2, card={"engine": "sglang"}) as s:
        _in_turn(s, breaks, goes_on)
        body = await (await s.chat(stream=True)).read()
        assert b"engine core died" not in body and body.endswith(b"[DONE]\n\n")
        assert s.records[0].outcome == "ok" and "engine core died" in s.records[0].legs[0].failure


async def test_a_silent_engine_is_left_and_another_goes_on() -> None:
    async def stalls(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await said(request, [chunk({"content": "a "})], hold=30.0)

    async def goes_on(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await said(request, [chunk({"content": "b"}, finish="stop"), DONE])

    frontend = FrontendSettings(upstream=UpstreamSettings(stall_timeout=0.3))
    async with stand(2, card={"engine": "sglang"}, frontend=frontend) as s:
        _in_turn(s, stalls, goes_on)
        body = await (await s.chat(stream=True)).read()
        assert body.endswith(b"[DONE]\n\n") and "silent" in s.records[0].legs[0].failure


async def test_a_stream_that_lost_only_its_last_words_is_ended_for_its_engine() -> None:
    async def ends_early(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await said(request, [chunk({"content": "a "}), chunk({"content": "b"}, finish="stop")])

    async with stand(1, card={"engine": "sglang"}) as s:
        s.engines[0].reply = ends_early
        body = await (await s.chat(stream=True)).read()
        assert body.endswith(b"[DONE]\n\n") and body.count(b'"finish_reason":"stop"') == 1
        assert s.records[0].outcome == "ok" and len(s.engines[0].bodies) == 1


async def test_an_unary_answer_that_the_engine_aborted_is_asked_for_again() -> None:
    async def aborts(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        message = {"role": "assistant", "content": "half"}
        return web.json_response({"choices": [{"index": 0, "message": message, "finish_reason": "abort"}]})

    async def well(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        message = {"role": "assistant", "content": "whole"}
        return web.json_response({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})

    async with stand(2) as s:
        _in_turn(s, aborts, well)
        found = await (await s.chat()).json()
        assert found["choices"][0]["message"]["content"] == "whole"


async def test_an_engine_that_refuses_because_it_ends_is_taken_out_though_its_health_is_good() -> None:
    async def leaving(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        error = {"message": "cannot schedule new futures after shutdown", "code": 500}
        return web.json_response({"error": error}, status=500)

    async def well(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await answer_well(request, body)

    async with stand(2, card={"engine": "vllm"}) as s:
        _in_turn(s, leaving, well, well, well)
        for _ in range(3):
            assert (await s.chat()).status == 200
        states = sorted(worker.state for worker in s.router.roster)
        assert states == ["draining", "ready"]
        assert [worker.failures for worker in s.router.roster] == [0, 0], "ending is no failure"


async def test_a_stream_of_nothing_but_the_end_mark_is_no_answer() -> None:
    async def empty(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await said(request, [DONE])

    async with stand(2, card={"engine": "vllm"}) as s:
        _in_turn(s, empty, answer_well)
        body = await (await s.chat(stream=True)).read()
        assert b"t0 " in body and body.endswith(DONE)
        assert "without any output" in s.records[0].legs[0].failure


IMPATIENT = FrontendSettings(upstream=UpstreamSettings(quiet_timeout=0.1))


async def test_a_silent_stream_of_a_worker_that_left_is_given_up_early() -> None:

    async def stalls(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await said(request, [chunk({"content": "a "})], hold=30.0)

    async def goes_on(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await said(request, [chunk({"content": "b"}, finish="stop"), DONE])

    async with stand(2, frontend=IMPATIENT, card={"engine": "sglang"}) as s:
        _in_turn(s, stalls, goes_on)
        answer = await s.chat(stream=True)
        gone = WorkerId(answer.headers["x-penstock-worker"])
        s.live.post("router", WorkerLeft(worker=gone, epoch=1, reason="its health check failed"))
        assert (await answer.read()).endswith(DONE)
        assert "its worker is gone" in s.records[0].legs[0].failure


@pytest.mark.parametrize("streamed", [True, False])
async def test_an_answer_that_a_worker_that_left_never_begins_is_got_elsewhere(streamed: bool) -> None:
    """vLLM forgets what comes while its engine ends, and keeps the connection open: it even waits for it."""
    arrived = asyncio.Event()

    async def hangs(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        arrived.set()
        await asyncio.sleep(30)
        raise AssertionError("its client must have hung up by now")

    async with stand(2, frontend=IMPATIENT) as s:
        _in_turn(s, hangs, answer_well)
        asked = asyncio.create_task(s.chat(stream=streamed))
        await arrived.wait()
        (request,) = s.router.requests.values()
        assert request.target is not None
        s.live.post("router", WorkerLeft(worker=request.target.worker, epoch=1, reason="its health check failed"))
        answer = await asked
        body = await answer.read()
        assert answer.status == 200 and (b"[DONE]" in body if streamed else b"xxxxx" in body)
        assert "its worker is gone" in s.records[0].legs[0].failure


@pytest.mark.parametrize("begun", [True, False])
async def test_a_request_that_can_go_nowhere_else_waits_for_a_worker_that_is_gone(begun: bool) -> None:
    """An engine that compiles kernels answers no health check either."""
    goes_on, arrived = asyncio.Event(), asyncio.Event()

    async def busy(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        if begun:
            await response.write(chunk({"content": "a "}))
        arrived.set()
        await goes_on.wait()
        await response.write(chunk({"content": "b"}, finish="stop") + DONE)
        return response

    async with stand(frontend=IMPATIENT, card={"engine": "sglang"}) as s:
        s.engines[0].reply = busy
        asked = asyncio.create_task(s.chat(stream=True))
        await arrived.wait()
        s.live.post("router", WorkerLeft(worker=WorkerId("e0"), epoch=1, reason="its health check failed"))
        (attempt,) = s.service.exchanges.attempts.open.values()
        await eventually(lambda: not begun or attempt.tap.started)  # type: ignore[attr-defined]
        for later in (1.0, 50.0):  # beyond the limit on those that are gone, within that on silence
            await attempt.look(time.monotonic() + later)
        goes_on.set()
        assert (await (await asked).read()).endswith(DONE)
        assert s.records[0].outcome == "ok"


async def test_a_worker_that_answers_no_health_check_is_avoided_unless_bytes_come_from_it_or_it_is_the_last() -> None:
    async with stand(2) as s:
        attempts, now = s.service.exchanges.attempts, time.monotonic()
        worker = s.router.roster.workers[WorkerId("e0")]
        s.silent.add(WorkerId("e0"))
        attempts.heard[WorkerId("e0")] = now
        attempts.judge(s.service.cluster, now + 4.0, 5.0)
        assert not worker.doubts, "a byte came since"
        attempts.judge(s.service.cluster, now + 6.0, 5.0)
        assert worker.doubts
        assert {(await s.chat(f"prompt {n}")).headers["x-penstock-worker"] for n in range(4)} == {"e1"}
        assert any("health check" in finding.text for finding in s.service.cluster.status().findings)
        s.live.post("router", WorkerLeft(worker=WorkerId("e1"), epoch=1, reason="it is no more"))
        assert (await s.chat()).headers["x-penstock-worker"] == "e0"
        s.silent.clear()
        attempts.judge(s.service.cluster, now + 6.0, 5.0)
        assert not worker.doubts


async def test_streams_move_from_an_engine_that_stops_in_the_middle_and_a_finding_names_it() -> None:
    """As at SIGSTOP: its connections stay open, and nothing comes."""

    async def stops(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await said(request, [chunk({"content": "a "})], hold=30.0)

    async def goes_on(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await said(request, [chunk({"content": "b"}, finish="stop"), DONE])

    async with stand(2, card={"engine": "sglang"}) as s:
        _in_turn(s, stops, goes_on)
        answer = await s.chat(stream=True)
        attempts, cluster = s.service.exchanges.attempts, s.service.cluster
        (attempt,) = attempts.open.values()
        now = time.monotonic()
        for later in (1.0, 4.0, 9.0, 11.0):
            await attempt.look(now + later)
            attempts.judge(cluster, now + later, 5.0)
        assert any("fallen silent" in finding.text for finding in cluster.status().findings)
        await attempt.look(now + 11.0)
        assert (await answer.read()).endswith(DONE)
        assert s.records[0].outcome == "ok" and "fell silent" in s.records[0].legs[0].failure


def test_a_worker_is_measured_by_its_own_pauses() -> None:
    attempts, worker, posts = OpenAttempts(), WorkerId("w"), []
    cluster: Any = SimpleNamespace(silent=(), doubt=lambda worker, on, reason: posts.append(on))
    for at in range(0, 40, 4):  # a long prefill lets its streams stand for four seconds again and again
        for later in range(4):
            attempts.note_byte(worker, float(at))
            attempts.judge(cluster, at + later + 0.9, 5.0)
    attempts.judge(cluster, 36.0 + 30.0, 5.0)
    assert not posts and not attempts.doubted(worker)
    attempts.judge(cluster, 36.0 + 50.0, 5.0)
    assert posts == [True] and attempts.doubted(worker)
    attempts.streaming.clear()  # they went elsewhere, which makes it no better
    attempts.judge(cluster, 36.0 + 60.0, 5.0)
    assert posts == [True]
    attempts.note_byte(worker, 97.0)
    attempts.judge(cluster, 97.1, 5.0)
    assert posts == [True, False]


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_request_that_waits_at_a_silent_engine_is_got_elsewhere(streamed: bool) -> None:
    begun = asyncio.Event()

    async def hangs(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        begun.set()
        await asyncio.sleep(30)
        raise AssertionError("its client must have hung up by now")

    async with stand(2) as s:
        _in_turn(s, hangs, answer_well)
        asked = asyncio.create_task(s.chat(stream=streamed))
        await begun.wait()
        (attempt,) = s.service.exchanges.attempts.open.values()
        now = time.monotonic()
        s.silent.add(attempt.dispatch.target.worker)  # type: ignore[attr-defined]
        s.service.exchanges.attempts.judge(s.service.cluster, now + 20.0, 5.0)
        await attempt.look(now + 20.0)
        assert (await asked).status == 200
        assert "its engine is silent" in s.records[0].legs[0].failure


@pytest.mark.parametrize(
    ("engine", "labels", "wanted"),
    [
        ("vllm", {"priority": "on"}, [-7, None]),
        ("vllm", {}, [None, None]),
        ("sglang", {"priority": "on"}, [7, 0]),
        ("sglang", {"priority": "off"}, [None, None]),
    ],
)
async def test_priority_travels_in_the_engines_own_way(
    engine: str, labels: dict[str, str], wanted: list[int | None]
) -> None:
    async with stand(card={"engine": engine, "labels": labels}) as s:
        await s.chat(headers={"x-penstock-priority": "7"})
        await s.chat()
        assert [json.loads(body).get("priority") for body in s.engines[0].bodies] == wanted


# --- two workers at once ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_late_first_token_is_got_from_a_second_engine_and_the_first_is_let_go(streamed: bool) -> None:
    async def hangs(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await asyncio.sleep(30)
        raise AssertionError("its client must have hung up by now")

    settings = ClusterSettings(
        models={"m": ModelSettings(pools={"main": PoolSettings()})},
        router=RouterSettings(hedge=HedgeSettings(after=0.1, share=1.0)),
    )
    async with stand(2, settings=settings) as s:
        _in_turn(s, hangs, answer_well)
        answer = await s.chat(stream=streamed)
        assert answer.status == 200
        body = await answer.read()
        assert b"[DONE]" in body if streamed else b"xxxxx" in body
        await eventually(lambda: s.records)
        record = s.records[0]
        assert record.outcome == "ok" and [leg.failure for leg in record.legs] == ["another worker was faster", None]
        await eventually(lambda: any(engine.hung_up.is_set() for engine in s.engines))
        assert answer.headers["x-penstock-worker"] == record.legs[-1].worker


async def test_with_hedging_on_a_client_that_leaves_stops_all_engines() -> None:
    async def hangs(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await asyncio.sleep(30)
        raise AssertionError("its client must have hung up by now")

    settings = ClusterSettings(
        models={"m": ModelSettings(pools={"main": PoolSettings()})},
        router=RouterSettings(hedge=HedgeSettings(after=0.1, share=1.0)),
    )
    async with stand(2, settings=settings) as s:
        _in_turn(s, hangs, hangs)
        asking = asyncio.create_task(s.chat())
        await eventually(lambda: sum(len(engine.bodies) for engine in s.engines) == 2)
        asking.cancel()
        await eventually(lambda: all(engine.hung_up.is_set() for engine in s.engines))
        await eventually(lambda: s.records and s.records[0].outcome == "cancelled")


DONE = b"data: [DONE]\n\n"


async def said(request: web.Request, parts: list[bytes], hold: float = 0.0) -> web.StreamResponse:
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    for part in parts:
        await response.write(part)
    if hold:
        await asyncio.sleep(hold)
    await response.write_eof()
    return response


def _in_turn(s: Stand, *replies: Any) -> None:
    """The first request that any engine gets is answered by the first reply, and so on."""
    left = list(replies)

    async def reply(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        assert request[ENGINE]
        found: web.StreamResponse = await left.pop(0)(request, body)
        return found

    for engine in s.engines:
        engine.reply = reply
