"""Anthropic's routes: messages over any chat engine, and the count of a request's tokens."""

import msgspec

from penstock.frontend.dialects.chat_call import answer_chat, body_fields, counted, read_chat
from penstock.frontend.dialects.messages_answer import MessagesAnswer, anthropic_error
from penstock.frontend.dialects.messages_request import chat_of
from penstock.frontend.dialects.system_messages import with_one_system
from penstock.frontend.exchange.token_timing import TokenTiming
from penstock.frontend.http.http_exchange import HttpExchange
from penstock.frontend.prompt.model_preset import as_served
from penstock.frontend.prompt.prompt_media import settle_media
from penstock.frontend.prompt.request_body import media_of, parse
from penstock.frontend.prompt.routing_hints import read_hints
from penstock.frontend.service import Service

_LABEL = "messages"


async def messages(service: Service, caller: HttpExchange) -> None:
    """POST /v1/messages"""
    timing = TokenTiming()
    fields = await body_fields(service, caller, _LABEL)
    left_out: list[str] = []
    with counted(service, _LABEL):
        chat = with_one_system(service, chat_of(fields, left_out))
    request = await read_chat(service, chat, left_out, caller.headers, timing)
    answer = MessagesAnswer(request.parsed.model, request.prompt.isl, timing)
    await answer_chat(service, caller, _LABEL, request, answer, timing, anthropic_error)


async def count_tokens(service: Service, caller: HttpExchange) -> None:
    """POST /v1/messages/count_tokens: the prompt's tokens, exact where this process has the model's tokenizer."""
    fields = await body_fields(service, caller, _LABEL)
    chat = with_one_system(service, chat_of(fields, [], counted=True))
    parsed = parse("chat_completions", msgspec.json.encode(chat))
    if media_of(parsed.fields):
        await settle_media(parsed, service.media, service.prompts, fetch=False)
    resolved = service.catalog.resolve(parsed.model)
    hints = read_hints(caller.headers, parsed.nvext, parsed.fields)
    if resolved.special:
        resolved = service.catalog.route(resolved, hints.preferences.session or caller.id)
        parsed = as_served(parsed, None, resolved.preset)
    hashing = service.catalog.hashing(resolved, hints.salt, parsed.media)
    prompt = await service.prompts.prepare(parsed, resolved.tokenizer, hashing)
    body = msgspec.json.encode({"input_tokens": prompt.isl})
    await caller.send(200, body, {"content-type": "application/json"})
