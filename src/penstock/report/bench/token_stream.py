"""Reads an answer's stream of server-sent events and counts the output tokens of each chunk, with its time."""

from typing import Literal

import msgspec

Counting = Literal["usage", "token_ids", "logprobs", "chunks"]
"""Source of a chunk's token count: running usage, token ids, log probabilities, or one per chunk."""

LINE_MAX = 1 << 20
"""Longest line of a stream in bytes; a server that sends more does not follow this protocol."""


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[msgspec.Raw] | None = None

    @property
    def has_output(self) -> bool:
        return bool(self.content or self.reasoning_content or self.reasoning or self.tool_calls)


class _Logprobs(msgspec.Struct):
    content: list[msgspec.Raw] | None = None
    tokens: list[msgspec.Raw] | None = None


class _StreamChoice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None


class _Event(msgspec.Struct):
    choices: list[_StreamChoice] = []
    usage: _Usage | None = None
    error: msgspec.Raw | None = None


class BadStream(Exception):
    """The stream is broken, or contains the server's error for the request."""


_decode = msgspec.json.Decoder(_Event).decode


class AnswerStream:
    """Parses the bytes of one streamed answer as they arrive.

    Bytes that are read together arrived at one time: their tokens count as one chunk. Cost: about 2 us per event.
    """

    __slots__ = ("_rest", "cached", "chunks", "counting", "done", "prompt_tokens", "tokens", "total")

    def __init__(self) -> None:
        self.chunks: list[tuple[float, int]] = []
        """(time of reading in seconds, output tokens of that chunk)"""
        self.tokens = 0
        """Output tokens counted so far, chunk by chunk."""
        self.total: int | None = None
        """Output tokens by the last usage."""
        self.prompt_tokens: int | None = None
        self.cached: int | None = None
        self.counting: Counting | None = None
        self.done = False
        self._rest = b""

    def feed(self, data: bytes, now: float) -> None:
        """Parse the bytes read at ``now`` (seconds of any one clock of the caller).

        Raises:
            BadStream: a line is no event, or is an error of the server.
        """
        lines = (self._rest + data if self._rest else data).split(b"\n")
        self._rest = lines.pop()
        if len(self._rest) > LINE_MAX:
            raise BadStream(f"a line of the stream is longer than {LINE_MAX} bytes")
        brought = 0
        for line in lines:
            if line.startswith(b"data:"):
                brought += self._event(line[5:].strip())
        if brought:
            self.tokens += brought
            self.chunks.append((now, brought))

    @property
    def exact(self) -> bool:
        """Whether the chunks' tokens add up to the total that the server reports."""
        return self.total is None or self.total == self.tokens

    def _event(self, text: bytes) -> int:
        if text == b"[DONE]":
            self.done = True
            return 0
        try:
            event = _decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise BadStream(f"an event of the stream is not what it should be: {error}") from error
        if event.error is not None:
            raise BadStream(f"the server answered: {bytes(event.error)[:200].decode('utf-8', 'replace')}")
        before = self.total or 0
        if event.usage is not None:
            self._usage(event.usage)
            if event.choices and event.usage.completion_tokens is not None:
                self.counting = "usage"
                return max(0, event.usage.completion_tokens - before)
        if self.counting == "usage":
            return 0  # with running usage, an event without it brings no token
        return sum(self._choice(choice) for choice in event.choices)

    def _usage(self, usage: _Usage) -> None:
        if usage.completion_tokens is not None:
            self.total = usage.completion_tokens
        if usage.prompt_tokens is not None:
            self.prompt_tokens = usage.prompt_tokens
        if usage.prompt_tokens_details is not None and usage.prompt_tokens_details.cached_tokens is not None:
            self.cached = usage.prompt_tokens_details.cached_tokens

    def _choice(self, choice: _StreamChoice) -> int:
        if choice.token_ids:
            self.counting = "token_ids"
            return len(choice.token_ids)
        if choice.logprobs is not None:
            listed = choice.logprobs.content or choice.logprobs.tokens
            if listed:
                self.counting = "logprobs"
                return len(listed)
        if choice.text or (choice.delta is not None and choice.delta.has_output):
            self.counting = self.counting or "chunks"
            return 1
        return 0
