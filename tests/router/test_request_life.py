"""A request from arrival to its one end."""

import msgspec
import pytest

from penstock.kernel.machine import SECOND, Wake, Woken
from penstock.kernel.values import RequestId, WorkerId
from penstock.router.events import (
    Abort,
    Cancelled,
    Closed,
    Dispatch,
    Failed,
    Finished,
    FirstToken,
    Grown,
    Preferences,
    WorkerCordoned,
    WorkerDraining,
    WorkerJoined,
    WorkerLeft,
)
from penstock.router.requests.routed_request import TRANSITIONS
from penstock.router.settings import BreakerSettings, QueueSettings
from penstock.testing import RouterWorld, arrived, card, none, only, prompt

R = RequestId("r")


def failed(attempt: int = 1, *, retryable: bool = True, **changes: object) -> Failed:
    return Failed(id=R, attempt=attempt, reason="connection refused", retryable=retryable, **changes)  # type: ignore[arg-type]


def test_a_request_is_placed_answered_and_closed_once() -> None:
    world = RouterWorld(card("a"))
    dispatch = only(world.post(arrived("r")), Dispatch)
    assert dispatch.target.worker == "a" and dispatch.attempt == 1
    world.post(FirstToken(id=R, attempt=1), after=0.5)
    closed = only(world.post(Finished(id=R, attempt=1, tokens=7, cached=48), after=0.5), Closed)
    assert (closed.outcome, closed.status, closed.osl, closed.cached) == ("ok", 200, 7, 48)
    assert closed.first == SECOND // 2 and closed.closed == SECOND
    assert [leg.last for leg in closed.legs] == [SECOND]
    assert world.router.status(world.now).hit_rate == 48 / 64


def test_late_events_of_an_ended_request_are_dropped_and_counted() -> None:
    world = RouterWorld(card("a"))
    world.post(arrived("r"))
    world.post(Finished(id=R, attempt=1, tokens=1))
    for event in (FirstToken(id=R, attempt=1), Finished(id=R, attempt=1, tokens=1), failed(), Cancelled(id=R)):
        assert world.post(event) == []
    assert world.router.dropped == 4


def test_a_second_arrival_under_an_open_id_is_ignored() -> None:
    world = RouterWorld(card("a"))
    world.post(arrived("r"))
    assert none(world.post(arrived("r")), Dispatch)
    world.post(Finished(id=R, attempt=1, tokens=1))
    world.ended("r")


def test_a_failure_before_the_first_token_goes_to_another_worker() -> None:
    world = RouterWorld(card("a"), card("b"))
    first = only(world.post(arrived("r")), Dispatch)
    second = only(world.post(failed()), Dispatch)
    assert second.attempt == 2 and second.target != first.target
    assert "failed this request before" in second.decision.excluded[0].reason
    world.post(Finished(id=R, attempt=2, tokens=1))
    closed = world.ended("r")
    assert closed.outcome == "ok" and closed.attempts == 2
    assert [leg.failure for leg in closed.legs] == ["connection refused", None]


def test_the_budget_of_attempts_ends_in_one_failure() -> None:
    world = RouterWorld(card("a"), card("b"), card("c"), card("d"), attempts_max=3)
    world.post(arrived("r"))
    world.post(failed(1))
    world.post(failed(2))
    closed = only(world.post(failed(3)), Closed)
    assert (closed.outcome, closed.fault, closed.status, closed.attempts) == ("failed", "engine", 502, 3)


def test_a_failure_after_the_first_token_is_final() -> None:
    world = RouterWorld(card("a"), card("b"))
    world.post(arrived("r"))
    world.post(FirstToken(id=R, attempt=1))
    assert only(world.post(failed(retryable=False)), Closed).outcome == "failed"


def test_an_event_of_an_earlier_attempt_does_not_touch_the_present_one() -> None:
    world = RouterWorld(card("a"), card("b"))
    world.post(arrived("r"))
    world.post(failed(1))
    assert world.post(Finished(id=R, attempt=1, tokens=3)) == []
    assert world.router.requests[R].attempt == 2


def test_the_engines_own_400_is_the_clients_fault_and_leaves_the_breaker_alone() -> None:
    world = RouterWorld(card("a"), breaker=BreakerSettings(failures=1))
    world.post(arrived("r"))
    closed = only(world.post(failed(retryable=False, worker_at_fault=False, status=400)), Closed)
    assert (closed.fault, closed.status) == ("client", 400)
    assert only(world.post(arrived("s")), Dispatch).target.worker == "a"


def test_a_client_that_leaves_aborts_the_engines_work() -> None:
    world = RouterWorld(card("a"))
    world.post(arrived("r"))
    effects = world.post(Cancelled(id=R))
    assert only(effects, Abort).target.worker == "a"
    assert only(effects, Closed).outcome == "cancelled"
    assert world.router.pools["m"].active.load(only(effects, Abort).target).requests == 0


def test_a_deadline_ends_a_running_request_with_504() -> None:
    world = RouterWorld(card("a"))
    effects = world.post(arrived("r", deadline=2 * SECOND))
    assert only(effects, Wake).at == 2 * SECOND
    effects = world.post(Woken(), after=2.0)
    assert only(effects, Closed).status == 504 and only(effects, Abort).attempt == 1


def test_a_wake_too_early_ends_nothing_and_asks_again() -> None:
    world = RouterWorld(card("a"))
    world.post(arrived("r", deadline=2 * SECOND))
    assert only(world.post(Woken(), after=1.0), Wake).at == 2 * SECOND


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        (Preferences(worker=WorkerId("ghost")), "its workers: a, b"),
        (Preferences(allowed=(WorkerId("ghost"),)), "allowed"),
    ],
)
def test_a_pin_that_nobody_can_meet_is_the_clients_fault(wish: Preferences, words: str) -> None:
    world = RouterWorld(card("a"), card("b"))
    closed = only(world.post(arrived("r", preferences=wish)), Closed)
    assert closed.status == 400 and words in closed.reason


def test_a_pinned_request_goes_where_it_is_pinned() -> None:
    world = RouterWorld(card("a"), card("b"))
    for number in range(8):
        wish = Preferences(worker=WorkerId("b"))
        assert only(world.post(arrived(f"r{number}", preferences=wish)), Dispatch).target.worker == "b"


def test_a_pin_to_a_rank_is_met() -> None:
    world = RouterWorld(card("a", ranks=4))
    wish = Preferences(worker=WorkerId("a"), rank=2)
    assert only(world.post(arrived("r", preferences=wish)), Dispatch).target.rank == 2


def test_mode_direct_without_a_pin_is_refused() -> None:
    world = RouterWorld(card("a"), mode="direct")
    assert only(world.post(arrived("r")), Closed).status == 400


def test_a_prompt_longer_than_every_worker_takes_is_the_clients_fault() -> None:
    world = RouterWorld(card("a", max_model_len=32))
    closed = only(world.post(arrived("r", 64)), Closed)
    assert closed.status == 400 and "32 tokens" in closed.reason


def test_without_workers_the_answer_is_503_with_a_time_to_retry() -> None:
    world = RouterWorld()
    closed = only(world.post(arrived("r")), Closed)
    assert (closed.status, closed.retry_after, closed.fault) == (503, 1.0, "overloaded")


def test_too_many_in_flight_are_refused_with_429() -> None:
    world = RouterWorld(card("a"), inflight_max=2)
    world.post(arrived("r1"))
    world.post(arrived("r2"))
    assert only(world.post(arrived("r3")), Closed).status == 429
    world.post(Finished(id=RequestId("r1"), attempt=1, tokens=1))
    only(world.post(arrived("r4")), Dispatch)


def test_draining_cordoned_and_gone_workers_get_nothing_new() -> None:
    world = RouterWorld(card("a"), card("b"), card("c"), card("d"))
    world.post(WorkerDraining(worker=WorkerId("a"), epoch=1))
    world.post(WorkerCordoned(worker=WorkerId("b"), on=True, reason="operator"))
    world.post(WorkerLeft(worker=WorkerId("c"), epoch=1, reason="crash"))
    for number in range(20):
        assert only(world.post(arrived(f"r{number}", prompt(number))), Dispatch).target.worker == "d"
    world.post(WorkerCordoned(worker=WorkerId("b"), on=False, reason="operator"))
    targets = {only(world.post(arrived(f"s{n}", prompt(n + 50))), Dispatch).target.worker for n in range(20)}
    assert "b" in targets and targets <= {"b", "d"}


def test_a_worker_of_another_block_size_is_refused_aloud() -> None:
    world = RouterWorld(card("a"))
    world.post(WorkerJoined(card=card("b", block_size=32)))
    assert {w.card.id for w in world.router.roster} == {"a"}


def test_growth_counts_output_blocks_until_the_end() -> None:
    world = RouterWorld(card("a"), track_output=True)
    target = only(world.post(arrived("r", 64)), Dispatch).target
    world.post(FirstToken(id=R, attempt=1))
    world.post(Grown(id=R, attempt=1, tokens=48))
    assert world.router.pools["m"].active.load(target).blocks == 4 + 3
    world.post(Finished(id=R, attempt=1, tokens=50))
    assert world.router.pools["m"].active.load(target).blocks == 0


def test_output_blocks_of_a_request_that_says_its_length_weigh_less_the_nearer_its_end_is() -> None:
    world = RouterWorld(card("a"), track_output=True)
    said = arrived("r", 64 + 16)
    hinted = msgspec.structs.replace(said, preferences=msgspec.structs.replace(said.preferences, osl=128))
    target = only(world.post(hinted), Dispatch).target
    load = world.router.pools["m"].active.load(target)
    prompt_blocks = load.blocks
    world.post(FirstToken(id=R, attempt=1))
    found = []
    for tokens in (64, 96, 128, 160):  # longer than was said is as near its end as can be
        world.post(Grown(id=R, attempt=1, tokens=tokens))
        found.append(load.blocks - prompt_blocks)
    assert found == [2, 2, 0, 0]
    world.router.check()
    world.post(Finished(id=R, attempt=1, tokens=170))
    assert world.router.pools["m"].active.load(target).blocks == 0


class TestQueue:
    def world(self, **settings: object) -> RouterWorld:
        queue = QueueSettings(threshold=0.5, **settings)  # type: ignore[arg-type]
        return RouterWorld(card("a"), queue=queue)

    def test_requests_wait_while_every_worker_is_busy_and_follow_when_one_is_not(self) -> None:
        world = self.world()
        only(world.post(arrived("r", 600)), Dispatch)
        assert none(world.post(arrived("s", prompt(1))), Dispatch)
        effects = world.post(FirstToken(id=R, attempt=1), after=2.0)
        assert only(effects, Dispatch).id == "s" and only(effects, Dispatch).decision.queued == 2.0

    def test_the_threshold_is_strict(self) -> None:
        world = self.world()
        only(world.post(arrived("r", 512)), Dispatch)
        only(world.post(arrived("s", prompt(1))), Dispatch)

    def test_a_full_queue_refuses_with_503(self) -> None:
        world = self.world(length_max=1)
        world.post(arrived("r", 600))
        world.post(arrived("s"))
        closed = only(world.post(arrived("t")), Closed)
        assert closed.status == 503 and closed.retry_after is not None

    def test_waiting_ends_after_its_limit(self) -> None:
        world = self.world(wait_max=3.0)
        world.post(arrived("r", 600))
        world.post(arrived("s"))
        closed = only(world.post(Woken(), after=3.0), Closed)
        assert (closed.id, closed.status, closed.queued) == ("s", 503, 3.0)

    def test_a_cancelled_request_leaves_the_queue(self) -> None:
        world = self.world()
        world.post(arrived("r", 600))
        world.post(arrived("s"))
        assert none(world.post(Cancelled(id=RequestId("s"))), Abort)
        assert none(world.post(FirstToken(id=R, attempt=1)), Dispatch)

    def test_a_strict_class_goes_first(self) -> None:
        world = self.world()
        world.post(arrived("r", 600))
        world.post(arrived("low"))
        world.post(arrived("high", preferences=Preferences(strict=1)))
        effects = world.post(FirstToken(id=R, attempt=1))
        assert [e.id for e in effects if isinstance(e, Dispatch)] == ["high", "low"]

    def test_when_the_last_worker_goes_nobody_waits_for_ever(self) -> None:
        world = self.world()
        world.post(arrived("r", 600))
        world.post(arrived("s"))
        effects = world.post(WorkerLeft(worker=WorkerId("a"), epoch=1, reason="crash"))
        assert only(effects, Closed).id == "s"


class TestBreaker:
    settings = BreakerSettings(failures=2, open_for=5.0)

    def test_failures_in_a_row_take_a_worker_out_and_one_success_brings_it_back(self) -> None:
        world = RouterWorld(card("a"), breaker=self.settings, attempts_max=1)
        for name in ("r1", "r2"):
            world.post(arrived(name))
            world.post(Failed(id=RequestId(name), attempt=1, reason="reset", retryable=True))
        closed = only(world.post(arrived("r3")), Closed)
        assert closed.status == 503 and closed.retry_after == 5.0 and "breaker" in closed.reason
        only(world.post(arrived("probe"), after=5.0), Dispatch)
        assert only(world.post(arrived("other")), Closed).status == 503  # one tries at a time
        world.post(FirstToken(id=RequestId("probe"), attempt=1))
        only(world.post(arrived("next")), Dispatch)

    def test_a_failed_try_doubles_the_wait(self) -> None:
        world = RouterWorld(card("a"), breaker=self.settings, attempts_max=1)
        for name in ("r1", "r2"):
            world.post(arrived(name))
            world.post(Failed(id=RequestId(name), attempt=1, reason="reset", retryable=True))
        world.post(arrived("probe"), after=5.0)
        world.post(Failed(id=RequestId("probe"), attempt=1, reason="reset", retryable=True))
        assert only(world.post(arrived("r3")), Closed).retry_after == 10.0

    def test_a_client_that_leaves_the_try_lets_another_try(self) -> None:
        world = RouterWorld(card("a"), breaker=self.settings, attempts_max=1)
        for name in ("r1", "r2"):
            world.post(arrived(name))
            world.post(Failed(id=RequestId(name), attempt=1, reason="reset", retryable=True))
        world.post(arrived("probe"), after=5.0)
        world.post(Cancelled(id=RequestId("probe")))
        only(world.post(arrived("again")), Dispatch)


def test_every_phase_but_the_last_can_be_closed() -> None:
    phases = {phase for phase, _ in TRANSITIONS} - {"done"}
    assert {phase for phase, step in TRANSITIONS if step == "close"} == phases


@pytest.mark.parametrize("mode", ["round_robin", "random"])
def test_a_mode_that_compares_nothing_prices_only_what_it_takes(mode: str) -> None:
    world = RouterWorld(*(card(name) for name in "abcd"), mode=mode)
    for n in range(40):
        world.post(arrived(f"r{n}", prompt(n)))
    decisions = [world.sent(f"r{n}").decision for n in range(40)]
    assert all([cost.target for cost in decision.candidates] == [decision.chosen] for decision in decisions)
    assert all("4 workers" in decision.reason for decision in decisions)
    taken = [decision.chosen.worker for decision in decisions]
    assert set(taken) == set("abcd") and (mode == "random" or taken == list("abcd") * 10)


def test_a_pin_wins_over_a_turn() -> None:
    world = RouterWorld(*(card(name) for name in "abcd"), mode="round_robin")
    for n in range(3):
        world.post(arrived(f"r{n}", preferences=Preferences(worker=WorkerId("c"))))
    assert [world.sent(f"r{n}").target.worker for n in range(3)] == ["c"] * 3
