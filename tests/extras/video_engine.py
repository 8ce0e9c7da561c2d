"""A small video server of OpenAI's shape: its jobs are done when a test says so, and it forgets them when it stops."""

from typing import Any

from aiohttp import web

from tests.extras.job_engine import JobEngine


class VideoEngine(JobEngine):
    """One server. ``cancels``: it has a route that ends a job without forgetting it."""

    def __init__(self, name: str, *, cancels: bool = False) -> None:
        super().__init__(name)
        self.jobs: dict[str, dict[str, Any]] = {}
        self.asked: list[tuple[str, str]] = []
        self.forms: list[dict[str, str]] = []
        self._cancels = cancels

    def add_routes(self, app: web.Application) -> None:
        app.router.add_post("/v1/videos", self._create)
        app.router.add_post("/v1/videos/{id}/remix", self._create)
        app.router.add_get("/v1/videos/{id}", self._one)
        app.router.add_delete("/v1/videos/{id}", self._delete)
        app.router.add_get("/v1/videos/{id}/content", self._content)
        if self._cancels:
            app.router.add_post("/v1/videos/{id}/cancel", self._cancel)

    async def stop(self) -> None:
        await super().stop()
        self.jobs.clear()

    async def _create(self, request: web.Request) -> web.Response:
        self.asked.append(("POST", request.path))
        form = await (request.json() if request.content_type == "application/json" else request.post())
        self.forms.append({key: value for key, value in form.items() if isinstance(value, str)})
        if form["prompt"] == "forbidden":
            return web.json_response({"error": {"message": "no such videos here", "code": "moderation"}}, status=400)
        # Every engine begins to count at the same number, as real ones may.
        job = {"id": f"vid {len(self.jobs)}", "object": "video", "status": "queued", "progress": 0, "model": "video-1"}
        job |= {"prompt": form["prompt"], "seconds": form.get("seconds", "4"), "size": "720x1280", "created_at": 1}
        if "id" in request.match_info:
            job["remixed_from_video_id"] = request.match_info["id"]
        self.jobs[job["id"]] = job
        return web.json_response(job)

    def _job(self, request: web.Request) -> dict[str, Any]:
        self.asked.append((request.method, request.path))
        job = self.jobs.get(request.match_info["id"])
        if job is None:
            raise web.HTTPNotFound(text='{"error": {"message": "unknown"}}', content_type="application/json")
        return job

    async def _one(self, request: web.Request) -> web.Response:
        return web.json_response(self._job(request))

    async def _delete(self, request: web.Request) -> web.Response:
        del self.jobs[self._job(request)["id"]]
        return web.json_response({"id": request.match_info["id"], "object": "video.deleted", "deleted": True})

    async def _cancel(self, request: web.Request) -> web.Response:
        self._job(request)["status"] = "failed"
        return web.json_response(self._job(request))

    async def _content(self, request: web.Request) -> web.Response:
        job = self._job(request)
        if job["status"] != "completed":
            return web.json_response({"error": {"message": "it is not ready"}}, status=409)
        data = (self.name.encode() + job["prompt"].encode()) * 50_000
        if request.http_range.start is not None:
            part = data[request.http_range]
            headers = {"content-range": f"bytes 0-{len(part) - 1}/{len(data)}"}
            return web.Response(status=206, body=part, content_type="video/mp4", headers=headers)
        return web.Response(body=data, content_type="video/mp4")
