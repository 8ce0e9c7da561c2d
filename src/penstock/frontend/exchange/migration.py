"""Migration of a broken stream: whether another engine can continue the answer, and the request for that engine.

It gets the prompt and the output so far (`Transcript`) as one longer prompt, and the rest of the output limit. Not
every request can migrate: `obstacle` returns what forbids it, and such an answer ends with an error instead. While a
stream runs, its transcript costs a search per piece: of the engine's chunks only the token ids are kept, which Penstock
requests from the engine and cuts out of the client's stream.
"""

import re
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from penstock.adapters.engines.dialects.dialect import Dialect
from penstock.adapters.engines.http.event_stream import chunks_of
from penstock.frontend.exchange.upstream_request import UpstreamRequest
from penstock.frontend.parsers.chat_speech import speech_in
from penstock.frontend.prompt.model_catalog import ResolvedModel
from penstock.frontend.prompt.prompt_hashing import BlockHashing
from penstock.frontend.prompt.request_body import PATHS, Parsed
from penstock.kernel.hashing import block_hashes
from penstock.kernel.values import JsonObject, Prompt
from penstock.router.events import Resume

Mode = Literal["ids", "text"]
"""How another engine receives the output so far: as token ids, or as text that it tokenises again."""

TEXT_BYTES_MAX = 1 << 20
"""Most bytes of a stream that are kept where its text may be needed; a longer one does not migrate."""
# Inside a JSON string every quote is escaped, so these can only match a field.
_OUTPUT = re.compile(rb'"token_ids"\s*:\s*\[([\d,\s]*)\]')
_FIELDS = re.compile(rb',\s*"(?:prompt_)?token_ids"\s*:\s*(?:\[[\d,\s]*\]|null)')


class Transcript:
    """Records what the client gets.

    Args:
        mode: what another engine will receive.
        keep_text: the text may be needed although ids are sent.
        strip: cut the token ids out, because the client did not request them.
        continue_fields: fields of a chat's body that make the engine continue its last message.
    """

    __slots__ = (
        "_keep",
        "_last",
        "_opening",
        "_strip",
        "continue_fields",
        "count",
        "finish_reason",
        "ids",
        "mode",
        "pieces",
        "size",
    )

    def __init__(
        self, mode: Mode, *, keep_text: bool, strip: bool, continue_fields: Sequence[tuple[str, Any]] = ()
    ) -> None:
        self.mode = mode
        self.continue_fields = continue_fields
        self.ids: array[int] = array("I")
        """Output tokens so far."""
        self.count = 0
        """Output chunks so far: the only measure of length where there are no ids."""
        self.finish_reason: str | None = None
        """Set where the answer had ended and only the end of its stream is missing; see `settle`."""
        self.pieces: list[bytes] = []
        self.size = 0
        self._keep = keep_text or mode == "text"
        self._strip = strip
        self._opening = b""
        self._last = b""

    def take(self, out: bytes) -> bytes:
        """Take whole events of the engine; return them in the client's form."""
        if not self._opening:
            self._opening = out
        self._last = out
        if self.mode == "ids" and b'token_ids"' in out:
            for ids in _OUTPUT.findall(out):
                if ids:
                    self.ids.extend(map(int, ids.split(b",")))
            if self._strip:
                out = _FIELDS.sub(b"", out)
        if self._keep and self.size <= TEXT_BYTES_MAX:
            self.pieces.append(out)
            self.size += len(out)
        return out

    def wrote(self, tokens: Sequence[int], out: bytes, finish_reason: str | None) -> None:
        """Record the output of a later leg."""
        self.ids.extend(tokens)
        self._last = b""
        self.finish_reason = finish_reason
        if self._keep and self.size <= TEXT_BYTES_MAX:
            self.pieces.append(out)
            self.size += len(out)

    def settle(self) -> None:
        """Determine whether the answer had ended; called when a leg broke off."""
        for chunk in chunks_of(self._last):
            for choice in chunk.get("choices") or ():
                self.finish_reason = choice.get("finish_reason") or self.finish_reason

    @property
    def head(self) -> JsonObject:
        """Fields that every chunk of the answer carries: id, object, created, model."""
        for chunk in chunks_of(self._opening):
            if chunk.get("choices"):
                return {k: v for k, v in chunk.items() if k not in ("choices", "usage", "prompt_token_ids")}
        return {}

    @property
    def prompt(self) -> list[int] | None:
        """The prompt's token ids as the first engine counted them, or None where it did not report them."""
        for chunk in chunks_of(self._opening):
            places = [chunk, *(chunk.get("choices") or ())]
            for place in places:
                ids = place.get("prompt_token_ids")
                if isinstance(ids, list):
                    return ids
        return None

    @property
    def reasons(self) -> bool:
        """Whether the engine parses the model's reasoning out of its text: then text and tokens do not agree."""
        return b'"reasoning' in self._opening and any(
            choice["delta"].get(name)
            for chunk in chunks_of(self._opening)
            for choice in chunk.get("choices") or ()
            if isinstance(choice.get("delta"), dict)
            for name in ("reasoning", "reasoning_content")
        )

    @property
    def text(self) -> str | None:
        """The text that the client has received, or None where it was too long to keep."""
        if self.size > TEXT_BYTES_MAX:
            return None
        parts: list[str] = []
        for chunk in chunks_of(b"".join(self.pieces)):
            for choice in chunk.get("choices") or ():
                parts.append(speech_in(choice.get("delta") or {"content": choice.get("text")}).text)
        return "".join(parts)


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
    elif dialect.resume == "message" or (
        job.parsed.endpoint == "completions" and isinstance(_single_prompt(job.parsed), str)
    ):
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
        job=_leg_request(job, "completions", fields),
        point=Resume(prompt=Prompt(len(whole), blocks), tokens=done),
        head=head,
        prompt_tokens=len(prompt_ids),
        left=left,
        unsent_text=_unsent_text(transcript, parsed, resolved),
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
        fields["prompt"] = _single_prompt(parsed) + text
    else:
        last = {"role": "assistant", "content": text}
        fields |= {"messages": [*fields["messages"], last], **dict(transcript.continue_fields)}
    left = left_of(parsed, done, None)
    if left is not None:
        name = "max_completion_tokens" if fields.get("max_completion_tokens") is not None else "max_tokens"
        fields[name] = left
    _shorten(fields, parsed.fields, done)
    return StreamLeg(
        job=_leg_request(job, parsed.endpoint, fields),
        point=Resume(prompt=Prompt(prompt.isl + done, prompt.blocks, prompt.estimated), tokens=done),
        head=transcript.head,
        prompt_tokens=prompt.isl,
        left=left,
        unsent_text="",
    )


def _leg_request(job: UpstreamRequest, endpoint: Any, fields: JsonObject) -> UpstreamRequest:
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


def _unsent_text(transcript: Transcript, parsed: Parsed, resolved: ResolvedModel) -> str:
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


def _single_prompt(parsed: Parsed) -> Any:
    prompt = parsed.fields.get("prompt")
    return prompt[0] if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str) else prompt


def _unlike_text(parsed: Parsed) -> str | None:
    if parsed.endpoint == "completions":
        prompt = _single_prompt(parsed)
        plain = isinstance(prompt, str) or (isinstance(prompt, list) and all(isinstance(t, int) for t in prompt))
        return None if plain else "it has several prompts"
    for message in parsed.fields["messages"]:
        content = message.get("content")
        if isinstance(content, list) and any(isinstance(p, dict) and p.get("type", "text") != "text" for p in content):
            return "its prompt is not only text"
    return None
