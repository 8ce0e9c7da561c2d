"""Batch routes: create, list, read and cancel batches."""

import asyncio
import re
import secrets
import time
from operator import attrgetter

import msgspec
from aiohttp import web

from penstock.frontend.http.error_responses import quoted, rejected
from penstock.frontend.http.request_context import read_body
from penstock.frontend.openai.models import page_of
from penstock_extras.batches.batch_answers import ENDED, Batch, BatchList
from penstock_extras.batches.batch_desk import answered, desk_of, owner_of, shown

WINDOW_MAX = 7 * 24 * 3600
"""Longest completion window in seconds."""
OPEN_MAX = 100
"""Most batches of one owner that have not ended."""
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_WINDOW = re.compile(r"([1-9][0-9]{0,6})([smhd])\Z")


class NewBatch(msgspec.Struct):
    """What a client asks for."""

    input_file_id: str
    endpoint: str
    completion_window: str = "24h"
    metadata: dict[str, str] | None = None


async def create(request: web.Request) -> web.Response:
    """POST /v1/batches"""
    desk, owner = desk_of(request), owner_of(request)
    try:
        wanted = msgspec.json.decode(await read_body(request), type=NewBatch)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise rejected(f"the body is not a batch: {error}", code="invalid_body") from None
    if wanted.endpoint not in desk.endpoints:
        listed = ", ".join(sorted(desk.endpoints))
        raise rejected(f"endpoint must be one of {listed}, not {quoted(wanted.endpoint)}", "endpoint")
    match = _WINDOW.match(wanted.completion_window)
    window = 0 if match is None else int(match[1]) * _UNITS[match[2]]
    if not 0 < window <= WINDOW_MAX:
        raise rejected("completion_window must be such as '24h', at most '7d'", "completion_window")
    file = await asyncio.to_thread(desk.folder.file, wanted.input_file_id)
    if file is None or file.owner != owner:
        text = f"there is no file {quoted(wanted.input_file_id)}"
        raise rejected(text, "input_file_id", code="not_found", status=404)
    if file.purpose != "batch":
        raise rejected("the file's purpose is not 'batch'", "input_file_id")
    batches = await asyncio.to_thread(desk.folder.batches)
    if sum(batch.owner == owner and batch.status not in ENDED for batch in batches) >= OPEN_MAX:
        raise rejected(f"{OPEN_MAX} batches have not ended, which is the limit", code="too_many_batches", status=429)
    now = int(time.time())
    batch = Batch(
        id=f"batch-{secrets.token_hex(12)}",
        endpoint=wanted.endpoint,
        input_file_id=wanted.input_file_id,
        completion_window=wanted.completion_window,
        created_at=now,
        expires_at=now + window,
        metadata=wanted.metadata,
        owner=owner,
    )
    await asyncio.to_thread(desk.folder.save, batch)
    desk.runner.look.set()
    return answered(shown(batch))


async def list_batches(request: web.Request) -> web.Response:
    """GET /v1/batches"""
    batches = await asyncio.to_thread(desk_of(request).folder.batches)
    data, more = page_of(
        request, [batch for batch in batches if batch.owner == owner_of(request)], 100, attrgetter("id")
    )
    first, last = (data[0].id, data[-1].id) if data else (None, None)
    return answered(BatchList(data=[shown(b) for b in data], first_id=first, last_id=last, has_more=more))


async def one_batch(request: web.Request) -> web.Response:
    """GET /v1/batches/{batch}"""
    return answered(shown(await _batch(request)))


async def cancel(request: web.Request) -> web.Response:
    """POST /v1/batches/{batch}/cancel"""
    batch = await _batch(request)
    if batch.status in ENDED:
        raise rejected(f"the batch is {batch.status} already", "batch_id", code="batch_ended", status=409)
    await asyncio.to_thread(desk_of(request).folder.cancel, batch.id)
    return answered(shown(await _batch(request)))


async def _batch(request: web.Request) -> Batch:
    id = request.match_info["batch"]
    batch = await asyncio.to_thread(desk_of(request).folder.batch, id)
    if batch is None or batch.owner != owner_of(request):
        raise rejected(f"there is no batch {quoted(id)}", "batch_id", code="not_found", status=404)
    return batch
