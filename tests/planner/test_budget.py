"""The classic budget rules, by their golden cases, and what holds for every budget."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.planner.budget import (
    Guarded,
    Pair,
    Widths,
    cap_change,
    clamp_pair,
    clamp_single,
    fit_transition,
    in_band,
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
    assert clamp_pair(Pair(*wanted), Widths(*widths), low, high, Pair(minimum, minimum)) == expected


@pytest.mark.parametrize(
    ("wanted", "gpus", "low", "high", "minimum", "expected"),
    [(10, 4, -1, 16, 1, 4), (1, 2, 8, 8, 1, 4), (0, 4, -1, 3, 1, 0), (1, 2, 5, 5, 1, 2)],
)
def test_a_single_pool_is_fitted_and_never_breaks_the_ceiling(wanted, gpus, low, high, minimum, expected):
    assert clamp_single(wanted, gpus, low, high, minimum) == expected


@pytest.mark.parametrize(
    ("current", "wanted", "low", "high", "expected"),
    [
        ((4, 4), (6, 4), -1, 8, (4, 4)),
        ((4, 4), (5, 3), 8, 8, (5, 3)),
        ((4, 4), (8, 8), -1, 12, (6, 6)),
    ],
)
def test_a_transition_goes_as_far_as_it_fits(current, wanted, low, high, expected):
    assert fit_transition(Pair(*current), Pair(*wanted), Widths(), low, high) == expected


def test_the_load_guard_holds_reconciles_or_lets_through():
    assert load_guard(Pair(4, 4), Pair(5, 4), Widths(), -1, 8) == Guarded(Pair(4, 4), "gpu_budget_guard_hold")
    assert load_guard(Pair(6, 6), Pair(6, 6), Widths(), -1, 8) == Guarded(Pair(4, 4), "gpu_budget_reconcile")
    assert load_guard(Pair(2, 2), Pair(3, 3), Widths(), -1, 8) == Guarded(Pair(3, 3))


def test_a_throughput_step_is_capped_and_a_minimum_may_exceed_the_cap():
    assert [cap_change(24, 8, 8), cap_change(40, 180, 8)] == [16, 48]
    assert clamp_pair(Pair(16, 48), Widths(), 64, 64) == (16, 48)
    assert cap_change(1, 1, 8, minimum=20) == 20


counts = st.integers(0, 40)
widths = st.builds(Widths, st.integers(1, 8), st.integers(1, 8))
bounds = st.tuples(st.integers(-1, 60), st.integers(-1, 60)).filter(lambda b: b[0] <= b[1] or b[1] < 0)


@given(st.builds(Pair, counts, counts), widths, bounds, st.builds(Pair, st.integers(0, 3), st.integers(0, 3)))
def test_a_fitted_pair_is_under_the_ceiling_and_over_the_minima_or_nothing(wanted, widths, bounds, minima):
    found = clamp_pair(wanted, widths, *bounds, minima)
    assert bounds[1] < 0 or widths.total(found) <= bounds[1]
    if found != (0, 0):
        assert found.prefill >= minima.prefill and found.decode >= minima.decode
    else:
        assert 0 in (*wanted, *minima) or widths.total(minima) > bounds[1] >= 0 or widths.total(minima) == 0


@given(st.builds(Pair, counts, counts), st.builds(Pair, counts, counts), widths, bounds)
def test_a_transition_is_what_a_search_of_every_pair_on_the_way_finds(current, wanted, widths, bounds):
    best = None
    for prefill in range(min(current.prefill, wanted.prefill), max(current.prefill, wanted.prefill) + 1):
        for decode in range(min(current.decode, wanted.decode), max(current.decode, wanted.decode) + 1):
            pair = Pair(prefill, decode)
            if in_band(pair, widths, *bounds):
                missing = abs(wanted.prefill - prefill) + abs(wanted.decode - decode)
                best = missing if best is None else min(best, missing)
    found = fit_transition(current, wanted, widths, *bounds)
    if best is None:
        assert found == current
    else:
        assert in_band(found, widths, *bounds)
        assert abs(wanted.prefill - found.prefill) + abs(wanted.decode - found.decode) == best
