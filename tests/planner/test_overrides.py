"""What is remembered between ticks: who else set numbers, and whether traffic can be read."""

import msgspec
import pytest

from penstock.kernel.values import Traffic
from penstock.planner.observation import ModelState, Observation
from penstock.planner.overrides import OverrideTracker
from penstock.planner.plugins.proposals import Reason
from tests.planner.pool_states import pool_state

SOME = Traffic(seconds=5.0, arrived=1, prompt_tokens=10)


def seen(at: float, desired: int = 2, traffic=SOME, **more) -> Observation:
    pool = pool_state(role="aggregated", desired=desired, ready=desired)
    return Observation(at=at, window=5.0, models={"m": ModelState(traffic=traffic, pools={"main": pool}, **more)})


def look(standing: OverrideTracker, found: Observation, hold: float = 60.0) -> list[str]:
    return [because.code for because in standing.observe(found, hold)]


def test_a_first_look_is_how_it_is_and_nobodys_doing():
    standing = OverrideTracker()
    assert look(standing, seen(0.0, 7)) == [] and not standing.manual


def test_a_number_that_is_neither_the_one_before_nor_ours_is_somebody_elses():
    standing = OverrideTracker(ordered={"main": 4})
    assert look(standing, seen(0.0, 2)) == []
    assert look(standing, seen(5.0, 4)) == []
    assert look(standing, seen(10.0, 9)) == ["manual"]
    kept = standing.hold_reason("main", "m", 4, 9)
    assert kept is not None and kept.code == "manual" and "70" in kept.text


def test_a_slow_connector_that_comes_to_want_an_older_number_of_ours_is_nobody_else():
    standing = OverrideTracker()
    look(standing, seen(0.0, 2))
    standing.record_order({"main": 5})
    standing.record_order({"main": 6})
    assert look(standing, seen(5.0, 2)) == []
    assert look(standing, seen(10.0, 5)) == [], "the first order came through after the second was said"
    assert look(standing, seen(15.0, 6)) == []
    assert look(standing, seen(20.0, 5)) == ["manual"], "it had caught up, so this is somebody"


def test_it_is_respected_for_the_hold_and_from_then_on_not():
    standing = OverrideTracker()
    look(standing, seen(0.0, 2))
    look(standing, seen(5.0, 9))
    look(standing, seen(64.9, 9))
    assert standing.hold_reason("main", "m", 4, 9) is not None
    look(standing, seen(65.0, 9))
    assert standing.hold_reason("main", "m", 4, 9) is None


def test_a_hold_of_nothing_takes_it_as_a_start_only():
    standing = OverrideTracker()
    look(standing, seen(0.0, 2), hold=0.0)
    look(standing, seen(5.0, 9), hold=0.0)
    assert standing.hold_reason("main", "m", 4, 9) is None


@pytest.mark.parametrize(
    ("traffic", "health", "expected"),
    [
        (SOME, "fresh", None),
        (SOME, "stale", "source_stale"),
        (SOME, "broken", "source_broken"),
        (None, "fresh", "source_stale"),
    ],
)
def test_nothing_is_taken_away_where_traffic_is_not_known(traffic, health, expected):
    standing = OverrideTracker()
    look(standing, seen(0.0, traffic=traffic, health=health))
    kept = standing.hold_reason("main", "m", 1, 2)
    assert (None if kept is None else kept.code) == expected
    assert standing.hold_reason("main", "m", 3, 2) is None, "more is always allowed"


def test_unreadable_for_long_is_broken_which_is_said_once():
    standing = OverrideTracker()
    found = [look(standing, seen(at, traffic=None)) for at in (0.0, 10.0, 59.0, 60.0, 65.0)]
    assert found == [[], [], [], ["source_broken"], []]
    assert standing.health == {"m": "broken"}
    assert look(standing, seen(70.0)) == [] and standing.health == {"m": "fresh"}


def test_a_source_that_says_itself_that_it_is_broken_is_believed_at_once():
    assert look(OverrideTracker(), seen(0.0, traffic=SOME, health="broken", why="401")) == ["source_broken"]


def test_a_ceiling_that_begins_to_bind_is_said_once_and_again_after_a_while_without():
    standing = OverrideTracker()
    short = Reason(code="ceiling", text="2 more GPUs", facts={"model": "m", "more_gpus": 2})
    others = Reason(code="manual", text="somebody else", facts={"pool": "main"})
    said = {at: len(standing.ceiling_reached(at, bound)) for at, bound in ((5.0, [others]), (10.0, [short, others]))}
    said |= {at: len(standing.ceiling_reached(at, [short])) for at in (15.0, 300.0, 899.0, 1500.0)}
    assert said == {5.0: 0, 10.0: 1, 15.0: 0, 300.0: 0, 899.0: 0, 1500.0: 1}


def test_what_is_kept_and_read_again_is_the_same():
    standing = OverrideTracker(ordered={"main": 4}, problems={"main": "no machine"})
    look(standing, seen(0.0, 2))
    look(standing, seen(5.0, 9, traffic=None))
    assert msgspec.json.decode(msgspec.json.encode(standing), type=OverrideTracker) == standing
