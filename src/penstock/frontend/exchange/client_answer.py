"""Client answer: what the client of one request gets, from the attempt that speaks first, and what the router hears."""

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from penstock.adapters.telemetry.request_span import RequestSpan
from penstock.frontend.cluster_view import RequestTicket
from penstock.frontend.exchange.exchange_context import ExchangeContext
from penstock.frontend.exchange.response_metadata import extra_fields
from penstock.frontend.exchange.spoken_message import SpokenMessage
from penstock.frontend.exchange.sse import cached_tokens, output_tokens
from penstock.frontend.exchange.stream_resume import ResumableStream
from penstock.frontend.exchange.token_timing import TokenTiming
from penstock.frontend.exchange.transcript import Transcript
from penstock.frontend.exchange.upstream_request import UpstreamRequest
from penstock.frontend.http.http_exchange import HttpExchange
from penstock.frontend.parsers.answer_parsing import AnswerParsing
from penstock.frontend.prompt.model_catalog import ResolvedModel
from penstock.kernel.values import Prompt
from penstock.router.events import Dispatch

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
    ticket: RequestTicket
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

    def speak(self, attempt: Dispatch, transcript: Transcript | None, parsing: AnswerParsing | None = None) -> bool:
        """An attempt has something for the client; False where another one was faster, and this one must stop.

        Args:
            transcript: follows its output, so that another engine can continue it.
            parsing: of its output, unless an earlier one had begun the answer.
        """
        if self.speaker is not None:
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
        if not caller.begun and self.job.streamed and self.job.parsed is not None:
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
