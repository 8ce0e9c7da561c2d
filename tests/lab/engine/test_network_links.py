"""Do transfers share links as they should? Situations, and a naive twin in small steps of time."""

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.kernel.errors import InvariantError
from penstock.kernel.machine import MILLISECOND, SECOND, Event, Nanos, Woken, nanos
from penstock.kernel.simulation import Simulation
from penstock_lab.engine.network_links import CancelTransfer, NetworkLinks, StartTransfer, Transferred
from tests.depth import deep

Timed = list[tuple[Nanos, Event]]
STEP = 2 * MILLISECOND


def sent(id: str, source: str, target: str, size: int) -> StartTransfer:
    return StartTransfer(id=id, source=source, target=target, size=size)


class Driven:
    """Links under the kernel's Simulation; ``done``: when each transfer was over, ``moved``: bytes that rates made."""

    def __init__(self, links: NetworkLinks, events: Timed) -> None:
        self.links = links
        self.done: dict[str, Nanos] = {}
        self.moved: dict[str, float] = {}
        self._seen: tuple[Nanos, dict[str, float]] = (0, {})
        self.simulation = Simulation({"links": links}, self._world, checked=True, watch=self._watch)
        for at, event in events:
            self.simulation.post(at, "links", event)

    def run(self, until: Nanos | None = None) -> "Driven":
        self.simulation.run(until=until, limit=100_000)
        return self

    def _watch(self, now: Nanos, name: str, event: Event, effects: Any) -> None:
        before, rates = self._seen
        for id, rate in rates.items():
            self.moved[id] = self.moved.get(id, 0.0) + rate * (now - before) / SECOND
        self._seen = now, dict(self.links.rates())

    def _world(self, now: Nanos, name: str, effect: Any) -> tuple[()]:
        if isinstance(effect, Transferred):
            assert effect.at == now
            self.done[effect.id] = effect.at
        return ()


def test_one_transfer_alone_takes_its_bytes_by_the_bandwidth_and_the_latency() -> None:
    driven = Driven(NetworkLinks(1e9, latency=0.25), [(7, sent("a", "p", "d", 500_000_000))]).run()
    assert driven.done == {"a": 7 + nanos(0.25 + 0.5)}
    assert driven.simulation.events_handled == 3  # sent, begins to move, over


def test_two_out_of_one_engine_get_half_each_and_the_longer_one_gets_the_rest() -> None:
    links = NetworkLinks(100.0)
    driven = Driven(links, [(0, sent("a", "p", "d", 100)), (0, sent("b", "p", "e", 300))]).run(until=SECOND)
    assert links.rates() == {"a": 50.0, "b": 50.0}
    assert driven.run().done == {"a": 2 * SECOND, "b": 4 * SECOND}


def test_what_a_full_link_leaves_of_another_is_used_by_others() -> None:
    links = NetworkLinks(100.0)
    links.set("slow", 30.0)
    events: Timed = [(0, sent("a", "p", "slow", 30)), (0, sent("b", "p", "d", 70)), (0, sent("c", "q", "e", 100))]
    driven = Driven(links, events).run(until=1)
    assert links.rates() == {"a": 30.0, "b": 70.0, "c": 100.0}
    assert driven.run().done == {"a": SECOND, "b": SECOND, "c": SECOND}


def test_in_and_out_of_one_engine_do_not_share() -> None:
    driven = Driven(NetworkLinks(100.0), [(0, sent("a", "p", "d", 100)), (0, sent("b", "d", "p", 100))]).run()
    assert driven.done == {"a": SECOND, "b": SECOND}


def test_a_cancelled_transfer_leaves_its_share_to_others_and_is_never_over() -> None:
    events: Timed = [
        (0, sent("a", "p", "d", 100)),
        (0, sent("b", "p", "e", 100)),
        (SECOND, CancelTransfer(id="b")),
        (SECOND, CancelTransfer(id="nobody")),
    ]
    driven = Driven(NetworkLinks(100.0), events).run()
    assert driven.done == {"a": 1_500_000_000} and len(driven.links) == 0
    last: Timed = [(0, sent("a", "p", "d", 1000)), (SECOND, CancelTransfer(id="a"))]
    assert Driven(NetworkLinks(100.0), last).run().simulation.now == SECOND


def test_nothing_takes_only_the_latency() -> None:
    assert Driven(NetworkLinks(100.0, latency=0.5), [(0, sent("a", "p", "d", 0))]).run().done == {"a": nanos(0.5)}


def test_mistakes_of_a_driver_are_told() -> None:
    links = NetworkLinks(100.0)
    links.handle(0, sent("a", "p", "d", 100))
    with pytest.raises(InvariantError, match="on its way already"):
        links.handle(1, sent("a", "p", "d", 100))
    with pytest.raises(InvariantError, match="in use"):
        links.set("p", 5.0)


def test_a_late_driver_gets_the_exact_times_all_the_same() -> None:
    links = NetworkLinks(100.0)
    links.handle(0, sent("a", "p", "d", 100))
    links.handle(0, sent("b", "p", "d", 300))
    told = links.handle(99 * SECOND, Woken())
    assert told == [Transferred(id="a", at=2 * SECOND), Transferred(id="b", at=4 * SECOND)]


def naive(bandwidths: dict[str, float], latency: Nanos, events: Timed) -> dict[str, Nanos]:
    """Move bytes step by step; per step, let all rates grow by little until no link has room."""
    events = list(events)
    flows: dict[str, list[Any]] = {}  # id -> [begins, out, in, bytes left]
    done: dict[str, Nanos] = {}
    rates: dict[str, float] = {}
    known: list[str] = []
    now = 0
    while events or flows:
        while events and events[0][0] <= now:
            at, event = events.pop(0)
            if isinstance(event, StartTransfer):
                flows[event.id] = [at + latency, event.source + ">", ">" + event.target, float(event.size)]
            elif isinstance(event, CancelTransfer):
                flows.pop(event.id, None)
        moving = [id for id, flow in flows.items() if flow[0] <= now]
        if moving != known:
            known, rates = moving, grown(bandwidths, {id: (flows[id][1], flows[id][2]) for id in moving})
        for id in moving:
            flows[id][3] -= rates[id] * STEP / SECOND
            if flows[id][3] <= 0:
                done[id] = now
                del flows[id]
        now += STEP
    return done


def grown(bandwidths: dict[str, float], flows: dict[str, tuple[str, str]]) -> dict[str, float]:
    rates = dict.fromkeys(flows, 0.0)
    growing = set(flows)
    while growing:
        for id in sorted(growing):
            for link in flows[id]:
                if sum(rate for other, rate in rates.items() if link in flows[other]) > bandwidths[link.strip(">")]:
                    growing.discard(id)
        for id in growing:
            rates[id] += 0.25
    return rates


@st.composite
def traffic(draw: st.DrawFn) -> tuple[dict[str, float], Timed]:
    names = [f"w{i}" for i in range(draw(st.integers(2, 5)))]
    bandwidths = {name: float(draw(st.sampled_from([50, 100, 100, 200]))) for name in names}
    events: Timed = []
    at = 0
    for number in range(draw(st.integers(1, 9))):
        at += draw(st.sampled_from([0, 0, 130, 600])) * MILLISECOND
        source, target = draw(st.sampled_from(names)), draw(st.sampled_from(names))
        events.append((at, sent(f"f{number}", source, target, draw(st.integers(0, 150)))))
        if draw(st.integers(0, 4)) == 0:
            events.append((at + draw(st.integers(0, 800)) * MILLISECOND, CancelTransfer(id=f"f{number}")))
    return bandwidths, sorted(events, key=lambda pair: pair[0])


def links_of(bandwidths: dict[str, float], latency: Nanos) -> NetworkLinks:
    links = NetworkLinks(100.0, latency / SECOND)
    for name, bandwidth in bandwidths.items():
        links.set(name, bandwidth)
    return links


@given(traffic(), st.sampled_from([0, 50 * MILLISECOND]))
@settings(max_examples=deep(60), deadline=None)
def test_transfers_are_over_when_the_naive_twin_says_and_no_byte_is_lost(
    case: tuple[dict[str, float], Timed], latency: Nanos
) -> None:
    bandwidths, events = case
    driven = Driven(links_of(bandwidths, latency), events).run()
    sizes = {event.id: event.size for _, event in events if isinstance(event, StartTransfer)}
    for id in driven.done:
        assert driven.moved.get(id, 0.0) == pytest.approx(sizes[id], abs=1e-5)
    want = naive(bandwidths, latency, events)
    last = {event.id: at for at, event in events if isinstance(event, CancelTransfer)}
    for id in want.keys() | driven.done.keys():
        mine, theirs = driven.done.get(id), want.get(id)
        if mine is None or theirs is None:  # over about when it was cancelled: either may be first
            assert abs((mine or theirs or 0) - last[id]) <= 200 * MILLISECOND
        elif not last:
            assert mine == pytest.approx(theirs, rel=0.03, abs=40 * MILLISECOND)


@given(traffic(), st.integers(0, 3 * SECOND))
@settings(max_examples=deep(60), deadline=None)
def test_a_snapshot_taken_at_any_time_changes_nothing(case: tuple[dict[str, float], Timed], at: Nanos) -> None:
    bandwidths, events = case
    straight = Driven(links_of(bandwidths, 5), events).run()
    broken = Driven(links_of(bandwidths, 5), events).run(until=at)
    state = msgspec.json.decode(msgspec.json.encode(broken.links.snapshot()))
    broken.links.restore(state)
    assert broken.links.snapshot() == state
    broken.links.check()
    assert broken.run().done == straight.done
