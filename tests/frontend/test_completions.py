"""Do completions reach an engine and come back whole, whatever engine and client do?"""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from penstock.adapters.engines.http.event_stream import chunks_of
from penstock.config.settings.cluster_settings import ClusterSettings, ModelSettings, PoolSettings
from penstock.config.settings.frontend_settings import FrontendSettings, LimitSettings, UpstreamSettings
from penstock.router.settings import QueueSettings, RouterSettings
from tests.frontend.raw import connect, read_answer
from tests.frontend.stand import ENGINE, Reply, answer, answer_well, chunk, eventually, stand
from tests.security.attacks import post


async def test_unary_chat_passes_through_with_marks() -> None:
    async with stand() as s:
        answer = await s.chat("hello", headers={"x-request-id": "my-id", "traceparent": "00-aa-bb-01"}, seed=5)
        assert answer.status == 200
        found = await answer.json()
        assert found["choices"][0]["message"]["content"] == "xxxxx"
        assert answer.headers["x-penstock-worker"] == "e0"
        assert answer.headers["x-penstock-request-id"] == "my-id"
        assert answer.headers["x-penstock-expected-cached-tokens"] == "0"
        assert float(answer.headers["x-penstock-queue-ms"]) >= 0
        engine = s.engines[0]
        assert json.loads(engine.bodies[0])["seed"] == 5
        assert engine.headers[0]["x-request-id"] == "my-id"
        assert engine.headers[0]["traceparent"] == "00-aa-bb-01"
        record = s.records[0]
        assert (record.outcome, record.osl, record.cached, record.id) == ("ok", 5, 3, "my-id")


async def test_unary_body_reaches_engine_byte_for_byte() -> None:
    async with stand() as s:
        raw = b'{ "model":"m", "x":1.50e2,  "messages":[{"role":"user","content":"\\u00e9\xc3\xa9"}] }'
        await s.http.post("/v1/chat/completions", data=raw, headers={"content-type": "application/json"})
        assert s.engines[0].bodies == [raw]


async def test_stream_is_byte_equal_when_client_asks_for_usage() -> None:
    async with stand() as s:
        answer = await s.chat(stream=True, stream_options={"include_usage": True})
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert await answer.read() == s.engines[0].sent


async def test_usage_chunk_is_learnt_and_left_out_for_a_client_that_did_not_ask() -> None:
    async with stand() as s:
        answer = await s.chat(stream=True)
        body = await answer.read()
        sent = s.engines[0].sent
        events = [event for event in sent.split(b"\n\n") if b'"usage"' not in event]
        assert body == b"\n\n".join(events)
        assert json.loads(s.engines[0].bodies[0])["stream_options"] == {"include_usage": True}
        assert (s.records[0].osl, s.records[0].cached) == (5, 3)
        assert s.records[0].ttft is not None and s.records[0].itl.gaps == 4


async def test_stream_options_of_the_client_are_kept_beside_ours() -> None:
    async with stand() as s:
        await (await s.chat(stream=True, stream_options={"include_usage": False, "other": 1})).read()
        assert json.loads(s.engines[0].bodies[0])["stream_options"] == {"other": 1, "include_usage": True}


async def test_first_packet_carries_headers_and_token() -> None:
    async with stand() as s:

        async def slow(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            return await answer(request, body, 3, gap=0.05)

        s.engines[0].reply = slow
        reader, writer = await asyncio.open_connection("127.0.0.1", int(s.server.url.rsplit(":", 1)[1]))
        body = json.dumps({"model": "m", "stream": True, "messages": [{"role": "user", "content": "a"}]}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
        writer.write(head + body)
        first = await reader.read(65_536)
        assert first.startswith(b"HTTP/1.1 200") and b"t0 " in first
        writer.close()


async def test_text_and_token_prompts() -> None:
    async with stand() as s:
        for prompt in ("some text", ["a", "b"], [1, 2, 3, 4, 5, 6, 7, 8], [[1, 2], [3]]):
            answer = await s.http.post("/v1/completions", json={"model": "m", "prompt": prompt, "n": 2})
            assert answer.status == 200, await answer.text()
        blocks = [record.blocks for record in s.records]
        assert len(blocks[2]) == 2 and blocks[3] == []
        assert s.records[2].isl == 8 and s.records[3].isl == 3


async def test_failing_worker_is_replaced_before_the_first_token() -> None:
    async with stand(2) as s:

        async def broken(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            response = web.StreamResponse(headers={"content-type": "text/event-stream"})
            await response.prepare(request)
            await response.write(chunk({"role": "assistant", "content": ""}))
            assert request.transport is not None
            request.transport.close()
            return response

        s.engines[0].reply = broken
        for _ in range(4):
            answer = await s.chat(stream=True, stream_options={"include_usage": True})
            assert answer.status == 200
            assert await answer.read() == s.engines[1].sent
        assert any(record.attempts == 2 for record in s.records)
        assert all(record.outcome == "ok" for record in s.records)


async def test_dead_worker_is_replaced_and_all_dead_is_502() -> None:
    async with stand(2) as s:
        await s.engines[0].stop()
        for _ in range(3):
            assert (await s.chat()).status == 200
        await s.engines[1].stop()
        answer = await s.chat()
        assert answer.status in (502, 503)
        error = (await answer.json())["error"]
        assert error["type"] in ("engine_error", "overloaded_error") and error["message"]


async def test_engine_500_is_retried_and_then_502() -> None:
    async with stand(2) as s:

        async def failing(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            return web.json_response({"error": {"message": "boom"}}, status=500)

        s.engines[0].reply = failing
        assert {(await s.chat()).status for _ in range(3)} == {200}
        s.engines[1].reply = failing
        answer = await s.chat()
        assert answer.status == 502
        assert "boom" in (await answer.json())["error"]["message"]


def broken(how: str) -> Callable[[web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]:
    """Return an engine that breaks, in one way, at prompts that begin with "poison"."""

    async def reply(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if not body["messages"][0]["content"].startswith("poison"):
            return await answer_well(request, body)
        if how == "500":
            return web.json_response({"error": {"message": "CUDA error"}}, status=500)
        if how == "hangs up":
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        code = {"no code": {}, "a text": {"code": "internal"}}[how]
        await response.write(b"data: " + json.dumps({"error": {"message": "boom", **code}}).encode() + b"\n\n")
        return response

    return reply


@pytest.mark.parametrize("how", ["500", "hangs up", "no code", "a text"])
@pytest.mark.parametrize("streamed", [True, False])
async def test_a_prompt_at_which_every_engine_breaks_harms_nobody_else(how: str, streamed: bool) -> None:
    async with stand(3) as s:
        for engine in s.engines:
            engine.reply = broken(how)
        assert (await s.chat("well")).status == 200
        for number in range(12):  # four calls of a client that tries each three times
            assert (await s.chat(f"poison {number}", stream=streamed)).status in (500, 502)
            assert (await s.chat(f"well {number}")).status == 200
        lost = [record for record in s.records if record.outcome == "failed"]
        assert [record.attempts for record in lost] == [3 if how == "hangs up" else 2] * 12
        assert all("it failed alike on e" in record.reason for record in lost) == (how != "hangs up")
        workers = s.service.cluster.status().workers
        assert [worker.breaker for worker in workers] == ["closed"] * 3


@pytest.mark.parametrize(
    "error",
    [
        {"message": "The model `m` does not exist.", "type": "NotFoundError", "param": "model", "code": 404},
        {"message": "model 'm' not found, try pulling it first", "type": "api_error"},
        {"message": "Model not found. Did you forget to load it?", "code": 400},
    ],
)
@pytest.mark.parametrize("streamed", [True, False])
async def test_an_engine_that_now_serves_another_model_is_not_the_clients_fault(
    error: dict[str, Any], streamed: bool
) -> None:
    async with stand(2) as s:

        async def other(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            return web.json_response({"error": error}, status=400 if error.get("code") == 400 else 404)

        s.engines[0].reply = other
        for number in range(24):
            assert (await s.chat(f"prompt {number}", stream=streamed)).status == 200
        assert len(s.engines[0].bodies) <= 5, "its breaker opens, until the supervisor has looked again"
        s.engines[1].reply = other
        answer = await s.chat("nobody has it", stream=streamed)
        assert answer.status in (404, 502) and "odel" in (await answer.json())["error"]["message"]


async def test_engine_400_goes_to_the_client_as_it_is_and_harms_no_worker() -> None:
    async with stand(2) as s:

        async def refusing(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            return web.json_response({"error": {"message": "top_k must be small", "code": 400}}, status=400)

        for engine in s.engines:
            engine.reply = refusing
        for _ in range(8):
            answer = await s.chat(top_k=-7)
            assert answer.status == 400
            assert (await answer.json())["error"]["message"] == "top_k must be small"
        assert sum(len(engine.bodies) for engine in s.engines) == 8
        assert all(worker.breaker == "closed" for worker in s.service.cluster.status().workers)


async def test_busy_engine_is_503_with_retry_after_and_no_fault() -> None:
    async with stand() as s:

        async def busy(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            return web.json_response({"error": {"message": "full"}}, status=503)

        s.engines[0].reply = busy
        for _ in range(5):
            answer = await s.chat()
            assert answer.status == 503
        assert s.service.cluster.status().workers[0].breaker == "closed"


async def test_break_after_first_token_is_an_error_event_and_never_a_second_answer() -> None:
    async with stand(2) as s:

        async def breaking(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            response = web.StreamResponse(headers={"content-type": "text/event-stream"})
            await response.prepare(request)
            await response.write(chunk({"content": "one"}))
            await asyncio.sleep(0.05)
            assert request.transport is not None
            request.transport.close()
            return response

        for engine in s.engines:
            engine.reply = breaking
        answer = await s.chat(stream=True)
        body = await answer.read()
        events = [event for event in body.split(b"\n\n") if event]
        assert len(events) == 2 and b"one" in events[0]
        error = json.loads(events[1][5:])["error"]
        assert error["type"] == "engine_error" and "e" in error["message"]
        assert b"[DONE]" not in body
        assert sum(len(engine.bodies) for engine in s.engines) == 1
        assert s.records[0].outcome == "failed" and s.records[0].fault == "engine"


async def test_a_broken_stream_leaves_its_connection_for_the_next_request() -> None:
    async with stand() as s:
        reader, writer = await connect(s)
        for text, ended in (("a", b'"error"'), ("b", b"[DONE]")):  # one pooled connection, two of its users
            s.engines[0].reply = writes(chunk({"content": text})) if text == "a" else answer_well
            writer.write(post(b'{"model":"m","stream":true,"messages":[{"role":"user","content":"a"}]}'))
            answer = await read_answer(reader)
            assert ended in answer.body and "connection" not in answer.headers
        writer.close()


async def test_stream_that_ends_without_its_mark_is_not_taken_as_whole() -> None:
    async with stand() as s:

        async def early(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            response = web.StreamResponse(headers={"content-type": "text/event-stream"})
            await response.prepare(request)
            await response.write(chunk({"content": "one"}))
            await response.write_eof()
            return response

        s.engines[0].reply = early
        body = await (await s.chat(stream=True)).read()
        assert b'"error"' in body and s.records[0].outcome == "failed"


async def test_engines_own_error_event_is_passed_on_after_the_first_token_and_retried_before() -> None:
    async with stand(2) as s:

        async def failing(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            response = web.StreamResponse(headers={"content-type": "text/event-stream"})
            await response.prepare(request)
            if body["seed"]:
                await response.write(chunk({"content": "one"}))
                await asyncio.sleep(0.02)
            await response.write(b'data: {"error":{"message":"out of memory","code":500}}\n\ndata: [DONE]\n\n')
            await response.write_eof()
            return response

        s.engines[0].reply = failing
        for _ in range(2):
            assert b"t4" in await (await s.chat(stream=True, seed=0)).read()
        s.engines[1].reply = failing
        body = await (await s.chat(stream=True, seed=1)).read()
        assert b"out of memory" in body
        assert s.records[-1].outcome == "failed"


@pytest.mark.parametrize("stream", [True, False])
async def test_client_that_hangs_up_aborts_the_engine(stream: bool) -> None:
    async with stand() as s:
        started = asyncio.Event()

        async def endless(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            started.set()
            if not body.get("stream"):
                await asyncio.sleep(60)
            return await answer(request, body, 100_000, gap=0.01)

        s.engines[0].reply = endless
        task = asyncio.create_task(s.chat(stream=stream))
        await started.wait()
        if stream:
            response = await task
            await response.content.readany()
            response.close()
        else:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        async with asyncio.timeout(5):
            await s.engines[0].hung_up.wait()
        await eventually(lambda: s.records)
        assert s.records[0].outcome == "cancelled"
        await eventually(lambda: s.service.gate.inflight == 0)
        assert s.service.cluster.status().workers[0].active_requests == 0


async def test_client_that_leaves_on_the_end_mark_has_its_answer() -> None:
    async with stand() as s:
        response = await s.chat(stream=True)
        seen = b""
        while b"[DONE]" not in seen:
            seen += await response.content.readany()
        response.close()
        await eventually(lambda: s.records)
        assert s.records[0].outcome == "ok"


async def test_deadline_is_504_before_and_an_error_event_after_the_first_token() -> None:
    async with stand() as s:

        async def slow(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            if body["seed"]:
                return await answer(request, body, 10_000, gap=0.01)
            await asyncio.sleep(60)
            raise AssertionError

        s.engines[0].reply = slow
        response = await s.chat(seed=0, headers={"x-penstock-timeout": "0.1"})
        assert response.status == 504
        assert (await response.json())["error"]["code"] == "deadline_exceeded"
        body = await (await s.chat(seed=1, stream=True, headers={"x-penstock-timeout": "0.2"})).read()
        assert b"t0 " in body and b"deadline_exceeded" in body
        async with asyncio.timeout(5):
            await s.engines[0].hung_up.wait()


async def test_silent_engine_is_given_up() -> None:
    frontend = FrontendSettings(upstream=UpstreamSettings(first_byte_timeout=0.1, stall_timeout=0.3))
    async with stand(frontend=frontend) as s:

        async def silent(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            if body["seed"]:
                return await answer(request, body, 2, gap=60)
            await asyncio.sleep(60)
            raise AssertionError

        s.engines[0].reply = silent
        response = await s.chat(seed=0, stream=True)
        assert response.status == 502 and "no first byte" in (await response.json())["error"]["message"]
        body = await (await s.chat(seed=1, stream=True)).read()
        assert b"silent for" in body


async def test_heartbeat_keeps_a_quiet_stream_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.frontend.exchange.client_answer.HEARTBEAT", 0.05)
    async with stand() as s:

        async def quiet(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            return await answer(request, body, 3, gap=0.4)

        s.engines[0].reply = quiet
        body = await (await s.chat(stream=True)).read()
        assert b": waiting\n\n" in body
        assert body.replace(b": waiting\n\n", b"").endswith(b"data: [DONE]\n\n")


QUIET = {
    "/v1/chat/completions": (b": waiting\n\n", b"data: [DONE]"),
    "/v1/messages": (b"event: ping\n", b"event: message_stop"),
    "/v1/responses": (b"event: response.in_progress\n", b"event: response.completed"),
}
"""What each API's clients count as a sign of life, and what ends its stream."""


@pytest.mark.parametrize("path", QUIET)
async def test_a_client_hears_something_before_the_first_token_and_the_answer_may_still_move(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.frontend.exchange.client_answer.HEARTBEAT", 0.05)
    alive, end = QUIET[path]
    async with stand(2) as s:
        heard = asyncio.Event()

        async def failing(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            await heard.wait()
            return web.json_response({"error": {"message": "boom"}}, status=500)

        s.engines[0].reply = failing
        body = {"model": "m", "stream": True, "max_tokens": 5, "messages": [{"role": "user", "content": "a"}]}
        for _ in range(2):
            response = await s.http.post(path, json={**body, "input": "a"})
            assert response.status == 200 and response.content_type == "text/event-stream"
            if not s.engines[0].bodies:
                await response.read()
                continue
            said = b""
            while said.count(alive) < 4:
                said += await response.content.readany()
            heard.set()
            said += await response.read()
            assert b"t4 " in said and end in said
            break
        else:
            raise AssertionError("nothing went to the first engine")
        assert s.records[-1].attempts == 2 and s.records[-1].outcome == "ok"


@pytest.mark.parametrize("path", QUIET)
async def test_a_refusal_after_the_streams_begin_is_an_event_in_the_apis_own_words(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.frontend.exchange.client_answer.HEARTBEAT", 0.05)
    async with stand() as s:
        heard = asyncio.Event()

        async def refusing(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            await heard.wait()
            return web.json_response({"error": {"message": "no such tool"}}, status=400)

        s.engines[0].reply = refusing
        body = {"model": "m", "stream": True, "max_tokens": 5, "messages": [{"role": "user", "content": "a"}]}
        response = await s.http.post(path, json={**body, "input": "a"})
        assert response.status == 200
        heard.set()
        last = json.loads((await response.read()).rsplit(b"data: ", 1)[1])
        error = last["response"]["error"] if path == "/v1/responses" else last["error"]
        assert "no such tool" in error["message"] and "{" not in error["message"]
        assert error.get("type", error["code"] if path == "/v1/responses" else "") in (
            "invalid_request_error",
            "invalid_prompt",
        )
        assert s.records[0].status == 400 and s.records[0].fault == "client"


async def test_a_request_that_waits_in_the_queue_is_not_silent_and_a_whole_answer_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("penstock.frontend.exchange.client_answer.HEARTBEAT", 0.05)
    router = RouterSettings(queue=QueueSettings(start_wait=30.0))
    settings = ClusterSettings(models={"m": ModelSettings(pools={"main": PoolSettings()})}, router=router)
    async with stand(settings=settings) as s:
        s.leave("e0")
        await eventually(lambda: not s.service.cluster.status().workers)
        response = await s.chat(stream=True)
        assert await response.content.readexactly(11) == b": waiting\n\n"

        async def slow(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            await asyncio.sleep(0.5)
            return await answer_well(request, body)

        s.engines[0].reply = slow
        whole = asyncio.create_task(s.chat())
        s.join(s.engines[0], epoch=2)
        assert (await response.read()).endswith(b"data: [DONE]\n\n")
        assert (await (await whole).json())["choices"]


async def test_other_separators_and_split_events_pass() -> None:
    async with stand() as s:

        async def crlf(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            response = web.StreamResponse(headers={"content-type": "text/event-stream"})
            await response.prepare(request)
            data = (b": ping\n\n" + chunk({"content": "é"}) * 3 + b"data: [DONE]\n\n").replace(b"\n\n", b"\r\n\r\n")
            request[ENGINE].sent = data
            for position in range(0, len(data), 7):
                await response.write(data[position : position + 7])
                await asyncio.sleep(0)
            await response.write_eof()
            return response

        s.engines[0].reply = crlf
        body = await (await s.chat(stream=True)).read()
        assert body == s.engines[0].sent
        await eventually(lambda: s.records)  # the answer's end has not waited for the engine's
        assert s.records[0].osl == 3


async def test_nvext_in_the_answer_only_on_request() -> None:
    async with stand() as s:
        extra = {"extra_fields": ["worker_id", "timing", "mystery"], "mystery": {"a": 1}}
        found = await (await s.chat(nvext=extra)).json()
        assert found["nvext"]["worker_id"]["worker_id"] == "e0"
        assert found["nvext"]["timing"]["cached_tokens"] == 3
        assert json.loads(s.engines[0].bodies[0])["nvext"] == extra
        assert "nvext" not in await (await s.chat()).json()
        body = await (await s.chat(stream=True, nvext=extra)).read()
        events = [event for event in body.split(b"\n\n") if event]
        assert json.loads(events[-2][5:])["nvext"]["worker_id"]["dp_rank"] == 0
        assert events[-1] == b"data: [DONE]"


async def test_pin_and_unknown_pin() -> None:
    async with stand(3) as s:
        for name in ("e2", "e1"):
            assert (await s.chat(nvext={"backend_instance_id": name})).headers["x-penstock-worker"] == name
        pinned = await s.chat(nvext={"backend_instance_id": "e1"}, headers={"x-dynamo-worker-instance-id": "e0"})
        assert pinned.headers["x-penstock-worker"] == "e0"
        refused = await s.chat(nvext={"backend_instance_id": 4711})
        assert refused.status == 400 and "4711" in (await refused.json())["error"]["message"]


async def test_cache_salt_from_nvext_reaches_engine_and_blocks() -> None:
    async with stand(card={"engine": "vllm"}) as s:
        long = "word " * 400
        await s.chat(long, nvext={"cache_salt": "tenant"})
        await s.chat(long, cache_salt="tenant")
        await s.chat(long)
        assert json.loads(s.engines[0].bodies[0])["cache_salt"] == "tenant"
        first, second, third = (record.blocks for record in s.records)
        assert first == second and first and first[0] != third[0]


async def test_unknown_model_lists_the_known_ones_and_adapters_are_models() -> None:
    async with stand(card={"adapters": ("org/lora-a",)}) as s:
        refused = await s.http.post("/v1/completions", json={"model": "nope", "prompt": "x"})
        assert refused.status == 404
        error = (await refused.json())["error"]
        assert error["code"] == "model_not_found" and "m, org/lora-a" in error["message"]
        answer = await s.http.post("/v1/completions", json={"model": "org/lora-a", "prompt": "x"})
        assert answer.status == 200
        assert s.records[0].model == "m"


async def test_model_without_worker_is_503_with_retry_after() -> None:
    async with stand(0) as s:
        answer = await s.chat()
        assert answer.status == 503 and int(answer.headers["retry-after"]) >= 1
        assert (await answer.json())["error"]["type"] == "overloaded_error"


async def test_prompt_too_long_says_the_numbers() -> None:
    frontend = FrontendSettings(limits=LimitSettings(prompt_max=10))
    async with stand(frontend=frontend) as s:
        answer = await s.http.post("/v1/completions", json={"model": "m", "prompt": [1] * 11})
        error = (await answer.json())["error"]
        assert answer.status == 400 and error["param"] == "prompt" and "11" in error["message"]
        assert "10" in error["message"]
    async with stand(card={"max_model_len": 8}) as s:
        answer = await s.http.post("/v1/completions", json={"model": "m", "prompt": [1] * 8})
        assert answer.status == 400 and (await answer.json())["error"]["code"] == "context_length_exceeded"


async def test_inflight_limit_of_router_and_of_process() -> None:
    settings = ClusterSettings(models={"m": ModelSettings()}, router=RouterSettings(inflight_max=1))
    async with stand(settings=settings) as s:
        started = asyncio.Event()

        async def waiting(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            started.set()
            await asyncio.sleep(60)
            raise AssertionError

        s.engines[0].reply = waiting
        first = asyncio.create_task(s.chat())
        await started.wait()
        refused = await s.chat()
        assert refused.status == 429 and refused.headers["retry-after"] == "1"
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)


async def test_same_request_id_twice_at_once_is_two_requests() -> None:
    async with stand() as s:
        release = asyncio.Event()

        async def waiting(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            await release.wait()
            return await answer_well(request, body)

        s.engines[0].reply = waiting
        both = [asyncio.create_task(s.chat(headers={"x-request-id": "same"})) for _ in range(2)]
        await eventually(lambda: len(s.engines[0].bodies) == 2)
        release.set()
        ids = {(await task).headers["x-penstock-request-id"] for task in both}
        assert len(ids) == 2 and "same" in ids


async def test_strange_request_id_is_replaced() -> None:
    async with stand() as s:
        for wished in ("a b", "x" * 129, "ü"):
            answer = await s.chat(headers={"x-request-id": wished})
            assert answer.headers["x-penstock-request-id"].startswith("req-")


async def test_metrics_of_a_stream() -> None:
    async with stand() as s:
        await (await s.chat(stream=True, nvext={"context_type": "agent"})).read()
        await s.chat("x", nvext={"agent_hints": {"priority": 3}})
        await s.http.post("/v1/completions", json={"model": "evil\n", "prompt": "x"})
        text = await (await s.http.get("/metrics")).text()
        for line in (
            'dynamo_frontend_requests_total{endpoint="chat_completions",error_type="",model="m",'
            'request_type="stream",status="success"} 1',
            'dynamo_frontend_requests_started_total{endpoint="chat_completions",model="m",request_type="unary"} 1',
            'dynamo_frontend_time_to_first_token_seconds_count{model="m"} 1',
            'dynamo_frontend_inter_token_latency_seconds_count{model="m"} 4',
            'dynamo_frontend_output_tokens_total{model="m"} 10',
            'dynamo_frontend_cached_tokens_sum{model="m"} 6',
            'dynamo_frontend_active_requests{model="m"} 0',
            'dynamo_frontend_queued_requests{model="m"} 0',
            'penstock_requests_by_context_type_total{model="m",context_type="agent"} 1',
            'penstock_kv_without_event_source{model="m"} 1',
            'penstock_worker_index_state{model="m",state="none",worker="e0"} 1',
        ):
            assert line + "\n" in text, line
        assert "evil" not in text
        assert "dynamo_component_router_kv_hit_rate_bucket" in text


async def test_context_types_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.adapters.telemetry.frontend_metrics.CONTEXT_TYPES_MAX", 2)
    async with stand() as s:
        for name in ("a", "b", "c", "d", "a"):
            await s.chat(nvext={"context_type": name})
        text = await (await s.http.get("/metrics")).text()
        assert 'penstock_requests_by_context_type_total{model="m",context_type="other"} 2' in text
        assert 'context_type="c"' not in text


async def test_a_hint_that_does_nothing_is_said_and_counted() -> None:
    async with stand() as s:
        idle = {"session_control": {"action": "close"}, "cache_control": {"type": "ephemeral"}}
        answer = await (await s.chat(nvext={**idle, "extra_fields": ["worker_id"]})).json()
        assert answer["nvext"]["ignored_hints"] == ["cache_control", "session_control.action"]
        answer = await (await s.chat(nvext={"session_control": {"action": None}})).json()
        assert "nvext" not in answer
        text = await (await s.http.get("/metrics")).text()
        assert 'penstock_ignored_hints_total{model="m",hint="cache_control"} 1' in text


async def test_a_pin_and_a_priority_reach_the_tiers_or_are_reported() -> None:
    hints = {"cache_control": {"type": "ephemeral", "ttl": "5m"}, "agent_hints": {"priority": 3}}
    labels = {"kv_tiers": "priority", "client_fields": "kv_transfer_params"}
    async with stand(card={"engine": "sim", "labels": labels}) as s:
        answer = await s.chat(nvext=hints)
        assert "x-penstock-ignored-hints" not in answer.headers
        await s.chat(nvext=hints, kv_transfer_params={"x": 1, "penstock": {"pin": 9}})
        await s.chat()
        sent = [json.loads(body).get("kv_transfer_params") for body in s.engines[0].bodies]
        assert sent == [
            {"penstock": {"pin": 300.0, "priority": 3}},
            {"x": 1, "penstock": {"pin": 9, "priority": 3}},
            None,
        ]
    async with stand(card={"engine": "sim", "labels": {"kv_tiers": "lru"}}) as s:
        await s.chat(nvext={"agent_hints": {"next_request_in": 60}})
        await s.chat(headers={"x-penstock-next-request-in": "90"})
        assert (await s.chat(nvext={"agent_hints": {"next_request_in": "soon"}})).status == 400
        sent = [json.loads(body).get("kv_transfer_params") for body in s.engines[0].bodies]
        assert sent == [{"penstock": {"prefetch": True, "after": after}} for after in (58.0, 88.0)]
    async with stand() as s:
        answer = await s.chat(headers={"x-penstock-next-request-in": "90"})
        assert answer.headers["x-penstock-ignored-hints"] == "agent_hints.next_request_in"
    for order in ("", "lru"):
        async with stand(card={"engine": "sim", "labels": {"kv_tiers": order} if order else {}}) as s:
            answer = await s.chat(nvext=hints, headers={"x-request-id": "r"})
            assert answer.headers["x-penstock-ignored-hints"] == "cache_control"
            assert b"kv_transfer_params" not in s.engines[0].bodies[0]
            assert s.records[0].ignored_hints == ("cache_control",)
            explained = s.service.history.explain("r")
            assert explained is not None and explained.request is not None
            assert explained.request.ignored_hints == ("cache_control",)


async def test_client_that_reads_nothing_is_cut_off() -> None:
    frontend = FrontendSettings(upstream=UpstreamSettings(stall_timeout=0.5))
    async with stand(frontend=frontend) as s:

        async def flood(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            response = web.StreamResponse(headers={"content-type": "text/event-stream"})
            await response.prepare(request)
            while True:
                await response.write(chunk({"content": "x" * 60_000}))

        s.engines[0].reply = flood
        _, writer = await asyncio.open_connection("127.0.0.1", int(s.server.url.rsplit(":", 1)[1]), limit=1024)
        body = json.dumps({"model": "m", "stream": True, "messages": [{"role": "user", "content": "a"}]}).encode()
        writer.write(f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode())
        writer.write(body)
        await eventually(lambda: s.records, timeout=10)
        assert s.records[0].outcome == "cancelled"
        await eventually(lambda: s.service.gate.inflight == 0)
        async with asyncio.timeout(5):
            await s.engines[0].hung_up.wait()
        writer.close()


async def test_slow_body_is_408(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.frontend.http.request_context.BODY_TIMEOUT", 0.1)
    async with stand() as s:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(s.server.url.rsplit(":", 1)[1]))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 408")
        writer.close()


async def test_a_stream_for_a_client_of_http_1_0_ends_with_its_connection() -> None:
    async with stand() as s:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(s.server.url.rsplit(":", 1)[1]))
        body = json.dumps({"model": "m", "stream": True, "messages": [{"role": "user", "content": "a"}]}).encode()
        head = "POST /v1/chat/completions HTTP/1.0\r\nhost: x\r\nconnection: Keep-Alive, TE\r\n"
        head += f"content-length: {len(body)}"
        # Behind another request: there the library forgets that only the connection's end can be the body's.
        writer.write(b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n" + head.encode() + b"\r\n\r\n" + body)
        async with asyncio.timeout(10):
            answers = await reader.read()
        assert answers.rstrip().endswith(b"[DONE]") and b"transfer-encoding" not in answers.lower()
        writer.close()


async def test_a_stream_ends_with_its_end_mark_whatever_the_engine_does_then() -> None:
    async with stand() as s:
        read = asyncio.Event()

        async def lingering(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            response = web.StreamResponse(headers={"content-type": "text/event-stream"})
            await response.prepare(request)
            await response.write(chunk({"content": "a"}) + b"data: [DONE]\n\n")
            await read.wait()
            await response.write_eof()
            return response

        s.engines[0].reply = lingering
        reader, writer = await connect(s)
        async with asyncio.timeout(10):
            for _ in range(2):  # on one connection: the second does not wait for the first one's engine
                writer.write(post(b'{"model":"m","stream":true,"messages":[{"role":"user","content":"a"}]}'))
                assert (await read_answer(reader)).body == chunk({"content": "a"}) + b"data: [DONE]\n\n"
        await eventually(lambda: len(s.records) == 2 and s.service.gate.inflight == 0)
        assert {record.outcome for record in s.records} == {"ok"}
        writer.close()
        read.set()


FINISH, USAGE = chunk({}, finish="stop"), b'data: {"choices":[],"usage":{"completion_tokens":1}}\n\n'


@pytest.mark.parametrize(
    ("written", "outcome"),
    [
        ([b"event: message\n" + chunk({"content": "a"}), FINISH, b"data: [DONE]\n\n"], "ok"),
        ([b": hello\nid: 1\n" + chunk({"content": "a"}), b"id: 2\n" + FINISH, b"id: 3\ndata: [DONE]\n\n"], "ok"),
        ([b": ping\r\n\r\n", chunk({"content": "a"}), b": ping\r\n\r\n", FINISH, b"data: [DONE]\n\n"], "ok"),
        ([b"data:\n\n", chunk({"content": "a"}), FINISH, b"data:[DONE]"], "ok"),
        ([chunk({"content": "a"}), FINISH, USAGE], "ok"),
        ([chunk({"content": "a"}), FINISH.rstrip()], "ok"),
        ([chunk({"content": "a"}, finish="stop").rstrip() + b"\r\n\r\n"], "ok"),
        ([chunk({"content": "a"}), USAGE], "failed"),
        ([chunk({"content": "a"}), FINISH[:-20]], "failed"),
    ],
)
async def test_what_is_a_whole_stream(written: list[bytes], outcome: str) -> None:
    async with stand() as s:
        s.engines[0].reply = writes(*written)
        body = await (await s.chat(stream=True)).read()
        assert chunks_of(body)[0]["choices"][0]["delta"]["content"] == "a"
        assert (b"[DONE]" in body) == (outcome == "ok") and (b'"error"' in body) == (outcome == "failed")
        await eventually(lambda: s.records)
        assert s.records[0].outcome == outcome and s.records[0].attempts == 1


def said(*shape: Any) -> bytes:
    return b"data: " + json.dumps(*shape).encode() + b"\n\n"


WORDS = "top_k must be small"
REFUSALS = [
    said({"error": {"message": WORDS, "code": 400}}),
    said({"error": {"message": WORDS, "code": "400"}}),
    said({"error": {"message": WORDS, "type": "invalid_request_error", "code": None}}),
    said({"error": {"message": WORDS, "type": "BadRequestError"}}),
    said({"error": {"message": WORDS, "code": "context_length_exceeded"}}),
    said({"object": "error", "message": WORDS, "type": "BadRequestError", "param": None, "code": 400}),
    said({"error": WORDS, "error_type": "validation"}),
    said({"message": WORDS, "status_code": 400}),
    said({"detail": WORDS, "status": "400"}),
    said({"code": 400, "msg": WORDS}),
    said({"detail": [{"loc": ["body", "top_k"], "msg": WORDS}], "type": "RequestValidationError"}),
    said({"choices": [{"index": 0, "delta": {}, "error": {"message": WORDS, "code": 400}, "finish_reason": "error"}]}),
    b'error: {"code":400,"message":"' + WORDS.encode() + b'"}\n\n',
    b"event: error\n" + said({"message": WORDS, "code": 400}),
]
FAILURES = [
    said({"error": {"message": WORDS, "code": 500}}),
    said({"error": WORDS}),
    said({"error": {"message": WORDS}}),
    said({"error": WORDS, "error_type": "generation"}),
    said({"errors": [{"message": WORDS}]}),
    said({"choices": [{"index": 0, "delta": {}, "error": {"message": WORDS}, "finish_reason": "stop"}]}),
    said({"object": "error", "message": WORDS, "code": 50001}),
    said({"choices": [{"index": 0, "delta": {}, "finish_reason": "error"}], "error": {"message": WORDS}}),
    said({"choices": [{"index": 0, "delta": {"content": ""}, "finish_reason": "error"}]}),
    said(WORDS),
    b"data: " + WORDS.encode() + b"\n\n",
    WORDS.encode(),
    b'{"error":"' + WORDS.encode() + b'"}',
]


@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize("event", REFUSALS)
async def test_a_refusal_within_a_stream_keeps_its_status_and_words_and_is_tried_once(
    event: bytes, started: bool
) -> None:
    async with stand(2) as s:
        for engine in s.engines:
            engine.reply = writes(*([chunk({"content": "a"})] if started else []), event, b"data: [DONE]\n\n")
        for _ in range(3):
            response = await s.chat(stream=True, headers={"connection": "close"})
            body = await response.read()
            error = json.loads(body)["error"] if not started else chunks_of(body)[-1]["error"]
            assert WORDS in error["message"] and error["type"] == "invalid_request_error"
            assert response.status == 200 if started else response.status in (400, 422)
        assert sum(len(engine.bodies) for engine in s.engines) == 3
        assert {(record.outcome, record.fault) for record in s.records} == {("failed", "client")}
        assert all(worker.breaker == "closed" for worker in s.service.cluster.status().workers)


@pytest.mark.parametrize("dialect", ["openai", "vllm", "sglang", "llamacpp", "trtllm"])
@pytest.mark.parametrize("event", FAILURES)
async def test_a_failure_within_a_stream_is_got_elsewhere(event: bytes, dialect: str) -> None:
    async with stand(2, card={"engine": dialect}) as s:
        s.engines[0].reply = writes(event)
        for _ in range(2):
            assert b"t4" in await (await s.chat(stream=True)).read()
        s.engines[1].reply = s.engines[0].reply
        response = await s.chat(stream=True)
        message = (await response.json())["error"]["message"]
        assert response.status == 502 and (WORDS in message or "finish reason 'error'" in message)


@pytest.mark.parametrize(
    "body",
    [
        *({"error": {"message": WORDS, "code": 400}}, {"object": "error", "message": WORDS}),
        {"choices": [{"message": {"content": ""}, "finish_reason": "stop", "error": {"message": WORDS, "code": 400}}]},
    ],
)
async def test_an_error_in_place_of_a_whole_answer_is_no_answer(body: dict[str, Any]) -> None:
    async with stand() as s:

        async def failing(request: web.Request, _: dict[str, Any]) -> web.StreamResponse:
            return web.json_response(body)

        s.engines[0].reply = failing
        response = await s.chat()
        assert response.status == (502 if "object" in body else 400)
        assert WORDS in (await response.json())["error"]["message"]


@pytest.mark.parametrize("status", [413, 429, 503])
@pytest.mark.parametrize(
    ("given", "passed"),
    [("37", "37"), (" 36.5 ", "37"), ("9" * 400, "86400"), ("nan", None), ("-3", None), ("x", None)],
)
async def test_an_engines_retry_after_is_passed_on(status: int, given: str, passed: str | None) -> None:
    async with stand(2) as s:

        async def later(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            return web.json_response({"error": {"message": "full"}}, status=status, headers={"retry-after": given})

        for engine in s.engines:
            engine.reply = later
        response = await s.chat()
        assert (response.status, response.headers.get("retry-after")) == (status, passed)


@pytest.mark.parametrize("path", QUIET)
@pytest.mark.parametrize("engine", ["vllm", "openai"])
async def test_a_field_of_ours_that_an_engine_refuses_is_left_out_from_then_on(path: str, engine: str) -> None:
    async with stand(2, card={"engine": engine}) as s:

        async def strict(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            for name in ("return_token_ids", "stream_options"):
                if name in body:
                    extra = {"type": "extra_forbidden", "loc": ["body", name], "msg": "Extra inputs are not permitted"}
                    return web.json_response({"detail": [extra]}, status=422)
            return await answer_well(request, body)

        s.engines[0].reply = strict
        body = {"model": "m", "stream": True, "max_tokens": 5, "messages": [{"role": "user", "content": "a"}]}
        for _ in range(4):
            response = await s.http.post(path, json={**body, "input": "a"})
            assert response.status == 200 and QUIET[path][1] in await response.read()
        refused = 2 if engine == "vllm" else 1
        assert len(s.engines[0].bodies) == 2 + refused and len(s.engines[1].bodies) == 2
        assert "stream_options" in json.loads(s.engines[1].bodies[-1])
        assert [(record.outcome, record.attempts, record.osl) for record in s.records] == [("ok", 1, 5)] * 4
        s.join(s.engines[0], engine=engine, epoch=2)
        before = len(s.engines[0].bodies)
        while len(s.engines[0].bodies) == before:
            await (await s.http.post(path, json={**body, "input": "a"})).read()
        assert len(s.engines[0].bodies) == before + refused + 1, "another engine there is asked anew"


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (400, "Unknown field streamOptions"),
        (422, "body.include_usage: extra fields not permitted"),
        (500, "generate() got an unexpected keyword argument 'stream_options'"),
        (501, "stream options are not supported"),
        (200, "stream_options is not supported"),
    ],
)
async def test_a_refusal_of_a_field_of_ours_is_known_in_other_words(status: int, words: str) -> None:
    async with stand() as s:

        async def strict(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            if "stream_options" not in body:
                return await answer_well(request, body)
            if status == 200:
                return await writes(said({"error": {"message": words, "code": 400}}))(request, body)
            return web.json_response({"error": {"message": words}}, status=status)

        s.engines[0].reply = strict
        for _ in range(2):
            assert b"t4" in await (await s.chat(stream=True)).read()
        assert len(s.engines[0].bodies) == 3


async def test_a_field_of_the_clients_own_that_an_engine_refuses_is_the_clients_matter() -> None:
    async with stand() as s:

        async def strict(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            return web.json_response({"error": {"message": "no stream_options here"}}, status=400)

        s.engines[0].reply = strict
        for _ in range(2):
            answer = await s.chat(stream=True, stream_options={"include_usage": True})
            assert answer.status == 400 and "stream_options" in await answer.text()
        assert len(s.engines[0].bodies) == 2


def writes(*pieces: bytes) -> Reply:
    """Return an engine's behaviour: a stream of exactly these bytes."""

    async def reply(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for piece in pieces:
            await response.write(piece)
        await response.write_eof()
        return response

    return reply


@pytest.mark.parametrize("path", QUIET)
@pytest.mark.parametrize("begun", [False, True])
async def test_a_whole_answer_to_a_stream_is_a_stream(path: str, begun: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.frontend.exchange.client_answer.HEARTBEAT", 0.05 if begun else 15.0)
    call = {"id": "call_a", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    message = {"role": "assistant", "content": "It rains.", "tool_calls": [call]}
    async with stand() as s:

        async def whole(request: web.Request, _: dict[str, Any]) -> web.StreamResponse:
            if begun:
                await waits.wait()
            choice = {"index": 0, "message": message, "finish_reason": "tool_calls"}
            usage = {"prompt_tokens": 7, "completion_tokens": 3}
            return web.json_response({"id": "a", "choices": [choice], "usage": usage})

        waits = asyncio.Event()
        s.engines[0].reply = whole
        body = {"model": "m", "stream": True, "max_tokens": 5, "messages": [{"role": "user", "content": "a"}]}
        if not begun:
            waits.set()
        async with s.http.post(path, json={**body, "input": "a"}) as response:
            waits.set()
            text = await response.read()
            assert response.content_type == "text/event-stream"
        assert b"It rains." in text and b"Oslo" in text and b'"error":{' not in text
        (record,) = s.records
        assert (record.outcome, record.osl, record.attempts) == ("ok", 3, 1)
        s.engines[0].reply = answers_with({"choices": []})
        async with s.http.post(path, json={**body, "input": "a"}) as response:
            text = await response.read()
        assert b"error" in text and s.records[1].status == 502


@pytest.mark.parametrize("content_type", ["text/plain", "application/json", "application/octet-stream"])
async def test_a_stream_is_one_whatever_its_type_says(content_type: str) -> None:
    async with stand() as s:

        async def plain(request: web.Request, _: dict[str, Any]) -> web.StreamResponse:
            stream = b": hello\n\n" + chunk({"content": "It rains."}) + FINISH + b"data: [DONE]\n\n"
            return web.Response(body=stream, content_type=content_type)

        s.engines[0].reply = plain
        response = await s.chat(stream=True)
        assert response.content_type == "text/event-stream" and b"It rains." in await response.read()
        assert s.records[0].outcome == "ok"


async def test_a_whole_text_completion_to_a_stream_is_a_stream() -> None:
    async with stand() as s:
        s.engines[0].reply = answers_with({"choices": [{"index": 0, "text": "It rains.", "finish_reason": "stop"}]})
        body = {"model": "m", "prompt": "x", "stream": True}
        events = chunks_of(await (await s.http.post("/v1/completions", json=body)).read())
        assert [event["choices"] for event in events] == [[{"index": 0, "text": "It rains.", "finish_reason": "stop"}]]


def answers_with(body: dict[str, Any]) -> Reply:
    """Return an engine's behaviour: this answer, whole."""

    async def reply(request: web.Request, _: dict[str, Any]) -> web.StreamResponse:
        return web.json_response(body)

    return reply
