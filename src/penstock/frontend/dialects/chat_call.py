"""Chat call: sends another API's request to the engines as a chat completion, by the one way that all requests go."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import msgspec

from penstock.frontend.dialects.dialect_answer import DialectAnswer, Event, encoded
from penstock.frontend.exchange.client_answer import TokenTiming
from penstock.frontend.http.error_responses import ErrorResponse
from penstock.frontend.http.http_exchange import AnswerFilter, HttpExchange, WholeAnswer
from penstock.frontend.http.request_gate import Shape
from penstock.frontend.openai.completions import CompletionRequest, carry, read_completion
from penstock.frontend.openai.request_books import UNKNOWN, refusal
from penstock.frontend.prompt.model_names import as_served
from penstock.frontend.prompt.prompt_hashing import PARSE_INLINE_MAX
from penstock.frontend.prompt.prompt_media import settle_media
from penstock.frontend.prompt.request_body import decode_object, media_of, parse
from penstock.frontend.prompt.routing_hints import read_hints
from penstock.frontend.service import Service
from penstock.kernel.errors import PenstockError
from penstock.kernel.values import JsonObject


async def body_fields(service: Service, caller: HttpExchange, label: str) -> JsonObject:
    """Return a request's body as fields; a large one is decoded off the event loop.

    Raises:
        ClientError: 400: it is no JSON object.
    """
    raw = await caller.body()
    with counted(service, label):
        return decode_object(raw) if len(raw) <= PARSE_INLINE_MAX else await asyncio.to_thread(decode_object, raw)


@contextmanager
def counted(service: Service, label: str) -> Iterator[None]:
    """Count a request that is refused while it is translated."""
    try:
        yield
    except PenstockError as error:
        service.metrics.refused(UNKNOWN, label, False, refusal(error))
        raise


async def read_chat(
    service: Service,
    caller: str,
    chat: JsonObject,
    left_out: Sequence[str],
    headers: Mapping[str, str],
    timing: TokenTiming,
) -> CompletionRequest:
    """Return a translated request as a chat completion that can be routed.

    Args:
        caller: whose it is, by name.
        left_out: what of it has no effect here; it is reported as hints without an effect are.
    Raises:
        PenstockError: it can't be served; it has been counted as a chat.
    """
    body = msgspec.json.encode(chat)
    request = await read_completion(service, "chat_completions", body, headers, timing, caller=caller, fields=chat)
    if not left_out:
        return request
    hints = replace(request.hints, ignored=(*request.hints.ignored, *left_out), uncertain=True)
    return request._replace(hints=hints)


async def prompt_tokens(service: Service, caller: HttpExchange, chat: JsonObject) -> int:
    """Return the tokens of a translated request's prompt, exact where this process has the model's tokenizer.

    Raises:
        PenstockError: it can't be served.
    """
    parsed = parse("chat_completions", msgspec.json.encode(chat), chat)
    resolved = service.catalog.resolve(parsed.model, caller.name)
    service.check_model(caller.name, resolved)
    if media_of(parsed.fields):
        await settle_media(parsed, service.media, service.prompts, fetch=False)
    hints = read_hints(caller.headers, parsed.nvext, parsed.fields)
    if resolved.special:
        resolved = service.catalog.route(resolved, hints.preferences.session or caller.id, caller.name)
        parsed = as_served(parsed, None, resolved.preset)
    hashing = service.catalog.hashing(resolved, hints.salt, parsed.media)
    return (await service.prompts.prepare(parsed, resolved.tokenizer, hashing)).isl


async def answer_chat(
    service: Service,
    caller: HttpExchange,
    label: str,
    request: CompletionRequest,
    answer: DialectAnswer,
    timing: TokenTiming,
    shape: Shape | None = None,
) -> None:
    """Have a request answered by the engines; what its client gets is translated."""
    if service.exchanges.warming.open:
        service.exchanges.warming.overtaken(request.parsed)
    caller.filters.insert(0, TranslatedAnswer(answer, caller, shape))
    job = request.job(label, adds_usage=request.parsed.stream)
    await carry(caller, service, request.resolved, job, request.prompt, timing)


class TranslatedAnswer(AnswerFilter):
    """Translates a chat's answer into that of another API.

    Args:
        shape: turns an error answer into the API's.
    """

    def __init__(self, answer: DialectAnswer, caller: HttpExchange, shape: Shape | None = None) -> None:
        self._answer = answer
        self._caller = caller
        self._shape = shape
        self._events: list[Event] = []
        """Those read before a piece that can't be: without the first one a stream's error is not understood."""

    async def whole(self, answer: WholeAnswer) -> WholeAnswer:
        status, body, headers = answer
        if status < 400:
            return WholeAnswer(status, self._answer.whole(body), {**headers, "content-type": "application/json"})
        if self._shape is None:
            return answer
        return WholeAnswer(*self._shape(ErrorResponse(status, body, dict(headers)), self._caller.id))

    def piece(self, data: bytes) -> bytes:
        for event in self._answer.events(data):
            self._events.append(event)
        written = encoded(self._events)
        self._events.clear()
        return written
