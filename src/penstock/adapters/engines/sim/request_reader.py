"""Request reader of the simulated engine: checks bodies of /v1/completions and /v1/chat/completions."""

import hashlib
from dataclasses import dataclass, field
from typing import Any, Literal

from penstock.adapters.engines.sim.json_output import least_json
from penstock.adapters.engines.sim.sim_text import SimText
from penstock.adapters.engines.sim.sim_tokenizer import IMAGE_TOKENS
from penstock.kernel.errors import ClientError
from penstock.kernel.hashing import MediaSpan
from penstock.kernel.values import JsonObject

Kind = Literal["completion", "chat"]
CHOICES_MAX = 128


@dataclass(slots=True)
class GenerationRequest:
    """One HTTP request: ``len(prompts) * n`` answers. Tokens unless the name says otherwise."""

    kind: Kind
    model: str
    prompts: list[list[int]]
    max_tokens: int
    lora: str | None = None
    n: int = 1
    min_tokens: int = 0
    ignore_eos: bool = False
    stream: bool = False
    usage: bool = False
    usage_always: bool = False
    logprobs: int | None = None
    echo: bool = False
    stops: list[str] = field(default_factory=list)
    stop_tokens: list[int] = field(default_factory=list)
    priority: int = 0
    salt: str | None = None
    media: list[MediaSpan] = field(default_factory=list)
    """Images and other media in a chat's one prompt."""
    seed: int = 0
    token_ids: bool = False
    forced: str | None = None
    tool: str | None = None


class RequestReader:
    """Reads bodies for one server.

    Args:
        limit: longest prompt and output together that the engine can hold.
    """

    def __init__(self, text: SimText, model: str, adapters: tuple[str, ...], limit: int) -> None:
        self._text = text
        self._model = model
        self._adapters = adapters
        self._limit = limit

    def read(self, kind: Kind, body: Any) -> GenerationRequest:
        """Check a body.

        Raises:
            ClientError: 404 for an unknown model, 400 for anything else that can't be served.
        """
        if not isinstance(body, dict):
            raise ClientError("The body must be a JSON object.")
        model = self.model(body)
        media: list[MediaSpan] = []
        prompts = self.chat_prompt(body, media) if kind == "chat" else self._prompts(body)
        longest = max(len(prompt) for prompt in prompts)
        stream = bool(body.get("stream"))
        options = _of(body, "stream_options", dict, {})
        tool = _tool(body) if kind == "chat" else None
        return GenerationRequest(
            kind=kind,
            model=model,
            prompts=prompts,
            max_tokens=self._max_tokens(kind, body, longest),
            lora=model if model in self._adapters else None,
            n=_number(body, "n", 1, 1, CHOICES_MAX),
            min_tokens=_number(body, "min_tokens", 0, 0, None),
            ignore_eos=bool(body.get("ignore_eos")),
            stream=stream,
            usage=bool(options.get("include_usage")),
            usage_always=bool(options.get("continuous_usage_stats")),
            logprobs=_logprobs(kind, body),
            echo=kind == "completion" and bool(body.get("echo")),
            stops=_stops(body),
            stop_tokens=[token for token in _of(body, "stop_token_ids", list, []) if isinstance(token, int)],
            priority=_number(body, "priority", 0, None, None),
            salt=_of(body, "cache_salt", str, None),
            media=media,
            seed=_number(body, "seed", 0, None, None),
            token_ids=bool(body.get("return_token_ids")),
            forced=tool[1] if tool is not None else _format(body),
            tool=tool[0] if tool is not None else None,
        )

    def model(self, body: JsonObject) -> str:
        """Return the model or adapter that a body names; no name means the model."""
        name = body.get("model") or self._model
        if name != self._model and name not in self._adapters:
            raise ClientError(f"The model `{name}` does not exist.", status=404, code="NotFoundError", param="model")
        return str(name)

    def chat_prompt(self, body: JsonObject, media: list[MediaSpan] | None = None) -> list[list[int]]:
        """Return the one prompt of a chat.

        Args:
            media: a list to which its images are added.
        Raises:
            ClientError: the messages are malformed or too long.
        """
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
            raise ClientError("messages must be a list of at least one message.", param="messages")
        tools = _of(body, "tools", list, None)
        try:
            rendered = self._text.chat(messages, tools, body.get("add_generation_prompt", True) is not False)
            tokens, spans = _with_images(self._text.encode(rendered), self._text.image, _images(messages))
            if media is not None:
                media += spans
            return self._fitting([tokens])
        except ValueError as error:
            raise ClientError(str(error), param="messages") from error

    def _prompts(self, body: JsonObject) -> list[list[int]]:
        prompt = body.get("prompt")
        if isinstance(prompt, str):
            return self._fitting([self._text.encode(prompt)])
        if isinstance(prompt, list) and prompt:
            if all(type(token) is int for token in prompt):
                return self._fitting([_tokens(prompt)])
            if all(isinstance(part, str) for part in prompt):
                return self._fitting([self._text.encode(part) for part in prompt])
            if all(isinstance(part, list) and all(type(t) is int for t in part) for part in prompt):
                return self._fitting([_tokens(part) for part in prompt])
        raise ClientError("prompt must be a text, token ids, or a list of either.", param="prompt")

    def _fitting(self, prompts: list[list[int]]) -> list[list[int]]:
        for prompt in prompts:
            if not prompt:
                raise ClientError("The prompt is empty.", param="prompt")
            if len(prompt) >= self._limit:
                raise ClientError(
                    f"This model's maximum context length is {self._limit} tokens. However, your request has "
                    f"{len(prompt)} input tokens. (parameter=input_tokens, value={len(prompt)})",
                    param="input_tokens",
                )
        return prompts

    def _max_tokens(self, kind: Kind, body: JsonObject, longest: int) -> int:
        room = self._limit - longest
        name = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
        wanted: int | None = _number(body, name, None, 1, None)
        if wanted is None:
            return room if kind == "chat" else min(16, room)
        if wanted > room:
            raise ClientError(
                f"'max_tokens' or 'max_completion_tokens' is too large: {wanted}. This model's maximum context length "
                f"is {self._limit} tokens and your request has {longest} input tokens ({wanted} > {self._limit} - "
                f"{longest}). (parameter=max_tokens, value={wanted})",
                param="max_tokens",
            )
        return wanted


def _number(body: JsonObject, name: str, default: Any, low: int | None, high: int | None) -> Any:
    value = body.get(name)
    if value is None:
        return default
    if type(value) is not int or (low is not None and value < low) or (high is not None and value > high):
        span = f" from {low}" if low is not None else ""
        span += f" to {high}" if high is not None else ""
        raise ClientError(f"{name} must be a whole number{span}, not {value!r}.", param=name)
    return value


def _of(body: JsonObject, name: str, kind: type, default: Any) -> Any:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, kind):
        raise ClientError(f"{name} must be a {kind.__name__}, not {type(value).__name__}.", param=name)
    return value


def _images(messages: list[JsonObject]) -> list[str]:
    """Return the ids of a chat's images and other media: the client's ``uuid``, else a digest of the part."""
    ids = []
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else []:
            if isinstance(part, dict) and "text" not in part:
                own = part.get("uuid")
                ids.append(own if isinstance(own, str) else hashlib.sha256(repr(part).encode()).hexdigest())
    return ids


def _with_images(tokens: list[int], placeholder: int | None, ids: list[str]) -> tuple[list[int], list[MediaSpan]]:
    """Put as many tokens as an image takes in the place of each placeholder."""
    if placeholder is None or not ids:
        return tokens, []
    if tokens.count(placeholder) != len(ids):
        raise ValueError(f"{len(ids)} images are given, and the prompt has {tokens.count(placeholder)} places for them")
    out: list[int] = []
    spans: list[MediaSpan] = []
    for token in tokens:
        if token == placeholder:
            spans.append(MediaSpan(ids[len(spans)], len(out), IMAGE_TOKENS))
            out += [token] * IMAGE_TOKENS
        else:
            out.append(token)
    return out, spans


def _tokens(prompt: list[int]) -> list[int]:
    wrong = next((token for token in prompt if not 0 <= token < 1 << 32), None)
    if wrong is not None:
        raise ClientError(f"Token id {wrong} is out of vocabulary.", param="prompt")
    return prompt


def _stops(body: JsonObject) -> list[str]:
    value = body.get("stop")
    if value is None:
        return []
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise ClientError("stop must be a text or a list of texts.", param="stop")
    return [stop for stop in stops if stop]


def _logprobs(kind: Kind, body: JsonObject) -> int | None:
    if kind == "completion":
        number: int | None = _number(body, "logprobs", None, 0, 100)
        return number
    if not body.get("logprobs"):
        return None
    count: int = _number(body, "top_logprobs", 0, 0, 100)
    return count


def _tool(body: JsonObject) -> tuple[str, str] | None:
    """Return the name and arguments of the tool call that ``tool_choice`` requires."""
    choice = body.get("tool_choice")
    tools = [tool for tool in _of(body, "tools", list, []) if isinstance(tool, dict)]
    functions = [tool["function"] for tool in tools if isinstance(tool.get("function"), dict)]
    if choice == "required":
        if not functions:
            raise ClientError("tool_choice is required, but there are no tools.", param="tool_choice")
        function = functions[0]
    elif isinstance(choice, dict):
        name = _of(choice, "function", dict, {}).get("name")
        function = next((f for f in functions if f.get("name") == name), None)
        if function is None:
            raise ClientError(f"tool_choice names {name!r}, which is not among the tools.", param="tool_choice")
    else:
        return None
    return str(function.get("name", "")), least_json(function.get("parameters") or {"type": "object"})


def _format(body: JsonObject) -> str | None:
    """Return the text for the requested response format, or None for free text."""
    response_format = _of(body, "response_format", dict, {})
    kind = response_format.get("type", "text")
    if kind == "json_object":
        return '{"answer":"water"}'
    if kind == "json_schema":
        return least_json(_of(response_format, "json_schema", dict, {}).get("schema", {}))
    if kind != "text":
        raise ClientError(
            f"response_format {kind!r} is none of text, json_object, json_schema.", param="response_format"
        )
    return None
