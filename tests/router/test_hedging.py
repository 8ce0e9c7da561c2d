"""A first token is late: does a second worker get the request, and only one of them count in the end?"""

from penstock.kernel.machine import Woken
from penstock.kernel.values import RequestId
from penstock.router.events import Abort, Cancelled, Closed, Dispatch, Failed, Finished, FirstToken, Preferences
from penstock.router.settings import HedgeSettings
from penstock.testing import RouterWorld, arrived, card, none, only

R = RequestId("r")
EARLY = HedgeSettings(after=1.0, share=1.0)


def hedged(*workers: str, settings: HedgeSettings = EARLY) -> RouterWorld:
    world = RouterWorld(*(card(name) for name in workers or ("a", "b")), hedge=settings)
    world.post(arrived("r"))
    return world


def late(world: RouterWorld) -> Dispatch:
    return only(world.post(Woken(), after=1.0), Dispatch)


def test_no_second_worker_by_default_or_before_the_time() -> None:
    plain = RouterWorld(card("a"), card("b"))
    plain.post(arrived("r"))
    assert none(plain.post(Woken(), after=100.0), Dispatch)
    assert none(hedged().post(Woken(), after=0.9), Dispatch)


def test_a_second_worker_gets_it_and_the_decision_says_why() -> None:
    world = hedged()
    first = world.sent("r")
    second = late(world)
    assert second.attempt == 2 and second.target != first.target
    assert f"no first token from {first.target} after 1 s" in second.decision.reason
    assert "has the request already" in [e.reason for e in second.decision.excluded]
    assert none(world.post(Woken(), after=5.0), Dispatch), "one hedge in a leg"


def test_the_faster_one_is_taken_whichever_it_is() -> None:
    for winner in (1, 2):
        world = hedged()
        targets = {1: world.sent("r").target, 2: late(world).target}
        abort = only(world.post(FirstToken(id=R, attempt=winner), after=0.1), Abort)
        assert (abort.attempt, abort.target) == (3 - winner, targets[3 - winner])
        world.post(FirstToken(id=R, attempt=3 - winner))
        world.post(Finished(id=R, attempt=winner, tokens=5))
        closed = world.ended("r")
        assert closed.outcome == "ok" and closed.legs[-1].target == targets[winner]
        assert [leg.failure for leg in closed.legs] == ["another worker was faster", None]
        assert all(not pool.active.loads() for pool in world.router.pools.values())


def test_one_that_fails_leaves_the_other_to_go_on() -> None:
    for loser in (1, 2):
        world = hedged()
        late(world)
        effects = world.post(Failed(id=R, attempt=loser, reason="reset", retryable=True))
        assert none(effects, Dispatch) and none(effects, Closed)
        world.post(Finished(id=R, attempt=3 - loser, tokens=5))
        assert world.ended("r").outcome == "ok"


def test_both_may_fail_and_a_third_worker_is_tried() -> None:
    world = hedged("a", "b", "c")
    late(world)
    world.post(Failed(id=R, attempt=1, reason="reset", retryable=True))
    third = only(world.post(Failed(id=R, attempt=2, reason="boom", retryable=True, status=500)), Dispatch)
    assert third.attempt == 3 and len({d.target for d in world.effects if isinstance(d, Dispatch)}) == 3


def test_a_request_at_fault_is_refused_once_for_both() -> None:
    world = hedged()
    late(world)
    effects = world.post(
        Failed(id=R, attempt=1, reason="bad field", retryable=False, worker_at_fault=False, status=400)
    )
    assert only(effects, Abort).attempt == 2 and only(effects, Closed).status == 400


def test_a_client_that_leaves_stops_both() -> None:
    world = hedged()
    late(world)
    effects = world.post(Cancelled(id=R))
    assert sorted(e.attempt for e in effects if isinstance(e, Abort)) == [1, 2]
    assert all(not pool.active.loads() for pool in world.router.pools.values())


def test_pinned_requests_and_those_beyond_the_share_are_left_alone() -> None:
    world = RouterWorld(card("a"), card("b"), hedge=EARLY)
    world.post(arrived("r", preferences=Preferences(worker=world.router.roster.workers["a"].card.id)))  # type: ignore[index]
    assert none(world.post(Woken(), after=2.0), Dispatch)
    frugal = hedged(settings=HedgeSettings(after=1.0, share=0.5))
    assert none(frugal.post(Woken(), after=2.0), Dispatch), "one hedge would be more than half of one request"
    frugal.post(arrived("s"))
    assert only(frugal.post(Woken(), after=2.0), Dispatch).id == "s"
