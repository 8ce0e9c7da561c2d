"""File routes: upload, list, read and delete the files of batches; uploads for other purposes go on to an engine."""

import asyncio
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path

from aiohttp import BodyPartReader, web
from aiohttp.http_exceptions import HttpProcessingError

from penstock.frontend.http.error_responses import quoted, rejected
from penstock.frontend.http.request_context import BODY_TIMEOUT
from penstock.frontend.openai.models import page_of
from penstock_extras.batches.batch_answers import ENDED, FileDeleted, FileList, StoredFile
from penstock_extras.batches.batch_desk import UploadedForm, answered, desk_of, owner_of, shown
from penstock_extras.batches.batch_folder import BatchFolder
from penstock_extras.batches.batch_input import FILE_MAX

CHUNK = 1 << 18
"""Bytes of an upload or an answer that lie in memory."""
FIELDS_MAX, FIELD_MAX = 16, 1 << 16
"""Most fields of a form beside its file, and most bytes of one: OpenAI's have a purpose and an expiry."""


async def upload(request: web.Request) -> web.Response:
    """POST /v1/files"""
    if not request.content_type.startswith("multipart/"):
        raise rejected("send a form (multipart/form-data) with the fields purpose and file", "file")
    desk = desk_of(request)
    folder = desk.folder
    part = await asyncio.to_thread(folder.new_upload)
    try:
        async with asyncio.timeout(BODY_TIMEOUT * 10):  # a file is larger than other bodies
            form = await _receive(request, part)
        if form.filename is None:
            raise rejected("the form has no file", "file", code="missing_field")
        purpose = form.fields.get("purpose", b"").decode("utf-8", "replace")
        if not purpose:
            raise rejected(
                "the form has no purpose: batch, or one that an engine knows", "purpose", code="missing_field"
            )
        if purpose != "batch":
            return await desk.elsewhere(request, form)
        file = await asyncio.to_thread(folder.add_file, part, form.filename, purpose, owner_of(request))
    except TimeoutError:
        raise rejected("the file did not arrive in time", code="body_timeout", status=408) from None
    except (ValueError, HttpProcessingError) as error:
        raise rejected(f"the form can't be read: {error}", code="invalid_body") from None
    finally:
        await asyncio.to_thread(part.unlink, missing_ok=True)
    return answered(shown(file))


async def page_of_files(request: web.Request, others: Sequence[StoredFile]) -> FileList:
    """Return the page of files that a request asks for; ``others``: those of its owner that are not in the folder."""
    files = await asyncio.to_thread(desk_of(request).folder.files)
    purpose = request.query.get("purpose")
    mine = [f for f in (*files, *others) if f.owner == owner_of(request) and purpose in (None, f.purpose)]
    mine.sort(key=lambda file: file.created_at, reverse=True)
    data, more = page_of(request, mine, 10_000, attrgetter("id"))
    first, last = (data[0].id, data[-1].id) if data else (None, None)
    return FileList(data=[shown(f) for f in data], first_id=first, last_id=last, has_more=more)


async def one_file(request: web.Request) -> web.Response:
    """GET /v1/files/{job}"""
    return answered(shown(await _file_of_request(request)))


async def content(request: web.Request) -> web.StreamResponse:
    """GET /v1/files/{job}/content"""
    file = await _file_of_request(request)
    path = desk_of(request).folder.content(file.id)
    response = web.StreamResponse(headers={"content-type": "application/octet-stream"})
    response.content_length = file.bytes
    with await asyncio.to_thread(path.open, "rb") as data:
        await response.prepare(request)
        while part := await asyncio.to_thread(data.read, CHUNK):
            await response.write(part)
    await response.write_eof()
    return response


async def delete(request: web.Request) -> web.Response:
    """DELETE /v1/files/{job}"""
    file = await _file_of_request(request)
    folder = desk_of(request).folder
    batch = await asyncio.to_thread(_user_of, folder, file.id)
    if batch is not None:
        raise rejected(f"the file is the input of {batch}, which has not ended", "file_id", status=409)
    await asyncio.to_thread(folder.remove_file, file.id)
    return answered(FileDeleted(id=file.id))


async def _receive(request: web.Request, path: Path) -> UploadedForm:
    """Write the form's file, and return the form."""
    fields: dict[str, bytes] = {}
    filename, content_type = None, "application/octet-stream"
    async for part in await request.multipart():
        if not isinstance(part, BodyPartReader):
            raise rejected("the form has a form inside it", code="invalid_body")
        if part.name == "file":
            filename = (part.filename or "upload.jsonl")[:200]
            content_type = part.headers.get("content-type", content_type)
            await _write_upload(part, path)
        elif part.name is not None and len(fields) < FIELDS_MAX:
            fields[part.name] = await part.read_chunk(FIELD_MAX)
    return UploadedForm(path, filename, content_type, fields)


async def _write_upload(part: BodyPartReader, path: Path) -> None:
    size = 0
    with await asyncio.to_thread(path.open, "wb") as file:
        while data := await part.read_chunk(CHUNK):
            size += len(data)
            if size > FILE_MAX:
                raise rejected(f"a file has at most {FILE_MAX} bytes", "file", code="file_too_large", status=413)
            await asyncio.to_thread(file.write, data)


def _user_of(folder: BatchFolder, id: str) -> str | None:
    """Return the batch that still reads a file."""
    return next((b.id for b in folder.batches() if b.input_file_id == id and b.status not in ENDED), None)


async def _file_of_request(request: web.Request) -> StoredFile:
    id = request.match_info["job"]
    file = await asyncio.to_thread(desk_of(request).folder.file, id)
    if file is None or file.owner != owner_of(request):
        raise rejected(f"there is no file {quoted(id)}", "file_id", code="not_found", status=404)
    return file
