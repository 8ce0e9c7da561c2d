"""Do OpenAI's own clients get their files and batches answered, once each, through kills, cancels and expiry?"""

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web

from penstock.adapters.stores.memory_store import MemorySpace, MemoryStore
from penstock.config.settings.frontend_settings import FrontendSettings, LimitSettings, SecuritySettings
from penstock.frontend.app import routed_handlers
from penstock_extras.batches import batch_input, batch_runner, file_routes
from penstock_extras.batches.batch_answers import LineResponse, LineResult
from penstock_extras.batches.batch_claim import BatchClaim
from penstock_extras.batches.batch_extension import batch_desk
from penstock_extras.batches.batch_folder import BatchFolder
from tests.frontend.stand import answer_well, eventually, stand

openai = pytest.importorskip("openai")
Json = dict[str, Any]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"LOOK": 0.05, "PACE": 0.01, "SAVE": 0.02, "PAUSE": 0.01}.items():
        monkeypatch.setattr(batch_runner, name, value)


def settings(folder: Path, **more: Any) -> FrontendSettings:
    return FrontendSettings(batch_folder=str(folder), **more)


def line(id: str, url: str = "/v1/chat/completions", **more: Any) -> Json:
    body = {"model": "m", "messages": [{"role": "user", "content": id}], **more}
    return {"custom_id": id, "method": "POST", "url": url, "body": body}


def lines(*ids: str) -> bytes:
    return b"".join(json.dumps(line(id)).encode() + b"\n" for id in ids)


def client(s: Any, key: str = "none") -> Any:
    return openai.AsyncOpenAI(base_url=s.server.url + "/v1", api_key=key, max_retries=0)


async def begin(ai: Any, content: bytes, **more: Any) -> Any:
    file = await ai.files.create(file=("in.jsonl", content), purpose="batch")
    wanted = {"endpoint": "/v1/chat/completions", "completion_window": "24h", **more}
    return await ai.batches.create(input_file_id=file.id, **wanted)


async def ended(ai: Any, id: str) -> Any:
    async with asyncio.timeout(10):
        while (batch := await ai.batches.retrieve(id)).status in (
            "validating",
            "in_progress",
            "finalizing",
            "cancelling",
        ):
            await asyncio.sleep(0.02)
    return batch


async def read(ai: Any, file: str) -> list[Json]:
    return [json.loads(each) for each in (await ai.files.content(file)).text.splitlines()]


async def test_a_batch_of_the_openai_client_is_answered_once_per_line(tmp_path):
    async with stand(frontend=settings(tmp_path)) as s, client(s) as ai:
        batch = await begin(ai, lines("a", "b", "c"), metadata={"job": "7"})
        assert batch.status == "validating" and batch.metadata == {"job": "7"}
        done = await ended(ai, batch.id)
        assert (done.status, done.request_counts.completed, done.request_counts.failed) == ("completed", 3, 0)
        found = await read(ai, done.output_file_id)
        assert sorted(each["custom_id"] for each in found) == ["a", "b", "c"]
        assert all(each["response"]["status_code"] == 200 and each["error"] is None for each in found)
        assert found[0]["response"]["body"]["choices"][0]["message"]["content"] == "xxxxx"
        assert done.error_file_id is None and len(s.engines[0].bodies) == 3
        assert len(s.records) == 3  # as any request, they are routed, counted and recorded
        assert [each.id for each in (await ai.batches.list()).data] == [batch.id]
        assert {each.purpose for each in (await ai.files.list()).data} == {"batch_output", "batch"}
        deleted = await ai.files.delete(done.output_file_id)
        assert deleted.deleted
        with pytest.raises(openai.NotFoundError):
            await ai.files.retrieve(done.output_file_id)


async def test_what_engines_refuse_is_in_the_error_file(tmp_path):
    async def refuse(request: web.Request, body: Json) -> web.StreamResponse:
        if "bad" in body["messages"][0]["content"]:
            return web.json_response({"error": {"message": "no"}}, status=400)
        return await answer_well(request, body)

    async with stand(frontend=settings(tmp_path)) as s, client(s) as ai:
        s.engines[0].reply = refuse
        content = lines("bad", "good") + json.dumps(line("unknown", model="other")).encode()
        done = await ended(ai, (await begin(ai, content)).id)
        assert (done.status, done.request_counts.completed, done.request_counts.failed) == ("completed", 1, 2)
        failed = {each["custom_id"]: each["response"]["status_code"] for each in await read(ai, done.error_file_id)}
        assert failed == {"bad": 400, "unknown": 404}


async def test_a_killed_frontend_loses_no_result_and_repeats_none(tmp_path):
    async def stuck(request: web.Request, body: Json) -> web.StreamResponse:
        if body["messages"][0]["content"] == "c":
            await asyncio.sleep(30)
        return await answer_well(request, body)

    async with stand(frontend=settings(tmp_path)) as s, client(s) as ai:
        s.engines[0].reply = stuck
        batch = await begin(ai, lines("a", "b", "c"))
        await eventually(lambda: len(s.engines[0].bodies) == 3)
        folder = BatchFolder(tmp_path)
        await eventually(lambda: len(list(folder.results(batch.id))) == 2)
        file = tmp_path / "batches" / f"{batch.id}.results"
        before = file.read_bytes()
    torn = before + before[:40]  # the process was killed in the middle of a line, after it had written one twice
    file.write_bytes(before[: before.index(b"\n") + 1] + torn)
    async with stand(frontend=settings(tmp_path)) as s, client(s) as ai:
        done = await ended(ai, batch.id)
        assert (done.status, done.request_counts.completed) == ("completed", 3)
        assert sorted(each["custom_id"] for each in await read(ai, done.output_file_id)) == ["a", "b", "c"]
        assert len(s.engines[0].bodies) == 1  # only what had no result was sent again
        assert not file.exists()


async def test_live_requests_push_a_batch_aside(tmp_path):
    async def slow(request: web.Request, body: Json) -> web.StreamResponse:
        await asyncio.sleep(0.3 if body["messages"][0]["content"].startswith("live") else 0)
        return await answer_well(request, body)

    async with stand(frontend=settings(tmp_path)) as s, client(s) as ai:
        s.engines[0].reply = slow
        live = [asyncio.create_task(s.chat(f"live {number}")) for number in range(batch_runner.PER_WORKER)]
        await eventually(lambda: len(s.engines[0].bodies) == len(live))
        batch = await begin(ai, lines("a"))
        await asyncio.gather(*live)
        await ended(ai, batch.id)
        words = [json.loads(body)["messages"][0]["content"] for body in s.engines[0].bodies]
        assert words == ["live 0", "live 1", "a"]


async def test_a_cancelled_batch_gives_what_it_has(tmp_path):
    async def stuck(request: web.Request, body: Json) -> web.StreamResponse:
        if body["messages"][0]["content"] != "a":
            await asyncio.sleep(30)
        return await answer_well(request, body)

    async with stand(frontend=settings(tmp_path)) as s, client(s) as ai:
        s.engines[0].reply = stuck
        batch = await begin(ai, lines("a", "b", "c", "d"))
        await eventually(lambda: len(s.engines[0].bodies) == 3)
        with pytest.raises(openai.ConflictError, match="has not ended"):
            await ai.files.delete(batch.input_file_id)
        assert (await ai.batches.cancel(batch.id)).status == "cancelling"
        done = await ended(ai, batch.id)
        assert done.status == "cancelled" and done.cancelled_at and s.engines[0].hung_up.is_set()
        assert [each["custom_id"] for each in await read(ai, done.output_file_id)] == ["a"]
        with pytest.raises(openai.ConflictError, match="cancelled already"):
            await ai.batches.cancel(batch.id)


async def test_what_does_not_run_in_its_window_expires(tmp_path):
    async with stand(0, frontend=settings(tmp_path)) as s, client(s) as ai:
        done = await ended(ai, (await begin(ai, lines("a", "b"), completion_window="1s")).id)
        assert (done.status, done.request_counts.failed) == ("expired", 2)
        assert {each["error"]["code"] for each in await read(ai, done.error_file_id)} == {"batch_expired"}


async def test_an_engine_that_fails_for_a_while_costs_no_result(tmp_path):
    calls = 0

    async def flaky(request: web.Request, body: Json) -> web.StreamResponse:
        nonlocal calls
        calls += 1
        return web.Response(status=503) if calls <= 4 else await answer_well(request, body)

    async with stand(frontend=settings(tmp_path)) as s, client(s) as ai:
        s.engines[0].reply = flaky
        done = await ended(ai, (await begin(ai, lines("a"))).id)
        assert (done.status, done.request_counts.completed) == ("completed", 1)


async def test_wrong_files_fail_their_batch_with_the_line(tmp_path):
    wrong = {
        "duplicate_custom_id": lines("a", "a"),
        "mismatched_endpoint": json.dumps(line("a", "/v1/embeddings")).encode(),
        "invalid_json_line": b"{}",
        "invalid_request": json.dumps(line("a", stream=True)).encode(),
        "line_too_large": json.dumps(line("a", text="x" * 70_000)).encode(),
        "empty_file": b"\n",
        "invalid_custom_id": lines(""),
    }
    limits = LimitSettings(body_max=65_536)
    async with stand(frontend=settings(tmp_path, limits=limits)) as s, client(s) as ai:
        for code, content in wrong.items():
            done = await ended(ai, (await begin(ai, content)).id)
            assert done.status == "failed" and [each.code for each in done.errors.data] == [code], code
        assert s.engines[0].bodies == []


async def no_such_route(request: web.Request, body: Json) -> web.StreamResponse:
    return web.json_response({"error": {"message": "Not Found"}}, status=404)


async def test_refusals_are_typed_and_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(file_routes, "FILE_MAX", 1000)
    monkeypatch.setattr(batch_input, "REQUESTS_MAX", 2)
    async with stand(frontend=settings(tmp_path)) as s, client(s) as ai:
        with pytest.raises(openai.APIStatusError, match="at most 1000 bytes") as refused:
            await ai.files.create(file=("in.jsonl", b"x" * 1001), purpose="batch")
        assert refused.value.status_code == 413
        s.engines[0].reply = no_such_route
        with pytest.raises(openai.BadRequestError, match="another purpose"):
            await ai.files.create(file=("in.jsonl", b"x"), purpose="assistants")
        for form in (
            b"",
            b"x",
            b"--b\r\n[]--b--\r\n",
            b"--b\r\n: x\r\n\r\nabc\r\n--b--\r\n",
            b'--b\r\ncontent-disposition: form-data; name="file"\r\n\r\nabc',
        ):
            kind = {"content-type": "multipart/form-data; boundary=b"}
            refusal = await s.http.post("/v1/files", data=form, headers=kind)
            assert refusal.status == 400 and (await refusal.json())["error"]["code"] == "invalid_body", form
        assert not list((tmp_path / "files").iterdir())  # nothing stays of a refused upload
        for more, text in (
            ({"endpoint": "/v1/audio/speech"}, "endpoint"),
            ({"completion_window": "8d"}, "7d"),
            ({"completion_window": "soon"}, "24h"),
        ):
            with pytest.raises(openai.BadRequestError, match=text):
                await begin(ai, lines("a"), **more)
        with pytest.raises(openai.NotFoundError):
            await ai.batches.create(
                input_file_id="file-../../x", endpoint="/v1/chat/completions", completion_window="24h"
            )
        for id in ("..%2f..%2fx", "file-" + "0" * 24):
            assert (await s.http.get(f"/v1/files/{id}/content")).status == 404
        done = await ended(ai, (await begin(ai, lines("a", "b", "c"))).id)
        assert [each.code for each in done.errors.data] == ["too_many_requests"]


async def test_keys_see_their_own_files_only(tmp_path):
    frontend = settings(tmp_path, security=SecuritySettings(api_keys=("one", "two")))
    async with stand(frontend=frontend) as s, client(s, "one") as mine, client(s, "two") as other:
        batch = await begin(mine, lines("a"))
        await ended(mine, batch.id)
        assert not (await other.files.list()).data and not (await other.batches.list()).data
        for call in (other.batches.retrieve(batch.id), other.files.content(batch.input_file_id)):
            with pytest.raises(openai.NotFoundError):
                await call
        with pytest.raises(openai.AuthenticationError):
            await client(s, "three").files.list()
        raw = await (await s.http.get(f"/v1/batches/{batch.id}", headers={"authorization": "Bearer one"})).json()
        assert "owner" not in raw


async def test_without_a_folder_there_are_no_files():
    async with stand() as s, client(s) as ai:
        with pytest.raises(openai.NotFoundError, match="batch_folder"):
            await ai.files.list()


async def test_one_process_at_a_time_has_the_claim():
    space = MemorySpace()
    stores = [MemoryStore(space) for _ in range(3)]
    claims = [BatchClaim(store, f"f{number}", 5.0) for number, store in enumerate(stores)]
    taken = [await claim.take() for claim in claims]
    assert taken == [True, False, False] and await claims[0].take()
    await stores[0].close()  # the process is gone, and its key with it
    assert not claims[2].owned and await claims[2].take() and not await claims[1].take()
    await claims[2].release()
    together = await asyncio.gather(*(claim.take() for claim in claims[1:]))
    assert sum(together) <= 1


def test_results_of_two_runs_become_one(tmp_path):
    folder = BatchFolder(tmp_path)
    (tmp_path / "batches").mkdir()
    results = [
        LineResult(
            id=str(n), custom_id="a", response=LineResponse(status_code=200, request_id="r", body=msgspec.Raw(b"{}"))
        )
        for n in range(2)
    ]
    for result in results:
        folder.append("batch-" + "0" * 24, [result])
    assert [result.id for result in folder.results("batch-" + "0" * 24)] == ["0"]


async def test_batches_use_the_folder_of_the_run(tmp_path):
    async with stand() as s:
        assert batch_desk(s.service, routed_handlers(s.service)) is None
        s.service.run = str(tmp_path)
        desk = batch_desk(s.service, routed_handlers(s.service))
        assert desk is not None and desk.folder.new_upload().is_relative_to(tmp_path / "batches")
