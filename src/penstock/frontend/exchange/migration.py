"""Migration of a broken stream: whether another engine can continue the answer, and the request for that engine.

It gets the prompt and the output so far as one longer prompt, and the rest of the output limit. Not every request can
migrate: `obstacle` returns what forbids it, and such an answer ends with an error instead.
"""

from array import array
from collections.abc import Mapping
from typing import Any

import msgspec

from penstock.adapters.engines.dialects.dialect import Dialect
from penstock.frontend.exchange.transcript import Mode, Transcript
from penstock.frontend.exchange.upstream_request import UpstreamRequest
from penstock.frontend.prompt.model_catalog import ResolvedModel
from penstock.frontend.prompt.prompt_hashing import BlockHashing
from penstock.frontend.prompt.request_body import PATHS, Parsed
from penstock.kernel.hashing import block_hashes
from penstock.kernel.values import JsonObject, Prompt
from penstock.router.events import Resume

COMPLETION_TOKENS = 16
"""Output tokens of a text completion that names no limit, by the OpenAI API."""
_SAMPLING = (
    "model",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "seed",
    "user",
    "logit_bias",
    "bad_words",
    "allowed_token_ids",
)
"""Fields of a request that mean the same when its rest is requested as a text completion."""
_GUIDES = (
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "structured_outputs",
    "regex",
    "ebnf",
    "json_schema",
)
_OTHERWISE = ("suffix", "echo", "use_beam_search", "logits_processors", "truncate_prompt_tokens", "prompt_embeds")
_RARE = frozenset(
    {
        *("n", "best_of", "logprobs", "top_logprobs", "prompt_logprobs", "response_format", "seed", "tools"),
        *("frequency_penalty", "presence_penalty", "repetition_penalty", *_GUIDES, *_OTHERWISE),
    }
)
"""Every field that may forbid it; most requests have none of them."""


class MigrationImpossible(Exception):
    """This answer can't migrate; the message says why."""


class StreamLeg(msgspec.Struct, frozen=True):
    """The request for the next engine."""

    job: UpstreamRequest
    point: Resume
    head: JsonObject
    """Fields that every chunk carries: id, object, created, model."""
    prompt_tokens: int
    left: int | None
    """Output tokens that are left to be made; None where there is no known limit."""
    unsent_text: str
    """Text of generated tokens that the client never got."""


def obstacle(job: UpstreamRequest, *, raw_calls: bool = False) -> str | None:
    """Return what forbids the migration of a request's answer, or None.

    Args:
        raw_calls: its engine passes on calls of tools as the model wrote them, so that text and tokens agree.
    """
    parsed = job.parsed
    if parsed is None:
        return "routes that are passed on as they are do not go on elsewhere"
    fields = parsed.fields
    if _RARE.isdisjoint(fields):
        return _unlike_text(parsed)
    if any((fields.get(name) or 1) != 1 for name in ("n", "best_of")):
        return "it asks for several answers"
    if fields.get("logprobs") or fields.get("top_logprobs") or fields.get("prompt_logprobs") is not None:
        return "it asks for log-probabilities"
    if any(fields.get(name) for name in _GUIDES) or (fields.get("response_format") or {}).get("type", "text") != "text":
        return "its output is guided"
    if fields.get("frequency_penalty") or fields.get("presence_penalty"):
        return "its penalties depend on its output"
    if (fields.get("repetition_penalty") or 1.0) != 1.0:
        return "its penalties depend on its output"
    if fields.get("seed") is not None and fields.get("temperature", 1.0) != 0:
        return "its seed counts from its first token"
    if fields.get("tools") and fields.get("tool_choice") != "none" and not raw_calls:
        return "it may call tools"
    for name in _OTHERWISE:
        if fields.get(name):
            return f"it uses {name}"
    return _unlike_text(parsed)


def transcript_for(job: UpstreamRequest, dialect: Dialect, *, raw_calls: bool = False) -> Transcript | None:
    """Return the transcript that lets an answer migrate, or None where it can't."""
    if job.parsed is None:
        return None
    mode: Mode
    if dialect.resume == "ids":
        mode = "ids"
    elif dialect.resume == "message" or (job.parsed.endpoint == "completions" and isinstance(_prompt(job.parsed), str)):
        mode = "text"
    else:
        return None
    if obstacle(job, raw_calls=raw_calls) is not None:
        return None
    fields = job.parsed.fields
    return Transcript(
        mode,
        keep_text=bool(fields.get("stop")),
        strip=not fields.get("return_token_ids"),
        continue_fields=dialect.continue_fields,
    )


def leg_of(
    transcript: Transcript,
    job: UpstreamRequest,
    prompt: Prompt,
    resolved: ResolvedModel,
    hashing: BlockHashing,
    tokens_max: int,
    counted: int,
    added: JsonObject,
) -> StreamLeg:
    """Return the request that makes another engine continue where the stream broke off.

    Args:
        prompt: of the request as it arrived.
        tokens_max: longest prompt and output together that may migrate.
        counted: output tokens that passed, for an answer without ids.
        added: further fields of the request.
    Raises:
        MigrationImpossible: it can't migrate.
    """
    parsed = job.parsed
    assert parsed is not None
    if transcript.reasons:
        raise MigrationImpossible("the engine parses its reasoning")
    head = transcript.head
    if not head:
        raise MigrationImpossible("its chunks do not say what they are")
    if transcript.mode == "text":
        leg = _text_leg(transcript, job, parsed, prompt, counted, added)
        if leg.point.prompt.isl > tokens_max:
            raise MigrationImpossible(
                f"prompt and output have {leg.point.prompt.isl} tokens, of which {tokens_max} may go on"
            )
        return leg
    prompt_ids = transcript.prompt
    if prompt_ids is None:
        raise MigrationImpossible("the engine did not say the prompt's token ids")
    done = len(transcript.ids)
    whole = array("I", prompt_ids)
    whole.extend(transcript.ids)
    if len(whole) > tokens_max:
        raise MigrationImpossible(f"prompt and output have {len(whole)} tokens, of which {tokens_max} may go on")
    room = None if resolved.max_model_len is None else resolved.max_model_len - len(prompt_ids)
    left = left_of(parsed, done, room)
    if left is None:
        raise MigrationImpossible("neither it nor the engine says how long it may become")
    fields = {name: parsed.fields[name] for name in _SAMPLING if parsed.fields.get(name) is not None}
    fields |= {**added, "prompt": whole.tolist(), "max_tokens": left, "return_token_ids": True}
    _shorten(fields, parsed.fields, done)
    blocks = (
        prompt.blocks
        if prompt.estimated
        else [*block_hashes(whole, hashing.block_size, lora=hashing.adapter, salt=hashing.salt)]
    )
    return StreamLeg(
        job=_job(job, "completions", fields),
        point=Resume(prompt=Prompt(len(whole), blocks), tokens=done),
        head=head,
        prompt_tokens=len(prompt_ids),
        left=left,
        unsent_text=_owed(transcript, parsed, resolved),
    )


def left_of(parsed: Parsed, done: int, room: int | None) -> int | None:
    """Return how many output tokens are left of a request's limit, or None where there is no known limit."""
    fields = parsed.fields
    limit = fields.get("max_completion_tokens") if parsed.endpoint == "chat_completions" else None
    if limit is None:
        limit = fields.get("max_tokens")
    if limit is None and parsed.endpoint == "completions":
        limit = COMPLETION_TOKENS
    known = [value for value in (limit, room) if value is not None]
    return min(known) - done if known else None


def _text_leg(
    transcript: Transcript, job: UpstreamRequest, parsed: Parsed, prompt: Prompt, done: int, added: JsonObject
) -> StreamLeg:
    text = transcript.text
    if text is None:
        raise MigrationImpossible("its output is too long to be told again as text")
    fields = {**parsed.fields, **added}
    if parsed.endpoint == "completions":
        fields["prompt"] = _prompt(parsed) + text
    else:
        last = {"role": "assistant", "content": text}
        fields |= {"messages": [*fields["messages"], last], **dict(transcript.continue_fields)}
    left = left_of(parsed, done, None)
    if left is not None:
        name = "max_completion_tokens" if fields.get("max_completion_tokens") is not None else "max_tokens"
        fields[name] = left
    _shorten(fields, parsed.fields, done)
    return StreamLeg(
        job=_job(job, parsed.endpoint, fields),
        point=Resume(prompt=Prompt(prompt.isl + done, prompt.blocks, prompt.estimated), tokens=done),
        head=transcript.head,
        prompt_tokens=prompt.isl,
        left=left,
        unsent_text="",
    )


def _job(job: UpstreamRequest, endpoint: Any, fields: JsonObject) -> UpstreamRequest:
    fields["stream"] = True
    parsed = Parsed(endpoint, msgspec.json.encode(fields), fields, fields["model"], stream=True, wants_usage=True)
    return UpstreamRequest(
        path=PATHS[parsed.endpoint],
        body=parsed.raw,
        content_type="application/json",
        endpoint=job.endpoint,
        streamed=True,
        parsed=parsed,
        hints=job.hints,
        adds_usage=True,
    )


def _shorten(fields: JsonObject, requested: Mapping[str, Any], done: int) -> None:
    if requested.get("min_tokens"):
        fields["min_tokens"] = max(0, requested["min_tokens"] - done)


def _owed(transcript: Transcript, parsed: Parsed, resolved: ResolvedModel) -> str:
    """Return the text that an engine held back because a stop text might begin in it."""
    stops = parsed.fields.get("stop")
    if not stops:
        return ""
    text = transcript.text
    if text is None or resolved.tokenizer is None:
        raise MigrationImpossible("it has stop texts, and what was held back for them is not known without a tokenizer")
    whole = resolved.tokenizer.decode(transcript.ids)
    if not whole.startswith(text):
        raise MigrationImpossible("its text and its tokens do not agree")
    for stop in [stops] if isinstance(stops, str) else stops:
        if any(whole.endswith(stop[:size]) for size in range(1, len(stop))):
            raise MigrationImpossible("it broke off where one of its stop texts may have begun")
    return whole[len(text) :]


def _prompt(parsed: Parsed) -> Any:
    prompt = parsed.fields.get("prompt")
    return prompt[0] if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str) else prompt


def _unlike_text(parsed: Parsed) -> str | None:
    if parsed.endpoint == "completions":
        prompt = _prompt(parsed)
        plain = isinstance(prompt, str) or (isinstance(prompt, list) and all(isinstance(t, int) for t in prompt))
        return None if plain else "it has several prompts"
    for message in parsed.fields["messages"]:
        content = message.get("content")
        if isinstance(content, list) and any(isinstance(p, dict) and p.get("type", "text") != "text" for p in content):
            return "its prompt is not only text"
    return None
