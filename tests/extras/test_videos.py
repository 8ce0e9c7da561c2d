"""Does a job stay at the engine that made it, for every frontend, and is it clear what is wrong when that is gone?"""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest

from penstock.adapters.seams import Store
from penstock.adapters.stores.memory_store import MemorySpace, MemoryStore
from penstock.config.settings.cluster_settings import ClusterSettings, ModelSettings, PoolSettings
from penstock.config.settings.frontend_settings import FrontendSettings, SecuritySettings
from penstock_extras.jobs import engine_jobs
from tests.extras.job_engine import running
from tests.extras.video_engine import VideoEngine
from tests.frontend.stand import Stand, stand
from tests.frontend.test_overflow_clients import client

CLIP = {"model": "m", "prompt": "a clip", "seconds": "8"}


def engines(count: int = 2, **options: Any) -> AbstractAsyncContextManager[list[VideoEngine]]:
    return running([VideoEngine(f"e{number}", **options) for number in range(count)])


@asynccontextmanager
async def frontend(engines: list[VideoEngine], store: Store | None = None, **options: Any) -> AsyncIterator[Stand]:
    async with stand(0, **options) as s:
        s.service.cluster._node.store = store  # type: ignore[attr-defined]
        for engine in engines:
            s.join(engine)  # type: ignore[arg-type]
        yield s


async def ask(s: Stand, method: str, path: str, key: str = "", **options: Any) -> tuple[int, Any]:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with s.http.request(method, f"/v1/videos{path}", headers=headers, **options) as answer:
        return answer.status, await answer.json()


async def make(s: Stand, prompt: str, worker: str = "", key: str = "") -> dict[str, Any]:
    headers = {"x-penstock-worker": worker} if worker else {}
    headers |= {"authorization": f"Bearer {key}"} if key else {}
    async with s.http.post("/v1/videos", json={**CLIP, "prompt": prompt}, headers=headers) as answer:
        assert answer.status == 200, await answer.text()
        made: dict[str, Any] = await answer.json()
        return made


async def test_a_job_is_asked_for_at_its_engine_by_every_frontend() -> None:
    space = MemorySpace()
    async with engines() as made:
        async with frontend(made, MemoryStore(space)) as s:
            jobs = [await make(s, f"clip {number}", worker=f"e{number % 2}") for number in range(4)]
            assert len({job["id"] for job in jobs}) == 4, "two engines give the same ids, and we do not"
            assert jobs[0]["prompt"] == "clip 0" and s.records[0].outcome == "ok"
        made[1].jobs["vid 0"] |= {"status": "completed", "progress": 100}
        # The frontend has been restarted, and knows what the one before knew.
        async with frontend(made, MemoryStore(space)) as s:
            status, listed = await ask(s, "GET", "")
            assert [video["id"] for video in listed["data"]] == [job["id"] for job in reversed(jobs)]
            assert [video["status"] for video in listed["data"]] == ["queued", "queued", "completed", "queued"]
            status, page = await ask(s, "GET", f"?limit=1&order=asc&after={jobs[0]['id']}")
            assert [video["prompt"] for video in page["data"]] == ["clip 1"] and page["has_more"]
            async with s.http.get(f"/v1/videos/{jobs[1]['id']}/content") as answer:
                assert answer.content_type == "video/mp4" and await answer.read() == b"e1clip 1" * 50_000
            async with s.http.get(f"/v1/videos/{jobs[1]['id']}/content", headers={"range": "bytes=0-3"}) as answer:
                assert (answer.status, await answer.read()) == (206, b"e1cl")
            status, refused = await ask(s, "GET", f"/{jobs[0]['id']}/content")
            assert (status, refused["error"]["message"]) == (409, "it is not ready")
            assert await ask(s, "DELETE", f"/{jobs[1]['id']}") == (
                200,
                {"id": jobs[1]["id"], "object": "video.deleted", "deleted": True},
            )
            assert "vid 0" not in made[1].jobs and "vid 0" in made[0].jobs
            assert (await ask(s, "GET", f"/{jobs[1]['id']}"))[0] == 404
            assert len(space.values) == 3


async def test_an_engine_that_is_gone_is_named() -> None:
    async with engines() as made, frontend(made) as s:
        job, other = await make(s, "one", worker="e0"), await make(s, "two", worker="e1")
        port = int(made[0].url.rpartition(":")[2])
        await made[0].stop()
        status, answer = await ask(s, "GET", f"/{job['id']}")
        assert status == 502 and "the engine e0, which has video" in answer["error"]["message"]
        listed = (await ask(s, "GET", ""))[1]["data"]
        assert [video["status"] for video in listed] == ["queued", "failed"]
        assert listed[1]["error"]["code"] == "engine_gone" and listed[0]["id"] == other["id"]
        await made[0].start(port)
        status, answer = await ask(s, "GET", f"/{job['id']}")
        assert status == 404 and "it may have been restarted" in answer["error"]["message"]
        s.leave("e1")
        async with s.http.get(f"/v1/videos/{other['id']}") as response:
            answer = await response.json()
            assert response.status == 503 and int(response.headers["retry-after"]) > 0
        assert f"at the engine e1 ({made[1].url}), which is not in the cluster now" in answer["error"]["message"]
        # The same server under another name, as when servers are attached anew.
        made[1].name = "attached-7"
        s.join(made[1])  # type: ignore[arg-type]
        assert (await ask(s, "GET", f"/{other['id']}"))[0] == 200


async def test_a_remix_is_made_where_the_video_is() -> None:
    async with engines() as made, frontend(made) as s:
        for worker in ("e0", "e1", "e0"):
            job = await make(s, "first", worker=worker)
            status, remix = await ask(s, "POST", f"/{job['id']}/remix", json={"prompt": "again"})
            assert status == 200 and remix["remixed_from_video_id"] == job["id"] != remix["id"]
            assert remix["id"] == (await ask(s, "GET", f"/{remix['id']}"))[1]["id"]
        assert [len(engine.jobs) for engine in made] == [4, 2]
        assert (await ask(s, "POST", "/video_unknown/remix", json={"prompt": "x"}))[0] == 404


@pytest.mark.parametrize("cancels", [True, False])
async def test_a_job_is_cancelled_where_its_engine_can(cancels: bool) -> None:
    async with engines(1, cancels=cancels) as made, frontend(made) as s:
        job = await make(s, "long")
        status, answer = await ask(s, "POST", f"/{job['id']}/cancel")
        if cancels:
            assert (status, answer["status"], answer["id"]) == (200, "failed", job["id"])
        else:
            assert status == 501 and "DELETE the video" in answer["error"]["message"]


async def test_a_key_sees_only_its_own_jobs() -> None:
    security = SecuritySettings(api_keys=("one", "two"))
    async with engines(1) as made, frontend(made, frontend=FrontendSettings(security=security)) as s:
        job = await make(s, "mine", key="one")
        assert (await ask(s, "GET", f"/{job['id']}", key="one"))[0] == 200
        for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/content"), ("POST", "/cancel"), ("POST", "/remix")):
            body = {"json": {"prompt": "x"}} if path == "/remix" else {}
            assert (await ask(s, method, f"/{job['id']}{path}", key="two", **body))[0] == 404
        assert (await ask(s, "GET", "", key="two"))[1]["data"] == []
        assert (await ask(s, "GET", f"/{job['id']}"))[0] == 401
        assert len(made[0].asked) == 2


async def test_what_can_not_begin_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    space = MemorySpace()
    async with engines(1) as made, frontend(made, MemoryStore(space)) as s:
        for body, status, words in (
            ({**CLIP, "prompt": "forbidden"}, 400, "no such videos here"),
            ({**CLIP, "model": "x"}, 404, "'x' does not exist"),
        ):
            got, answer = await ask(s, "POST", "", json=body)
            assert got == status and words in answer["error"]["message"]
        space.outage = "the disk is full"
        got, answer = await ask(s, "POST", "", json=CLIP)
        assert got == 503 and "the disk is full" in answer["error"]["message"]
        assert made[0].jobs == {}, "a job that nobody could find is not begun"
        space.outage = None
        monkeypatch.setattr(engine_jobs, "JOBS_MAX", 1)
        await make(s, "one")
        assert (await ask(s, "POST", "", json=CLIP))[0] == 429
        monkeypatch.setattr(engine_jobs, "JOB_TTL", -1.0)
        await make(s, "room, for the other is too old")
        assert (await ask(s, "GET", ""))[1]["data"] == [] and len(space.values) == 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The Sora API:DeprecationWarning")
async def test_openais_client_makes_polls_and_fetches_a_video() -> None:
    openai = client("openai")
    async with engines() as made, frontend(made) as s:
        async with openai.AsyncOpenAI(base_url=f"{s.server.url}/v1", api_key="none", max_retries=0) as vendor:
            video = await vendor.videos.create(
                model="m", prompt="a clip", seconds="8", input_reference=("a.png", b"png", "image/png")
            )
            (engine,) = [engine for engine in made if engine.jobs]
            assert engine.forms == [{"model": "m", "prompt": "a clip", "seconds": "8"}]
            engine.jobs["vid 0"]["status"] = "completed"
            done = await vendor.videos.poll(video.id)
            assert (done.id, done.status) == (video.id, "completed")
            data = await vendor.videos.download_content(video.id)
            assert data.read() == f"{engine.name}a clip".encode() * 50_000
            remix = await vendor.videos.remix(video.id, prompt="again")
            assert [listed.id async for listed in vendor.videos.list(limit=1)] == [remix.id, video.id]
            assert (await vendor.videos.delete(video.id)).deleted
            with pytest.raises(openai.NotFoundError, match="no video"):
                await vendor.videos.retrieve(video.id)
        assert [record.outcome for record in s.records] == ["ok", "ok"]


async def test_a_job_keeps_the_name_by_which_its_model_was_asked_for() -> None:
    models = {"m": ModelSettings(pools={"main": PoolSettings()}, aliases=("clips",))}
    async with (
        engines(1) as made,
        frontend(made, MemoryStore(MemorySpace()), settings=ClusterSettings(models=models)) as s,
    ):
        for model, said in (("clips", "clips"), ("m", "video-1")):
            async with s.http.post("/v1/videos", json={**CLIP, "model": model}) as answer:
                job = await answer.json()
            _, remixed = await ask(s, "POST", f"/{job['id']}/remix", json={"prompt": "at night"})
            _, asked = await ask(s, "GET", f"/{job['id']}")
            _, listed = await ask(s, "GET", "")
            assert [told["model"] for told in (job, remixed, asked, *listed["data"][:2])] == [said] * 5
