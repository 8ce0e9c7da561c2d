"""Workers from joining to gone: epochs, moves, and the breaker's states."""

import pytest

from penstock.kernel.machine import SECOND
from penstock.kernel.values import WorkerId
from penstock.router.settings import BreakerSettings
from penstock.router.workers.roster import CircuitBreaker, Roster
from penstock.testing import card
from tests.router.written_states import written

A = WorkerId("a")


def test_a_worker_joins_gets_ready_drains_and_leaves() -> None:
    roster = Roster()
    worker = roster.join(card("a"), ready=False, now=0)
    assert worker is not None and worker.why_not(0) == "is joined"
    assert roster.move(A, 1, "ready", 1) and worker.why_not(1) is None
    assert roster.move(A, 1, "drain", 2) and worker.why_not(2) == "is draining"
    assert not roster.move(A, 1, "ready", 3), "a draining worker does not come back in the same epoch"
    assert roster.leave(A, 1) is worker and roster.get(A) is None
    roster.check()


def test_words_about_another_epoch_are_stale() -> None:
    roster = Roster()
    roster.join(card("a", epoch=2), ready=True, now=0)
    assert not roster.move(A, 1, "drain", 0)
    assert roster.leave(A, 3) is None
    assert roster.join(card("a", epoch=1), ready=True, now=0) is None
    assert roster.stale == 3


def test_a_late_word_of_a_worker_that_left_does_not_bring_it_back() -> None:
    roster = Roster()
    roster.join(card("a"), ready=True, now=0)
    roster.leave(A, 1)
    assert roster.join(card("a"), ready=True, now=0) is None
    assert roster.join(card("a", epoch=2), ready=True, now=0) is not None


def test_the_same_epoch_again_only_makes_it_ready() -> None:
    roster = Roster()
    roster.join(card("a"), ready=False, now=0)
    assert roster.join(card("a"), ready=True, now=1) is None
    found = roster.get(A)
    assert found is not None and found.state == "ready"


def test_a_roster_survives_a_snapshot() -> None:
    roster = Roster()
    worker = roster.join(card("a", labels={"zone": "x"}), ready=True, now=5)
    assert worker is not None
    worker.breaker.failed(SECOND, 0, BreakerSettings(failures=1))
    worker.cordons.append("operator")
    worker.speed = (0.0, 1e-4, 0.0, 1e-6)
    other = Roster()
    other.restore(written(roster))
    assert other.snapshot() == roster.snapshot() and other.workers == roster.workers


def test_a_breaker_opens_lets_one_try_and_closes() -> None:
    settings = BreakerSettings(failures=2, open_for=1.0)
    breaker = CircuitBreaker()
    assert not breaker.failed(0, 0, settings) and breaker.failed(0, 0, settings)
    assert breaker.state(0) == "open" and not breaker.allows(0)
    assert breaker.state(SECOND) == "half_open" and breaker.allows(SECOND)
    breaker.dispatched(SECOND)
    assert not breaker.allows(SECOND), "one at a time"
    assert breaker.succeeded(SECOND, settings)
    assert breaker.state(SECOND) == "closed" and breaker.failures == 0


def test_a_breaker_opens_where_half_of_the_last_requests_fail_and_not_below() -> None:
    settings = BreakerSettings(failures=5)
    breaker = CircuitBreaker()
    for _ in range(200):
        opened = breaker.failed(0, 0, settings)
        breaker.succeeded(0, settings)
        breaker.succeeded(0, settings)
        assert not opened and breaker.until is None, "a third of its requests"
    breaker = CircuitBreaker()
    opened = [breaker.succeeded(0, settings) or breaker.failed(0, 0, settings) for _ in range(5)]
    assert opened == [False] * 4 + [True], "every second one"


def test_the_wait_doubles_up_to_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.router.workers.roster.OPEN_MAX", 3.0)
    settings = BreakerSettings(failures=1, open_for=1.0)
    breaker = CircuitBreaker()
    now = 0
    waits = []
    for _ in range(4):
        breaker.dispatched(now)
        breaker.failed(now, now, settings)
        assert breaker.until is not None
        waits.append((breaker.until - now) / SECOND)
        now = breaker.until
    assert waits == [1.0, 2.0, 3.0, 3.0]


def test_requests_sent_before_it_opened_neither_lengthen_the_wait_nor_end_it() -> None:
    settings = BreakerSettings(failures=1, open_for=1.0)
    breaker = CircuitBreaker()
    breaker.failed(0, 0, settings)
    until = breaker.until
    assert not breaker.failed(1, 0, settings) and breaker.until == until
    assert not breaker.failed(SECOND, 0, settings) and breaker.until == until, "not even where another one tries now"
    assert not breaker.succeeded(0, settings) and breaker.until == until
