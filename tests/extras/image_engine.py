"""A small image server of the shapes of diffusion servers: images at once, by URL or as jobs, and files of its own."""

from typing import Any

from aiohttp import web

from tests.extras.job_engine import JobEngine


class ImageEngine(JobEngine):
    """One server. Each begins to count at the same number, as real ones may."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.images: dict[str, dict[str, Any]] = {}
        self.files: dict[str, dict[str, Any]] = {}
        self.contents: dict[str, bytes] = {}
        self.prompts: list[dict[str, Any]] = []

    def add_routes(self, app: web.Application) -> None:
        app.router.add_post("/v1/images/generations", self._generate)
        app.router.add_post("/v1/images/edits", self._generate)
        app.router.add_post("/v1/images", self._begin)
        app.router.add_get("/v1/images/{id}", self._one)
        app.router.add_delete("/v1/images/{id}", self._delete)
        app.router.add_post("/v1/images/{id}/cancel", self._cancel)
        app.router.add_get("/v1/images/{id}/content", self._content)
        app.router.add_post("/v1/files", self._upload)
        app.router.add_get("/v1/files/{id}", self._file)
        app.router.add_delete("/v1/files/{id}", self._delete_file)
        app.router.add_get("/v1/files/{id}/content", self._file_content)

    def _made(self, given: dict[str, Any], status: str) -> dict[str, Any]:
        self.prompts.append(given)
        id = f"img-{len(self.images)}"
        self.images[id] = {"id": id, "object": "image", "status": status, "prompt": given.get("prompt")}
        return self.images[id]

    async def _generate(self, request: web.Request) -> web.Response:
        form = await (request.json() if request.content_type == "application/json" else request.post())
        given = {key: value for key, value in form.items() if isinstance(value, str | int)}
        if given.get("response_format") == "b64_json":
            return web.json_response({"created": 1, "data": [{"b64_json": "cG5n"}]})
        made = [self._made(given, "completed") for _ in range(int(given.get("n", 1)))]
        base = self.url if given.get("user") == "absolute" else ""
        data = [{"url": f"{base}/v1/images/{each['id']}/content"} for each in made]
        return web.json_response({"id": made[0]["id"], "created": 1, "data": data})

    async def _begin(self, request: web.Request) -> web.Response:
        return web.json_response(self._made(await request.json(), "queued"))

    def _found(self, request: web.Request, among: dict[str, dict[str, Any]]) -> dict[str, Any]:
        found = among.get(request.match_info["id"])
        if found is None:
            raise web.HTTPNotFound(text='{"error": {"message": "unknown"}}', content_type="application/json")
        return found

    async def _one(self, request: web.Request) -> web.Response:
        return web.json_response(self._found(request, self.images))

    async def _delete(self, request: web.Request) -> web.Response:
        del self.images[self._found(request, self.images)["id"]]
        return web.json_response({"id": request.match_info["id"], "object": "image.deleted", "deleted": True})

    async def _cancel(self, request: web.Request) -> web.Response:
        self._found(request, self.images)["status"] = "cancelled"
        return web.json_response(self._found(request, self.images))

    async def _content(self, request: web.Request) -> web.Response:
        image = self._found(request, self.images)
        return web.Response(body=f"{self.name} {image['id']}".encode(), content_type="image/png")

    async def _upload(self, request: web.Request) -> web.Response:
        form = await request.post()
        file, purpose = form["file"], form["purpose"]
        assert isinstance(file, web.FileField)
        id = f"f{len(self.files)}"
        self.contents[id] = file.file.read()
        entry = {"id": id, "object": "file", "bytes": len(self.contents[id]), "created_at": 1}
        self.files[id] = {**entry, "filename": file.filename, "purpose": purpose, "type": file.content_type}
        return web.json_response(self.files[id])

    async def _file(self, request: web.Request) -> web.Response:
        return web.json_response(self._found(request, self.files))

    async def _delete_file(self, request: web.Request) -> web.Response:
        del self.files[self._found(request, self.files)["id"]]
        return web.json_response({"id": request.match_info["id"], "object": "file", "deleted": True})

    async def _file_content(self, request: web.Request) -> web.Response:
        return web.Response(body=self.contents[self._found(request, self.files)["id"]])
