"""Request reader of the simulated engine: checks bodies of /v1/completions and /v1/chat/completions."""

import re
from collections.abc import Container
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from penstock.kernel.errors import ClientError
from penstock.kernel.hashing import MediaSpan
from penstock.kernel.values import JsonObject
from penstock_lab.sim.json_output import least_json
from penstock_lab.sim.sim_media import media_in
from penstock_lab.sim.sim_text import SimText

Kind = Literal["completion", "chat"]
CHOICES_MAX = 128
Count = Annotated[int, Meta(ge=0)]
_PLACE = re.compile(r" - at `\$\.?(\w*)[^`]*`$")
"""Where msgspec's message for people names the field at fault."""


class StreamOptions(msgspec.Struct, frozen=True):
    """What a stream tells of tokens: ``usage`` at its end, ``usage_always`` with each chunk."""

    usage: bool | None = msgspec.field(default=False, name="include_usage")
    usage_always: bool | None = msgspec.field(default=False, name="continuous_usage_stats")


class BodyOptions(msgspec.Struct, kw_only=True):
    """Fields of a body, under its own names where none is given. Tokens unless the name says otherwise."""

    messages: Any = None
    tools: list[Any] = []
    tool_choice: Any = None
    add_generation_prompt: Any = True
    response_format: JsonObject = {}
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    min_tokens: Count = 0
    ignore_eos: bool = False
    n: Annotated[int, Meta(ge=1, le=CHOICES_MAX)] = 1
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    logprobs: Annotated[int, Meta(ge=0, le=100)] | bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=100)] = 0
    echo: bool = False
    stop: str | list[str] = []
    stop_tokens: list[int] = msgspec.field(default_factory=list, name="stop_token_ids")
    priority: int = 0
    salt: str | None = msgspec.field(default=None, name="cache_salt")
    seed: int = 0
    token_ids: bool = msgspec.field(default=False, name="return_token_ids")


class GenerationRequest(BodyOptions, kw_only=True):
    """One HTTP request: ``len(prompts) * n`` answers."""

    kind: Kind
    model: str
    prompts: list[list[int]]
    output_max: int
    lora: str | None
    media: list[MediaSpan]
    """Images and other media in a chat's one prompt."""
    forced: str | None
    tool: str | None

    @property
    def stops(self) -> list[str]:
        """The texts that end an answer."""
        return [stop for stop in ([self.stop] if isinstance(self.stop, str) else self.stop) if stop]


def options_of(body: Any) -> BodyOptions:
    """Read the fields of a body; null counts as absent.

    Raises:
        ClientError: a field has another type or range; its ``param`` names the field.
    """
    if not isinstance(body, dict):
        raise ClientError("The body must be a JSON object.")
    given = {name: value for name, value in body.items() if value is not None}
    try:
        return msgspec.convert(given, BodyOptions, strict=False)
    except msgspec.ValidationError as error:
        place = _PLACE.search(str(error))
        param = place[1] if place is not None else None
        raise ClientError(f"{param}: {_PLACE.sub('', str(error))}.", param=param) from error


class RequestReader:
    """Reads bodies for one server.

    Args:
        adapters: LoRA names that it serves beside the model, as they are when a request comes.
        limit: longest prompt and output together that the engine can hold.
    """

    def __init__(self, text: SimText, model: str, adapters: Container[str], limit: int) -> None:
        self._text = text
        self._model = model
        self._adapters = adapters
        self._limit = limit

    def read(self, kind: Kind, body: Any) -> GenerationRequest:
        """Check a body.

        Raises:
            ClientError: 404 for an unknown model, 400 for anything else that can't be served.
        """
        options = options_of(body)
        model = self.model(body)
        media: list[MediaSpan] = []
        prompts = self.chat_prompt(options, media) if kind == "chat" else self._prompts(body)
        tool = _required_tool_call(options) if kind == "chat" else None
        request = GenerationRequest(
            **msgspec.structs.asdict(options),
            kind=kind,
            model=model,
            prompts=prompts,
            output_max=self._output_max(kind, options, max(map(len, prompts))),
            lora=model if model in self._adapters else None,
            media=media,
            forced=tool[1] if tool is not None else _text_of_format(options),
            tool=tool[0] if tool is not None else None,
        )
        request.echo = kind == "completion" and options.echo
        if kind == "chat":
            request.logprobs = options.top_logprobs if options.logprobs else None
        elif isinstance(options.logprobs, bool):
            raise ClientError("logprobs must be a whole number.", param="logprobs")
        return request

    def model(self, body: JsonObject) -> str:
        """Return the model or adapter that a body names; no name means the model."""
        name = body.get("model") or self._model
        if name != self._model and name not in self._adapters:
            raise ClientError(f"The model `{name}` does not exist.", status=404, code="NotFoundError", param="model")
        return str(name)

    def chat_prompt(self, options: BodyOptions, media: list[MediaSpan] | None = None) -> list[list[int]]:
        """Return the one prompt of a chat.

        Args:
            media: a list to which its images are added.
        Raises:
            ClientError: the messages are malformed or too long.
        """
        messages = options.messages
        if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
            raise ClientError("messages must be a list of at least one message.", param="messages")
        try:
            rendered = self._text.chat(messages, options.tools, options.add_generation_prompt is not False)
            tokens, spans = _with_images(self._text.encode(rendered), self._text.image, media_in(messages))
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
                return self._fitting([_checked_tokens(prompt)])
            if all(isinstance(part, str) for part in prompt):
                return self._fitting([self._text.encode(part) for part in prompt])
            if all(isinstance(part, list) and all(type(t) is int for t in part) for part in prompt):
                return self._fitting([_checked_tokens(part) for part in prompt])
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

    def _output_max(self, kind: Kind, options: BodyOptions, longest: int) -> int:
        room = self._limit - longest
        wanted = options.max_completion_tokens or options.max_tokens
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


def _with_images(
    tokens: list[int], placeholder: int | None, media: list[tuple[str, int]]
) -> tuple[list[int], list[MediaSpan]]:
    """Put as many tokens as a medium takes in the place of each placeholder."""
    if placeholder is None or not media:
        return tokens, []
    if tokens.count(placeholder) != len(media):
        places = tokens.count(placeholder)
        raise ValueError(f"{len(media)} images are given, and the prompt has {places} places for them")
    out: list[int] = []
    spans: list[MediaSpan] = []
    for token in tokens:
        if token == placeholder:
            id, length = media[len(spans)]
            spans.append(MediaSpan(id, len(out), length))
            out += [token] * length
        else:
            out.append(token)
    return out, spans


def _checked_tokens(prompt: list[int]) -> list[int]:
    wrong = next((token for token in prompt if not 0 <= token < 1 << 32), None)
    if wrong is not None:
        raise ClientError(f"Token id {wrong} is out of vocabulary.", param="prompt")
    return prompt


def _required_tool_call(options: BodyOptions) -> tuple[str, str] | None:
    """Return the name and arguments of the tool call that ``tool_choice`` requires."""
    choice = options.tool_choice
    tools = [tool for tool in options.tools if isinstance(tool, dict)]
    functions = [tool["function"] for tool in tools if isinstance(tool.get("function"), dict)]
    if choice == "required":
        if not functions:
            raise ClientError("tool_choice is required, but there are no tools.", param="tool_choice")
        function = functions[0]
    elif isinstance(choice, dict):
        named = choice.get("function")
        name = named.get("name") if isinstance(named, dict) else None
        function = next((f for f in functions if f.get("name") == name), None)
        if function is None:
            raise ClientError(f"tool_choice names {name!r}, which is not among the tools.", param="tool_choice")
    else:
        return None
    return str(function.get("name", "")), least_json(function.get("parameters") or {"type": "object"})


def _text_of_format(options: BodyOptions) -> str | None:
    """Return the text for the requested response format, or None for free text."""
    kind = options.response_format.get("type", "text")
    if kind == "json_object":
        return '{"answer":"water"}'
    if kind == "json_schema":
        described = options.response_format.get("json_schema") or {}
        if not isinstance(described, dict):
            raise ClientError("json_schema must be an object.", param="json_schema")
        return least_json(described.get("schema", {}))
    if kind != "text":
        raise ClientError(
            f"response_format {kind!r} is not one of text, json_object, json_schema.", param="response_format"
        )
    return None
