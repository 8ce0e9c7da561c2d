"""A worker is lost in the middle of its answer: who goes on, how often, and what is said of it."""

from penstock.kernel.hashing import block_hashes
from penstock.kernel.machine import SECOND, Woken
from penstock.kernel.values import Prompt, RequestId, WorkerId
from penstock.router.events import (
    Closed,
    Dispatch,
    Failed,
    Finished,
    FirstToken,
    OperatorNote,
    Resume,
    WorkerJoined,
    WorkerLeft,
)
from penstock.router.settings import MigrationSettings, QueueSettings
from penstock.testing import RouterWorld, arrived, card, none, only
from penstock.testing.router_world import BLOCK

R = RequestId("r")


def resume(tokens: int, prompt: int = 64) -> Resume:
    return Resume(
        prompt=Prompt(prompt + tokens, list(block_hashes(list(range(prompt + tokens)), BLOCK))), tokens=tokens
    )


def lost(attempt: int, tokens: int | None, **changes: object) -> Failed:
    point = None if tokens is None else resume(tokens)
    fields: dict[str, object] = {"reason": "connection reset", "retryable": False, "resume": point, **changes}
    return Failed(id=R, attempt=attempt, **fields)  # type: ignore[arg-type]


def streaming(*workers: str, **settings: object) -> RouterWorld:
    world = RouterWorld(*(card(name) for name in workers), **settings)
    world.post(arrived("r"))
    world.post(FirstToken(id=R, attempt=1), after=0.5)
    return world


def test_another_worker_goes_on_and_the_request_ends_once_with_its_own_prompt() -> None:
    world = streaming("a", "b")
    before = world.sent("r").target
    effects = world.post(lost(1, 10), after=0.5)
    dispatch = only(effects, Dispatch)
    assert dispatch.attempt == 2 and dispatch.target != before
    assert (dispatch.decision.isl, dispatch.decision.resumed) == (74, 10)
    assert only(effects, OperatorNote).kind == "migrated"
    world.post(FirstToken(id=R, attempt=2), after=0.5)
    world.post(Finished(id=R, attempt=2, tokens=30, cached=64), after=0.5)
    closed = world.ended("r")
    assert (closed.outcome, closed.isl, closed.osl, closed.migrations, closed.attempts) == ("ok", 64, 30, 1, 2)
    assert closed.first == SECOND // 2, "the first token of the first leg is the request's"
    assert closed.cached is None, "what a later leg finds in a cache is partly output"
    assert [leg.failure for leg in closed.legs] == ["connection reset", None]


def test_without_a_point_to_go_on_from_it_ends_as_the_engines_fault() -> None:
    world = streaming("a", "b")
    closed = only(world.post(lost(1, None)), Closed)
    assert (closed.outcome, closed.fault, closed.migrations) == ("failed", "engine", 0)


def test_the_budget_of_migrations_is_kept() -> None:
    world = streaming("a", "b", "c", migration=MigrationSettings(limit=1))
    world.post(lost(1, 5))
    world.post(FirstToken(id=R, attempt=2))
    closed = only(world.post(lost(2, 9)), Closed)
    assert (closed.outcome, closed.migrations, closed.attempts) == ("failed", 1, 2)


def test_each_migration_has_its_own_tries_and_forgets_who_failed_before() -> None:
    world = streaming("a", "b", attempts_max=2)
    first = world.sent("r").target
    world.post(lost(1, 5))
    second = world.sent("r").target
    world.post(FirstToken(id=R, attempt=2))
    world.post(lost(2, 9))
    assert world.sent("r").target == first != second
    # The leg fails before its first token: that is a retry, from the same point.
    world.post(lost(3, None, retryable=True, worker_at_fault=False, status=503))
    assert none(world.effects, Closed), "it waits for a worker: its client has part of an answer"


def test_a_stranded_answer_goes_on_as_soon_as_a_worker_is_there() -> None:
    world = streaming("a")
    assert none(world.post(lost(1, 12)), Dispatch)
    world.post(WorkerLeft(worker=WorkerId("a"), epoch=1, reason="killed"))
    assert none(world.effects, Closed)
    dispatch = only(world.post(WorkerJoined(card=card("a", epoch=2)), after=1.0), Dispatch)
    assert dispatch.decision.resumed == 12 and dispatch.decision.queued >= 1.0
    world.post(Finished(id=R, attempt=2, tokens=20))
    assert world.ended("r").outcome == "ok"


def test_a_stranded_answer_ends_after_the_longest_wait_with_what_broke_it() -> None:
    world = streaming("a", queue=QueueSettings(wait_max=2.0))
    world.post(lost(1, 12))
    world.post(Woken(), after=1.9)
    assert none(world.effects, Closed)
    world.post(Woken(), after=0.2)
    closed = world.ended("r")
    assert (closed.outcome, closed.fault, closed.osl) == ("failed", "engine", 12)
    assert "connection reset" in closed.reason and "2 s" in closed.reason


def test_a_worker_that_failed_and_came_back_may_try_again() -> None:
    world = RouterWorld(card("a"), card("b"), attempts_max=3)
    world.post(arrived("r"))
    first = world.sent("r").target.worker
    world.post(Failed(id=R, attempt=1, reason="refused", retryable=True, received=False))
    world.post(WorkerJoined(card=card(str(first), epoch=2)))
    world.post(Failed(id=R, attempt=2, reason="refused", retryable=True, received=False))
    assert world.sent("r").target.worker == first and world.sent("r").attempt == 3
