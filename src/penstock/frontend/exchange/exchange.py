"""Request exchange: carries one request between client and engines, with retries and migration, to exactly one end.

Nothing reaches the client before the first output token, so until then a failed attempt can be repeated elsewhere
invisibly, and two may race (`router.requests.hedging`); afterwards bytes pass as they come, and where an engine is lost
another one continues (`stream_resume`).
"""

import asyncio
from dataclasses import dataclass

from penstock.adapters.engines.dialects.dialect import overflows
from penstock.adapters.engines.dialects.dialect_registry import dialect_of
from penstock.frontend import decision_span
from penstock.frontend.exchange.attempt import Attempt, AttemptLost
from penstock.frontend.exchange.client_answer import ClientAnswer, before_end, marks
from penstock.frontend.exchange.open_attempts import STOPPED, adapter_ready
from penstock.frontend.exchange.upstream_request import engine_headers
from penstock.frontend.http.error_responses import problem, send_error, sse_error
from penstock.frontend.prompt import context_overflow
from penstock.router.events import Closed, Dispatch, Resume
from penstock.router.stage_graph import FINAL

GOODBYE = 2.0
"""Seconds that a client has to read the last event of a broken stream."""


@dataclass(slots=True, eq=False)
class RequestExchange:
    """One request. ``run`` answers it; the result is then in the answer's ticket and timing."""

    answer: ClientAnswer
    _last: Dispatch | None = None

    async def run(self) -> None:
        """Follow the router's effects until the request has ended.

        A client that hangs up cancels this coroutine; the engine's connection is closed on the way out and the
        cancellation is posted to the router.
        """
        ticket = self.answer.ticket
        answers = self.answer.context.attempts.answers
        answers.add(self.answer)
        try:
            if self.answer.context.settings.router.hedge.after is not None:
                return await self._race()
            while True:
                effect = await ticket.next()
                if isinstance(effect, Closed):
                    return await self._ended(effect)
                if effect.stage not in FINAL:
                    self._stage(effect)  # its result is posted to the router, and the client gets nothing of it
                elif not ticket.aborted and await self._attempt(effect):
                    return
        except ConnectionResetError:
            # A write failed before the server noticed: the same as being cancelled.
            ticket.cancelled()
        finally:
            answers.discard(self.answer)
            self.answer.count_first()
            if ticket.closed is None:
                ticket.cancelled()

    async def _attempt(self, dispatch: Dispatch) -> bool:
        """Carry out one attempt; False where the router's next effect decides."""
        self._last = dispatch
        if self.answer.span.sampled:
            decision_span.placed(self.answer.span, dispatch)
        if self.answer.resolved.adapter is not None and not await self._has_adapter(dispatch):
            return False
        attempt = Attempt(self.answer, dispatch)
        result = await attempt.run()
        if isinstance(result, AttemptLost) and result.adapter and not attempt.gave_up:
            loads, adapter = self.answer.context.cluster.adapters, self.answer.resolved.adapter
            if loads is not None and adapter is not None:
                loads.missing(dispatch.card, adapter)
                if not await self._has_adapter(dispatch):
                    return False
                attempt = Attempt(self.answer, dispatch)
                result = await attempt.run()
        while isinstance(result, AttemptLost) and result.usual and not attempt.gave_up:
            attempt = Attempt(self.answer, dispatch)
            result = await attempt.run()
        return await self._lost(attempt, result) if isinstance(result, AttemptLost) else result

    async def _has_adapter(self, dispatch: Dispatch) -> bool:
        """Wait until the worker has loaded the request's LoRA adapter; False where the router's next effect decides."""
        answer = self.answer
        assert answer.resolved.adapter is not None
        context, ticket = answer.context, answer.ticket
        failure = await adapter_ready(context.cluster, context.attempts, ticket.id, dispatch, answer.resolved.adapter)
        if failure is None:
            return not ticket.aborted and ticket.closed is None
        if failure is not STOPPED:
            ticket.failed(
                f"worker {dispatch.target}: {failure.reason}",
                retryable=True,
                worker_at_fault=False,
                status=failure.status,
                attempt=dispatch.attempt,
            )
        return False

    async def _lost(self, attempt: Attempt, lost: AttemptLost) -> bool:
        """An attempt ended without a whole answer."""
        answer, ticket, dispatch = self.answer, self.answer.ticket, attempt.dispatch
        spoke = answer.speaker is dispatch
        if ticket.closed is not None and ticket.closed.outcome == "ok" and spoke:
            await answer.caller.end()  # broken only after its end mark: nothing is missing
            return True
        if attempt.gave_up:
            return False
        resume: Resume | None = None
        if spoke and answer.caller.status is not None:
            resume = await answer.resumable.drop(attempt.tap.tokens)
            if resume is not None and answer.resumable.complete:
                return await self._say_goodbye()
        text = f"worker {dispatch.target}: {lost.reason}"
        if spoke and answer.caller.status is not None and resume is None:
            text += f"; it can't go on elsewhere: {answer.resumable.why_not}"
        elif spoke:
            answer.speaker = None
        ticket.failed(
            text,
            retryable=not (spoke and answer.caller.status is not None),
            worker_at_fault=lost.at_fault,
            status=lost.status,
            retry_after=lost.retry_after,
            resume=resume,
            leaving=lost.leaving,
            received=lost.received,
            attempt=dispatch.attempt,
        )
        return False

    # --- several attempts -------------------------------------------------------------------------------------------

    def _stage(self, dispatch: Dispatch) -> None:
        answer = self.answer
        if answer.ticket.closed is None:  # else the KV that it makes would never be released
            job = answer.resumable.job
            dialect = dialect_of(dispatch.card.engine)
            headers = engine_headers(job, dialect, dispatch, answer.ticket.id, answer.caller.headers, answer.span)
            answer.context.stages.start(answer.ticket, dispatch, job, answer.resolved.adapter, headers)
            if answer.span.sampled:
                decision_span.placed(answer.span, dispatch)

    async def _race(self) -> None:
        """Follow the router's effects where it may dispatch to a second worker before the first has answered."""
        attempts: set[asyncio.Task[bool]] = set()
        hearing = asyncio.ensure_future(self.answer.ticket.next())
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
                        hearing = asyncio.ensure_future(self.answer.ticket.next())
                    else:
                        attempts.add(asyncio.create_task(self._attempt(effect)))
                        hearing = asyncio.ensure_future(self.answer.ticket.next())
        finally:
            hearing.cancel()
            for attempt in attempts:
                attempt.cancel()
            await asyncio.gather(hearing, *attempts, return_exceptions=True)

    # --- end of the request -----------------------------------------------------------------------------------------

    async def _say_goodbye(self) -> bool:
        """End a stream whose output is whole, in place of its lost engine."""
        answer = self.answer
        ending, usage = answer.resumable.last_words()
        if answer.parsing is not None:
            ending = answer.parsing.stream(ending)
        answer.take_usage(usage, 0)
        if answer.job.wants_extra:
            ending = before_end(ending, answer.job, answer.ticket.id, answer.extra())
        answer.caller.write(ending, last=True)
        answer.finish()
        await answer.caller.end()
        return True

    async def _ended(self, closed: Closed) -> None:
        """Answer the client with the end of its request, where the engine's answer does not."""
        status, code = status_of(closed)
        caller, reason = self.answer.caller, closed.reason
        if closed.fault == "client" and overflows(reason):
            code = context_overflow.CODE
            reason = context_overflow.in_openai_words(reason, self.answer.resolved.max_model_len)
        if caller.status is not None:
            # No end mark: a client must notice that this answer is not whole. Its connection stays: who has put it back
            # into a pool loses the next request at one that closes unannounced.
            try:
                async with asyncio.timeout(GOODBYE):
                    if self.answer.parsing is not None:
                        caller.write(self.answer.parsing.rest())
                    caller.write(sse_error(status, reason, code=code))
                    await caller.end()
            except TimeoutError:
                caller.abort()  # the client does not read, and nothing else would end that
            return
        error = problem(status, reason, code=code, retry_after=closed.retry_after)
        await send_error(caller, error, {} if self._last is None else marks(self._last, self.answer.job))


def status_of(closed: Closed) -> tuple[int, str | None]:
    """Return the status and the code with which a client is told that its request has ended without an answer."""
    status = 502 if closed.fault == "engine" and closed.status not in (404, 429, 503) else closed.status
    if closed.code is not None:
        return status, closed.code
    code = {"engine": "engine_error", "overloaded": "overloaded", "deadline": "deadline_exceeded"}.get(closed.fault)
    return status, code
