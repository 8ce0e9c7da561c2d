"""Token route: an answer that an engine generates of tokens which a render server has made, in the client's own form.

Template, tokens and words are then the engine's own code everywhere. A stream is put into words by the engine (vLLM's
output mode ``text``); a whole answer by the server that rendered its prompt, which has the parsers for calls and
reasoning. A request of which that would change something takes the usual route, and `explain` says why.
"""

import time
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from penstock.adapters.engines.dialects.kv_transfer_protocol import PARAMS
from penstock.adapters.engines.dialects.scale_out_routes import GENERATE, ROUTE_PATHS, has_route
from penstock.adapters.engines.http.event_stream import object_in, payload_of, split_events
from penstock.frontend.exchange.upstream_request import UpstreamRequest
from penstock.frontend.parsers.answer_parsing import ParserPlan
from penstock.frontend.prompt.prompt_renderer import PromptRenderer, RenderedPrompt
from penstock.frontend.prompt.request_body import Endpoint, Parsed, is_whole
from penstock.kernel.values import JsonObject, WorkerCard

OutputMode = Literal["tokens", "text"]
"""What the engine answers: token ids alone, which are then derendered, or their text as well."""

PATH = ROUTE_PATHS[GENERATE]
_CARRIED = frozenset({PARAMS, "priority", "cache_salt", "stream_options", "return_token_ids"})
"""Fields for an engine that its generate route has, too."""
_RENDERED = frozenset({"model", "tool_choice", "skip_special_tokens"})
"""Fields for an engine that are in what was rendered, or that only its own parsers heed."""
_OWN_WORDS = ("stop", "stop_token_ids", "include_stop_str_in_output")
"""Fields by which an answer's text is not that of all its tokens: the engine alone knows it."""
_UNFIT = ("chat_template", "return_tokens_as_token_ids")


def token_obstacle(
    job: UpstreamRequest, card: WorkerCard, added: Mapping[str, Any], plan: ParserPlan | None
) -> str | None:
    """Return why a request whose prompt is rendered takes an engine's usual route, or None.

    Args:
        added: the fields that an engine gets beside the client's own.
        plan: what is parsed here of its answer.
    """
    prompt, parsed = job.rendered, job.parsed
    assert prompt is not None and parsed is not None
    fields = parsed.fields
    if not has_route(card, GENERATE):
        return f"{card.id} has no generate route"
    if is_whole(parsed):
        return "it asks for several answers, or for more than its output"
    unfit = sorted(added.keys() - _CARRIED - _RENDERED) + [name for name in _UNFIT if fields.get(name)]
    if unfit:
        return f"the generate route has no {unfit[0]}"
    calls = bool(fields.get("tools")) and fields.get("tool_choice") != "none" and (plan is None or plan.calls is None)
    if calls and fields.get("tool_choice") not in (None, "auto"):
        return "it forces a tool's call"
    parses = calls or (prompt.reasons and (plan is None or plan.tags is None))
    if parsed.stream and parses:
        return "a stream's calls and reasoning are parsed by the engine"
    if parses and (not prompt.derenders or _own_words(parsed)):
        return "its calls and reasoning are parsed by the engine"
    if parsed.endpoint == "completions" and fields.get("logprobs") is not None and output_mode(job, plan) == "text":
        return "log-probabilities of a text completion are worded by the engine"
    return None


def output_mode(job: UpstreamRequest, plan: ParserPlan | None) -> OutputMode:
    """Return what an engine is to answer."""
    prompt, parsed = job.rendered, job.parsed
    assert prompt is not None and parsed is not None
    return "text" if parsed.stream or plan is not None or not prompt.derenders or _own_words(parsed) else "tokens"


def _own_words(parsed: Parsed) -> bool:
    fields = parsed.fields
    return any(fields.get(name) for name in _OWN_WORDS) or fields.get("skip_special_tokens") is False


class TokenRoute:
    """One request on its way by tokens.

    Args:
        request: its id, of which those of its chunks are made.
        added: the fields that an engine gets beside the client's own.
        plan: what is parsed here of its answer.
    """

    __slots__ = ("_added", "_head", "_model", "_parsed", "_plan", "_prompt", "_spoken", "_tail", "mode")

    def __init__(
        self, job: UpstreamRequest, request: str, added: Mapping[str, Any], plan: ParserPlan | None = None
    ) -> None:
        assert job.rendered is not None and job.parsed is not None
        self.mode: OutputMode = output_mode(job, plan)
        self._prompt: RenderedPrompt = job.rendered
        self._parsed: Parsed = job.parsed
        self._added = added
        self._plan = plan
        self._model: str = msgspec.json.decode(job.rendered.request["model"])
        """The engines' name of it; the client may have asked by another."""
        self._tail = b""
        self._spoken = False
        """Whether the stream's opening was sent."""
        chat = self._chat
        self._head: JsonObject = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{request}",
            "object": {(True, True): "chat.completion.chunk", (True, False): "chat.completion"}.get(
                (chat, job.streamed), "text_completion"
            ),
            "created": int(time.time()),
            "model": self._model,
        }

    @property
    def text(self) -> str:
        """How the answer comes about, for `explain`."""
        worded = "by the engine itself" if self.mode == "text" else f"by {self._prompt.server}"
        return f"rendered by {self._prompt.server}, generated of tokens, put into words {worded}"

    def body(self) -> bytes:
        """Return the request for the engine's generate route."""
        parsed = self._parsed
        fields: JsonObject = dict(self._prompt.request)
        fields |= {"output_mode": self.mode, "stream": parsed.stream}
        if parsed.stream and (options := parsed.fields.get("stream_options")):
            fields["stream_options"] = options
        if "return_token_ids" in parsed.fields:
            fields["return_token_ids"] = parsed.fields["return_token_ids"]
        fields |= {name: value for name, value in self._added.items() if name in _CARRIED}
        if self._plan is not None and self._plan.special:
            sampling = msgspec.json.decode(self._prompt.request["sampling_params"])
            fields["sampling_params"] = {**sampling, "skip_special_tokens": False}
        return msgspec.json.encode(fields)

    def stream(self, data: bytes) -> bytes:
        """Take a piece of the engine's stream; return its whole events as those of a completion's stream."""
        *events, self._tail = split_events(self._tail + data)
        return b"".join([self._event(event) for event in events])

    async def whole(self, body: bytes, renderer: PromptRenderer) -> bytes:
        """Return a whole answer as that of a completion.

        Raises:
            EngineError: no words could be put to its tokens.
        """
        answer = msgspec.json.decode(body, type=JsonObject)
        if self.mode == "text":
            choices = [self._choice(choice) for choice in answer["choices"]]
        else:
            worded = await renderer.words(self._prompt.server, self._parsed.endpoint, self._derendering(answer))
            choices = [_ended(choice) for choice in worded["choices"]]  # type: ignore[attr-defined]
        return msgspec.json.encode({**self._head, "choices": choices, "usage": answer.get("usage")})

    def _derendering(self, answer: JsonObject) -> JsonObject:
        """Return the body for the server that puts a whole answer into words."""
        endpoint: Endpoint = self._parsed.endpoint
        asked = msgspec.Raw(self._parsed.raw)
        body: JsonObject = {"model": self._model, "stream": False}
        if endpoint == "completions":
            return {
                **body,
                "generate_responses": [answer],
                "prompt_token_ids": [self._prompt.tokens],
                "completion_request": asked,
            }
        answer = {**answer, "prompt_token_ids": self._prompt.tokens}  # its parsers read them here alone
        return {**body, "generate_response": answer, "chat_request": asked}

    def _event(self, event: bytes) -> bytes:
        chunk = object_in(payload_of(event))
        choices = None if chunk is None else chunk.get("choices")
        if chunk is None or not isinstance(choices, list):
            return event  # the end mark, a comment or an error, which the tap reads
        body: JsonObject = {**self._head, "choices": [self._choice(choice) for choice in choices]}
        if chunk.get("usage") is not None:
            body["usage"] = chunk["usage"]
        out = b""
        if choices and not self._spoken:
            self._spoken = True
            out = self._opening(chunk, body)
        return out + b"data: " + msgspec.json.encode(body) + b"\n\n"

    def _opening(self, chunk: JsonObject, body: JsonObject) -> bytes:
        """Return the event with which a chat's stream begins; the prompt's token ids, where asked for, are in it."""
        ids = {"prompt_token_ids": chunk["prompt_token_ids"]} if "prompt_token_ids" in chunk else {}
        if not self._chat:
            body["choices"][0] |= ids
            return b""
        delta = {"role": "assistant", "content": ""}
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
        return b"data: " + msgspec.json.encode({**self._head, **ids, "choices": [choice]}) + b"\n\n"

    def _choice(self, choice: JsonObject) -> JsonObject:
        """Return one choice, or its part of a stream, in the form of a completion."""
        text = choice.get("text") or ""
        said: JsonObject = {"text": text}
        if self._chat and self._parsed.stream:
            said = {"delta": {"content": text}}
        elif self._chat:
            said = {"message": {"role": "assistant", "content": text}}
        reason = choice.get("finish_reason")
        out = {"index": choice["index"], **said, "logprobs": choice.get("logprobs"), "finish_reason": reason}
        if reason is not None:
            out["stop_reason"] = choice.get("stop_reason")
        if self._added.get("return_token_ids") or self._parsed.fields.get("return_token_ids"):
            out["token_ids"] = choice.get("token_ids")
        return out

    @property
    def _chat(self) -> bool:
        return self._parsed.endpoint == "chat_completions"


def _ended(choice: JsonObject) -> JsonObject:
    """Return a derendered choice with the reason that vLLM's own answers give where they have calls."""
    message = choice.get("message") or {}
    return {**choice, "finish_reason": "tool_calls"} if message.get("tool_calls") else choice
