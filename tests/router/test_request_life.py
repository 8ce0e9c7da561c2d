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
from penstock.router.routed_request import TRANSITIONS
from penstock.router.settings import BreakerSettings, QueueSettings
from penstock.testing import RouterWorld, arrived, card, none, only, prompt

R = RequestId("r")


def failed(attempt: int = 1, *, retryable: bool = True, **changes: object) -> Failed:
    more = {"received": False, **changes}
    return Failed(id=R, attempt=attempt, reason="connection refused", retryable=retryable, **more)  # type: ignore[arg-type]


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
    assert "router.attempts_max 3" in closed.reason
    (finding,) = (each for each in world.router.status(world.now).findings if "failed on workers" in each.text)
    assert finding.text.endswith("it was: connection refused")


def test_a_request_that_ends_sooner_says_why_no_other_worker_took_it() -> None:
    world = RouterWorld(card("a"), card("b"), attempts_max=3)
    world.post(arrived("r"))
    world.post(failed(1))
    closed = only(world.post(failed(2)), Closed)
    assert "no other worker can take it" in closed.reason and "failed this request before" in closed.reason
    world.post(Woken(), after=601.0)
    assert not any("failed on workers" in each.text for each in world.router.status(world.now).findings)


def test_workers_that_refuse_connections_are_all_tried_before_a_request_is_lost() -> None:
    """Two thousand streams at once: some connects run into their limit at every worker."""
    world = RouterWorld(*(card(name) for name in "abcd"), attempts_max=3)
    for n in range(40):
        world.post(arrived(f"r{n}", prompt(n)))
    ends = []
    for n in range(40):
        id = RequestId(f"r{n}")
        for attempt in (1, 2):
            late = Failed(id=id, attempt=attempt, reason="TimeoutError", retryable=True, received=False)
            ends += [effect for effect in world.post(late) if isinstance(effect, Closed)]
    assert not ends and all(world.sent(f"r{n}").attempt == 3 for n in range(40))


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


def fails(
    world: RouterWorld, name: str, status: int | None = None, received: bool = True, after: float = 0.0
) -> Closed:
    """Let a request fail at every worker that it is sent to, and return its end."""
    ended = [effect for effect in world.post(arrived(name), after=after) if isinstance(effect, Closed)]
    attempt = 0
    while not ended:
        attempt += 1
        event = Failed(
            id=RequestId(name), attempt=attempt, reason="boom", retryable=True, status=status, received=received
        )
        ended = [effect for effect in world.post(event) if isinstance(effect, Closed)]
    return ended[0]


def answered(world: RouterWorld, name: str) -> str:
    """Let a request be answered, and return by which worker."""
    target = only(world.post(arrived(name)), Dispatch).target
    world.post(Finished(id=RequestId(name), attempt=1, tokens=1))
    return target.worker


def breakers(world: RouterWorld) -> list[str]:
    return [worker.breaker for worker in world.router.status(world.now).workers]


class TestBreaker:
    settings = BreakerSettings(failures=2, open_for=5.0)

    def opened(self) -> RouterWorld:
        """Return workers of which a's breaker has opened: it refused two connections."""
        world = RouterWorld(card("a"), card("b"), mode="round_robin", breaker=self.settings)
        for name in ("r1", "r2"):
            world.post(arrived(name, preferences=Preferences(worker=WorkerId("a"))))
            refused = Failed(id=RequestId(name), attempt=1, reason="refused", retryable=False, received=False)
            world.post(refused)
        assert breakers(world) == ["open", "closed"]
        return world

    def try_it(self, world: RouterWorld, name: str, after: float = 0.0) -> Dispatch:
        """Send a request that b may not have, so that it goes to a where that is no longer open."""
        wish = Preferences(allowed=(WorkerId("a"), WorkerId("b")), worker=WorkerId("a"))
        return only(world.post(arrived(name, preferences=wish), after=after), Dispatch)

    def test_failures_take_a_worker_out_and_one_success_brings_it_back(self) -> None:
        world = self.opened()
        assert {answered(world, f"s{n}") for n in range(8)} == {"b"}
        self.try_it(world, "probe", after=5.0)
        assert {answered(world, f"t{n}") for n in range(8)} == {"b"}, "one tries at a time"
        world.post(FirstToken(id=RequestId("probe"), attempt=1))
        assert {answered(world, f"u{n}") for n in range(8)} == {"a", "b"}

    def test_a_failed_try_doubles_the_wait(self) -> None:
        world = self.opened()
        self.try_it(world, "probe", after=5.0)
        world.post(Failed(id=RequestId("probe"), attempt=1, reason="reset", retryable=False, received=False))
        until = world.router.roster.workers[WorkerId("a")].breaker.until
        assert until is not None and until - world.now == 10 * SECOND

    def test_a_client_that_leaves_the_try_lets_another_try(self) -> None:
        world = self.opened()
        self.try_it(world, "probe", after=5.0)
        world.post(Cancelled(id=RequestId("probe")))
        assert {answered(world, f"t{n}") for n in range(8)} == {"a", "b"}


class TestBlame:
    @pytest.mark.parametrize("status", [500, 501])
    def test_a_request_that_fails_alike_on_two_workers_is_at_fault_and_tried_no_further(self, status: int) -> None:
        world = RouterWorld(*(card(name) for name in "abcd"), attempts_max=4)
        closed = fails(world, "poison", status)
        assert closed.attempts == 2 and "failed alike on" in closed.reason
        assert closed.status == status
        assert sum(worker.failures for worker in world.router.roster) == 1, "it counts once"

    def test_a_request_at_which_engines_hang_up_is_tried_further_and_counts_once(self) -> None:
        """They may have been killed one after the other."""
        world = RouterWorld(*(card(name) for name in "abcd"), attempts_max=4)
        closed = fails(world, "poison", None)
        assert closed.attempts == 4 and closed.status == 502
        assert sum(worker.failures for worker in world.router.roster) == 1

    @pytest.mark.parametrize("status", [500, None])
    def test_such_requests_open_no_breaker_of_workers_that_answer_others(self, status: int | None) -> None:
        world = RouterWorld(card("a"), card("b"), mode="round_robin")
        by = [answered(world, f"good{n}") for n in range(8)]
        assert set(by) == {"a", "b"}
        for n in range(60):  # four of five requests: what a client's own retries make of one in three
            assert fails(world, f"poison{n}", status, after=0.25).attempts >= 2
            if n % 4 == 0:
                by.append(answered(world, f"more{n}"))
        assert breakers(world) == ["closed", "closed"] and set(by[8:]) == {"a", "b"}

    def test_two_broken_workers_are_found_all_the_same(self) -> None:
        """Nothing but failures tells them from two such requests: then it is the workers."""
        world = RouterWorld(card("a"), card("b"), card("c"))
        broken = {"a", "b"}
        ends = []
        for n in range(60):
            name = RequestId(f"r{n}")
            target = only(world.post(arrived(name), after=0.2), Dispatch)
            while target.target.worker in broken:
                event = Failed(id=name, attempt=target.attempt, reason="CUDA error", retryable=True, status=500)
                effects = world.post(event)
                closed = [effect for effect in effects if isinstance(effect, Closed)]
                if closed:
                    ends.append(closed[0].status)
                    break
                target = only(effects, Dispatch)
            else:
                world.post(Finished(id=name, attempt=target.attempt, tokens=1))
                ends.append(200)
        assert ends[-30:] == [200] * 30, "its breakers and the third worker answer"

    def test_a_worker_is_blamed_once_another_has_answered_what_it_failed(self) -> None:
        world = RouterWorld(card("a"), card("b"))
        first = only(world.post(arrived("r")), Dispatch).target.worker
        world.post(failed(1, status=500, received=True))
        assert sum(worker.failures for worker in world.router.roster) == 0
        world.post(FirstToken(id=R, attempt=2))
        assert [w.card.id for w in world.router.roster if w.failures] == [first]

    def test_two_failures_that_differ_are_two_workers_faults(self) -> None:
        world = RouterWorld(card("a"), card("b"), card("c"))
        world.post(arrived("r"))
        world.post(failed(1, status=500, received=True))
        assert only(world.post(failed(2, status=None, received=True)), Dispatch).attempt == 3
        world.post(FirstToken(id=R, attempt=3))
        assert sum(worker.failures for worker in world.router.roster) == 2

    def test_a_request_that_failed_elsewhere_is_not_the_one_that_tries(self) -> None:
        world = RouterWorld(card("a"), card("b"), card("c"), breaker=BreakerSettings(failures=1, open_for=1.0))
        wish = Preferences(worker=WorkerId("a"))
        world.post(arrived("down", preferences=wish))
        world.post(Failed(id=RequestId("down"), attempt=1, reason="refused", retryable=False, received=False))
        world.post(arrived("r", preferences=Preferences(allowed=(WorkerId("b"), WorkerId("c")))), after=2.0)
        second = only(world.post(failed(1, status=500, received=True)), Dispatch)
        assert second.target.worker != "a"
        poison = world.router.requests[R].unproven
        assert poison is not None

    def test_a_try_that_fails_alike_elsewhere_says_nothing_about_the_worker(self) -> None:
        world = RouterWorld(card("a"), card("b"), mode="round_robin", breaker=BreakerSettings(failures=1, open_for=1.0))
        down = Preferences(worker=WorkerId("a"))
        world.post(arrived("down", preferences=down))
        world.post(Failed(id=RequestId("down"), attempt=1, reason="refused", retryable=False, received=False))
        breaker = world.router.roster.workers[WorkerId("a")].breaker
        until = breaker.until
        if only(world.post(arrived("r"), after=2.0), Dispatch).target.worker != "a":  # whose turn it is not
            world.post(Finished(id=R, attempt=1, tokens=1))
            assert only(world.post(arrived("r")), Dispatch).target.worker == "a"
        assert breaker.trying
        assert only(world.post(failed(1, status=500, received=True)), Dispatch).target.worker == "b"
        assert only(world.post(failed(2, status=500, received=True)), Closed).status == 500
        assert breaker.until == until and not breaker.trying, "another one may try"

    def test_no_breaker_excludes_the_last_workers_of_a_model_and_a_finding_says_so(self) -> None:
        world = RouterWorld(card("a"), card("b"), breaker=BreakerSettings(failures=1, open_for=5.0))
        assert fails(world, "down", received=False).status == 502
        assert breakers(world) == ["open", "open"]
        status = world.router.status(world.now)
        assert any("is in doubt" in finding.text for finding in status.findings) and status.models[0].ready
        sent = only(world.post(arrived("good")), Dispatch)
        assert "no other worker is left" in sent.decision.reason
        world.post(WorkerDraining(worker=WorkerId("a"), epoch=1))
        assert only(world.post(arrived("more")), Dispatch).target.worker == "b"

    def test_nor_the_only_worker_that_can_take_a_request(self) -> None:
        world = RouterWorld(card("a"), card("b"), breaker=BreakerSettings(failures=1, open_for=5.0))
        wish = Preferences(worker=WorkerId("a"))
        world.post(arrived("down", preferences=wish))
        world.post(Failed(id=RequestId("down"), attempt=1, reason="refused", retryable=False, received=False))
        assert breakers(world) == ["open", "closed"] and answered(world, "other") == "b"
        assert only(world.post(arrived("r", preferences=wish)), Dispatch).target.worker == "a"


class TestFleetLimits:
    """Limits that are not set follow from the sequences that the engines take."""

    @staticmethod
    def limits(world: RouterWorld) -> tuple[int, int]:
        pool = world.router.pools["m"]
        return pool.roles.waiting_max, pool.roles.inflight_max

    def test_they_grow_and_shrink_with_the_fleet(self) -> None:
        world = RouterWorld(*(card(f"w{n}", max_num_seqs=256) for n in range(100)))
        assert self.limits(world) == (12_800, 25_600 + 12_800)
        world.post(WorkerJoined(card=card("more", max_num_seqs=None, ranks=2)))
        assert self.limits(world)[1] == 25_600 + 12_800 + 3 * 256, "two ranks of the usual size"
        for n in range(90):
            world.post(WorkerLeft(worker=WorkerId(f"w{n}"), epoch=1, reason="scaled in"))
        assert self.limits(world) == (10 * 128 + 256, 8192)

    def test_a_small_fleet_keeps_what_a_router_has_memory_for(self) -> None:
        assert self.limits(RouterWorld(card("a", max_num_seqs=1))) == (1024, 8192)

    def test_what_is_set_counts(self) -> None:
        cards = [card(f"w{n}", max_num_seqs=256) for n in range(100)]
        assert self.limits(RouterWorld(*cards, inflight_max=7, queue=QueueSettings(length_max=3))) == (3, 7)

    def test_a_snapshot_keeps_them(self) -> None:
        world = RouterWorld(*(card(f"w{n}", max_num_seqs=256) for n in range(100)))
        other = RouterWorld()
        other.router.restore(world.router.snapshot())
        assert self.limits(other) == self.limits(world)


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
