"""How long replicas took to serve, and when those on the way are expected."""

import msgspec
import pytest

from penstock.planner.seen import PoolSeen
from penstock.planner.start_up import KEPT, StartUps


def pool(**told) -> PoolSeen:
    return PoolSeen(**{"role": "aggregated", "desired": 4, "ready": 1, "variant": "h100", **told})


def test_before_anything_was_measured_it_is_what_is_assumed():
    assert StartUps(90.0).quantile("m", pool(), 0.5) == 90.0 and StartUps(90.0).measured("m", pool()) == 0


def test_it_is_learnt_per_model_kind_of_gpu_and_warmth():
    known = StartUps(90.0)
    known.note("m", pool(came=(40.0, 50.0, 60.0)))
    known.note("m", pool(came=(10.0,), warm=True))
    assert known.quantile("m", pool(), 0.5) == 50.0 and known.measured("m", pool()) == 3
    assert known.quantile("m", pool(warm=True), 0.5) == 10.0
    assert known.quantile("m", pool(variant="a100"), 0.5) == 90.0
    assert known.quantile("n", pool(), 0.5) == 90.0


def test_of_the_other_warmth_is_better_than_an_assumption():
    known = StartUps(90.0)
    known.note("m", pool(came=(40.0,)))
    assert known.quantile("m", pool(warm=True), 0.5) == 40.0


def test_only_the_last_ones_count():
    known = StartUps()
    known.note("m", pool(came=(500.0,) * KEPT))
    known.note("m", pool(came=(20.0,) * KEPT))
    assert known.quantile("m", pool(), 1.0) == 20.0


def test_the_soonest_comes_first_and_one_that_is_over_its_time_any_moment():
    known = StartUps(60.0)
    assert known.coming("m", pool(starting=(80.0, 50.0, 5.0)), 600.0) == ((0.0, 10.0, 55.0), 0)


def test_those_older_than_the_deadline_and_those_that_failed_are_given_up():
    found = StartUps(60.0).coming("m", pool(starting=(700.0, 600.0, 5.0), failed=2), 600.0)
    assert found.number == 2 and found.given_up == 3


def test_what_is_kept_and_read_again_is_the_same():
    known = StartUps(90.0)
    known.note("m", pool(came=(40.0, 50.5)))
    twin = StartUps.restored(msgspec.json.decode(msgspec.json.encode(known.snapshot())))
    assert twin.quantile("m", pool(), 0.3) == pytest.approx(known.quantile("m", pool(), 0.3))
    assert twin.snapshot() == known.snapshot()
