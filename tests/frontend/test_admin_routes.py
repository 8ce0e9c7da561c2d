"""Do the routes for people and machines say what is true?"""

import json
import re

import msgspec
import pytest
from aiohttp import web
from yarl import URL

from penstock.config.settings.cluster_settings import ClusterSettings, ModelSettings
from penstock.config.settings.frontend_settings import FrontendSettings
from penstock.frontend.admin import page_routes
from penstock.frontend.admin.request_history import RequestHistory
from penstock.kernel.values import Target
from penstock.router.events import Closed, Decision
from tests.frontend.stand import stand


async def test_models_with_slashes_and_readiness() -> None:
    settings = ClusterSettings(models={"org/m": ModelSettings(), "waiting": ModelSettings()})
    async with stand(settings=settings, card={"model": "org/m", "adapters": ("ad/one",), "max_model_len": 99}) as s:
        listed = (await (await s.http.get("/v1/models")).json())["data"]
        assert [entry["id"] for entry in listed] == ["ad/one", "org/m", "waiting"]
        one = await (await s.http.get("/v1/models/org/m")).json()
        assert one["max_model_len"] == 99 and one["parent"] is None
        assert (await (await s.http.get("/v1/models/ad/one")).json())["parent"] == "org/m"
        assert (await s.http.get("/v1/models/org/m/ready")).status == 200
        assert (await s.http.get("/v1/models/waiting/ready")).status == 503
        assert (await s.http.get("/v1/models/none/ready")).status == 404
        health = await (await s.http.get("/health")).json()
        assert health["status"] == "degraded" and health["models"] == {"org/m": 1, "waiting": 0}


async def test_health_names_what_is_not_as_it_should_be() -> None:
    async with stand() as s:
        found = await (await s.http.get("/health")).json()
        assert found["status"] == "ok"
        assert any("without an event source" in note for note in found["notes"])
        assert any("hashed text" in note for note in found["notes"])
        assert len(set(found["notes"])) == len(found["notes"]), "each is said once"
    async with stand(0) as s:
        assert (await s.http.get("/health")).status == 503
        assert (await s.http.get("/live")).status == 200


async def test_status_explain_requests_and_decisions() -> None:
    async with stand(2) as s:
        answer = await s.chat("why here")
        request = answer.headers["x-penstock-request-id"]
        status = await (await s.http.get("/admin/status")).json()
        assert status["requests"]["ok"] == 1 and {w["id"] for w in status["workers"]} == {"e0", "e1"}
        assert status["models"][0]["tokenizer"] is None and status["endpoint"] == s.server.url
        assert any("text blocks" in finding["text"] for finding in status["findings"])
        found = await (await s.http.get(f"/admin/explain/{request}")).json()
        assert found["request"]["outcome"] == "ok"
        assert len(found["decisions"][0]["candidates"]) == 2
        assert found["decisions"][0]["chosen"][0] == answer.headers["x-penstock-worker"]
        assert (await (await s.http.get("/admin/requests?limit=1")).json())["requests"][0]["id"] == request
        assert (await (await s.http.get("/admin/decisions")).json())["decisions"][0]["request"] == request
        unknown = await s.http.get("/admin/explain/nope")
        assert unknown.status == 404 and "x-penstock-request-id" in (await unknown.json())["error"]["message"]
        for limit in ("0", "-1", "x", "1001", "9" * 30, "²"):
            assert (await s.http.get(f"/admin/requests?limit={limit}")).status == 400, limit


async def test_clear_kv_blocks_asks_every_engine() -> None:
    async with stand(2) as s:
        answer = await s.http.post("/clear_kv_blocks")
        assert answer.status == 200 and (await answer.json())["cleared"] == 2
        assert [engine.resets for engine in s.engines] == [1, 1]
        await s.engines[1].stop()
        answer = await s.http.post("/clear_kv_blocks")
        found = await answer.json()
        assert answer.status == 502 and (found["cleared"], found["failed"]) == (1, 1)
        assert [w["worker"] for w in found["workers"] if not w["cleared"]] == ["e1"]


async def test_an_engine_that_announces_a_clear_late_is_made_to_take_a_step() -> None:
    async def refuse(request: web.Request, body: object) -> web.StreamResponse:
        return web.json_response({}, status=500)

    async with stand(1, card={"engine": "vllm", "events": ("tcp://127.0.0.1:9",)}) as s:
        (worker,) = (await (await s.http.post("/clear_kv_blocks")).json())["workers"]
        assert worker["cleared"] and "reason" not in worker
        (body,) = map(json.loads, s.engines[0].bodies)
        assert body["max_tokens"] == 1 and s.engines[0].resets == 1
        s.engines[0].reply = refuse
        (worker,) = (await (await s.http.post("/clear_kv_blocks")).json())["workers"]
        assert worker["cleared"] and "only with its next request" in worker["reason"]
    async with stand(1, card={"engine": "vllm"}) as s:  # it announces nothing, so there is nothing to wait for
        assert (await (await s.http.post("/clear_kv_blocks")).json())["cleared"] == 1
        assert s.engines[0].bodies == []


async def test_an_engine_without_such_a_route_is_told_by_name() -> None:
    async with stand(1, card={"engine": "llamacpp"}) as s:
        answer = await s.http.post("/clear_kv_blocks")
        (worker,) = (await answer.json())["workers"]
        assert answer.status == 502 and worker["reason"] == "llama.cpp has no route that clears its cache"
        assert s.engines[0].resets == 0


async def test_page_is_self_contained() -> None:
    async with stand() as s:
        answer = await s.http.get("/ui")
        text = await answer.text()
        assert answer.headers["content-type"].startswith("text/html")
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe-inline" not in policy
        assert not re.search(r"<style|<script>|\sstyle=|\son[a-z]+=", text)
        named = re.findall(r"(?:src|href)=\"(ui/[^\"]+)", text)
        assert len(named) == 3
        for path in named:
            file = await s.http.get(f"/{path}")
            kind = {"js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}[path.rpartition(".")[2]]
            assert file.status == 200 and file.headers["content-type"].startswith(kind)
        everything = "".join(
            [(await (await s.http.get(f"/ui/{name}")).text()) for name in page_routes._browser_files()]
        )
        elsewhere = set(re.findall(r"https?://[^\s\"'`<]+", everything)) - {
            "http://www.w3.org/2000/svg",
            "https://github.com/leeoniya/uPlot",
        }
        assert not elsewhere and "innerHTML" not in everything
        for name in ("nothing.js", "..%2fui.py", "index.html%00"):
            assert (await s.http.get(URL(f"/ui/{name}", encoded=True))).status == 404, name


async def test_other_routes_are_proxied_as_they_are() -> None:
    async with stand(2) as s:

        async def embed(request: web.Request, body: dict[str, object]) -> web.StreamResponse:
            return web.json_response({"path": request.path, "data": [1.0]}, headers={"x-engine": "1"})

        for engine in s.engines:
            engine.reply = embed
        raw = b'{"model":"m",  "input":["a"]}'
        answer = await s.http.post("/v1/embeddings", data=raw, headers={"content-type": "application/json"})
        assert (await answer.json())["path"] == "/v1/embeddings" and "x-penstock-worker" in answer.headers
        assert [engine.bodies for engine in s.engines if engine.bodies] == [[raw]]
        nameless = await s.http.post("/v1/embeddings", json={"input": "a"})
        assert nameless.status == 200  # one model: no name needed
        assert (await s.http.post("/v1/embeddings", json={"model": "x", "input": "a"})).status == 404
        assert (await s.http.post("/v1/secrets", json={"model": "m"})).status == 404
        form = b'--b\r\ncontent-disposition: form-data; name="model"\r\n\r\nm\r\n--b--\r\n'
        kind = {"content-type": "multipart/form-data; boundary=b"}
        answer = await s.http.post("/v1/audio/transcriptions", data=form, headers=kind)
        assert answer.status == 200
        wrong = await s.http.post(
            "/v1/audio/transcriptions", data=form.replace(b"\r\nm\r\n", b"\r\nzz\r\n"), headers=kind
        )
        assert wrong.status == 404


async def test_proxied_stream_of_another_dialect_passes_untouched() -> None:
    async with stand(frontend=FrontendSettings(proxied_routes=("/v1/responses",))) as s:
        sent = b'event: response.created\ndata: {"usage": {"a": 1}, "choices": []}\n\nevent: done\ndata: {}\n\n'

        async def stream(request: web.Request, body: dict[str, object]) -> web.StreamResponse:
            response = web.StreamResponse(headers={"content-type": "text/event-stream"})
            await response.prepare(request)
            await response.write(sent)
            await response.write_eof()
            return response

        s.engines[0].reply = stream
        answer = await s.http.post("/v1/responses", json={"model": "m", "input": "x", "stream": True})
        assert await answer.read() == sent
        assert s.records[0].outcome == "ok"


async def test_allow_list_is_a_setting() -> None:
    async with stand(frontend=FrontendSettings(proxied_routes=("/v1/rerank",))) as s:
        assert (await s.http.post("/v1/embeddings", json={"model": "m"})).status == 404
        assert (await s.http.post("/v1/rerank", json={"model": "m"})).status == 200


def decision(request: str, attempt: int = 1) -> Decision:
    return Decision(
        request=request,  # type: ignore[arg-type]
        attempt=attempt,
        at=0,
        model="m",
        mode="kv",
        chosen=Target("w"),  # type: ignore[arg-type]
        reason="test",
        isl=1,
        blocks=0,
        queued=0.0,
        candidates=[],
    )


def test_history_forgets_the_oldest() -> None:
    history = RequestHistory(3, 2)
    for name, attempt in (("a", 1), ("a", 2), ("b", 1), ("c", 1)):
        history.decided(decision(name, attempt))
    found = history.explain("a")
    assert found is not None and [msgspec.json.decode(line)["attempt"] for line in found.decisions] == [2]
    history.decided(decision("d"))
    assert history.explain("a") is None
    closed = Closed(
        id="x",
        model="m",
        outcome="ok",
        fault="none",
        status=200,
        reason="",
        arrived=0,
        closed=1,
        isl=1,  # type: ignore[arg-type]
    )
    for name in ("x", "y", "z", "y"):
        history.closed(msgspec.structs.replace(closed, id=name))
    assert [entry.id for entry in history.last_closed(9)] == ["y", "z"]
    RequestHistory(0, 0).decided(decision("a"))
    msgspec.json.encode(history.last_decisions(5))


@pytest.mark.parametrize("path", ["/v1/models", "/health", "/metrics", "/live"])
async def test_public_get_routes_answer(path: str) -> None:
    async with stand() as s:
        assert (await s.http.get(path)).status == 200
