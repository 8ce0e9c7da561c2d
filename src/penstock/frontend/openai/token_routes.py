"""Token routes: tokenize and detokenize as vLLM has them, answered here where the model's tokenizer is at hand."""

import msgspec

from penstock.frontend.http.error_responses import rejected
from penstock.frontend.http.http_exchange import HttpExchange
from penstock.frontend.openai.passthrough import model_of, proxied
from penstock.frontend.prompt.chat_template import TemplateFailed
from penstock.frontend.prompt.model_catalog import ResolvedModel
from penstock.frontend.prompt.model_names import as_served
from penstock.frontend.prompt.prompt_tokenizer import PromptTokenizer
from penstock.frontend.prompt.request_body import Parsed, decode_object, media_of, parse
from penstock.frontend.service import Service
from penstock.kernel.values import JsonObject

ENGINES_OWN = frozenset({"chat_template", "mm_processor_kwargs"})
"""Fields with which only the engine can say what it makes of a chat."""


class Tokenized(msgspec.Struct, frozen=True):
    """Tokens of a prompt, as vLLM answers."""

    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(msgspec.Struct, frozen=True):
    """Text of tokens, as vLLM answers."""

    prompt: str


async def tokenize(service: Service, caller: HttpExchange) -> None:
    """POST /tokenize"""
    raw = await caller.body()
    fields = decode_object(raw)
    resolved = _allowed_model(service, caller, raw, fields)
    if resolved.preset is not None and "messages" in fields:
        raw, fields = _as_chat(raw, fields, resolved)
    tokenizer = resolved.tokenizer
    if tokenizer is None or not _renderable(fields, raw, tokenizer, resolved):
        return await proxied(service, caller, raw)
    try:
        answer = await service.prompts.in_thread(_tokenized, fields, tokenizer, resolved.max_model_len)
    except TemplateFailed:
        return await proxied(service, caller, raw)  # the engine says whether it takes this chat
    await _send_token_answer(caller, answer)


async def detokenize(service: Service, caller: HttpExchange) -> None:
    """POST /detokenize"""
    raw = await caller.body()
    fields = decode_object(raw)
    tokenizer = _allowed_model(service, caller, raw, fields).tokenizer
    if tokenizer is None:
        return await proxied(service, caller, raw)
    tokens = fields.get("tokens")
    if not isinstance(tokens, list) or not all(type(token) is int and 0 <= token < 1 << 32 for token in tokens):
        raise rejected("tokens must be a list of token ids", "tokens")
    await _send_token_answer(caller, Detokenized(await service.prompts.in_thread(tokenizer.literal, tokens)))


HANDLERS = {
    **dict.fromkeys(("/tokenize", "/v1/tokenize"), tokenize),
    **dict.fromkeys(("/detokenize", "/v1/detokenize"), detokenize),
}
"""Handlers that answer by path, each with a service before the exchange."""


def _allowed_model(service: Service, caller: HttpExchange, raw: bytes, fields: JsonObject) -> ResolvedModel:
    """Return the model of a request.

    Raises:
        ClientError: 404 or 403: there is none of this name, or not for this caller.
    """
    resolved = service.catalog.resolve(model_of(service, caller.name, raw, fields)[0], caller.name)
    service.check_model(caller.name, resolved)
    return resolved


def _as_chat(raw: bytes, fields: JsonObject, resolved: ResolvedModel) -> tuple[bytes, JsonObject]:
    """Return a chat with the model's system prompt, which its engine would get."""
    served = as_served(_parsed_chat(raw, fields, resolved), resolved.model, resolved.preset)
    return served.raw, served.fields


def _parsed_chat(raw: bytes, fields: JsonObject, resolved: ResolvedModel) -> Parsed:
    if "model" not in fields:
        fields = {**fields, "model": resolved.model}
        raw = msgspec.json.encode(fields)
    return parse("chat_completions", raw, fields)


def _renderable(fields: JsonObject, raw: bytes, tokenizer: PromptTokenizer, resolved: ResolvedModel) -> bool:
    """Return whether our own tokenizer says what the engine would.

    Raises:
        ClientError: 400: there is neither a prompt nor a chat.
    """
    if "messages" not in fields:
        if not isinstance(fields.get("prompt"), str):
            raise rejected("give prompt (a text) or messages", "prompt", code="missing_field")
        return True
    parsed = _parsed_chat(raw, fields, resolved)
    template = tokenizer.template
    usable = template is not None and not template.given_up
    return usable and ENGINES_OWN.isdisjoint(fields) and not media_of(parsed.fields)


def _tokenized(fields: JsonObject, tokenizer: PromptTokenizer, max_model_len: int | None) -> Tokenized:
    if "messages" in fields:
        assert tokenizer.template is not None
        continued = bool(fields.get("continue_final_message"))
        text = tokenizer.template.render(
            fields["messages"],
            tools=fields.get("tools"),
            add_generation_prompt=fields.get("add_generation_prompt") is not False and not continued,
            continue_final_message=continued,
            kwargs=fields.get("chat_template_kwargs"),
        )
        special = bool(fields.get("add_special_tokens"))
    else:
        text, special = fields["prompt"], fields.get("add_special_tokens") is not False
    tokens = tokenizer.encode(text, special=special).tolist()
    pieces = tokenizer.pieces(tokens) if fields.get("return_token_strs") else None
    return Tokenized(len(tokens), max_model_len, tokens, pieces)


async def _send_token_answer(caller: HttpExchange, answer: Tokenized | Detokenized) -> None:
    await caller.send(200, msgspec.json.encode(answer), {"content-type": "application/json"})
