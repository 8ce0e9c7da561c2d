"""Request exchange: carries one request between client and engines, with retries and migration, to exactly one end.

Nothing reaches the client before the first output token, so until then a failed attempt can be repeated elsewhere
invisibly, and two may race (`router.requests.hedging`); afterwards bytes pass as they come, and where an engine is lost
another one continues (`stream_resume`).
"""

import asyncio
import logging
import time
from dataclasses import dataclass, field

from penstock.adapters.engines.dialects.dialect import overflows
from penstock.adapters.telemetry.otel_tracer import OtelSpan
from penstock.frontend.exchange.attempt import Attempt
from penstock.frontend.exchange.response_metadata import before_end, extra_fields, marks
from penstock.frontend.exchange.sse import cached_tokens, output_tokens
from penstock.frontend.exchange.stream_resume import ResumableStream
from penstock.frontend.exchange.token_timing import TokenTiming
from penstock.frontend.exchange.upstream_request import UpstreamRequest
from penstock.frontend.http.error_responses import problem, sse_error
from penstock.frontend.http.http_exchange import HttpExchange
from penstock.frontend.http.request_guard import send_error
from penstock.frontend.openai import context_overflow
from penstock.frontend.service import RequestTicket, ResolvedModel, Service
from penstock.kernel.values import Prompt
from penstock.router.events import Closed, Dispatch, Resume
from penstock.router.requests.stage_graph import FINAL

log = logging.getLogger("penstock.frontend")

GOODBYE = 2.0
"""Seconds that a client has to read the last event of a broken stream."""


@dataclass(slots=True, eq=False)
class RequestExchange:
    """One request. ``run`` answers it; the result is then in the ticket and in ``timing``."""

    caller: HttpExchange
    service: Service
    resolved: ResolvedModel
    job: UpstreamRequest
    prompt: Prompt
    ticket: RequestTicket
    span: OtelSpan
    timing: TokenTiming = field(default_factory=TokenTiming)
    speaker: Attempt | None = None
    """The attempt whose answer the client gets."""
    baton: ResumableStream = field(init=False)
    _last: Attempt | None = None
    _first_counted: bool = False

    def __post_init__(self) -> None:
        self.baton = ResumableStream(self.service, self.resolved, self.job, self.prompt)

    async def run(self) -> None:
        """Follow the router's effects until the request has ended.

        A client that hangs up cancels this coroutine; the engine's connection is closed on the way out and the
        cancellation is posted to the router.
        """
        try:
            if self.service.settings.router.hedge.after is not None:
                return await self._race()
            while True:
                effect = await self.ticket.next()
                if isinstance(effect, Closed):
                    return await self._ended(effect)
                if effect.stage not in FINAL:
                    self._stage(effect)  # its result is posted to the router, and the client gets nothing of it
                elif not self.ticket.aborted and await self._attempt(effect).run():
                    return
        except ConnectionResetError:
            # A write failed before the server noticed: the same as being cancelled.
            self.ticket.cancelled()
        finally:
            self._count_first()
            if self.ticket.closed is None:
                self.ticket.cancelled()
            # An attempt refers to its exchange: break the cycle, or all that the request held waits for the collector.
            self.speaker = self._last = None

    # --- reports of attempts ----------------------------------------------------------------------------------------

    def speak(self, attempt: Attempt, *, quietly: bool = False) -> bool:
        """An attempt has its first output; False where another one was faster, and this one must stop.

        Args:
            quietly: it has no output but an answer of another kind, which is reported to the router otherwise.
        """
        if self.speaker is attempt:
            return True
        if attempt.gave_up or self.speaker is not None:
            return False
        self.speaker = attempt
        if quietly:
            return True
        if attempt.transcript is not None:
            self.baton.transcript = attempt.transcript
        if self.job.streamed:
            self.ticket.first_token(attempt.dispatch.attempt)
            self.span.event("first_token" if self.baton.leg is None else "migrated")
        self._count_first()
        self.baton.taken()
        return True

    def is_speaker(self, attempt: Attempt) -> bool:
        return self.speaker is attempt

    def finish(self, *, usage: dict[str, object] | None, counted: int) -> None:
        """The answer is whole; that is posted to the router before the last bytes go out."""
        assert self.speaker is not None
        tokens = output_tokens(usage)
        timing = self.timing
        timing.last = time.monotonic()
        timing.settle(counted if tokens is None else tokens, self.service.metrics.gaps(self.resolved.model))
        timing.cached = cached_tokens(usage)
        self.ticket.finished(timing.output, timing.cached, self.speaker.dispatch.attempt)

    def refused(self, attempt: Attempt, reason: str, status: int) -> None:
        """The engine reports that the request itself is at fault."""
        self.ticket.failed(
            reason, retryable=False, worker_at_fault=False, status=status, attempt=attempt.dispatch.attempt
        )

    async def lost(
        self,
        attempt: Attempt,
        reason: str,
        *,
        status: int | None = None,
        at_fault: bool = True,
        leaving: bool = False,
    ) -> bool:
        """An attempt ended without a whole answer; False where the router's next effect decides."""
        if self.ticket.closed is not None and self.ticket.closed.outcome == "ok" and self.speaker is attempt:
            await self.caller.end()  # broken only after its end mark: nothing is missing
            return True
        if attempt.gave_up:
            return False
        resume: Resume | None = None
        spoke = self.speaker is attempt
        if spoke and self.caller.begun:
            resume = await self.baton.drop(attempt.tap.tokens)
            if resume is not None and self.baton.complete:
                return await self._say_goodbye()
        text = f"worker {attempt.dispatch.target}: {reason}"
        if spoke and resume is None:
            text += f"; it can't go on elsewhere: {self.baton.why_not}"
        elif spoke:
            self.speaker = None
        self.ticket.failed(
            text,
            retryable=not spoke,
            worker_at_fault=at_fault,
            status=status,
            resume=resume,
            leaving=leaving,
            attempt=attempt.dispatch.attempt,
        )
        return False

    def extra(self) -> dict[str, object]:
        """Return the metadata that the client requested."""
        assert self.speaker is not None
        return extra_fields(self.job, self.speaker.dispatch, self.timing)

    # --- several attempts -------------------------------------------------------------------------------------------

    def _stage(self, dispatch: Dispatch) -> None:
        if self.ticket.closed is None:  # else the KV that it makes would never be released
            self.service.handoffs.start(self, dispatch)
            self.span.event(dispatch.stage)

    def _attempt(self, dispatch: Dispatch) -> Attempt:
        self._last = Attempt(self, dispatch)
        return self._last

    async def _race(self) -> None:
        """Follow the router's effects where it may dispatch to a second worker before the first has answered."""
        attempts: set[asyncio.Task[bool]] = set()
        hearing = asyncio.ensure_future(self.ticket.next())
        ended: Closed | None = None
        try:
            while True:
                waiting: set[asyncio.Future[object]] = {*attempts, *(() if ended else (hearing,))}  # type: ignore[arg-type]
                if not waiting:
                    assert ended is not None
                    return await self._ended(ended)
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in attempts & done:  # type: ignore[operator]
                    attempts.discard(task)
                    if task.result():
                        return
                if hearing in done:
                    effect = hearing.result()
                    if isinstance(effect, Closed):
                        ended = effect  # stopped attempts end by themselves; a whole answer is written out
                    elif effect.stage not in FINAL:
                        self._stage(effect)
                        hearing = asyncio.ensure_future(self.ticket.next())
                    else:
                        attempts.add(asyncio.create_task(self._attempt(effect).run()))
                        hearing = asyncio.ensure_future(self.ticket.next())
        finally:
            hearing.cancel()
            for attempt in attempts:
                attempt.cancel()
            await asyncio.gather(hearing, *attempts, return_exceptions=True)

    # --- end of the request -----------------------------------------------------------------------------------------

    async def _say_goodbye(self) -> bool:
        """End a stream whose output is whole, in place of its lost engine."""
        ending, usage = self.baton.last_words()
        self.finish(usage=usage, counted=0)
        if self.job.wants_extra:
            ending = before_end(ending, self.job, self.ticket.id, self.extra())
        self.caller.write(ending)
        await self.caller.end()
        return True

    async def _ended(self, closed: Closed) -> None:
        """Answer the client with the end of its request, where the engine's answer does not."""
        status = 502 if closed.fault == "engine" and closed.status not in (429, 503) else closed.status
        code = {"engine": "engine_error", "overloaded": "overloaded", "deadline": "deadline_exceeded"}.get(closed.fault)
        reason = closed.reason
        if closed.fault == "client" and overflows(reason):
            code, reason = context_overflow.CODE, context_overflow.in_openai_words(reason, self.resolved.max_len)
        if self.caller.begun:
            # No end mark and no keep-alive: a client must notice that this answer is not whole.
            try:
                async with asyncio.timeout(GOODBYE):
                    self.caller.write(sse_error(status, reason, code=code))
                    await self.caller.end(close=True)
            except TimeoutError:
                self.caller.abort()  # the client does not read, and nothing else would end that
            return
        error = problem(status, reason, code=code, retry_after=closed.retry_after)
        await send_error(self.caller, error, {} if self._last is None else marks(self._last.dispatch))

    def _count_first(self) -> None:
        if not self._first_counted:
            self._first_counted = True
            self.service.metrics.first_token(self.resolved.model)
