"""Is a new request refused, with its reason and when to come back, where every worker is beyond a limit?"""

import pytest

from penstock.config.cluster import ClusterSettings, SloSettings
from penstock.kernel.values import RequestId
from penstock.router.events import Closed, Dispatch, Failed, Finished, FirstToken
from penstock.router.settings import OverloadSettings, QueueSettings, RouterSettings
from tests.router.worlds import World, arrived, card, none, only, prompt


def refused(world: World, name: str, tokens: int = 64) -> Closed:
    closed = only(world.post(arrived(name, prompt(hash(name) % 1000, tokens))), Closed)
    assert (closed.outcome, closed.fault, closed.status) == ("rejected", "overloaded", 503)
    assert closed.retry_after is not None and closed.retry_after > 0
    return closed


def test_prefill_tokens_refuse_only_when_every_worker_is_beyond_them() -> None:
    world = World(card("a"), card("b"), overload=OverloadSettings(prefill_tokens=100))
    for number in range(4):
        world.post(arrived(f"r{number}", prompt(number)))
    assert {world.sent(f"r{n}").target.worker for n in range(4)} == {"a", "b"}
    closed = refused(world, "late")
    assert "128 tokens to prefill (router.overload.prefill_tokens 100)" in closed.reason
    world.post(FirstToken(id=RequestId("r0"), attempt=1))
    assert only(world.post(arrived("again", prompt(9))), Dispatch).target == world.sent("r0").target


def test_blocks_in_use_refuse_and_an_unknown_size_does_not() -> None:
    limit = OverloadSettings(blocks=0.5)
    world = World(card("a", kv_blocks=8), overload=limit)
    world.post(arrived("r1", prompt(1)))
    world.post(arrived("r2", prompt(2)))
    assert "8 of 8 blocks" in refused(world, "r3").reason
    blind = World(card("a", kv_blocks=None), overload=limit)
    for number in range(9):
        assert none(blind.post(arrived(f"r{number}", prompt(number))), Closed)


def test_queue_time_refuses_once_someone_has_waited_for_too_long() -> None:
    world = World(card("a"), overload=OverloadSettings(queue_time=2.0), queue=QueueSettings(threshold=0.0))
    world.post(arrived("runs"))
    world.post(arrived("waits", prompt(1)))
    world.post(arrived("waits too", prompt(2)), after=1.9)
    assert none(world.effects, Closed)
    closed = only(world.post(arrived("late", prompt(3)), after=0.3), Closed)
    assert "waiting for 2.2 s" in closed.reason and closed.retry_after == pytest.approx(2.2)


def taught(ttft: float) -> World:
    """A router that has learnt 1 ms per token ahead."""
    world = World(card("a"), card("b"), overload=OverloadSettings(ttft=ttft))
    for number in range(12):
        tokens = 64 * (1 + number % 3)
        world.post(arrived(f"t{number}", prompt(number, tokens)))
        world.post(FirstToken(id=RequestId(f"t{number}"), attempt=1), after=tokens / 1e3)
        world.post(Finished(id=RequestId(f"t{number}"), attempt=1, tokens=1))
    return world


def test_a_first_token_that_would_come_too_late_is_refused_by_prediction() -> None:
    world = taught(ttft=0.2)
    assert none(world.post(arrived("short", prompt(50, 128))), Closed)
    closed = only(world.post(arrived("long", prompt(51, 640))), Closed)
    assert "expected after 0.64 s, the limit is 0.2 s" in closed.reason
    assert closed.retry_after == pytest.approx(0.44, abs=0.02)


def test_nothing_is_predicted_before_enough_was_measured() -> None:
    world = World(card("a"), overload=OverloadSettings(ttft=0.001))
    assert none(world.post(arrived("r", prompt(1, 4096))), Closed)


def test_a_retry_is_never_refused_for_load() -> None:
    world = World(card("a"), card("b"), overload=OverloadSettings(prefill_tokens=10))
    world.post(arrived("r"))
    world.post(arrived("other", prompt(1)))
    effects = world.post(Failed(id=RequestId("r"), attempt=1, reason="reset", retryable=True))
    assert only(effects, Dispatch).attempt == 2


def test_the_service_level_is_the_limit_where_the_router_names_none() -> None:
    promised = SloSettings(ttft=0.5)
    assert ClusterSettings(slo=promised).routing.overload.ttft == 0.5
    off = RouterSettings(overload=OverloadSettings(ttft=0.0))
    assert not ClusterSettings(slo=promised, router=off).routing.overload.limits
    assert ClusterSettings().routing.overload.ttft is None
