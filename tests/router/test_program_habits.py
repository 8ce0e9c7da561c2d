"""What the router learns of programs: output lengths and pauses, bounded, and what it does with them."""

from penstock.kernel.machine import SECOND
from penstock.kernel.values import RequestId, WorkerId
from penstock.router.events import Closed, Dispatch, Finished, FirstToken, Preferences
from penstock.router.pool_tables import PROGRAMS_MAX, HabitsState, ProgramHabits, prefetch_after
from penstock.router.router import Router
from penstock.router.settings import CostSettings
from penstock.testing import RouterWorld, arrived, card, only, prompt
from tests.router.written_states import written


def test_an_estimate_needs_some_observations_and_follows_what_changes() -> None:
    habits = ProgramHabits()
    for tokens in (100, 100):
        habits.answered("p", tokens)
    assert habits.output("p") is None
    habits.answered("p", 100)
    assert habits.output("p") == 100
    for _ in range(40):
        habits.answered("p", 1000)
    found = habits.output("p")
    assert found is not None and 950 < found <= 1000
    assert habits.output("q") is None and habits.pause("p") is None


def test_tables_are_bounded_and_the_longest_unused_goes() -> None:
    habits = ProgramHabits()
    for number in range(PROGRAMS_MAX + 50):
        for _ in range(3):
            habits.answered(f"p{number}", 10)
        habits.ended(f"s{number}", number)
        habits.answered("kept", 10)
    assert habits.output("p0") is None and habits.output("kept") == 10
    assert [len(table) for table in habits.snapshot()[:3]] == [PROGRAMS_MAX, 0, PROGRAMS_MAX]
    again = ProgramHabits()
    again.restore(written(habits, HabitsState))
    assert again.snapshot() == habits.snapshot()


def turn(world: RouterWorld, name: str, session: str, pause: float, **wish: object) -> Dispatch:
    """Have one turn of a session answered, some seconds after the one before."""
    preferences = Preferences(session=session, program="p", **wish)  # type: ignore[arg-type]
    sent = only(world.post(arrived(name, prompt(1), preferences=preferences), after=pause), Dispatch)
    world.post(FirstToken(id=RequestId(name), attempt=1), after=1.0)
    only(world.post(Finished(id=RequestId(name), attempt=1, tokens=500), after=1.0), Closed)
    return sent


def test_blocks_are_wanted_back_shortly_before_a_session_returns() -> None:
    world = RouterWorld(card("a"), prefetch=True)
    sent = [turn(world, f"r{number}", "s", 60.0) for number in range(6)]
    assert [each.prefetch_after is None for each in sent] == [True] * 3 + [False] * 3
    assert sent[-1].prefetch_after is not None and 55.0 < sent[-1].prefetch_after < 60.0
    assert turn(world, "sibling", "other", 0.0).prefetch_after is not None  # its program is known
    off = RouterWorld(card("a"))
    assert [turn(off, f"r{number}", "s", 60.0).prefetch_after for number in range(6)] == [None] * 6
    says = turn(off, "says", "s", 1.0, next_in=90.0)
    assert says.prefetch_after == 88.0 and says.decision.reason.endswith("its next request is likely 90 s after it")
    assert turn(off, "short", "s", 1.0, next_in=2.0).prefetch_after is None
    assert prefetch_after(4.9) is None and prefetch_after(5.0) == 3.0


def test_a_session_whose_next_request_goes_elsewhere_is_counted_and_the_decision_says_so() -> None:
    tiers = {"kv_tiers": "lru"}
    world = RouterWorld(card("a", labels=tiers), card("b", labels=tiers), card("c"))
    told = turn(world, "first", "s", 1.0, next_in=60.0, worker=WorkerId("a"))
    assert told.target.worker == "a" and told.prefetch_after == 58.0
    elsewhere = turn(world, "second", "s", 30.0, next_in=60.0, worker=WorkerId("b"))
    assert "a was asked to bring its session's blocks up, which nobody uses now" in elsewhere.decision.reason
    home = turn(world, "third", "s", 60.0, next_in=60.0, worker=WorkerId("b"))
    assert "in vain" not in home.decision.reason
    assert "in vain" not in turn(world, "other", "t", 1.0, worker=WorkerId("a")).decision.reason
    again = Router(world.router.settings, seed=1)
    again.restore(world.router.snapshot())
    for router in (world.router, again):
        assert router.status(world.now).models[0].awaited == {"home": 1, "elsewhere": 1}
    # A worker without tiers is not told.
    last = turn(world, "fourth", "s", 60.0, next_in=60.0, worker=WorkerId("c"))
    assert "b was asked to bring its session's blocks up" in last.decision.reason
    assert "in vain" not in turn(world, "fifth", "s", 60.0, worker=WorkerId("a")).decision.reason


def test_a_learnt_output_length_weighs_where_the_cost_counts_it() -> None:
    def decode(expect: bool, **wish: object) -> float:
        world = RouterWorld(card("a"), card("b"), expect_output=expect, cost=CostSettings(kind="latency"))
        for number in range(5):
            turn(world, f"r{number}", "s", 1.0)
        preferences = Preferences(session="s", program="p", **wish)  # type: ignore[arg-type]
        sent = only(world.post(arrived("now", prompt(2), preferences=preferences)), Dispatch)
        return sent.decision.candidates[0].decode

    assert decode(True) > 2.0 * decode(False)  # 500 tokens, where the mean has only begun to leave 128
    assert decode(True, osl=500) == decode(False, osl=500)


def test_a_router_goes_on_from_its_snapshot_with_what_it_learnt() -> None:
    world = RouterWorld(card("a"), prefetch=True, expect_output=True)
    for number in range(5):
        turn(world, f"r{number}", "s", 60.0)
    pool = next(iter(world.router.pools.values()))
    assert pool.habits.pause("p") is not None and pool.habits.output("p") == 500
    again = Router(world.router.settings, seed=1)
    again.restore(world.router.snapshot())
    assert next(iter(again.pools.values())).habits.snapshot() == pool.habits.snapshot()
    assert world.now > 60 * SECOND
