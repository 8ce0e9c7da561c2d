"""The live driver keeps the kernel's contract; tickets carry a request's milestones."""

import asyncio
from collections.abc import Sequence

import pytest

from penstock.kernel.machine import Effect, Event, Nanos, Send, Snapshot, Wake
from penstock.kernel.values import Prompt, RequestId
from penstock.router.events import Abort, Arrived, Closed, Dispatch, OperatorNote, WorkerJoined
from penstock.router.router import Router
from penstock.router.settings import RouterSettings
from penstock.runtime.live_driver import LiveDriver
from penstock.runtime.node.tickets import Tickets
from penstock.testing import arrived, card


class Ping(Event, frozen=True, kw_only=True):
    text: str


class Shout(Effect, frozen=True, kw_only=True):
    text: str


class Recorder:
    def __init__(self, answers: dict[str, list[Effect]] | None = None) -> None:
        self.heard: list[str] = []
        self.woken = asyncio.Event()
        self.answers = answers or {}

    def handle(self, now: Nanos, event: Event) -> Sequence[Effect]:
        text = event.text if isinstance(event, Ping) else "woken"
        self.heard.append(text)
        if text == "woken":
            self.woken.set()
        if text == "break":
            raise RuntimeError("broken")
        return self.answers.get(text, [])

    def snapshot(self) -> Snapshot:
        return {"version": 1}

    def restore(self, snapshot: Snapshot) -> None: ...

    def check(self) -> None: ...


async def test_what_a_carrier_posts_is_handled_after_the_present_event_and_before_post_returns() -> None:
    a = Recorder({"x": [Shout(text="1"), Send(machine="b", message=Ping(text="hello")), Shout(text="2")]})
    b = Recorder()
    live = LiveDriver({"a": a, "b": b})
    order: list[str] = []

    def carry(now: Nanos, name: str, effect: Shout) -> None:
        order.append(effect.text)
        live.post("b", Ping(text=f"answer {effect.text}"))

    live.on(Shout, carry)
    live.post("a", Ping(text="x"))
    assert order == ["1", "2"]
    assert sorted(b.heard) == ["answer 1", "answer 2", "hello"]


async def test_only_the_newest_wake_fires() -> None:
    a = Recorder({"x": [Wake(at=0), Wake(at=30_000_000)]})
    live = LiveDriver({"a": a})
    live.post("a", Ping(text="x"))
    await asyncio.wait_for(a.woken.wait(), 5)
    assert a.heard == ["x", "woken"] and live.now() >= 30_000_000


async def test_time_never_goes_back() -> None:
    readings = iter([0, 10, 5, 20])
    live = LiveDriver({}, clock=lambda: next(readings))
    assert [live.now(), live.now(), live.now()] == [10, 10, 20] and live.clamped == 1


async def test_one_bad_event_is_told_and_does_not_strand_the_rest() -> None:
    a = Recorder({"x": [Send(machine="a", message=Ping(text="break")), Send(machine="a", message=Ping(text="y"))]})
    live = LiveDriver({"a": a})
    with pytest.raises(RuntimeError, match="broken"):
        live.post("a", Ping(text="x"))
    assert a.heard == ["x", "break", "y"] and live.faults == 1
    live.post("a", Ping(text="y"))
    assert a.heard[-1] == "y"


def tickets(*workers: str) -> tuple[Tickets, LiveDriver]:
    live = LiveDriver({"router": Router(RouterSettings())})
    live.on(OperatorNote, lambda now, name, effect: None)
    made = Tickets(live)
    for name in workers:
        live.post("router", WorkerJoined(card=card(name)))
    return made, live


async def test_a_ticket_sees_its_request_through() -> None:
    made, _ = tickets("a", "b")
    heard: list[Effect] = []
    made.listen(lambda now, effect: heard.append(effect))
    ticket = made.arrive(arrived("r"))
    first = await ticket.next()
    assert isinstance(first, Dispatch) and ticket.attempt == 1
    ticket.failed("connection refused", retryable=True)
    second = await ticket.next()
    assert isinstance(second, Dispatch) and second.target != first.target
    ticket.first_token()
    ticket.finished(12, 48)
    assert ticket.closed is not None and ticket.closed.osl == 12 and len(made) == 0
    assert isinstance(await ticket.next(), Closed)
    assert [type(effect) for effect in heard] == [Dispatch, Dispatch, Closed]
    ticket.cancelled()


async def test_a_deadline_sets_aborted_and_next_tells_the_end() -> None:
    made, live = tickets("a")
    event = arrived("r", deadline=live.now() + 20_000_000)
    ticket = made.arrive(event)
    await ticket.next()
    end = await asyncio.wait_for(ticket.next(), 5)
    assert isinstance(end, Closed) and end.status == 504
    assert ticket.aborted


async def test_an_open_id_is_refused() -> None:
    made, _ = tickets("a")
    made.arrive(arrived("r"))
    with pytest.raises(ValueError, match="already in use"):
        made.arrive(arrived("r"))


async def test_effects_for_requests_that_are_not_here_are_counted() -> None:
    made, live = tickets("a")
    live.post("router", Arrived(id=RequestId("x"), model="m", prompt=Prompt(1, [])))
    assert made.unknown == 1
    assert Abort.__name__ == "Abort"
