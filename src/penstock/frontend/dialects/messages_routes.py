"""Anthropic's routes: messages over any chat engine, and the count of a request's tokens."""

import msgspec

from penstock.frontend.dialects.body_fields import with_one_system
from penstock.frontend.dialects.chat_call import answer_chat, body_fields, counted, prompt_tokens, read_chat
from penstock.frontend.dialects.messages_answer import MessagesAnswer, anthropic_error
from penstock.frontend.dialects.messages_request import chat_of
from penstock.frontend.exchange.client_answer import TokenTiming
from penstock.frontend.http.http_exchange import HttpExchange
from penstock.frontend.service import Service

_LABEL = "messages"


async def messages(service: Service, caller: HttpExchange) -> None:
    """POST /v1/messages"""
    timing = TokenTiming()
    fields = await body_fields(service, caller, _LABEL)
    left_out: list[str] = []
    with counted(service, _LABEL):
        chat = with_one_system(service, caller.name, chat_of(fields, left_out))
    request = await read_chat(service, caller.name, chat, left_out, caller.headers, timing)
    answer = MessagesAnswer(request.parsed.model, request.prompt.isl, timing)
    await answer_chat(service, caller, _LABEL, request, answer, timing, anthropic_error)


async def count_tokens(service: Service, caller: HttpExchange) -> None:
    """POST /v1/messages/count_tokens: the prompt's tokens, exact where this process has the model's tokenizer."""
    fields = await body_fields(service, caller, _LABEL)
    chat = with_one_system(service, caller.name, chat_of(fields, [], counted=True))
    body = msgspec.json.encode({"input_tokens": await prompt_tokens(service, caller, chat)})
    await caller.send(200, body, {"content-type": "application/json"})
