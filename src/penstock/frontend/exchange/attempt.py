"""Attempt: one request at one worker; holds back bytes before the first token and passes the rest on."""

import asyncio
import time
from collections.abc import Awaitable, Mapping
from typing import Any, NamedTuple

from penstock.adapters.engines.dialects.dialect import overflows
from penstock.adapters.engines.dialects.dialect_registry import dialect_of
from penstock.adapters.engines.http.engine_call import (
    CallStopped,
    ConnectFailed,
    EngineBroken,
    EngineCall,
    EngineUnreachable,
)
from penstock.adapters.engines.pool_overrides import REASONING_PARSER, TOOL_PARSER
from penstock.frontend.exchange import token_route
from penstock.frontend.exchange.client_answer import ClientAnswer
from penstock.frontend.exchange.open_attempts import WorkerAbsence
from penstock.frontend.exchange.response_metadata import before_end, marks, with_nvext
from penstock.frontend.exchange.token_route import TokenRoute, token_obstacle
from penstock.frontend.exchange.token_timing import CHUNKS_MAX
from penstock.frontend.exchange.transcript import Transcript
from penstock.frontend.exchange.upstream_request import (
    UpstreamRequest,
    engine_additions,
    engine_body,
    engine_headers,
    error_text,
)
from penstock.frontend.exchange.usage import gave_up, usage_of
from penstock.frontend.parsers.answer_parsing import AnswerParsing, parser_plan
from penstock.frontend.prompt.context_overflow import refusal_body
from penstock.kernel.errors import EngineError
from penstock.router.events import Dispatch

HOLD_MAX = 1 << 20
"""Most bytes held back before the first token; an engine's longer answer without one is passed on as it is."""
HEARTBEAT = 15.0
"""Seconds of silence after which a stream gets a comment line: proxies close a silent one, many after 30 s."""


class AttemptLost(NamedTuple):
    """Result of an attempt that ended without a whole answer.

    Args:
        status: the engine's, where it answered.
        at_fault: whether the worker is.
        leaving: whether it said that it is ending.
        adapter: whether it does not hold the request's LoRA adapter.
        received: whether the engine had the request.
        usual: whether the same worker can answer where it gets the prompt instead of its tokens.
    """

    reason: str
    status: int | None = None
    at_fault: bool = True
    leaving: bool = False
    adapter: bool = False
    usual: bool = False
    received: bool = True


class Attempt:
    """One request at one worker; ``run`` once."""

    __slots__ = (
        "_absence",
        "_answer",
        "_answering",
        "_begun",
        "_buffered",
        "_call",
        "_context",
        "_fetches",
        "_grown",
        "_last_beat",
        "_last_byte",
        "_parsing",
        "_prefill",
        "_tokens",
        "_track_output",
        "dialect",
        "dispatch",
        "gave_up",
        "tap",
        "transcript",
    )

    def __init__(self, answer: ClientAnswer, dispatch: Dispatch) -> None:
        self.dispatch = dispatch
        self.gave_up = False
        """Whether the router stopped it: then it needs no report."""
        self.dialect = dialect_of(dispatch.card.engine)
        self.tap = answer.resumable.tap(self.dialect)
        self._answer = answer
        self._context = answer.context
        self._buffered = b""
        """Bytes from before the first token."""
        self._grown = 0
        self._track_output = answer.context.settings.router.track_output
        self._last_beat = 0.0
        self._last_byte = time.monotonic()
        self._absence = WorkerAbsence(answer.context.cluster, dispatch.card)
        labels, parsed = dispatch.card.labels, answer.job.parsed
        self._parsing: AnswerParsing | None = answer.parsing
        if labels and parsed is not None and not answer.caller.begun:
            self._parsing = None
            if TOOL_PARSER in labels or REASONING_PARSER in labels:
                plan = parser_plan(dispatch.card, parsed)
                self._parsing = None if plan is None else AnswerParsing(plan, parsed)
        job, self.transcript = answer.resumable.start(self.dialect, self._parsing)
        ids = self.transcript is not None and self.transcript.mode == "ids"
        headers = engine_headers(job, self.dialect, dispatch, answer.ticket.id, answer.caller.headers, answer.span)
        handoff = dispatch.handoff
        stages = answer.context.stages
        self._prefill = None if handoff is None else stages.taken_by(dispatch, answer.ticket.id)
        handed = None if handoff is None else stages.fields_for(dispatch, self._prefill)
        self._tokens = None if job.rendered is None else self._token_route(job, ids, handed)
        path, body = job.path, b""
        if self._tokens is not None:
            path, body = token_route.PATH, self._tokens.body()
        else:
            body = engine_body(job, self.dialect, dispatch, answer.resolved.adapter, token_ids=ids, handed=handed)
        self._fetches = handoff is not None and handoff.protocol == "completed"
        """Whether it fetches KV that an engine holds for it: then it is not cut before its first token."""
        self._begun: asyncio.Task[None] | None = None
        self._answering: asyncio.Task[bool | AttemptLost] | None = None
        self._call: EngineCall = answer.context.engines.call(dispatch.card.url, path, body, headers)

    def _token_route(self, job: UpstreamRequest, ids: bool, handed: Mapping[str, Any] | None) -> TokenRoute | None:
        """Return the way by which the engine begins with the prompt's tokens; None: it gets the prompt itself."""
        answer, card = self._answer, self.dispatch.card
        added = engine_additions(
            job, self.dialect, self.dispatch, answer.resolved.adapter, token_ids=ids, handed=handed
        )
        plan = None if self._parsing is None else self._parsing.plan
        obstacle = token_obstacle(job, card, added, plan)
        if obstacle is not None:
            job.way = f"its prompt went to the engine as it was: {obstacle}"
            return None
        route = TokenRoute(job, answer.ticket.id, added, plan)
        job.way = route.text
        return route

    def _left_route(self, why: str) -> AttemptLost:
        """The way by tokens failed: the same worker gets the prompt itself."""
        self._answer.job.rendered = None
        self._answer.job.way = f"its prompt went to the engine as it was: {why}"
        return AttemptLost(why, at_fault=False, usual=True)

    def stop(self, reason: str) -> None:
        """Stop the attempt, by order of the router."""
        self.gave_up = True
        if self._answering is not None and not self.tap.started:
            self._answering.cancel()
        else:
            self._call.stop(reason)

    async def run(self) -> bool | AttemptLost:
        """Answer the client; False where the router's next effect decides."""
        key = (self._answer.ticket.id, self.dispatch.attempt)
        self._context.attempts.open[key] = self
        over = False
        try:
            if not self._fetches:
                return await self._carry(self._call.begin())
            self._begun = asyncio.create_task(self._call.begin())
            self._answering = asyncio.create_task(self._carry(asyncio.shield(self._begun)))
            try:
                answered = await self._answering
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if self.gave_up and task is not None and not task.cancelling():
                    return False
                raise
            over = True
            return answered
        finally:
            del self._context.attempts.open[key]
            if self.tap.started:
                self._context.attempts.heard[self.dispatch.target.worker] = self._last_byte
            if self._begun is not None and not over and not self.tap.started:
                self._context.stages.finish_fetch(self.dispatch, self._prefill, self._call, self._begun)
            else:
                self._call.close()

    async def _carry(self, begun: Awaitable[None]) -> bool | AttemptLost:
        call = self._call
        try:
            await begun
            took = time.monotonic() - self._last_byte
            self._context.bookkeeping.add((self._context.metrics.stage, ("dispatch", took)))
            if call.status >= 400:
                return await self._refused()
            if call.streams:
                return await self._stream()
            if self._answer.caller.begun:
                raise EngineBroken("the engine answered a stream's second part in one piece")
            return await self._unary()
        except (EngineUnreachable, EngineBroken, CallStopped) as error:
            return AttemptLost(error.message, received=not isinstance(error, ConnectFailed))

    async def look(self, now: float) -> None:
        """Stop an engine that is silent for too long, and keep a quiet stream alive for the proxies in front."""
        upstream, caller = self._context.settings.frontend.upstream, self._answer.caller
        silent = now - self._last_byte
        if self.tap.started:
            self._context.attempts.note_byte(self.dispatch.target.worker, self._last_byte)
        if not self.tap.started:
            # An unary answer's first byte comes with its last token: only the request's deadline limits that.
            limit = upstream.first_byte_timeout
            if silent > limit and self._answer.job.streamed:
                self._call.stop(f"no first byte within {limit} s")
            elif silent > 2 * upstream.quiet_timeout and self._doubted():
                self._call.stop(f"its engine is silent, and nothing came for {silent:.1f} s")
            elif self._absence.beyond(upstream.quiet_timeout, now):
                self._call.stop(f"its worker is gone, and nothing came for {silent:.1f} s")
        elif caller.full:
            if silent > upstream.stall_timeout:
                caller.abort()  # the client does not read any more; the server then cancels this task
        elif silent > upstream.quiet_timeout and self._absence.beyond(0.0, now):
            self._call.stop(f"its worker is gone and has been silent for {silent:.1f} s")
        elif silent > upstream.quiet_timeout and self._answer.resumable.transcript is not None and self._doubted():
            self._call.stop(f"all streams of its engine fell silent, this one for {silent:.1f} s")
        elif silent > upstream.stall_timeout:
            self._call.stop(f"the engine was silent for {silent:.1f} s inside its answer")
        elif silent > HEARTBEAT and now - self._last_beat > HEARTBEAT and self.tap.at_boundary:
            self._last_beat = now
            caller.write(b": waiting\n\n")
            try:
                await caller.drained()
            except ConnectionResetError:
                return  # the client's server detects that by itself

    def _doubted(self) -> bool:
        """Return whether the engine is silent for too long, and another one could go on."""
        context, card = self._context, self.dispatch.card
        return context.attempts.doubted(card.id) and not context.cluster.alone(card)

    def _speak(self, transcript: Transcript | None = None) -> bool:
        """Return whether this is the attempt whose answer the client gets."""
        if self.gave_up and self._answer.speaker is not self.dispatch:
            return False
        return self._answer.speak(self.dispatch, transcript, self._parsing)

    async def _stream(self) -> bool | AttemptLost:
        answer, tap = self._answer, self.tap
        await self._call.relay(self._feed, answer.caller)
        if self.gave_up and answer.speaker is not self.dispatch:
            return False
        if tap.error is not None:
            return await self._error()
        if not tap.done and answer.job.parsed is not None:
            return AttemptLost("the engine's stream ended without its end mark")
        if not tap.started and answer.job.parsed is not None:
            # An ending engine answers so: no token, no reason, only the end mark.
            return AttemptLost("the engine's stream ended without any output")
        begins = answer.speaker is not self.dispatch
        if begins and not self._speak(self.transcript):
            return False
        rest = self._buffered + tap.rest()
        if answer.parsing is not None:
            rest = answer.parsing.stream(rest) + answer.parsing.rest()
        if not answer.caller.begun:  # a stream of another dialect, without a byte
            self._open()
        if rest:
            answer.caller.write(rest)
            if answer.spoken is not None:
                answer.spoken.take(rest)
        if begins:
            answer.began()
        if answer.ticket.closed is None:
            answer.take_usage(tap.usage, tap.tokens)
            answer.finish()
        await answer.caller.end()
        return True

    def _feed(self, data: bytes) -> bool:
        """Pass a piece of the engine's stream on to the client."""
        answer, tap = self._answer, self.tap
        if self._tokens is not None:
            data = self._tokens.stream(data)
        out = tap.feed(data)
        if not tap.started:
            if tap.error is not None:
                return False
            self._buffered += out
            if len(self._buffered) < HOLD_MAX:
                return True
            tap.started = True
            out = b""
        now = self._last_byte = time.monotonic()
        timing = answer.timing
        begins = answer.speaker is not self.dispatch
        if begins:
            if not self._speak(self.transcript):
                return False
            out, self._buffered = self._buffered + out, b""
            if timing.first is None:
                timing.first = now
                if answer.job.copy_of is None:
                    self._context.bookkeeping.add((self._context.first_token, (now, now - timing.arrived)))
            if not answer.caller.begun:
                self._open()
        if self.transcript is not None:
            out = self.transcript.take(out)
        if answer.parsing is not None:
            out = answer.parsing.stream(out)
        if answer.spoken is not None:
            answer.spoken.take(out)
        fresh = tap.tokens - timing.counted
        if fresh > 0:
            timing.counted = tap.tokens
            timing.last = now
            if len(timing.chunks) < CHUNKS_MAX:
                timing.chunks.append((now, fresh))
        whole = tap.done and tap.error is None and answer.ticket.closed is None
        if whole:
            answer.take_usage(tap.usage, tap.tokens)
            if answer.job.wants_extra:
                out = before_end(out, answer.job, answer.ticket.id, answer.extra())
        if out:
            answer.caller.write(out, last=whole)
        if begins:
            answer.began()
        if self._track_output:
            grown = tap.tokens // answer.resolved.block_size
            if grown > self._grown:
                self._grown = grown
                answer.ticket.grown(tap.tokens)
        if whole:
            answer.finish()
        return tap.error is None

    async def _unary(self) -> bool | AttemptLost:
        answer, call = self._answer, self._call
        body = await call.read()
        if answer.job.parsed is not None and gave_up(body, self.dialect.gave_up):
            raise EngineBroken("the engine aborted the request")
        if self._tokens is not None:
            try:
                body = await self._tokens.whole(body, self._context.renderer)
            except EngineError as error:
                return self._left_route(error.message)
        if not self._speak(self.transcript):
            return False
        known = answer.job.parsed is not None or call.content_type.startswith("application/json")
        answer.take_usage(usage_of(body) if known else None, 0)
        if answer.parsing is not None and call.status == 200:
            body = answer.parsing.whole(body)
        if answer.spoken is not None:
            answer.spoken.take(body)
        if answer.job.wants_extra:
            body = with_nvext(body, answer.extra())
        headers = {"content-type": call.content_type, **marks(self.dispatch, answer.job)}
        await answer.caller.send(call.status, body, headers)
        answer.began()
        answer.finish()
        return True

    async def _refused(self) -> bool | AttemptLost:
        """The engine answered with an error status: the fault of the request, of its load, or of the engine."""
        answer, call = self._answer, self._call
        body = await call.read()
        status = call.status
        text = error_text(body)
        if status == 404 and answer.resolved.adapter is not None and self.dispatch.card.adapter_slots:
            # The router believed it there; another frontend, or an operator, has unloaded it.
            return AttemptLost(f"the engine answered 404: {text}", 404, at_fault=False, adapter=True)
        kind = self.dialect.refusal(status, text)
        if kind == "client" and self._tokens is not None:
            # It words a refusal of the client's own request as the client knows it.
            return self._left_route(f"the generate route answered {status}: {text}")
        if kind != "client":
            text = f"the engine answered {status}: {text}"
            return AttemptLost(text, status, kind == "fault", kind == "leaving")
        if not self._speak():
            return False
        content_type = call.content_type
        if answer.job.parsed is not None and overflows(text):
            status, content_type = 400, "application/json"
            body = refusal_body(body, answer.resolved.max_model_len, answer.job.parsed.prompt_field)
        answer.refused(self.dispatch, f"the engine refused: {text}", status)
        if answer.caller.begun:
            return False
        await answer.caller.send(status, body, {"content-type": content_type, **marks(self.dispatch, answer.job)})
        return True

    async def _error(self) -> bool | AttemptLost:
        """The engine ended its stream with an error."""
        answer, tap = self._answer, self.tap
        assert tap.error is not None
        text = f"the engine answered: {str(tap.error.get('message', 'no message'))[:500]}"
        code = tap.error.get("code")
        status = code if isinstance(code, int) else None
        kind = self.dialect.refusal(status or 500, text)
        if kind != "client":
            return AttemptLost(text, status or 500, leaving=kind == "leaving")
        answer.refused(self.dispatch, text, status or 400)
        if answer.caller.begun and answer.resumable.leg is None:  # the request's own fault, with the engine's text
            answer.caller.write(tap.unsaid)
            await answer.caller.end()
            return True
        return False

    def _open(self) -> None:
        self._answer.caller.open(
            self._call.status,
            {
                "content-type": self._call.content_type,
                "cache-control": "no-cache",
                "x-accel-buffering": "no",
                **marks(self.dispatch, self._answer.job),
            },
        )
