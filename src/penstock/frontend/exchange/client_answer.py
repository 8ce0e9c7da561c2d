"""Client answer: what the client of one request gets, with its times and metadata, and what the router hears of it."""

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec

from penstock.adapters.telemetry.prometheus_text import Observations
from penstock.adapters.telemetry.request_span import RequestSpan
from penstock.frontend.exchange.exchange_context import ExchangeContext
from penstock.frontend.exchange.migration import Transcript
from penstock.frontend.exchange.prefix_warming import SpokenMessage
from penstock.frontend.exchange.sse import cached_tokens, output_tokens
from penstock.frontend.exchange.stream_resume import ResumableStream
from penstock.frontend.exchange.upstream_request import UpstreamRequest, ignored_hints, warming_card
from penstock.frontend.http.http_exchange import HttpExchange
from penstock.frontend.parsers.answer_parsing import AnswerParsing
from penstock.frontend.prompt.model_catalog import ResolvedModel
from penstock.frontend.prompt.request_body import Parsed
from penstock.kernel.request_record import ItlSummary, summarise_gaps
from penstock.kernel.values import JsonObject, Prompt
from penstock.router.events import Dispatch
from penstock.runtime.node.tickets import Ticket

CHUNKS_MAX = 65_536
"""Most chunks of a stream whose times are kept for its summary."""


@dataclass(slots=True)
class TokenTiming:
    """Times of `time.monotonic`, in seconds; counts in tokens."""

    arrived: float = field(default_factory=time.monotonic)
    routed: float | None = None
    """When the request reached the router, after reading and tokenising it."""
    first: float | None = None
    last: float | None = None
    output: int | None = None
    """Output tokens of a whole answer."""
    cached: int | None = None
    counted: int = 0
    """Pieces of output so far."""
    chunks: list[tuple[float, int]] = field(default_factory=list)
    """When each chunk came, and how many pieces it has: k of them are k gaps of a k-th each. At most `CHUNKS_MAX`."""

    def settle(self, gaps: Observations | None) -> None:
        """Weigh the chunks by the tokens of the whole output, and observe the gaps.

        An engine may put several tokens into one piece, so before the end a gap per piece is all that is known; the
        count from usage is then spread over the pieces evenly. ``gaps``: None where nobody waited for them.
        """
        output = self.output
        if self.counted and output is not None and output != self.counted:
            done = spread = 0
            weighed: list[tuple[float, int]] = []
            for at, pieces in self.chunks:
                done += pieces
                tokens = round(done * output / self.counted) - spread
                spread += tokens
                if tokens or not weighed:  # the first chunk is where the first token was, whatever its share
                    weighed.append((at, max(tokens, 1)))
            self.chunks = weighed
        if gaps is None:
            return
        before = self.first
        observed: list[tuple[float, int]] = []
        for at, tokens in self.chunks:
            if before is None or at == self.first:
                if tokens > 1:
                    observed.append((0.0, tokens - 1))
            else:
                observed.append(((at - before) / tokens, tokens))
            before = at
        gaps.observe_all(observed)

    @property
    def lead(self) -> float:
        """Seconds from its arrival to the router's."""
        return 0.0 if self.routed is None else self.routed - self.arrived

    @property
    def ttft(self) -> float | None:
        """First output token minus arrival; None where no token passed."""
        return None if self.first is None else self.first - self.arrived

    @property
    def itl(self) -> float | None:
        """Mean gap between output tokens; None below 2."""
        if self.first is None or len(self.chunks) < 2:
            return None
        return (self.chunks[-1][0] - self.first) / max(1, sum(tokens for _, tokens in self.chunks) - 1)

    @property
    def e2e(self) -> float | None:
        """Last output token minus arrival."""
        return None if self.last is None else self.last - self.arrived

    def summary(self) -> ItlSummary | None:
        """Sum up the gaps."""
        if self.first is None:
            return None
        return summarise_gaps([(at - self.first, tokens) for at, tokens in self.chunks])


def marks(dispatch: Dispatch, job: UpstreamRequest) -> dict[str, str]:
    """Return the headers that name a request's workers, and its hints that have no effect on them."""
    decision = dispatch.decision
    ignored = () if job.hints is None or not job.hints.uncertain else ignored_hints(job, dispatch)
    prefill = None if dispatch.handoff is None else prefill_of(dispatch)
    return {
        "x-penstock-worker": str(decision.chosen),
        **({} if prefill is None else {"x-penstock-prefill-worker": prefill}),
        "x-penstock-expected-cached-tokens": str(decision.expected_cached_tokens),
        "x-penstock-queue-ms": f"{decision.queued * 1e3:.1f}",
        **({"x-penstock-ignored-hints": ", ".join(ignored)} if ignored else {}),
        **(job.limits or {}),
    }


def prefill_of(dispatch: Dispatch) -> str | None:
    """Return the worker that did the prefill, where that was another one."""
    handoff = dispatch.handoff
    return None if handoff is None or handoff.source is None else handoff.source.id


def extra_fields(job: UpstreamRequest, dispatch: Dispatch, timing: TokenTiming) -> JsonObject:
    """Return the fields that ``nvext.extra_fields`` requests. Milliseconds and tokens."""
    decision = dispatch.decision
    names = () if job.hints is None else job.hints.extra
    out: JsonObject = {}
    if "worker_id" in names:
        worker, rank = decision.chosen
        out["worker_id"] = {
            "worker_id": worker,
            "dp_rank": rank,
            "prefill_worker_id": prefill_of(dispatch) or worker,
            "decode_worker_id": worker,
        }
    if names and (ignored := ignored_hints(job, dispatch)):
        out["ignored_hints"] = list(ignored)
    if names and job.hints is not None and job.hints.warms and (card := warming_card(job, dispatch)) is not None:
        out["speculative_prefill"] = card.id
    if "timing" in names:
        out["timing"] = {
            "queue_ms": round(decision.queued * 1e3, 3),
            "ttft_ms": None if timing.ttft is None else round(timing.ttft * 1e3, 3),
            "total_time_ms": round((time.monotonic() - timing.arrived) * 1e3, 3),
            "expected_cached_tokens": decision.expected_cached_tokens,
            "cached_tokens": timing.cached,
        }
    return out


def with_nvext(body: bytes, extra: JsonObject) -> bytes:
    """Return a JSON object with ``nvext`` added at its end; anything else is returned unchanged."""
    end = body.rstrip()
    if not end.startswith(b"{") or not end.endswith(b"}") or len(end) < 3:
        return body
    return end[:-1] + b',"nvext":' + msgspec.json.encode(extra) + b"}"


def before_end(out: bytes, job: UpstreamRequest, request: str, extra: JsonObject) -> bytes:
    """Put one more event before the end mark of a stream."""
    end = out.rfind(b"[DONE]")
    at = out.rfind(b"data:", 0, end) if end >= 0 else -1
    if at < 0 or job.parsed is None:
        return out
    return out[:at] + _chunk(job.parsed, request, extra) + out[at:]


def _chunk(parsed: Parsed, request: str, extra: JsonObject) -> bytes:
    """Return one event that holds ``nvext`` and no choice, as the usage chunk does."""
    chat = parsed.endpoint == "chat_completions"
    chunk: JsonObject = {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{request}",
        "object": "chat.completion.chunk" if chat else "text_completion",
        "created": int(time.time()),
        "model": parsed.model,
        "choices": [],
        "nvext": extra,
    }
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"


HEARTBEAT = 15.0
"""Seconds without a byte to the client after which a stream says something: many proxies close a silent one at 30."""


@dataclass(slots=True, eq=False)
class ClientAnswer:
    """The answer to one request, which its attempts share."""

    caller: HttpExchange
    context: ExchangeContext
    resolved: ResolvedModel
    job: UpstreamRequest
    prompt: Prompt
    ticket: Ticket
    span: RequestSpan
    timing: TokenTiming = field(default_factory=TokenTiming)
    spoken: SpokenMessage | None = None
    """Collects the answer, where the chat's next turn is to be prepared with it."""
    parsing: AnswerParsing | None = None
    """Reads tool calls and reasoning out of the answer, where its engine does not."""
    speaker: Dispatch | None = None
    """The attempt whose answer the client gets."""
    torn: bool = False
    """Whether half an event has been written, so that nothing of ours may follow yet."""
    resumable: ResumableStream = field(init=False)
    _opened: bool = False
    _first_counted: bool = False

    def __post_init__(self) -> None:
        self.resumable = ResumableStream(self.context, self.resolved, self.job, self.prompt)

    def speak(
        self, attempt: Dispatch, gave_up: bool, transcript: Transcript | None, parsing: AnswerParsing | None
    ) -> bool:
        """An attempt has something for the client; False where another one was faster, and this one must stop.

        Args:
            gave_up: the router has stopped it, so that it says nothing unless it has begun to.
            transcript: follows its output, so that another engine can continue it.
            parsing: of its output, unless an earlier one had begun the answer.
        """
        if gave_up or self.speaker is not None:
            return self.speaker is attempt
        self.speaker = attempt
        if transcript is not None:
            self.resumable.transcript = transcript
        if self.parsing is None:
            self.parsing = parsing
        return True

    def open(self, status: int, content_type: str, marks: Mapping[str, str]) -> None:
        """Begin a streamed answer; ``marks``: headers that name its workers."""
        self._opened = True
        headers = {"content-type": content_type, "cache-control": "no-cache", "x-accel-buffering": "no", **marks}
        self.caller.open(status, headers)

    async def look(self, now: float) -> None:
        """Keep a stream open whose client has not had a byte for long, whatever the reason: queue, prefill or parser.

        Before the first token that commits the status; where the request then fails, an event says so. Other APIs make
        an event of the comment, because some of their clients count only events.
        """
        caller = self.caller
        if now - caller.last_write < HEARTBEAT or self.torn or caller.full or self.ticket.closed is not None:
            return
        if caller.status is None and self.job.streamed and self.job.parsed is not None:
            self.open(200, "text/event-stream", self.job.limits or {})
        if self._opened:
            caller.write(b": waiting\n\n")
            with suppress(ConnectionResetError):  # the client's server detects that by itself
                await caller.drained()

    def began(self) -> None:
        """The first output has been written: the router hears of it after the client, in the same turn of the loop."""
        assert self.speaker is not None
        if self.job.streamed:
            self.ticket.first_token(self.speaker.attempt)
            if self.span.sampled:
                self.span.event("first_token" if self.resumable.leg is None else "migrated")
        self.count_first()
        if self.resumable.leg is not None:
            self.resumable.taken()

    def take_usage(self, usage: dict[str, object] | None, counted: int) -> None:
        """All output is here; ``counted``: its tokens, where the engine does not report them."""
        tokens = output_tokens(usage)
        timing = self.timing
        timing.last = time.monotonic()
        timing.output = counted if tokens is None else tokens
        timing.cached = cached_tokens(usage)

    def finish(self) -> None:
        """The last bytes have been written: nothing can come between, so the client can't hang up before this."""
        assert self.speaker is not None and self.timing.output is not None
        self.ticket.finished(self.timing.output, self.timing.cached, self.speaker.attempt)

    def refused(self, attempt: Dispatch, reason: str, status: int) -> None:
        """The engine reports that the request itself is at fault."""
        self.ticket.failed(reason, retryable=False, worker_at_fault=False, status=status, attempt=attempt.attempt)

    def extra(self) -> dict[str, object]:
        """Return the metadata that the client requested."""
        assert self.speaker is not None
        return extra_fields(self.job, self.speaker, self.timing)

    def count_first(self) -> None:
        """Count the request as one whose first token, or end, has come: once."""
        if not self._first_counted:
            self._first_counted = True
            self.context.bookkeeping.add((self.context.metrics.first_token, (self.resolved.model,)))
