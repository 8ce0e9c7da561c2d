"""How does one request live between client and engines? Dispatch, pass the answer on, try again, end exactly once.

Nothing reaches the client before the first output token, so until then a failed attempt can be repeated elsewhere
unseen; afterwards bytes go through as they come.
"""

import asyncio
import logging
import time
from dataclasses import dataclass, field

from aiohttp import web

from penstock.adapters.engines.openai import EngineAnswer, EngineBroken, EngineUnreachable
from penstock.adapters.telemetry.otel import Span
from penstock.frontend.errors import error_response, sse_error
from penstock.frontend.extras import before_end, extra_fields, marks, with_nvext
from penstock.frontend.job import Job, engine_body, engine_headers
from penstock.frontend.prompts import Prompt
from penstock.frontend.service import Resolved, Service, TicketLike
from penstock.frontend.sse import SseTap, cached_tokens, output_tokens
from penstock.frontend.timing import Timing
from penstock.frontend.usage import usage_of
from penstock.router.events import Closed, Dispatch

log = logging.getLogger("penstock.frontend")

HOLD_MAX = 1 << 20
"""Most bytes held back before the first token; an engine that sends more without one is passed on as it is."""
GOODBYE = 2.0
"""Seconds that a client has to take the last words of a broken stream."""


@dataclass(slots=True, eq=False)
class Exchange:
    """One request on its way. ``run`` returns the response; what it did is then in the ticket and in ``timing``."""

    request: web.Request
    service: Service
    resolved: Resolved
    job: Job
    prompt: Prompt
    ticket: TicketLike
    span: Span
    timing: Timing = field(default_factory=Timing)
    response: web.StreamResponse | None = None
    dispatch: Dispatch | None = None
    _scope: asyncio.Timeout | None = None
    _stopped: str | None = None
    """Why the running attempt was stopped from outside."""
    _gave_up: bool = False
    """Whether the router stopped it: then it knows already."""
    _last_byte: float = 0.0
    _last_beat: float = 0.0
    _tap: SseTap | None = None
    _writing: bool = False
    _first_counted: bool = False

    async def run(self) -> web.StreamResponse:
        """Follow the router's word until the request has ended.

        A client that hangs up cancels this coroutine; the engine's connection is closed on the way out and the router
        is told.
        """
        try:
            while True:
                word = await self.ticket.next()
                if isinstance(word, Closed):
                    return await self._ended(word)
                self.dispatch = word
                answer = await self._attempt(word)
                if answer is not None:
                    return answer
        except ConnectionResetError:
            # Writing found out before the server did: the same as being cancelled.
            self.ticket.cancelled()
            assert self.response is not None
            return self.response
        finally:
            self._count_first()
            if self.ticket.closed is None:
                self.ticket.cancelled()

    @property
    def begun(self) -> bool:
        """Whether anything has gone out to the client."""
        return self.response is not None and self.response.prepared

    def stop(self, reason: str) -> None:
        """Stop the running attempt: the router has given it up."""
        self._gave_up = True
        self._interrupt(reason)

    async def look(self, now: float) -> None:
        """Stop a stream that stalls, and keep a quiet one alive for the proxies before us (`Watched`)."""
        frontend = self.service.settings.frontend
        silent = now - self._last_byte
        if self._writing:
            if silent > frontend.upstream.stall_timeout:
                self._hang_up()  # it is the client that takes nothing any more
        elif silent > frontend.upstream.stall_timeout:
            self._interrupt(f"the engine was silent for {silent:.1f} s inside its answer")
        elif (
            frontend.heartbeat
            and silent > frontend.heartbeat
            and now - self._last_beat > frontend.heartbeat
            and self.response is not None
            and self._tap is not None
            and self._tap.at_boundary
        ):
            self._last_beat = now
            try:
                await self.response.write(b": waiting\n\n")
            except ConnectionResetError:
                return  # the handler finds out by itself

    # --- one attempt ------------------------------------------------------------------------------------------------

    async def _attempt(self, word: Dispatch) -> web.StreamResponse | None:
        """Send the request to one worker; None where the router's next word decides."""
        service, ticket = self.service, self.ticket
        if ticket.aborted.is_set():
            return None
        self._stopped, self._gave_up = None, False
        answer: EngineAnswer | None = None
        started = time.monotonic()
        # An unary answer's first byte comes with its last token: only the request's deadline limits that.
        limit = service.settings.frontend.upstream.first_byte_timeout if self.job.streamed else None
        self._scope = asyncio.timeout(limit)
        service.running[ticket.id] = self.stop
        body = engine_body(self.job)
        headers = engine_headers(self.job, word, self.ticket.id, self.request.headers, self.span)
        try:
            async with self._scope:
                answer = await service.engines.post(word.card.url, self.job.path, body, headers)
                service.metrics.stage("dispatch", time.monotonic() - started)
                if answer.status >= 400:
                    return await self._refused(answer)
                if answer.streams:
                    return await self._stream(answer)
                return await self._unary(answer)
        except TimeoutError:
            return await self._broken(self._stopped or f"no first byte within {limit} s")
        except (EngineUnreachable, EngineBroken) as error:
            return await self._broken(self._stopped or str(error))
        finally:
            service.running.pop(ticket.id, None)
            service.watched.discard(self)
            self._scope = None
            if answer is not None:
                answer.close()

    async def _stream(self, answer: EngineAnswer) -> web.StreamResponse | None:
        service, ticket, timing = self.service, self.ticket, self.timing
        tap = self._tap = SseTap(strip_usage=self.job.strip_usage, openai=self.job.parsed is not None)
        block = self.resolved.block_size if service.settings.router.track_output else 0
        held = b""
        grown = 0
        while data := await answer.next():
            out = tap.feed(data)
            if not tap.started:
                if tap.error is not None:
                    return await self._engine_error(tap)
                held += out
                if len(held) < HOLD_MAX:
                    continue
                tap.started = True
            now = self._last_byte = time.monotonic()
            if timing.first is None:
                if self._scope is not None and self._scope.expired():
                    await asyncio.sleep(0)  # too late by a moment: the timeout is already on its way to us
                timing.first = now
                self._first()
                self.response = self._open(answer)
                service.watched.add(self)
                if self._scope is not None:
                    self._scope.reschedule(None)  # from here on silence is watched, not the whole
                # The first write carries the headers too: one packet, so no delayed acknowledgement holds it up.
                await self.response.prepare(self.request)
                out, held = held + out, b""
            timing.chunk(now, tap.tokens)
            if block and tap.tokens // block > grown:
                grown = tap.tokens // block
                ticket.grown(tap.tokens)
            if tap.done and tap.error is None and ticket.closed is None:
                # Before the end mark goes out: a client may hang up on seeing it, and has its answer then.
                self._finish(usage=tap.usage, counted=tap.tokens)
                if self.job.wants_extra:
                    out = before_end(out, self.job, self.ticket.id, self._extra())
            if out:
                await self._write(out)
        return await self._stream_over(answer, tap, held + tap.rest())

    async def _stream_over(self, answer: EngineAnswer, tap: SseTap, rest: bytes) -> web.StreamResponse | None:
        """The engine closed its stream: in order, or not."""
        if tap.error is not None or (not tap.done and self.job.parsed is not None):
            if self.response is not None and rest:
                await self._write(rest)
            return await self._engine_error(tap)
        if self.response is None:  # a stream without any token, ended in order
            self.response = self._open(answer)
            await self.response.prepare(self.request)
        if self.ticket.closed is None:
            self._finish(usage=tap.usage, counted=tap.tokens)
        if rest:
            await self._write(rest)
        await self.response.write_eof()
        return self.response

    async def _unary(self, answer: EngineAnswer) -> web.StreamResponse:
        body = await answer.read()
        usage = usage_of(body) if self.job.parsed is not None else None
        self._finish(usage=usage, counted=0)
        if self.job.wants_extra:
            body = with_nvext(body, self._extra())
        return web.Response(
            status=answer.status, body=body, headers={"content-type": answer.content_type, **self._marks()}
        )

    # --- when it goes wrong -----------------------------------------------------------------------------------------

    async def _refused(self, answer: EngineAnswer) -> web.StreamResponse | None:
        """The engine answered with an error status: the request's fault, its load, or its own."""
        body = await answer.read()
        status = answer.status
        said = _said(body)
        if status in (408, 429, 503) or status >= 500:
            busy = status in (408, 429, 503)
            self.ticket.failed(
                f"the engine answered {status}: {said}", retryable=True, worker_at_fault=not busy, status=status
            )
            return None
        self.ticket.failed(f"the engine refused: {said}", retryable=False, worker_at_fault=False, status=status)
        return web.Response(status=status, body=body, headers={"content-type": answer.content_type, **self._marks()})

    async def _broken(self, reason: str) -> web.StreamResponse | None:
        """The attempt ended without a whole answer; the router says what now."""
        if self.ticket.closed is not None and self.ticket.closed.outcome == "ok":
            assert self.response is not None  # broken only after its end mark: nothing is missing
            await self.response.write_eof()
            return self.response
        if not self._gave_up:
            at = "" if self.dispatch is None else f"worker {self.dispatch.target}: "
            self.ticket.failed(at + reason, retryable=not self.begun)
        return None

    async def _engine_error(self, tap: SseTap) -> web.StreamResponse | None:
        """The engine ended its stream with an error, or without its end mark."""
        if tap.error is None:
            return await self._broken("the engine's stream ended without its end mark")
        said = str(tap.error.get("message", "no message"))[:500]
        code = tap.error.get("code")
        client = isinstance(code, int) and 400 <= code < 500 and code != 429
        self.ticket.failed(
            f"the engine said: {said}",
            retryable=not self.begun and not client,
            worker_at_fault=not client,
            status=code if isinstance(code, int) else None,
        )
        if self.begun and self.response is not None:  # its own words have been passed on already
            await self.response.write_eof()
            return self.response
        return None

    async def _ended(self, closed: Closed) -> web.StreamResponse:
        """Tell the client how its request ended, where the engine's answer does not."""
        status = 502 if closed.fault == "engine" and closed.status not in (429, 503) else closed.status
        code = {"engine": "engine_error", "overloaded": "overloaded", "deadline": "deadline_exceeded"}.get(closed.fault)
        if self.begun and self.response is not None:
            # No end mark and no keep-alive: a client must see that this answer is not whole.
            self.response.force_close()
            try:
                async with asyncio.timeout(GOODBYE):
                    await self.response.write(sse_error(status, closed.reason, code=code))
                    await self.response.write_eof()
            except TimeoutError:
                self._hang_up()  # it does not read, and nothing else would end that
            return self.response
        return error_response(
            status, closed.reason, code=code, retry_after=closed.retry_after, headers=self._marks() or None
        )

    def _interrupt(self, reason: str) -> None:
        if self._scope is not None and self._stopped is None and not self._scope.expired():
            self._stopped = reason
            self._scope.reschedule(asyncio.get_running_loop().time())

    def _hang_up(self) -> None:
        """Cut the client's connection; the server then cancels the handler."""
        if self.request.transport is not None:
            self.request.transport.abort()

    # --- small parts ------------------------------------------------------------------------------------------------

    async def _write(self, data: bytes) -> None:
        assert self.response is not None
        self._writing = True
        await self.response.write(data)
        self._writing = False
        self._last_byte = time.monotonic()

    def _first(self) -> None:
        self.ticket.first_token()
        self._count_first()
        self.span.event("first_token")

    def _count_first(self) -> None:
        if not self._first_counted:
            self._first_counted = True
            self.service.metrics.first_token(self.resolved.model)

    def _finish(self, *, usage: dict[str, object] | None, counted: int) -> None:
        tokens = output_tokens(usage)
        timing = self.timing
        timing.last = time.monotonic()
        timing.settle(counted if tokens is None else tokens, self.service.metrics.gaps(self.resolved.model))
        timing.cached = cached_tokens(usage)
        self.ticket.finished(timing.output, timing.cached)

    def _open(self, answer: EngineAnswer) -> web.StreamResponse:
        headers = {
            "content-type": answer.content_type,
            "cache-control": "no-cache",
            "x-accel-buffering": "no",
            **self._marks(),
        }
        return web.StreamResponse(status=answer.status, headers=headers)

    def _marks(self) -> dict[str, str]:
        return {} if self.dispatch is None else marks(self.dispatch)

    def _extra(self) -> dict[str, object]:
        assert self.dispatch is not None
        return extra_fields(self.job, self.dispatch, self.timing)


def _said(body: bytes) -> str:
    """Return the start of an engine's error text, for the log and the reason."""
    return " ".join(body[:300].decode("utf-8", "replace").split()) or "nothing"
