"""Attempt: one request at one worker; holds back bytes before the first token and passes the rest on."""

import asyncio
import time
from collections.abc import Awaitable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from penstock.adapters.engines.dialects.dialect import Refusal, overflows
from penstock.adapters.engines.dialects.dialect_registry import dialect_of
from penstock.adapters.engines.dialects.engine_failure import EngineFailure, dropped_by_engine, failure_of
from penstock.adapters.engines.http.engine_call import ConnectFailed, EngineCall
from penstock.adapters.engines.pool_overrides import REASONING_PARSER, TOOL_PARSER
from penstock.frontend.exchange import token_route
from penstock.frontend.exchange.client_answer import CHUNKS_MAX, ClientAnswer, before_end, marks, with_nvext
from penstock.frontend.exchange.open_attempts import WorkerAbsence
from penstock.frontend.exchange.sse import as_stream, end_of, usage_of
from penstock.frontend.exchange.token_route import TokenRoute, token_obstacle
from penstock.frontend.exchange.upstream_request import (
    UpstreamRequest,
    added_fields,
    engine_body,
    engine_headers,
    error_text,
)
from penstock.frontend.http.error_responses import seconds_text
from penstock.frontend.parsers.answer_parsing import AnswerParsing, parser_plan
from penstock.frontend.parsers.harmony_text import PASSED_ON, passed_on
from penstock.frontend.prompt.context_overflow import refusal_body
from penstock.frontend.prompt.request_body import without_places
from penstock.frontend.prompt.routing_hints import RoutingHints
from penstock.kernel.errors import EngineError
from penstock.router.events import Dispatch, Preferences

HOLD_MAX = 1 << 20
"""Most bytes held back before the first token; an engine's longer answer without one is passed on as it is."""


_UNKNOWN_FIELD = ("unexpected keyword", "not supported", "unsupported")
"""Texts of servers that fail (5xx) at a field that they do not know."""


class AttemptLost(NamedTuple):
    """Result of an attempt that ended without a whole answer.

    Args:
        status: the engine's, where it answered.
        at_fault: whether the worker is.
        leaving: whether it said that it is ending.
        adapter: whether it does not hold the request's LoRA adapter.
        received: whether the engine had the request.
        usual: whether the same worker can answer where it is asked in the usual way: by the prompt in place of its
            tokens, or without a field of ours.
        retry_after: seconds after which it wants to be asked again.
    """

    reason: str
    status: int | None = None
    at_fault: bool = True
    leaving: bool = False
    adapter: bool = False
    usual: bool = False
    received: bool = True
    retry_after: float | None = None


class Attempt:
    """One request at one worker; ``run`` once."""

    __slots__ = (
        "_absence",
        "_answer",
        "_answering",
        "_begun",
        "_buffered",
        "_call",
        "_content_type",
        "_context",
        "_fetches",
        "_grown",
        "_last_byte",
        "_late",
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
        self._late = False
        """Whether its first token came when the KV that it fetched may have been gone."""
        self._track_output = answer.context.settings.router.track_output
        self._last_byte = time.monotonic()
        self._absence = WorkerAbsence(answer.context.cluster, dispatch.card)
        labels, parsed = dispatch.card.labels, answer.job.parsed
        self._parsing: AnswerParsing | None = answer.parsing
        if labels and parsed is not None and answer.timing.first is None:
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
            without = self._context.refused_fields.of(dispatch.card)
            adapter = answer.resolved.adapter
            body = engine_body(job, self.dialect, dispatch, adapter, token_ids=ids, handed=handed, without=without)
        self._fetches = handoff is not None and handoff.protocol == "completed"
        """Whether it fetches KV that an engine holds for it: then it is not cut before its first token."""
        self._content_type = "text/event-stream"
        self._begun: asyncio.Task[None] | None = None
        self._answering: asyncio.Task[bool | AttemptLost] | None = None
        self._call: EngineCall = answer.context.engines.call(dispatch.card.url, path, body, headers)

    def _token_route(self, job: UpstreamRequest, ids: bool, handed: Mapping[str, Any] | None) -> TokenRoute | None:
        """Return the way by which the engine begins with the prompt's tokens; None: it gets the prompt itself."""
        answer, card = self._answer, self.dispatch.card
        assert job.parsed is not None  # what is rendered has been read
        adapter = answer.resolved.adapter
        added = added_fields(job, job.parsed, self.dialect, self.dispatch, adapter, token_ids=ids, handed=handed)
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

    def _left_kv(self) -> AttemptLost:
        """What was fetched may be another's KV, and lie in the worker's cache now: it computes the prompt, salted."""
        job = self._answer.job
        hints = RoutingHints(Preferences()) if job.hints is None else job.hints
        job.hints = replace(hints, salt=f"{hints.salt or ''}{self._answer.ticket.id}")
        return AttemptLost("its first token came after the lease of its KV", at_fault=False, usual=True)

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
                self._call.close(lingers=self.tap.done)

    async def _carry(self, begun: Awaitable[None]) -> bool | AttemptLost:
        call = self._call
        try:
            await begun
            took = time.monotonic() - self._last_byte
            self._context.bookkeeping.add((self._context.metrics.stage, ("dispatch", took)))
            if call.status >= 400:
                return await self._refused()
            if call.streams:
                self._content_type = call.content_type
                await call.relay(self._feed, self._answer.caller)
                return await self._streamed()
            return await self._unary()
        except EngineError as error:  # the engine's, or an answer that can't be translated
            return AttemptLost(error.message, received=not isinstance(error, ConnectFailed))

    async def look(self, now: float) -> None:
        """Stop an engine that is silent for too long."""
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

    def _doubted(self) -> bool:
        """Return whether the engine is silent for too long, and another one could go on."""
        context, card = self._context, self.dispatch.card
        return context.attempts.doubted(card.id) and not context.cluster.alone(card)

    async def _streamed(self) -> bool | AttemptLost:
        """Judge a stream of which all is here, and end the client's."""
        answer, tap = self._answer, self.tap
        if self.gave_up and answer.speaker is not self.dispatch:
            return False
        if self._late:
            return self._left_kv()
        if not tap.done and answer.job.parsed is not None:
            self._feed(b"\n\n")  # the last event may lack its blank line
            if tap.finished and tap.error is None:
                self._feed(b"data: [DONE]\n\n")
        if tap.error is not None:
            # Without a status of its own it is an error of the server's, as it would be before the stream.
            return self._failed(tap.error._replace(status=tap.error.status or 500))
        if not tap.done and answer.job.parsed is not None:
            return AttemptLost("the engine's stream ended before its answer was whole")
        if not tap.started and answer.job.parsed is not None:
            # An ending engine answers so: no token, no reason, only the end mark.
            return AttemptLost("the engine's stream ended without any output")
        begins = answer.speaker is not self.dispatch
        if begins and not answer.speak(self.dispatch, self.gave_up, self.transcript, self._parsing):
            return False
        rest = self._buffered
        if answer.parsing is not None:
            rest = answer.parsing.stream(rest) + answer.parsing.rest()
        if answer.caller.status is None:  # a stream of another dialect, without a byte
            answer.open(self._call.status, self._content_type, marks(self.dispatch, answer.job))
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
            if self._prefill is not None and now > self._prefill.until:
                self._late = True
                return False
            if not answer.speak(self.dispatch, self.gave_up, self.transcript, self._parsing):
                return False
            out, self._buffered = self._buffered + out, b""
            if timing.first is None:
                timing.first = now
                if answer.job.copy_of is None:
                    self._context.bookkeeping.add((self._context.first_token, (now, now - timing.arrived)))
            if answer.caller.status is None:
                answer.open(self._call.status, self._content_type, marks(self.dispatch, answer.job))
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
            answer.torn = tap.torn
        if begins:
            answer.began()
        if self._track_output:
            grown = tap.tokens // answer.resolved.block_size
            if grown > self._grown:
                self._grown = grown
                answer.ticket.grown(tap.tokens)
        if whole:
            answer.finish()
        return tap.error is None and not tap.done

    async def _unary(self) -> bool | AttemptLost:
        answer, call = self._answer, self._call
        body = await call.read()
        if answer.job.parsed is None:
            usage = usage_of(body) if call.content_type.startswith("application/json") else None
        else:
            end = end_of(body)
            if end is None and answer.job.streamed and b"\ndata:" in b"\n" + body[:HOLD_MAX]:
                self._feed(body)  # a stream under the name of another type
                return await self._streamed()
            if end is None or end.failed:
                return self._failed(failure_of(body))
            if self._prefill is not None and time.monotonic() - end.generation > self._prefill.until:
                return self._left_kv()
            if answer.job.parsed.endpoint == "chat_completions" and passed_on(body):
                return self._failed(PASSED_ON)
            for reason in end.reasons & self.dialect.gave_up:
                return self._failed(dropped_by_engine(reason))
            usage = end.usage
        if self._tokens is not None:
            try:
                body = await self._tokens.whole(body, self._context.renderer)
            except EngineError as error:
                return self._left_route(error.message)
        if answer.job.streamed and answer.job.parsed is not None:
            self._tokens = None
            self._feed(as_stream(body))
            return await self._streamed()
        if not answer.speak(self.dispatch, self.gave_up, self.transcript, self._parsing):
            return False
        body = without_places(body)
        answer.take_usage(usage, 0)
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
        asked = answer.resolved.adapter is not None and self.dispatch.card.adapter_slots
        if asked and self.dialect.lacks_adapter(status, text):
            # The router believed it there; another frontend, or an operator, has unloaded it.
            return AttemptLost(f"the engine answered {status}: {text}", 404, at_fault=False, adapter=True)
        kind = self.dialect.refusal(status, text)
        if kind == "client" and self._tokens is not None:
            # It words a refusal of the client's own request as the client knows it.
            return self._left_route(f"the generate route answered {status}: {text}")
        if self._names_ours(kind, body.decode("utf-8", "replace")):
            return AttemptLost(f"the engine refused a field of ours: {text}", at_fault=False, usual=True)
        if kind != "client":
            return self._lost(kind, f"the engine answered {status}: {text}", status)
        if not answer.speak(self.dispatch, self.gave_up, None, self._parsing):
            return False
        content_type = call.content_type
        if answer.job.parsed is not None and overflows(text):
            status, content_type = 400, "application/json"
            body = refusal_body(body, answer.resolved.max_model_len, answer.job.parsed.prompt_field)
        answer.refused(self.dispatch, f"the engine refused: {failure_of(body).message}", status)
        if answer.caller.status is not None:
            return False
        headers = {"content-type": content_type, **marks(self.dispatch, answer.job)}
        if call.retry_after is not None:
            headers["retry-after"] = seconds_text(call.retry_after)
        await answer.caller.send(status, body, headers)
        return True

    def _failed(self, failure: EngineFailure) -> bool | AttemptLost:
        """The engine said within an answer of status 200 that it failed."""
        text, status = f"the engine answered: {failure.message}", failure.status
        kind = self.dialect.refusal(status or 500, text)
        if not self.tap.started and self._names_ours(kind, text):
            return AttemptLost(text, at_fault=False, usual=True)
        if kind != "client":
            return self._lost(kind, text, status)
        self._answer.refused(self.dispatch, text, status or 400)
        return False

    def _names_ours(self, kind: Refusal, text: str) -> bool:
        """Return whether a refusal is of a field that only we had put in, without which the worker is asked again."""
        if kind != "client" and not any(map(text.count, _UNKNOWN_FIELD)):
            return False
        return bool(self._context.refused_fields.note(self.dispatch.card, self._answer.resumable.job, text))

    def _lost(self, kind: Refusal, text: str, status: int | None) -> AttemptLost:
        return AttemptLost(text, status, kind == "fault", kind == "leaving", retry_after=self._call.retry_after)
