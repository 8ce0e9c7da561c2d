"""Attempt: one request at one worker; holds back bytes before the first token and passes the rest on."""

import asyncio
import time
from collections.abc import Awaitable
from typing import TYPE_CHECKING

from penstock.adapters.engines.dialects.dialect import overflows
from penstock.adapters.engines.dialects.dialect_registry import dialect_of
from penstock.adapters.engines.http.engine_call import CallStopped, EngineBroken, EngineCall, EngineUnreachable
from penstock.frontend.exchange.response_metadata import before_end, marks, with_nvext
from penstock.frontend.exchange.upstream_request import engine_body, engine_headers, error_text
from penstock.frontend.exchange.usage import gave_up, usage_of
from penstock.frontend.openai.context_overflow import refusal_body
from penstock.router.events import Dispatch

if TYPE_CHECKING:
    from penstock.frontend.exchange.exchange import RequestExchange

HOLD_MAX = 1 << 20
"""Most bytes held back before the first token; an engine's longer answer without one is passed on as it is."""
GONE_SILENCE = 5.0
"""Seconds after which a silent answer of a worker that left is given up: some keep the connection open for ever."""
HEARTBEAT = 15.0
"""Seconds of silence after which a stream gets a comment line: proxies close a silent one, many after 30 s."""


class Attempt:
    """One request at one worker; ``run`` once."""

    __slots__ = (
        "_answering",
        "_begun",
        "_call",
        "_exchange",
        "_fetches",
        "_gone_since",
        "_grown",
        "_held",
        "_last_beat",
        "_last_byte",
        "_prefill",
        "dialect",
        "dispatch",
        "gave_up",
        "tap",
        "transcript",
    )

    def __init__(self, exchange: "RequestExchange", word: Dispatch) -> None:
        self.dispatch = word
        self.gave_up = False
        """Whether the router stopped it: then it needs no report."""
        self.dialect = dialect_of(word.card.engine)
        self.tap = exchange.baton.tap(self.dialect)
        self._exchange = exchange
        self._held = b""
        """Bytes from before the first token."""
        self._grown = 0
        self._last_beat = 0.0
        self._last_byte = time.monotonic()
        self._gone_since: float | None = None
        """When its worker was first found to be gone."""
        job, self.transcript = exchange.baton.start(self.dialect)
        ids = self.transcript is not None and self.transcript.mode == "ids"
        headers = engine_headers(job, word, exchange.ticket.id, exchange.caller.headers, exchange.span)
        handoff = word.handoff
        stages = exchange.service.handoffs
        self._prefill = None if handoff is None else stages.taken_by(word, exchange.ticket.id)
        handed = None if handoff is None else stages.fields_for(word, self._prefill)
        body = engine_body(job, word, exchange.resolved.adapter, token_ids=ids, handed=handed)
        self._fetches = handoff is not None and handoff.protocol == "completed"
        """Whether it fetches KV that an engine holds for it: then it is not cut before its first token."""
        self._begun: asyncio.Task[None] | None = None
        self._answering: asyncio.Task[bool] | None = None
        self._call: EngineCall = exchange.service.engines.call(word.card.url, job.path, body, headers)

    def stop(self, reason: str) -> None:
        """Stop the attempt, by order of the router."""
        self.gave_up = True
        if self._answering is not None and not self.tap.started:
            self._answering.cancel()
        else:
            self._call.stop(reason)

    async def run(self) -> bool:
        """Answer the client; False where the router's next effect decides."""
        service = self._exchange.service
        key = (self._exchange.ticket.id, self.dispatch.attempt)
        service.running[key] = self.stop
        service.watched.add(self)
        over = False
        try:
            if not self._fetches:
                return await self._answer(self._call.begin())
            self._begun = asyncio.create_task(self._call.begin())
            self._answering = asyncio.create_task(self._answer(asyncio.shield(self._begun)))
            try:
                found = await self._answering
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if self.gave_up and task is not None and not task.cancelling():
                    return False
                raise
            over = True
            return found
        finally:
            service.running.pop(key, None)
            service.watched.discard(self)
            if self._begun is not None and not over and not self.tap.started:
                service.handoffs.finish_fetch(self.dispatch, self._prefill, self._call, self._begun)
            else:
                self._call.close()

    async def _answer(self, begun: Awaitable[None]) -> bool:
        exchange, call = self._exchange, self._call
        service = exchange.service
        try:
            await begun
            service.metrics.stage("dispatch", time.monotonic() - self._last_byte)
            if call.status >= 400:
                return await self._refused()
            if call.streams:
                return await self._stream()
            if exchange.caller.begun:
                raise EngineBroken("the engine answered a stream's second part in one piece")
            return await self._unary()
        except (EngineUnreachable, EngineBroken, CallStopped) as error:
            return await exchange.lost(self, error.message)

    async def look(self, now: float) -> None:
        """Stop an engine that is silent for too long, and keep a quiet stream alive for the proxies in front."""
        frontend, caller = self._exchange.service.settings.frontend, self._exchange.caller
        silent = now - self._last_byte
        if not self.tap.started:
            # An unary answer's first byte comes with its last token: only the request's deadline limits that.
            limit = frontend.upstream.first_byte_timeout
            if silent > limit and self._exchange.job.streamed:
                self._call.stop(f"no first byte within {limit} s")
            elif self._gone_for(now) > GONE_SILENCE:
                self._call.stop(f"its worker is gone, and nothing came for {silent:.1f} s")
        elif caller.full:
            if silent > frontend.upstream.stall_timeout:
                caller.abort()  # the client does not read any more; the server then cancels this task
        elif silent > GONE_SILENCE and self._gone_for(now) >= 0:
            self._call.stop(f"its worker is gone and has been silent for {silent:.1f} s")
        elif silent > frontend.upstream.stall_timeout:
            self._call.stop(f"the engine was silent for {silent:.1f} s inside its answer")
        elif silent > HEARTBEAT and now - self._last_beat > HEARTBEAT and self.tap.at_boundary:
            self._last_beat = now
            caller.write(b": waiting\n\n")
            try:
                await caller.drained()
            except ConnectionResetError:
                return  # the client's server detects that by itself

    def _gone_for(self, now: float) -> float:
        """Return for how long its worker has been observed gone; below 0 where it is there."""
        if self._exchange.service.cluster.is_current(self.dispatch.card):
            self._gone_since = None
            return -1.0
        if self._gone_since is None:
            self._gone_since = now
        return now - self._gone_since

    async def _stream(self) -> bool:
        exchange, tap = self._exchange, self.tap
        await self._call.relay(self._feed, exchange.caller)
        if self.gave_up and not exchange.is_speaker(self):
            return False
        if tap.error is not None:
            return await self._error()
        if not tap.done and exchange.job.parsed is not None:
            return await exchange.lost(self, "the engine's stream ended without its end mark")
        if not tap.started and exchange.job.parsed is not None:
            # An ending engine answers so: no token, no reason, only the end mark.
            return await exchange.lost(self, "the engine's stream ended without any output")
        if not exchange.speak(self):
            return False
        rest = self._held + tap.rest()
        if not exchange.caller.begun:  # a stream of another dialect, without a byte
            self._open()
        if exchange.ticket.closed is None:
            exchange.finish(usage=tap.usage, counted=tap.tokens)
        if rest:
            exchange.caller.write(rest)
        await exchange.caller.end()
        return True

    def _feed(self, data: bytes) -> bool:
        """Pass a piece of the engine's stream on to the client."""
        exchange, tap = self._exchange, self.tap
        out = tap.feed(data)
        if not tap.started:
            if tap.error is not None:
                return False
            self._held += out
            if len(self._held) < HOLD_MAX:
                return True
            tap.started = True
            out = b""
        now = self._last_byte = time.monotonic()
        timing = exchange.timing
        if exchange.speaker is not self:
            if not exchange.speak(self):
                return False
            out, self._held = self._held + out, b""
            if timing.first is None:
                timing.first = now
                exchange.service.seen.first(now - timing.arrived)
            if not exchange.caller.begun:
                self._open()
        if self.transcript is not None:
            out = self.transcript.take(out)
        timing.chunk(now, tap.tokens)
        if exchange.service.track_output:
            grown = tap.tokens // exchange.resolved.block_size
            if grown > self._grown:
                self._grown = grown
                exchange.ticket.grown(tap.tokens)
        if tap.done and tap.error is None and exchange.ticket.closed is None:
            # Before the end mark goes out: a client may hang up on receiving it, and has its answer then.
            exchange.finish(usage=tap.usage, counted=tap.tokens)
            if exchange.job.wants_extra:
                out = before_end(out, exchange.job, exchange.ticket.id, exchange.extra())
        if out:
            exchange.caller.write(out)
        return tap.error is None

    async def _unary(self) -> bool:
        exchange, call = self._exchange, self._call
        body = await call.read()
        if exchange.job.parsed is not None and gave_up(body, self.dialect.gave_up):
            raise EngineBroken("the engine aborted the request")
        if not exchange.speak(self):
            return False
        exchange.finish(usage=usage_of(body) if exchange.job.parsed is not None else None, counted=0)
        if exchange.job.wants_extra:
            body = with_nvext(body, exchange.extra())
        await exchange.caller.send(call.status, body, {"content-type": call.content_type, **marks(self.dispatch)})
        return True

    async def _refused(self) -> bool:
        """The engine answered with an error status: the fault of the request, of its load, or of the engine."""
        exchange, call = self._exchange, self._call
        body = await call.read()
        status = call.status
        text = error_text(body)
        kind = self.dialect.refusal(status, text)
        if kind != "client":
            text = f"the engine answered {status}: {text}"
            at_fault, leaving = kind == "fault", kind == "leaving"
            return await exchange.lost(self, text, status=status, at_fault=at_fault, leaving=leaving)
        if not exchange.speak(self, quietly=True):
            return False
        content_type = call.content_type
        if exchange.job.parsed is not None and overflows(text):
            status, content_type = 400, "application/json"
            body = refusal_body(body, exchange.resolved.max_len, exchange.job.parsed.prompt_field)
        exchange.refused(self, f"the engine refused: {text}", status)
        if exchange.caller.begun:
            return False
        await exchange.caller.send(status, body, {"content-type": content_type, **marks(self.dispatch)})
        return True

    async def _error(self) -> bool:
        """The engine ended its stream with an error."""
        exchange, tap = self._exchange, self.tap
        assert tap.error is not None
        text = f"the engine answered: {str(tap.error.get('message', 'no message'))[:500]}"
        code = tap.error.get("code")
        status = code if isinstance(code, int) else None
        kind = self.dialect.refusal(status or 500, text)
        if kind != "client":
            return await exchange.lost(self, text, status=status, leaving=kind == "leaving")
        exchange.refused(self, text, status or 400)
        if exchange.caller.begun and exchange.baton.leg is None:  # the request's own fault, with the engine's text
            exchange.caller.write(tap.unsaid)
            await exchange.caller.end()
            return True
        return False

    def _open(self) -> None:
        self._exchange.caller.open(
            self._call.status,
            {
                "content-type": self._call.content_type,
                "cache-control": "no-cache",
                "x-accel-buffering": "no",
                **marks(self.dispatch),
            },
        )
