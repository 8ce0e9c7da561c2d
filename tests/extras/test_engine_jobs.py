"""Do images and files stay at the engine that has them, for every frontend, also after a restart?"""

import email
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from penstock.adapters.stores.memory_store import MemorySpace, MemoryStore
from penstock.config.settings.frontend_settings import FrontendSettings, SecuritySettings
from penstock_extras.batches.batch_desk import UploadedForm
from penstock_extras.jobs import engine_files
from tests.extras.image_engine import ImageEngine
from tests.extras.job_engine import running
from tests.frontend.stand import Stand, stand
from tests.frontend.test_overflow_clients import client


def engines(count: int = 2) -> AbstractAsyncContextManager[list[ImageEngine]]:
    return running([ImageEngine(f"e{number}") for number in range(count)])


@asynccontextmanager
async def frontend(
    engines: list[ImageEngine], folder: Path, space: MemorySpace | None = None, keys: tuple[str, ...] = ()
) -> AsyncIterator[Stand]:
    options = FrontendSettings(batch_folder=str(folder), security=SecuritySettings(api_keys=keys))
    async with stand(0, frontend=options) as s:
        s.service.cluster._node.store = MemoryStore(space or MemorySpace())  # type: ignore[attr-defined]
        for engine in engines:
            s.join(engine)  # type: ignore[arg-type]
        yield s


async def ask(s: Stand, method: str, path: str, *, worker: str = "", key: str = "", **options: Any) -> tuple[int, Any]:
    headers = {"x-penstock-worker": worker} if worker else {}
    headers |= {"authorization": f"Bearer {key}"} if key else {}
    async with s.http.request(method, path, headers=headers, **options) as answer:
        if answer.content_type == "application/json":
            return answer.status, await answer.json()
        return answer.status, await answer.read()


def upload(content: bytes, purpose: str = "vision", **fields: str) -> aiohttp.FormData:
    form = aiohttp.FormData()
    form.add_field("purpose", purpose)
    for name, value in fields.items():
        form.add_field(name, value)
    form.add_field("file", content, filename="a-b.png", content_type="image/png")
    return form


async def test_image_jobs_are_made_listed_fetched_cancelled_and_deleted_at_their_engines(tmp_path: Path) -> None:
    space = MemorySpace()
    async with engines() as made:
        async with frontend(made, tmp_path, space) as s:
            jobs = []
            for number in range(3):
                body = {"model": "m", "prompt": f"p{number}"}
                status, job = await ask(s, "POST", "/v1/images", worker=f"e{number % 2}", json=body)
                assert status == 200 and job["status"] == "queued" and job["id"].startswith("image_")
                jobs.append(job["id"])
        made[1].images["img-0"]["status"] = "completed"
        async with frontend(made, tmp_path, space) as s:  # the frontend has been restarted
            _, listed = await ask(s, "GET", "/v1/images")
            assert [(job["prompt"], job["status"]) for job in listed["data"]] == [
                ("p2", "queued"),
                ("p1", "completed"),
                ("p0", "queued"),
            ]
            assert await ask(s, "GET", f"/v1/images/{jobs[1]}/content") == (200, b"e1 img-0")
            assert (await ask(s, "POST", f"/v1/images/{jobs[2]}/cancel"))[1]["status"] == "cancelled"
            assert made[0].images["img-1"]["status"] == "cancelled" and made[0].images["img-0"]["status"] == "queued"
            assert (await ask(s, "DELETE", f"/v1/images/{jobs[0]}"))[1]["deleted"]
            assert [len(engine.images) for engine in made] == [1, 1]
            assert (await ask(s, "GET", f"/v1/images/{jobs[0]}"))[0] == 404
            video = jobs[1].replace("image", "video")
            assert (await ask(s, "GET", f"/v1/videos/{video}"))[0] == 404, "an id is of one kind"


@pytest.mark.parametrize("route", ["/v1/images/generations", "/v1/images/edits"])
@pytest.mark.parametrize("absolute", [False, True])
async def test_images_that_lie_at_their_engine_are_fetched_there(tmp_path: Path, route: str, absolute: bool) -> None:
    async with engines() as made, frontend(made, tmp_path) as s:
        body = {"model": "m", "prompt": "p", "n": 2, "response_format": "url"}
        body |= {"user": "absolute"} if absolute else {}
        answers = [(await ask(s, "POST", route, worker=f"e{number}", json=body))[1] for number in (1, 0)]
        urls = [entry["url"] for answer in answers for entry in answer["data"]]
        assert len(set(urls)) == 4 and all(url.startswith("/v1/images/image_") for url in urls)
        assert answers[0]["id"] in urls[0]
        contents = [(await ask(s, "GET", url))[1] for url in urls]
        assert contents == [b"e1 img-0", b"e1 img-1", b"e0 img-0", b"e0 img-1"]
        _, inline = await ask(s, "POST", route, json={**body, "response_format": "b64_json"})
        assert inline["data"] == [{"b64_json": "cG5n"}]
        assert len(await s.service.cluster.store.list("jobs/")) == 4  # type: ignore[union-attr]


async def test_a_file_of_an_engine_leads_requests_there(tmp_path: Path) -> None:
    space = MemorySpace()
    async with engines() as made:
        async with frontend(made, tmp_path, space) as s:
            status, ours = await ask(s, "POST", "/v1/files", data=upload(b"{}", "batch"))
            assert status == 200 and ours["id"].startswith("file-")
            files = []
            for number, worker in enumerate(("e1", "e0", "e1")):
                form = upload(b"png %d" % number, model="m")
                status, file = await ask(s, "POST", "/v1/files", worker=worker, data=form)
                assert status == 200 and file["id"].startswith("file_") and file["purpose"] == "vision"
                files.append(file["id"])
            assert made[1].files["f0"]["filename"] == "a-b.png" and made[1].files["f0"]["type"] == "image/png"
        async with frontend(made, tmp_path, space) as s:
            _, listed = await ask(s, "GET", "/v1/files")
            assert {entry["id"] for entry in listed["data"]} == {ours["id"], *files}
            _, visions = await ask(s, "GET", "/v1/files?purpose=vision")
            assert {entry["id"] for entry in visions["data"]} == set(files)
            assert visions["data"][0]["filename"] == "a-b.png" and visions["data"][0]["bytes"] == 5
            assert await ask(s, "GET", f"/v1/files/{files[2]}/content") == (200, b"png 2")
            assert (await ask(s, "GET", f"/v1/files/{files[1]}"))[1]["id"] == files[1]
            for id, engine, name in ((files[0], made[1], "f0"), (files[1], made[0], "f0"), (files[2], made[1], "f1")):
                body = {"model": "m", "prompt": "p", "input_reference": {"file_id": id}}
                assert (await ask(s, "POST", "/v1/images", json=body))[0] == 200
                assert engine.prompts[-1]["input_reference"] == {"file_id": name}
            form = aiohttp.FormData({"model": "m", "prompt": "edit", "image": files[1]}, default_to_multipart=True)
            assert (await ask(s, "POST", "/v1/images/edits", data=form))[0] == 200
            assert made[0].prompts[-1]["image"] == "f0"
            two = {"model": "m", "prompt": "p", "images": files[:2]}
            status, refused = await ask(s, "POST", "/v1/images/generations", json=two)
            assert status == 400 and "lie at two engines" in refused["error"]["message"]
            assert (await ask(s, "DELETE", f"/v1/files/{files[0]}"))[1] == {
                "id": files[0],
                "object": "file",
                "deleted": True,
            }
            assert list(made[1].files) == ["f1"]
            await made[0].stop()
            _, listed = await ask(s, "GET", "/v1/files")
            assert {entry["id"]: entry["status"] for entry in listed["data"]} == {
                ours["id"]: "processed",
                files[1]: "error",
                files[2]: "processed",
            }


def test_names_in_a_form_for_an_engine_make_no_headers(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"png")
    name = 'a"; filename="x"\r\nx-more: 1'
    body, kind = engine_files._form(UploadedForm(path, name, "image/png", {name: b"1"}))
    parts = email.message_from_bytes(f"content-type: {kind}\r\n\r\n".encode() + body).get_payload()
    expected = "a%22; filename=%22x%22%0D%0Ax-more: 1"
    assert [part.get_param("name", header="content-disposition") for part in parts] == [expected, "file"]
    assert parts[1].get_filename() == expected and parts[1].get_payload(decode=True) == b"png"
    assert not any(part["x-more"] for part in parts)


async def test_a_key_sees_only_its_own_images_and_files(tmp_path: Path) -> None:
    async with engines(1) as made, frontend(made, tmp_path, keys=("one", "two")) as s:
        _, file = await ask(s, "POST", "/v1/files", key="one", data=upload(b"secret", model="m"))
        _, image = await ask(s, "POST", "/v1/images", key="one", json={"model": "m", "prompt": "p"})
        for path in (f"/v1/files/{file['id']}", f"/v1/files/{file['id']}/content", f"/v1/images/{image['id']}"):
            assert (await ask(s, "GET", path, key="one"))[0] == 200
            assert (await ask(s, "GET", path, key="two"))[0] == 404
        assert (await ask(s, "GET", "/v1/files", key="two"))[1]["data"] == []
        body = {"model": "m", "prompt": "p", "file": file["id"]}
        await ask(s, "POST", "/v1/images", key="two", json=body)
        assert made[0].prompts[-1]["file"] == file["id"], "another's id stays as it is, and means nothing to the engine"


async def test_a_file_without_a_purpose_or_too_large_for_an_engine_is_refused(tmp_path: Path) -> None:
    async with engines(1) as made, frontend(made, tmp_path) as s:
        status, refused = await ask(s, "POST", "/v1/files", data=upload(b"x", ""))
        assert status == 400 and refused["error"]["param"] == "purpose"
        large = upload(b"x" * (s.service.settings.frontend.limits.body_max + 1))
        assert (await ask(s, "POST", "/v1/files", data=large))[0] == 413
        assert not made[0].files and not list((tmp_path / "files").iterdir())


@pytest.mark.slow
async def test_openais_client_uploads_lists_and_deletes_files_of_an_engine(tmp_path: Path) -> None:
    openai = client("openai")
    async with engines() as made, frontend(made, tmp_path) as s:  # noqa: SIM117 - the second needs the first's address
        async with openai.AsyncOpenAI(base_url=f"{s.server.url}/v1", api_key="none", max_retries=0) as vendor:
            file = await vendor.files.create(file=("a.png", b"png"), purpose="vision", extra_body={"model": "m"})
            assert (file.filename, file.bytes) == ("a.png", 3)
            assert [each.id async for each in vendor.files.list()] == [file.id]
            assert (await vendor.files.content(file.id)).read() == b"png"
            assert (await vendor.files.delete(file.id)).deleted
            with pytest.raises(openai.NotFoundError, match="no file"):
                await vendor.files.retrieve(file.id)
            image = await vendor.images.generate(model="m", prompt="p", response_format="url")
            async with s.http.get(image.data[0].url) as answer:
                assert answer.content_type == "image/png"


@pytest.mark.parametrize("method", ["GET", "DELETE", "OPTIONS"])
@pytest.mark.parametrize("name", ["edits", "generations"])
async def test_routes_that_make_images_at_once_are_no_jobs(tmp_path: Path, method: str, name: str) -> None:
    async with engines(1) as made, frontend(made, tmp_path) as s:
        async with s.http.request(method, f"/v1/images/{name}") as answer:
            assert (answer.status, answer.headers["allow"]) == (405, "POST")
        assert (await ask(s, "GET", "/v1/images/nothing"))[0] == 404
