"""Is a new request refused, with its reason and when to come back, where every worker is beyond a limit?"""

import math
from itertools import zip_longest

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config.settings.cluster_settings import ClusterSettings
from penstock.kernel.machine import SECOND
from penstock.kernel.values import RequestId, Slo
from penstock.router.events import Closed, Dispatch, Failed, Finished, FirstToken
from penstock.router.requests.scheduling import NO_LIMITS
from penstock.router.settings import OverloadSettings, QueueSettings
from penstock.router.status import REFUSAL_SHOWN
from penstock.testing import RouterWorld, arrived, card, none, only, prompt


def refused(world: RouterWorld, name: str, tokens: int = 64) -> Closed:
    closed = only(world.post(arrived(name, prompt(hash(name) % 1000, tokens))), Closed)
    assert (closed.outcome, closed.fault, closed.status) == ("rejected", "overloaded", 503)
    assert closed.retry_after is not None and closed.retry_after > 0
    return closed


def test_prefill_tokens_refuse_only_when_every_worker_is_beyond_them() -> None:
    world = RouterWorld(card("a"), card("b"), overload=OverloadSettings(prefill_tokens=100))
    for number in range(4):
        world.post(arrived(f"r{number}", prompt(number)))
    assert {world.sent(f"r{n}").target.worker for n in range(4)} == {"a", "b"}
    closed = refused(world, "late")
    assert "128 tokens to prefill (router.overload.prefill_tokens 100)" in closed.reason
    world.post(FirstToken(id=RequestId("r0"), attempt=1))
    assert only(world.post(arrived("again", prompt(9))), Dispatch).target == world.sent("r0").target


def test_blocks_in_use_refuse_and_an_unknown_size_does_not() -> None:
    limit = OverloadSettings(blocks=0.5)
    world = RouterWorld(card("a", kv_blocks=8), overload=limit)
    world.post(arrived("r1", prompt(1)))
    world.post(arrived("r2", prompt(2)))
    assert "8 of 8 blocks" in refused(world, "r3").reason
    blind = RouterWorld(card("a", kv_blocks=None), overload=limit)
    for number in range(9):
        assert none(blind.post(arrived(f"r{number}", prompt(number))), Closed)


def test_queue_time_refuses_once_someone_has_waited_for_too_long() -> None:
    world = RouterWorld(card("a"), overload=OverloadSettings(queue_time=2.0), queue=QueueSettings(threshold=0.0))
    world.post(arrived("runs"))
    world.post(arrived("waits", prompt(1)))
    world.post(arrived("waits too", prompt(2)), after=1.9)
    assert none(world.effects, Closed)
    closed = only(world.post(arrived("late", prompt(3)), after=0.3), Closed)
    assert "waiting for 2.2 s" in closed.reason and closed.retry_after == pytest.approx(2.2)


def taught(overload: OverloadSettings) -> RouterWorld:
    """A router that has learnt 1 ms per token ahead."""
    world = RouterWorld(card("a"), card("b"), overload=overload)
    for number in range(12):
        tokens = 64 * (1 + number % 3)
        world.post(arrived(f"t{number}", prompt(number, tokens)))
        world.post(FirstToken(id=RequestId(f"t{number}"), attempt=1), after=tokens / 1e3)
        world.post(Finished(id=RequestId(f"t{number}"), attempt=1, tokens=1))
    return world


def test_a_first_token_that_would_come_too_late_is_refused_by_prediction() -> None:
    world = taught(OverloadSettings(ttft=0.2))
    for number in range(2):
        assert none(world.post(arrived(f"short {number}", prompt(50 + number, 128))), Closed)
    closed = only(world.post(arrived("late", prompt(52, 128))), Closed)
    assert "expected after 0.256 s, the limit is 0.2 s" in closed.reason
    assert closed.retry_after == pytest.approx(0.056, abs=0.01)


def test_what_an_idle_worker_could_not_do_faster_is_taken() -> None:
    world = taught(OverloadSettings(ttft=0.2))
    assert none(world.post(arrived("long", prompt(51, 4096))), Closed)
    assert none(world.post(arrived("short", prompt(52, 128))), Closed)
    assert none(world.post(arrived("waits for the short one", prompt(53, 4096))), Closed)
    closed = only(world.post(arrived("waits for a long one", prompt(54, 640))), Closed)
    assert "of which an idle worker would take 0.64 s, the limit is 0.2 s" in closed.reason


@given(running=st.integers(0, 100), tokens=st.integers(16, 4096), limit=st.floats(0.05, 1.0))
def test_an_idle_fleet_refuses_nobody_and_who_comes_back_when_told_is_taken(
    running: int, tokens: int, limit: float
) -> None:
    """The two workers prefill 1 token in 1 ms, one request after the other, as the fitted line says."""
    world = taught(OverloadSettings(ttft=limit))
    for number in range(running):
        world.post(arrived(f"r{number}", prompt(100 + number, 32)))
    ended = [effect for effect in world.post(arrived("first", prompt(98, tokens))) if isinstance(effect, Closed)]
    if not ended:
        return
    before = [e for e in world.effects if isinstance(e, Dispatch) and e.id.startswith("r")]
    wait = ended[0].retry_after
    assert before and wait is not None
    lanes = [[e.id for e in before if e.target.worker == worker] for worker in ("a", "b")]
    for done in list(zip_longest(*lanes))[: math.ceil(wait * 1e3 / 32)]:
        world.post(FirstToken(id=done[0] or done[1], attempt=1), after=32 / 1e3)
        if all(done):
            world.post(FirstToken(id=done[1], attempt=1))
    assert none(world.post(arrived("again", prompt(99, tokens))), Closed)


def test_a_limit_that_refuses_is_a_finding_until_it_has_long_refused_nobody() -> None:
    world = RouterWorld(card("a"), mode="least_loaded", overload=OverloadSettings(prefill_tokens=100))
    assert world.router.status(world.now).findings == []
    for number in range(2):
        world.post(arrived(f"r{number}", prompt(number)))
    refused(world, "late")
    status = world.router.status(world.now)
    assert status.models[0].refused == {"prefill_tokens": 1}
    (found,) = status.findings
    assert "requests of m were refused for load" in found.text and "router.overload.prefill_tokens 1" in found.text
    assert "penstock set router.overload" in found.hint
    later = world.now + round((REFUSAL_SHOWN + 1) * SECOND)
    assert world.router.status(later).findings == []
    other = RouterWorld(mode="least_loaded")
    other.router.restore(world.router.snapshot())
    assert other.router.status(world.now).models[0].refused == {"prefill_tokens": 1}


def test_nothing_is_predicted_before_enough_was_measured() -> None:
    world = RouterWorld(card("a"), overload=OverloadSettings(ttft=0.001))
    assert none(world.post(arrived("r", prompt(1, 4096))), Closed)


def test_a_retry_is_never_refused_for_load() -> None:
    world = RouterWorld(card("a"), card("b"), overload=OverloadSettings(prefill_tokens=10))
    world.post(arrived("r"))
    world.post(arrived("other", prompt(1)))
    effects = world.post(Failed(id=RequestId("r"), attempt=1, reason="reset", retryable=True))
    assert only(effects, Dispatch).attempt == 2


def test_a_promise_refuses_nobody() -> None:
    promised = ClusterSettings(slo=Slo(ttft=0.5, itl=0.05)).routing.overload
    assert promised == NO_LIMITS
    world = taught(promised)
    assert none(world.post(arrived("long", prompt(60, 40_000))), Closed)
