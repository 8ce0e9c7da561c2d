"""Each reason for which the router refuses a request has a code of its own, and nothing else has it."""

from collections.abc import Callable

import pytest

from penstock.kernel.machine import Woken
from penstock.kernel.values import RequestId
from penstock.router.events import Closed, Dispatch, Failed, Finished, FirstToken, Preferences
from penstock.router.settings import OverloadSettings, QueueSettings
from penstock.testing import RouterWorld, arrived, card, only, prompt


def full() -> RouterWorld:
    world = RouterWorld(card("a"), inflight_max=1)
    world.post(arrived("first"))
    return world


def overloaded() -> RouterWorld:
    world = RouterWorld(card("a"), overload=OverloadSettings(prefill_tokens=10))
    world.post(arrived("first"))
    return world


def queue_full() -> RouterWorld:
    world = RouterWorld(card("a"), queue=QueueSettings(threshold=0.0, length_max=0))
    world.post(arrived("first"))
    return world


CAUSES: dict[str, tuple[Callable[[], RouterWorld], int]] = {
    "no_worker": (RouterWorld, 503),
    "inflight_limit": (full, 429),
    "overloaded": (overloaded, 503),
    "queue_full": (queue_full, 503),
}


@pytest.mark.parametrize("code", CAUSES)
def test_a_refusal_at_arrival_names_its_cause(code: str) -> None:
    make, status = CAUSES[code]
    closed = only(make().post(arrived("late", prompt(7))), Closed)
    assert (closed.code, closed.status, closed.fault) == (code, status, "overloaded")
    assert closed.retry_after is not None and closed.retry_after > 0


def test_a_request_that_waited_too_long_and_one_that_every_engine_refused() -> None:
    world = RouterWorld(card("a"), queue=QueueSettings(threshold=0.0, wait_max=5.0))
    world.post(arrived("first"))
    world.post(arrived("waits", prompt(7)))
    closed = only(world.post(Woken(), after=6.0), Closed)
    assert (closed.code, closed.status) == ("queue_timeout", 503)
    refusal = Failed(
        id=RequestId("first"), attempt=1, reason="full", retryable=False, worker_at_fault=False, status=429
    )
    closed = only(world.post(refusal), Closed)
    assert (closed.code, closed.status, closed.fault) == ("engine_busy", 429, "overloaded")


def test_an_answer_has_no_code() -> None:
    world = RouterWorld(card("a"))
    world.post(arrived("r"))
    world.post(FirstToken(id=RequestId("r"), attempt=1))
    assert only(world.post(Finished(id=RequestId("r"), attempt=1, tokens=3)), Closed).code is None


def test_who_wants_cached_prompts_only_is_refused_with_412_until_they_are() -> None:
    world = RouterWorld(card("a"), card("b"))
    wish = Preferences(if_cached=True)
    closed = only(world.post(arrived("cold", prompt(1), preferences=wish)), Closed)
    assert (closed.code, closed.status, closed.fault, closed.retry_after) == ("not_cached", 412, "client", None)
    assert "prompt tokens would be new" in closed.reason
    world.post(arrived("warms", prompt(1)))
    world.post(Finished(id=RequestId("warms"), attempt=1, tokens=3))
    again = only(world.post(arrived("warm", prompt(1), preferences=wish)), Dispatch)
    assert again.target == world.sent("warms").target


def test_it_is_refused_as_well_where_a_prefill_worker_would_be_used() -> None:
    split = {"handoff": "completed", "layout": "x"}
    world = RouterWorld(card("p", role="prefill", **split), card("d", role="decode", **split))
    closed = only(world.post(arrived("r", prompt(1, 8192), preferences=Preferences(if_cached=True))), Closed)
    assert (closed.code, closed.status) == ("not_cached", 412)
    assert "another worker would have to do its prefill" in closed.reason
