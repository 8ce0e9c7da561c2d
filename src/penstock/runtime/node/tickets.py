"""Tickets: each connects the coroutine of one request to the router machine.

The frontend posts a request's milestones through its ticket and awaits the router's effects: where to send it,
when to abort, how it ended.
"""

import asyncio
from collections import deque
from collections.abc import Callable

from penstock.kernel.machine import Effect, Nanos
from penstock.kernel.values import RequestId, WorkerId
from penstock.router.events import (
    Abort,
    Arrived,
    Cancelled,
    Closed,
    Dispatch,
    Failed,
    Finished,
    FirstToken,
    Grown,
    Release,
    Resume,
    Staged,
)
from penstock.runtime.live_driver import LiveDriver

Listener = Callable[[Nanos, Effect], None]
"""Receives `Dispatch`, `Abort`, `Release` and `Closed` effects: ``(now, effect)``."""


class Ticket:
    """One request between its arrival and its one terminal effect."""

    __slots__ = ("_answers", "_tickets", "_waiter", "aborted", "attempt", "closed", "id")

    def __init__(self, tickets: "Tickets", request: RequestId) -> None:
        self._tickets = tickets
        self._answers: deque[Dispatch | Closed] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self.id = request
        self.attempt = 0
        self.closed: Closed | None = None
        self.aborted = False
        """True when the running attempt should stop: the router aborted it; `next` returns what follows."""

    async def next(self) -> Dispatch | Closed:
        """Wait for the router's next effect: where to send the request, or how it ended."""
        while not self._answers:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        answer = self._answers.popleft()
        if isinstance(answer, Dispatch):
            self.attempt = answer.attempt
        return answer

    def _add_answer(self, answer: Dispatch | Closed) -> None:
        self._answers.append(answer)
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def first_token(self, attempt: int | None = None) -> None:
        """Report the first output token. ``attempt``: which one; the latest where None, here and below."""
        self.attempt = attempt or self.attempt
        self._tickets.live.post("router", FirstToken(id=self.id, attempt=self.attempt))

    def grown(self, tokens: int) -> None:
        """Report how many output tokens there are, about once a block."""
        self._tickets.live.post("router", Grown(id=self.id, attempt=self.attempt, tokens=tokens))

    def finished(self, tokens: int | None, cached: int | None, attempt: int | None = None) -> None:
        """Report that the answer is complete; ``closed`` is set when this returns."""
        self.attempt = attempt or self.attempt
        self._tickets.live.post("router", Finished(id=self.id, attempt=self.attempt, tokens=tokens, cached=cached))

    def failed(
        self,
        reason: str,
        *,
        retryable: bool,
        worker_at_fault: bool = True,
        status: int | None = None,
        retry_after: float | None = None,
        resume: Resume | None = None,
        leaving: bool = False,
        received: bool = True,
        attempt: int | None = None,
        served_by: WorkerId | None = None,
    ) -> None:
        """Report that this attempt broke; `next` then returns the following attempt or the end."""
        self._tickets.live.post(
            "router",
            Failed(
                id=self.id,
                attempt=attempt or self.attempt,
                reason=reason,
                retryable=retryable,
                worker_at_fault=worker_at_fault,
                status=status,
                retry_after=retry_after,
                resume=resume,
                leaving=leaving,
                received=received,
                served_by=served_by,
            ),
        )

    def staged(self, attempt: int, *, kv_retained: bool, cached: int | None) -> None:
        """Report that a stage before the last is done; `next` then returns where the request continues."""
        self._tickets.live.post("router", Staged(id=self.id, attempt=attempt, kv_retained=kv_retained, cached=cached))

    def cancelled(self) -> None:
        """Report that the client went away; harmless once the request has ended."""
        if self.closed is None:
            self._tickets.live.post("router", Cancelled(id=self.id))


class Tickets:
    """All open tickets of a frontend; carries out the router's per-request effects."""

    def __init__(self, live: LiveDriver) -> None:
        self.live = live
        self.unknown = 0
        """Effects for a request that has no ticket here; dropped and counted."""
        self.open: dict[RequestId, Ticket] = {}
        """Those of requests that have not ended."""
        live.on(Dispatch, self._dispatch)
        live.on(Abort, self._abort)
        live.on(Closed, self._closed)
        live.on(Release, self._release)
        self._listeners: list[Listener] = []

    def __len__(self) -> int:
        return len(self.open)

    def arrive(self, event: Arrived) -> Ticket:
        """Post a request to the router.

        Raises:
            ValueError: a request with this id is still open.
        """
        if event.id in self.open:
            raise ValueError(f"request id {event.id!r} is already in use by an open request")
        ticket = Ticket(self, event.id)
        self.open[event.id] = ticket
        self.live.post("router", event)
        return ticket

    def listen(self, listener: Listener) -> None:
        """Call ``listener(now, effect)`` for each of those effects, after the ticket has been served."""
        self._listeners.append(listener)

    def _dispatch(self, now: Nanos, _: str, effect: Dispatch) -> None:
        ticket = self.open.get(effect.id)
        if ticket is None:
            self.unknown += 1
            return
        ticket.aborted = False
        ticket._add_answer(effect)
        self._call_listeners(now, effect)

    def _abort(self, now: Nanos, _: str, effect: Abort) -> None:
        ticket = self.open.get(effect.id)
        if ticket is not None:
            ticket.aborted = True
        self._call_listeners(now, effect)

    def _closed(self, now: Nanos, _: str, effect: Closed) -> None:
        ticket = self.open.pop(effect.id, None)
        if ticket is None:
            self.unknown += 1
        else:
            ticket.closed = effect
            ticket._add_answer(effect)
        self._call_listeners(now, effect)

    def _release(self, now: Nanos, _: str, effect: Release) -> None:
        self._call_listeners(now, effect)

    def _call_listeners(self, now: Nanos, effect: Effect) -> None:
        for listener in self._listeners:
            listener(now, effect)
