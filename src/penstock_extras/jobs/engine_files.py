"""Engine files: files that an engine has, beside those of batches: uploaded to it, listed, read and deleted there."""

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Mapping

from aiohttp import web

from penstock.frontend.http.error_responses import rejected
from penstock.frontend.http.http_exchange import CollectedExchange
from penstock.frontend.http.request_context import CALLER
from penstock.frontend.prompt.request_body import FILES
from penstock.frontend.service import service_of
from penstock_extras.batches import file_routes
from penstock_extras.batches.batch_answers import StoredFile
from penstock_extras.batches.batch_desk import UploadedForm, answered, owner_of
from penstock_extras.jobs.engine_jobs import FILE, JobKind, PlacedJob, jobs_of
from penstock_extras.jobs.job_making import upload
from penstock_extras.jobs.job_routes import OF_ONE, PAGE_MAX, job_entry

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_PASSED_ON = ("x-penstock-worker", "x-penstock-session-id")


async def send_to_engine(request: web.Request, form: UploadedForm) -> web.Response:
    """Upload a file whose purpose is none of ours to an engine, which has it from now on."""
    service = service_of(request)
    most = service.settings.frontend.limits.body_max
    size = (await asyncio.to_thread(form.path.stat)).st_size
    if size > most:
        raise rejected(f"a file for an engine has at most {most} bytes", "file", code="file_too_large", status=413)
    raw, content_type = await asyncio.to_thread(_form, form)
    headers = {name: request.headers[name] for name in _PASSED_ON if name in request.headers}
    headers["content-type"] = content_type
    caller = CollectedExchange(service.new_id(), FILES, request[CALLER], raw, headers)
    await upload(service, caller)
    if caller.status in (404, 405, 501):
        text = "the engine takes no files, and none are kept here for another purpose than batch"
        raise rejected(text, "purpose")
    return web.Response(status=caller.status or 502, body=caller.answer, content_type="application/json")


async def list_files(request: web.Request) -> web.Response:
    """GET /v1/files: those of batches and those at engines, the newest first."""
    jobs = jobs_of(service_of(request))
    placed = (await jobs.jobs(owner_of(request), FILE))[:PAGE_MAX]
    entries = await asyncio.gather(*(job_entry(jobs, job) for job in placed))
    others = [_listed_file(entry, job) for entry, job in zip(entries, placed, strict=True)]
    return answered(await file_routes.page_of_files(request, others))


def either(ours: Handler, theirs: Callable[[JobKind, web.Request], Awaitable[web.StreamResponse]]) -> Handler:
    """Return the handler of a route of one file: ours for a file of batches, ``theirs`` for one at an engine."""

    async def handler(request: web.Request) -> web.StreamResponse:
        if not FILE.knows(request.match_info["job"]):
            return await ours(request)
        return await theirs(FILE, request)

    return handler


ROUTES: tuple[tuple[str, str, Handler], ...] = (
    ("GET", FILES, list_files),
    *(
        (method, FILES + path, either(ours, theirs))
        for (method, path, theirs), ours in zip(
            OF_ONE, (file_routes.one_file, file_routes.delete, file_routes.content), strict=True
        )
    ),
)
"""Beside the upload, whose form says where it goes."""


def _listed_file(entry: Mapping[str, object], job: PlacedJob) -> StoredFile:
    """Return an engine's file for a list; where the engine did not say, its bytes are 0 and its name is our id."""
    size, name, purpose = entry.get("bytes"), entry.get("filename"), entry.get("purpose")
    return StoredFile(
        id=job.id,
        bytes=size if isinstance(size, int) else 0,
        created_at=int(job.created_at),
        filename=str(name or job.id),
        purpose=str(purpose or "unknown"),
        status="error" if entry.get("status") == "failed" else "processed",
        owner=job.owner,
    )


def _form(form: UploadedForm) -> tuple[bytes, str]:
    """Write a form anew; return it and its content type."""
    boundary = secrets.token_hex(16)
    parts = [
        b"--%b\r\ncontent-disposition: form-data; name=%b\r\n\r\n%b\r\n" % (boundary.encode(), _quote_name(name), value)
        for name, value in form.fields.items()
    ]
    head = b'--%b\r\ncontent-disposition: form-data; name="file"; filename=%b\r\ncontent-type: %b\r\n\r\n'
    kind = form.content_type.encode()
    parts.append(
        head % (boundary.encode(), _quote_name(form.filename or "upload"), kind) + form.path.read_bytes() + b"\r\n"
    )
    return b"".join(parts) + b"--%b--\r\n" % boundary.encode(), f"multipart/form-data; boundary={boundary}"


def _quote_name(name: str) -> bytes:
    """Return a name as a form's header has it. Source: WHATWG, multipart/form-data encoding."""
    return b'"%b"' % name.replace('"', "%22").replace("\r", "%0D").replace("\n", "%0A").encode()
