"""Open-loop load generator: streamed HTTP requests at planned times, never waiting for the server.

Arrivals follow their plan whatever the server does. Each request is sent by its own task; its body is made
before its time comes. TTFT counts from the moment of sending, and the lateness of the sending is kept beside it.
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

import aiohttp
import msgspec

from penstock.adapters.background_tasks import BackgroundTasks
from penstock.kernel.plurals import counted

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


PREPARED_MAX = 64
"""Requests whose bodies are made ahead: covers a burst, costs a few MB."""
SPARE = 0.002
"""Seconds before the next arrival in which a further body may be made; making one takes 1 to 2 ms."""
ERROR_BYTES = 2000

Ending = Literal["ok", "rejected", "failed", "expired", "cancelled", "unsent"]


@dataclass(slots=True)
class PlannedShot:
    """One planned request. ``due``: seconds after the run's start; ``key``: the caller's key for it."""

    key: int
    due: float
    path: str
    body: bytes
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class ShotSample:
    """Result of a shot; times in seconds after the run's start."""

    key: int
    due: float
    sent: float
    ending: Ending = "unsent"
    status: int | None = None
    reason: str = ""
    ended: float | None = None
    headers: dict[str, str] = field(default_factory=dict)
    chunks: list[tuple[float, int]] = field(default_factory=list)
    tokens: int = 0
    prompt_tokens: int | None = None
    cached: int | None = None
    counting: Counting | None = None
    exact: bool = True

    @property
    def lateness(self) -> float:
        return self.sent - self.due


class LoadGenerator:
    """Send shots at their times and report each one's end.

    Args:
        http: session to send with; its connector must not limit connections.
        base: the server's URL, without /v1.
        inflight_max: an arrival that finds so many in flight is not sent, and counted as unsent.
        timeout: seconds after which an unfinished request is given up.
        ended: called once per shot, in order of ending.
    """

    def __init__(
        self,
        http: aiohttp.ClientSession,
        base: str,
        *,
        inflight_max: int,
        timeout: float,
        ended: Callable[[ShotSample], None],
    ) -> None:
        self._http = http
        self._base = base
        self._inflight_max = inflight_max
        self._timeout = timeout
        self._ended = ended
        self._start = 0.0
        self._tasks = BackgroundTasks()
        self._stopping = asyncio.Event()
        self.sent = 0

    @property
    def inflight(self) -> int:
        """Requests that wait for their answer."""
        return len(self._tasks)

    def now(self) -> float:
        """Seconds since the run's start."""
        return time.perf_counter() - self._start

    def stop(self) -> None:
        """Send no more, and cancel what is in flight."""
        self._stopping.set()
        for task in self._tasks:
            task.cancel()

    async def run(self, shots: Iterator[PlannedShot]) -> None:
        """Send every shot at its time, then wait for all answers."""
        prepared: deque[PlannedShot] = deque()
        more = _quiet_collector(shots, prepared)
        self._start = time.perf_counter()
        while prepared and not self._stopping.is_set():
            wait = prepared[0].due - self.now()
            if wait <= 0:
                self._fire(prepared.popleft())
                await asyncio.sleep(0)  # let it go out before the next body is made
                if more and not prepared:
                    more = _quiet_collector(shots, prepared)
            elif more and wait > SPARE and len(prepared) < PREPARED_MAX:
                more = _quiet_collector(shots, prepared)
                await asyncio.sleep(0)
            else:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), wait)
        await self._tasks.settled()

    def _fire(self, shot: PlannedShot) -> None:
        sample = ShotSample(key=shot.key, due=shot.due, sent=self.now())
        if len(self._tasks) >= self._inflight_max:
            sample.reason = f"already in flight: {counted(self._inflight_max, 'request')}"
            self._ended(sample)
            return
        self.sent += 1
        self._tasks.spawn(self._send(shot, sample))

    async def _send(self, shot: PlannedShot, sample: ShotSample) -> None:
        stream = AnswerStream()
        sample.sent = self.now()
        try:
            async with asyncio.timeout(self._timeout):
                await self._exchange(shot, sample, stream)
        except TimeoutError:
            sample.ending, sample.reason = "expired", f"no end within {self._timeout:g} s"
        except asyncio.CancelledError:
            sample.ending, sample.reason = "cancelled", "the run was interrupted"
        except (aiohttp.ClientError, OSError) as error:
            sample.ending, sample.reason = "failed", f"{type(error).__name__}: {error}"
        except BadStream as error:
            sample.ending, sample.reason = "failed", str(error)
        sample.ended = self.now()
        sample.chunks = stream.chunks
        sample.tokens = stream.tokens if stream.total is None else stream.total
        sample.prompt_tokens = stream.prompt_tokens
        sample.cached = stream.cached
        sample.counting = stream.counting
        sample.exact = stream.exact
        self._ended(sample)

    async def _exchange(self, shot: PlannedShot, sample: ShotSample, stream: AnswerStream) -> None:
        async with self._http.post(self._base + shot.path, data=shot.body, headers=shot.headers) as response:
            sample.status = response.status
            sample.headers = {name.lower(): value for name, value in response.headers.items()}
            if response.status != 200:
                text = (await response.content.read(ERROR_BYTES)).decode("utf-8", "replace")
                sample.ending = "rejected" if response.status in (429, 503) else "failed"
                sample.reason = f"HTTP {response.status}: {text.strip()[:300]}"
                return
            async for data in response.content.iter_any():
                stream.feed(data, self.now())
        if not stream.done:
            raise BadStream("the stream ended without [DONE]")
        sample.ending = "ok"


def _quiet_collector(shots: Iterator[PlannedShot], prepared: deque[PlannedShot]) -> bool:
    """Make one more shot; False where there is none."""
    shot = next(shots, None)
    if shot is None:
        return False
    prepared.append(shot)
    return True
