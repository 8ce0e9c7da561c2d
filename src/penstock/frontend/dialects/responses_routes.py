"""OpenAI's responses routes: create over any chat engine, retrieve, delete, cancel; what a response goes on from."""

import asyncio
import logging
import time
from operator import itemgetter
from typing import NamedTuple

import msgspec
from aiohttp import web

from penstock.adapters.engines.dialects.engine_failure import EngineFailure, failure_of
from penstock.frontend.dialects.body_fields import field_of, unserved, with_one_system
from penstock.frontend.dialects.chat_call import answer_chat, body_fields, counted, prompt_tokens, read_chat
from penstock.frontend.dialects.dialect_answer import new_id
from penstock.frontend.dialects.response_reach import end_response, find_response, forget_response
from penstock.frontend.dialects.response_tools import ResponseTools
from penstock.frontend.dialects.responses_answer import ResponsesAnswer, replayed
from penstock.frontend.dialects.responses_request import chat_of, items_of, listed
from penstock.frontend.exchange.client_answer import TokenTiming
from penstock.frontend.http.error_responses import ErrorResponse, quoted, rejected
from penstock.frontend.http.http_exchange import ClientlessExchange, HttpExchange
from penstock.frontend.http.request_context import CALLER
from penstock.frontend.openai.completions import CompletionRequest
from penstock.frontend.openai.models import json_response, page_of
from penstock.frontend.prompt.routing_hints import framework_hints
from penstock.frontend.response_store import StoredResponse
from penstock.frontend.service import Service, service_of
from penstock.kernel.errors import ClientError
from penstock.kernel.values import JsonObject

log = logging.getLogger("penstock.frontend")

_LABEL = "responses"
_ANSWERED = ("completed", "incomplete")
POLL = 0.5
"""Seconds between looks at a response that is being made."""
BEAT = 15.0
"""Seconds between comments to a client that waits for its events."""
_SESSION = "x-penstock-session-id"


class Conversation(NamedTuple):
    """What a response goes on from: its session and its items."""

    session: str
    items: list[JsonObject]


async def create(service: Service, caller: HttpExchange) -> None:
    """POST /v1/responses"""
    timing = TokenTiming()
    fields = await body_fields(service, caller, _LABEL)
    id = new_id("resp")
    owner = _response_owner(service, caller.name)
    left_out: list[str] = []
    with counted(service, _LABEL):
        session = framework_hints(caller.headers, fields).session or id
        before = await _before(service, owner, fields, Conversation(session, []))
        background = _runs_alone(fields)
        tools = ResponseTools(fields, left_out)
        chat = with_one_system(service, caller.name, chat_of(fields, before.items, tools, left_out))
    if background:
        chat["stream"] = True
    # A conversation has one session, so that where affinity is on it goes back to the engine that has its blocks.
    request = await read_chat(
        service, caller.name, chat, left_out, {_SESSION: before.session, **caller.headers}, timing
    )

    asked = [*before.items, *listed(items_of(fields))]

    def settle(answer: ResponsesAnswer) -> None:
        if fields.get("store") is False or (background and service.responses.get(id, owner) is None):
            return
        body = answer.body()
        items = msgspec.json.encode([*asked, *body["output"]])
        service.responses.put(StoredResponse(id, owner, before.session, msgspec.json.encode(body), items))

    answer = ResponsesAnswer(id, fields, tools, left_out, request.prompt.isl, timing, settle)
    if not background:
        return await answer_chat(service, caller, _LABEL, request, answer, timing)
    unheard = ClientlessExchange(caller.id, caller.path, caller.name, caller.headers, remote=caller.remote)
    body, items = answer.response("in_progress"), msgspec.json.encode(asked)
    running = StoredResponse(id, owner, before.session, msgspec.json.encode(body), items)
    running.task = service.responses.run(_in_background(service, unheard, request, answer, timing))
    service.responses.put(running)
    await caller.send(200, msgspec.json.encode(answer.response("queued")), {"content-type": "application/json"})


async def retrieve(request: web.Request) -> web.StreamResponse:
    """GET /v1/responses/{id}: a response, or its stream's events, which wait until it has been made."""
    stored = await _stored_response(request)
    if request.query.get("stream", "false") == "false":
        return web.Response(body=stored.body, content_type="application/json")
    after = request.query.get("starting_after", "-1")
    if not after.removeprefix("-").isdecimal():
        raise rejected("starting_after must be the number of an event", "starting_after")
    stream = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
    await stream.prepare(request)
    beat = time.monotonic()
    while (response := msgspec.json.decode(stored.body))["status"] == "in_progress":
        await asyncio.sleep(POLL)  # another process may be making it, of which only questions can be asked
        stored = await _stored_response(request)
        if time.monotonic() - beat > BEAT:
            beat = time.monotonic()
            await stream.write(b": waiting\n\n")
    await stream.write(replayed(response, int(after)))
    return stream


async def input_items(request: web.Request) -> web.Response:
    """GET /v1/responses/{id}/input_items: what a response answers, the newest first or by ``order``."""
    stored = await _stored_response(request)
    items = msgspec.json.decode(stored.items or b"[]")
    items = items[: len(items) - len(msgspec.json.decode(stored.body)["output"])]
    if request.query.get("order", "desc") == "desc":
        items.reverse()
    page, more = page_of(request, items, 100, itemgetter("id"))
    ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
    return json_response({"object": "list", "data": page, **ends, "has_more": more})


async def count_tokens(service: Service, caller: HttpExchange) -> None:
    """POST /v1/responses/input_tokens"""
    fields = await body_fields(service, caller, _LABEL)
    before = await _before(service, _response_owner(service, caller.name), fields, Conversation("", []))
    chat = with_one_system(service, caller.name, chat_of(fields, before.items, ResponseTools(fields, []), []))
    count = {"object": "response.input_tokens", "input_tokens": await prompt_tokens(service, caller, chat)}
    await caller.send(200, msgspec.json.encode(count), {"content-type": "application/json"})


async def delete(request: web.Request) -> web.Response:
    """DELETE /v1/responses/{id}: forget a response; one that is being made in the background ends."""
    service, id = service_of(request), request.match_info["id"]
    if not await forget_response(service, id, _response_owner(service, request[CALLER])):
        raise _unknown(id)
    return json_response({"id": id, "object": "response", "deleted": True})


async def cancel(request: web.Request) -> web.Response:
    """POST /v1/responses/{id}/cancel: end a background response; one that has ended stays as it is."""
    stored = await _stored_response(request)
    if not msgspec.json.decode(stored.body)["background"]:
        raise rejected("only a background response can be cancelled; close the connection of another", "id")
    return web.Response(body=await end_response(service_of(request), stored), content_type="application/json")


async def _in_background(
    service: Service, caller: HttpExchange, request: CompletionRequest, answer: ResponsesAnswer, timing: TokenTiming
) -> None:
    """Make a response that nobody waits for; it counts as a request in flight, so a drain waits for it."""

    def fail(error: ErrorResponse, id: str) -> ErrorResponse:
        answer.fail(failure_of(error.body), error.status)
        return error

    service.gate.enter()
    try:
        await answer_chat(service, caller, _LABEL, request, answer, timing, fail)
    except Exception:  # supervision boundary: nobody waits for this task, and the response must not stay in progress
        log.exception("background response %s failed by a bug of ours", answer.id)
        answer.fail(EngineFailure("an internal error; the log has it under this response's id"), 500)
    finally:
        service.gate.leave()


def _runs_alone(fields: JsonObject) -> bool:
    """Return whether nobody waits for the response.

    Raises:
        ClientError: 400: it could not be retrieved then, or is to be streamed.
    """
    background = field_of(fields, "background", bool) or False
    if background and (fields.get("stream") or fields.get("store") is False):
        raise unserved("background", "background", "it needs store, and can't be streamed; retrieve it instead")
    return background


async def _before(service: Service, owner: str, fields: JsonObject, new: Conversation) -> Conversation:
    """Return the conversation that a request goes on, or ``new``.

    Raises:
        ClientError: 400: it is not here, or has no answer to go on from.
    """
    id = field_of(fields, "previous_response_id", str)
    if id is None:
        return new
    stored = await find_response(service, id, owner)
    if stored is None or msgspec.json.decode(stored.body)["status"] not in _ANSWERED:
        why = "is not held by any frontend" if stored is None else "has no answer"
        raise rejected(
            f"previous response {quoted(id)} {why}; send the conversation's items instead",
            "previous_response_id",
            code="previous_response_not_found",
        )
    return Conversation(stored.session, msgspec.json.decode(stored.items or b"[]"))


async def _stored_response(request: web.Request) -> StoredResponse:
    """Return the response that a path names.

    Raises:
        ClientError: 404.
    """
    service, id = service_of(request), request.match_info["id"]
    stored = await find_response(service, id, _response_owner(service, request[CALLER]))
    if stored is None:
        raise _unknown(id)
    return stored


def _unknown(id: str) -> ClientError:
    return rejected(f"response {quoted(id)} is not held by any frontend", "id", code="not_found", status=404)


def _response_owner(service: Service, caller: str) -> str:
    """Return whose a response is: the key's, as whoever knows an id must not read another key's conversation."""
    return caller if service.gate.keys.needed else ""
