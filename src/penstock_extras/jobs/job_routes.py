"""Job routes: how a job is, what came of it, all jobs of a key, and their end, as the engines say that have them."""

import asyncio
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any

import aiohttp
import msgspec
from aiohttp import hdrs, web

from penstock.frontend.http.error_responses import rejected
from penstock.frontend.http.request_context import CALLER
from penstock.frontend.openai.models import json_response, page_of
from penstock.frontend.service import service_of
from penstock.kernel.errors import EngineError, OverloadedError
from penstock.kernel.values import JsonObject
from penstock_extras.jobs.engine_jobs import (
    ANSWER_TIMEOUT,
    IMAGE,
    VIDEO,
    EngineJobs,
    JobKind,
    PlacedJob,
    jobs_of,
    renamed,
)

PAGE_MAX = 100
"""Most jobs of a page: each asks its engine."""
CHUNK = 1 << 18
"""Bytes of a video, or of what else came of a job, that lie in memory."""
_PASSED_BACK = (
    hdrs.CONTENT_TYPE,
    hdrs.CONTENT_LENGTH,
    hdrs.CONTENT_RANGE,
    hdrs.ACCEPT_RANGES,
    hdrs.CONTENT_DISPOSITION,
)


async def list_jobs(kind: JobKind, request: web.Request) -> web.Response:
    """GET /v1/videos and the like: the newest first, each as its engine has it now."""
    jobs = jobs_of(service_of(request))
    every = await jobs.jobs(_owner_of_request(request), kind)
    if request.query.get("order", "desc") == "asc":
        every.reverse()
    page, more = page_of(request, every, PAGE_MAX, attrgetter("id"))
    data = await asyncio.gather(*(job_entry(jobs, job) for job in page))
    first, last = (page[0].id, page[-1].id) if page else (None, None)
    return json_response({"object": "list", "data": data, "first_id": first, "last_id": last, "has_more": more})


async def one_job(kind: JobKind, request: web.Request) -> web.Response:
    """GET /v1/videos/{job} and the like"""
    return await _passed(kind, request, "GET")


async def delete(kind: JobKind, request: web.Request) -> web.Response:
    """DELETE /v1/videos/{job} and the like: its engine ends it, and forgets what came of it."""
    response = await _passed(kind, request, "DELETE")
    if response.status < 400:
        await jobs_of(service_of(request)).forget(request.match_info["job"])
    return response


async def cancel(kind: JobKind, request: web.Request) -> web.Response:
    """POST /v1/videos/{job}/cancel: where its engine has that route; all others end a job by its deletion."""
    return await _passed(kind, request, "POST", "/cancel")


async def content(kind: JobKind, request: web.Request) -> web.StreamResponse:
    """GET /v1/videos/{job}/content and the like: the bytes as they come from the engine."""
    jobs, job = await _job_of(kind, request)
    wanted = {"range": request.headers[hdrs.RANGE]} if hdrs.RANGE in request.headers else None
    async with await jobs.ask(job, "GET", "/content", headers=wanted, query=request.query_string) as answer:
        if answer.status >= 300:
            return await _pass_engine_answer(job, answer)
        headers = {name: answer.headers[name] for name in _PASSED_BACK if name in answer.headers}
        response = web.StreamResponse(status=answer.status, headers=headers)
        await response.prepare(request)
        try:
            async for part in answer.content.iter_chunked(CHUNK):
                await response.write(part)
        except (aiohttp.ClientError, TimeoutError) as error:
            # The head is out: only a broken connection tells the client that this is not all.
            raise ConnectionResetError(f"the engine {job.worker} broke off: {error}") from error
        await response.write_eof()
        return response


async def _passed(kind: JobKind, request: web.Request, method: str, path: str = "") -> web.Response:
    """Ask a job's engine and return what it says, with our id in it."""
    jobs, job = await _job_of(kind, request)
    async with asyncio.timeout(ANSWER_TIMEOUT * 2), await jobs.ask(job, method, path) as answer:
        return await _pass_engine_answer(job, answer)


async def _pass_engine_answer(job: PlacedJob, answer: aiohttp.ClientResponse) -> web.Response:
    body = await answer.read()
    if answer.status == 404 and answer.method != "POST" and not answer.url.path.endswith("/content"):
        raise rejected(
            f"the engine {job.worker} does not have {job.kind} {job.id} any more; it may have been restarted",
            f"{job.kind}_id",
            code="not_found",
            status=404,
        )
    if answer.status in (404, 405, 501) and answer.method == "POST":
        raise rejected(
            f"the engine {job.worker} can't cancel; DELETE the {job.kind} to end it", code="not_supported", status=501
        )
    kind = answer.content_type or "application/json"
    try:
        body = msgspec.json.encode(renamed(msgspec.json.decode(body), job)) if answer.status < 300 else body
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise EngineError(
            f"the engine {job.worker} answers for {job.kind} {job.id} with something that is not valid JSON"
        ) from None
    return web.Response(status=answer.status, body=body, content_type=kind)


async def job_entry(jobs: EngineJobs, job: PlacedJob) -> JsonObject:
    """Return a job for a list: where its engine can't be asked, that is its error."""
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT), await jobs.ask(job, "GET") as answer:
            if answer.status == 200:
                return renamed(msgspec.json.decode(await answer.read()), job)  # type: ignore[no-any-return]
            why = f"the engine {job.worker} answers {answer.status}"
    except (EngineError, OverloadedError, TimeoutError, aiohttp.ClientError, msgspec.DecodeError) as error:
        why = str(error) or "its engine gives no answer"
    return {
        "id": job.id,
        "object": job.kind,
        "model": job.name or job.model,
        "status": "failed",
        "created_at": int(job.created_at),
        "error": {"code": "engine_gone", "message": why},
    }


async def _job_of(kind: JobKind, request: web.Request) -> tuple[EngineJobs, PlacedJob]:
    jobs = jobs_of(service_of(request))
    return jobs, await jobs.job(request.match_info["job"], _owner_of_request(request), kind)


def _owner_of_request(request: web.Request) -> str:
    return service_of(request).owner(request[CALLER])


OF_ONE: tuple[tuple[str, str, Callable[[JobKind, web.Request], Any]], ...] = (
    ("GET", "/{job}", one_job),
    ("DELETE", "/{job}", delete),
    ("GET", "/{job}/content", content),
)
ROUTES: tuple[tuple[str, str, Callable[[web.Request], Any]], ...] = tuple(
    (method, kind.route + path, partial(handler, kind))
    for kind in (VIDEO, IMAGE)
    for method, path, handler in (("GET", "", list_jobs), *OF_ONE, ("POST", "/{job}/cancel", cancel))
)
"""Beside those that begin a job, which go to engines as all requests do, and beside `engine_files`."""
