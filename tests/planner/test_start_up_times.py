"""How long replicas took to serve, and when those on the way are expected."""

import msgspec
import pytest

from penstock.planner.observation import PoolState
from penstock.planner.sizing.start_up_times import TIMES_MAX, StartUpTimes
from tests.planner.pool_states import pool_state


def pool(**told) -> PoolState:
    return pool_state(**{"role": "aggregated", "desired": 4, "ready": 1, "variant": "h100", **told})


def test_before_anything_was_measured_it_is_what_is_assumed():
    assert StartUpTimes(90.0).quantile("m", pool(), 0.5) == 90.0 and StartUpTimes(90.0).measured("m", pool()) == 0


def test_who_is_still_starting_says_that_it_takes_longer_than_assumed():
    assert StartUpTimes(60.0).quantile("m", pool(starting=(100.0, 5.0)), 0.5) == 100.0
    assert StartUpTimes(60.0).quantile("m", pool(starting=(20.0, 5.0)), 0.5) == 60.0
    assert StartUpTimes(60.0).quantile("m", pool(starting=(5000.0, 5.0)), 0.5) == 60.0, "it may never come"


def test_it_is_learnt_per_model_kind_of_gpu_and_warmth():
    known = StartUpTimes(90.0)
    known.note("m", pool(start_up_times=(40.0, 50.0, 60.0)))
    known.note("m", pool(start_up_times=(10.0,), warm=True))
    assert known.quantile("m", pool(), 0.5) == 50.0 and known.measured("m", pool()) == 3
    assert known.quantile("m", pool(warm=True), 0.5) == 10.0
    assert known.quantile("m", pool(variant="a100"), 0.5) == 90.0
    assert known.quantile("n", pool(), 0.5) == 90.0


def test_of_the_other_warmth_is_better_than_an_assumption():
    known = StartUpTimes(90.0)
    known.note("m", pool(start_up_times=(40.0,)))
    assert known.quantile("m", pool(warm=True), 0.5) == 40.0


def test_where_a_replica_sleeps_the_next_one_takes_as_long_as_a_wake():
    known = StartUpTimes(90.0)
    known.note("m", pool(start_up_times=(40.0, 50.0), wake_times=(3.0, 5.0, 4.0)))
    assert known.quantile("m", pool(asleep=1), 0.5) == 4.0
    assert known.quantile("m", pool(), 0.5) == 45.0, "nobody sleeps: it is started"
    assert known.measured("m", pool()) == 2
    assert StartUpTimes(90.0).quantile("m", pool(asleep=1), 0.5) == 90.0, "a wake was never measured"


def test_only_the_last_ones_count():
    known = StartUpTimes()
    known.note("m", pool(start_up_times=(500.0,) * TIMES_MAX))
    known.note("m", pool(start_up_times=(20.0,) * TIMES_MAX))
    assert known.quantile("m", pool(), 1.0) == 20.0


def test_the_soonest_comes_first_and_one_that_is_over_its_time_any_moment():
    known = StartUpTimes(60.0)
    assert known.coming("m", pool(starting=(80.0, 50.0, 5.0)), 600.0) == ((0.0, 30.0, 75.0), 0)


def test_those_older_than_the_deadline_and_those_that_failed_are_given_up():
    found = StartUpTimes(60.0).coming("m", pool(starting=(700.0, 600.0, 5.0), failed=2), 600.0)
    assert found.number == 2 and found.given_up == 3


def test_what_is_kept_and_read_again_is_the_same():
    known = StartUpTimes(90.0)
    known.note("m", pool(start_up_times=(40.0, 50.5)))
    twin = msgspec.json.decode(msgspec.json.encode(known), type=StartUpTimes)
    assert twin.quantile("m", pool(), 0.3) == pytest.approx(known.quantile("m", pool(), 0.3))
    assert twin == known
