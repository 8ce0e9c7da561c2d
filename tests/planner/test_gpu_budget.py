"""The classic budget rules, by their golden cases, and what holds for every budget."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_dynamo.policies.gpu_budget import (
    GuardedTargets,
    PoolPair,
    Widths,
    cap_change,
    clamp_pair,
    load_guard,
)


@pytest.mark.parametrize(
    ("wanted", "widths", "low", "high", "minimum", "expected"),
    [
        ((8, 8), (1, 1), -1, 8, 1, (4, 4)),
        ((10, 2), (1, 1), -1, 8, 1, (6, 2)),
        ((2, 10), (1, 4), -1, 16, 1, (1, 3)),
        ((10, 10), (2, 1), -1, 12, 1, (4, 4)),
        ((1, 1), (1, 1), 8, 8, 1, (4, 4)),
        ((2, 1), (1, 1), 8, -1, 1, (6, 2)),
        ((5, 5), (1, 1), -1, 1, 1, (0, 0)),
        ((0, 0), (1, 1), 7, -1, 0, (3, 4)),
    ],
)
def test_a_pair_is_fitted_in_proportion(wanted, widths, low, high, minimum, expected):
    assert clamp_pair(PoolPair(*wanted), Widths(*widths), low, high, PoolPair(minimum, minimum)) == expected


@pytest.mark.parametrize(
    ("current", "wanted", "low", "high", "expected"),
    [
        ((4, 4), (6, 4), -1, 8, (4, 4)),
        ((4, 4), (5, 3), 8, 8, (5, 3)),
        ((4, 4), (8, 8), -1, 12, (6, 6)),
    ],
)
def test_a_transition_goes_as_far_as_it_fits(current, wanted, low, high, expected):
    assert load_guard(PoolPair(*current), PoolPair(*wanted), Widths(), low, high).pair == expected


def test_the_load_guard_holds_reconciles_or_lets_through():
    assert load_guard(PoolPair(4, 4), PoolPair(5, 4), Widths(), -1, 8) == GuardedTargets(
        PoolPair(4, 4), "gpu_budget_guard_hold"
    )
    assert load_guard(PoolPair(6, 6), PoolPair(6, 6), Widths(), -1, 8) == GuardedTargets(
        PoolPair(4, 4), "gpu_budget_reconcile"
    )
    assert load_guard(PoolPair(2, 2), PoolPair(3, 3), Widths(), -1, 8) == GuardedTargets(PoolPair(3, 3))


def test_a_throughput_step_is_capped_and_a_minimum_may_exceed_the_cap():
    assert [cap_change(24, 8, 8), cap_change(40, 180, 8)] == [16, 48]
    assert clamp_pair(PoolPair(16, 48), Widths(), 64, 64) == (16, 48)
    assert cap_change(1, 1, 8, minimum=20) == 20


counts = st.integers(0, 40)
widths = st.builds(Widths, st.integers(1, 8), st.integers(1, 8))
bounds = st.tuples(st.integers(-1, 60), st.integers(-1, 60)).filter(lambda b: b[0] <= b[1] or b[1] < 0)


@given(st.builds(PoolPair, counts, counts), widths, bounds, st.builds(PoolPair, st.integers(0, 3), st.integers(0, 3)))
def test_a_fitted_pair_is_under_the_ceiling_and_over_the_minima_or_nothing(wanted, widths, bounds, minima):
    found = clamp_pair(wanted, widths, *bounds, minima)
    assert bounds[1] < 0 or widths.total(found) <= bounds[1]
    if found != (0, 0):
        assert found.prefill >= minima.prefill and found.decode >= minima.decode
    else:
        assert 0 in (*wanted, *minima) or widths.total(minima) > bounds[1] >= 0 or widths.total(minima) == 0


@pytest.mark.parametrize(
    ("current", "wanted", "widths", "low", "high", "expected"),
    [
        ((4, 4), (5, 3), (4, 1), -1, 20, (4, 4)),  # one GPU would be freed, four are lacking
        ((2, 4), (3, 3), (2, 1), 8, 8, (2, 4)),
        ((4, 4), (6, 1), (2, 1), -1, 12, (5, 2)),  # what one more prefill replica takes, and no more
        ((4, 4), (5, 1), (1, 1), -1, 8, (5, 1)),  # it fits: who wishes to give more than is taken may
    ],
)
def test_a_donor_gives_what_the_other_takes(current, wanted, widths, low, high, expected):
    assert load_guard(PoolPair(*current), PoolPair(*wanted), Widths(*widths), low, high).pair == expected


@given(st.builds(PoolPair, counts, counts), st.builds(PoolPair, counts, counts), widths, bounds)
def test_a_guarded_step_keeps_the_budget_and_its_direction(current, wanted, widths, bounds):
    low, high = bounds
    found = load_guard(current, wanted, widths, low, high, PoolPair(0, 0))
    assert high < 0 or widths.total(found.pair) <= high
    if found.reason == "gpu_budget_reconcile":
        return
    for now, goal, got in zip(current, wanted, found.pair, strict=True):
        assert min(now, goal) <= got <= max(now, goal)
    if found.reason:
        given = [max(0, now - got) * width for now, got, width in zip(current, found.pair, widths, strict=True)]
        lacking = [got < goal > now for now, got, goal in zip(current, found.pair, wanted, strict=True)]
        for giver, taker in ((0, 1), (1, 0)):
            # What it gives is taken: one replica more of its own would not have fitted.
            assert not (given[giver] and lacking[taker]) or widths.total(found.pair) + widths[giver] > high
