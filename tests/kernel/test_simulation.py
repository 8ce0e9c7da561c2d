"""The kernel's contract: order, wakes, sends, time that never goes back."""

from collections.abc import Sequence

from penstock.kernel.machine import Effect, Event, Nanos, Send, Snapshot, Wake, Woken
from penstock.kernel.simulation import Answer, Simulation


class Ping(Event, frozen=True, kw_only=True):
    text: str


class Shout(Effect, frozen=True, kw_only=True):
    text: str


class Recorder:
    """A machine that writes down what it hears and answers as it is told."""

    def __init__(self, answers: dict[str, list[Effect]] | None = None) -> None:
        self.heard: list[tuple[Nanos, str]] = []
        self.answers = answers or {}

    def handle(self, now: Nanos, event: Event) -> Sequence[Effect]:
        text = event.text if isinstance(event, Ping) else "woken"
        self.heard.append((now, text))
        return self.answers.get(text, [])

    def snapshot(self) -> Snapshot:
        return {"version": 1}

    def restore(self, snapshot: Snapshot) -> None: ...

    def check(self) -> None: ...


def nowhere(now: Nanos, name: str, effect: Effect) -> list[Answer]:
    return []


def test_events_are_handled_by_time_and_then_by_the_order_of_posting() -> None:
    machine = Recorder()
    run = Simulation({"a": machine}, nowhere)
    for at, text in ((5, "late"), (1, "first"), (1, "second")):
        run.post(at, "a", Ping(text=text))
    run.run()
    assert machine.heard == [(1, "first"), (1, "second"), (5, "late")]


def test_an_answer_at_once_comes_after_what_was_posted_for_that_moment_before_and_before_a_call() -> None:
    machine = Recorder({"first": [Shout(text="answer"), Send(machine="a", message=Ping(text="sent"))]})
    run = Simulation({"a": machine}, lambda now, name, effect: [(now, "a", Ping(text=effect.text))])
    run.call(1, lambda: machine.heard.append((run.now, "call")))
    for text in ("first", "second"):
        run.post(1, "a", Ping(text=text))
    run.run(until=0)
    run.post(0, "a", Ping(text="now"))
    run.run()
    assert machine.heard == [(0, "now"), *((1, text) for text in ("first", "second", "answer", "sent", "call"))]


def test_the_newest_wake_replaces_the_older_one() -> None:
    machine = Recorder({"x": [Wake(at=10), Wake(at=7)]})
    run = Simulation({"a": machine}, nowhere)
    run.post(0, "a", Ping(text="x"))
    run.run()
    assert machine.heard == [(0, "x"), (7, "woken")]


def test_a_send_arrives_after_the_present_handle_at_the_same_time() -> None:
    a = Recorder({"x": [Send(machine="b", message=Ping(text="hello")), Shout(text="then")]})
    b = Recorder()
    order: list[str] = []

    def world(now: Nanos, name: str, effect: Effect) -> list[Answer]:
        order.append(f"{effect}")
        return []

    run = Simulation({"a": a, "b": b}, world, watch=lambda now, name, event, effects: order.append(name))
    run.post(3, "a", Ping(text="x"))
    run.run()
    assert b.heard == [(3, "hello")]
    assert order == ["a", "Shout(text='then')", "b"]


def test_an_answer_in_the_past_is_clamped_and_counted() -> None:
    a = Recorder({"x": [Shout(text="?")]})
    run = Simulation({"a": a}, lambda now, name, effect: [(0, "a", Ping(text="answer"))])
    run.post(9, "a", Ping(text="x"))
    run.run()
    assert a.heard == [(9, "x"), (9, "answer")] and run.clamped == 1


def test_mail_to_a_machine_that_was_taken_out_is_lost() -> None:
    a = Recorder()
    run = Simulation({"a": a}, nowhere)
    run.post(1, "a", Ping(text="x"))
    run.remove("a")
    run.run()
    assert a.heard == []


def test_run_until_stops_between_events_and_goes_on() -> None:
    a = Recorder()
    run = Simulation({"a": a}, nowhere)
    run.post(1, "a", Ping(text="x"))
    run.post(5, "a", Ping(text="y"))
    run.run(until=3)
    assert [text for _, text in a.heard] == ["x"] and run.now == 3
    run.run()
    assert [text for _, text in a.heard] == ["x", "y"]


def test_woken_is_a_plain_event() -> None:
    assert Woken() == Woken()
