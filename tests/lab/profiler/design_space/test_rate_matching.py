"""Are the whole numbers of engines the best ones, and is the frontier what nothing beats?"""

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock_lab.profiler.design_space.rate_matching import ENGINES_MAX, Deployments, best_context, matched
from penstock_lab.profiler.design_space.serving_points import ServingPoints


def points(rows: list[tuple[float, float, float, float]]) -> ServingPoints:
    """Return points of (ttft, tpot, rate, gpus)."""
    ttft, tpot, rate, gpus = np.array(rows, dtype=np.float64).reshape(-1, 4).T
    nothing = np.zeros(len(ttft))
    return ServingPoints(nothing, nothing, nothing, ttft, tpot, rate, gpus)


def brute(rate: float, gpus: float, own: float, size: float) -> float:
    """Return the most requests per second and GPU, by trying all pairs."""
    pairs = itertools.product(range(1, ENGINES_MAX + 1), repeat=2)
    return max(min(c * rate, g * own) / (c * gpus + g * size) for c, g in pairs)


POSITIVE = st.floats(0.01, 100)
SIZE = st.sampled_from([1.0, 2.0, 4.0, 8.0, 64.0])


@settings(max_examples=60, deadline=None)
@given(POSITIVE, SIZE, POSITIVE, SIZE)
def test_no_pair_of_numbers_is_better_than_the_one_that_is_found(
    rate: float, gpus: float, own: float, size: float
) -> None:
    best = brute(rate, gpus, own, size)
    deployment = matched(points([(1.0, 0.0, rate, gpus)]), points([(0.0, 0.02, own, size)]), 2.0, 100)
    assert deployment.density[0] == pytest.approx(100 * best)


def test_the_best_context_engine_keeps_the_ttft() -> None:
    candidates = points([(3.0, 0, 9, 1), (1.0, 0, 8, 4), (1.5, 0, 3, 1), (0.5, 0, 1, 1)])
    assert best_context(candidates, 2.0) == 2
    assert best_context(candidates, 0.9) == 3
    assert best_context(candidates, 0.1) is None
    assert len(matched(candidates, points([(0, 0.02, 5, 1)]), 0.1, 100).density) == 0


def test_a_fixed_ratio_is_kept_in_gpus() -> None:
    context, generation = points([(1.0, 0, 4.0, 2)]), points([(0, 0.01, 1.0, 8), (0, 0.02, 3.0, 8)])
    for ratio in (0.5, 3.5):
        found = matched(context, generation, 2.0, 100, ratio)
        assert len(found.density) == 2
        assert found.ratio == pytest.approx([ratio, ratio], rel=0.1)
        assert (found.density <= matched(context, generation, 2.0, 100).density).all()


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), max_size=30))
def test_a_frontier_has_what_no_other_beats(rows: list[tuple[int, int]]) -> None:
    speed, density = np.array(rows, dtype=np.float64).reshape(-1, 2).T
    same: Any = np.zeros(len(speed))
    front = Deployments(speed, density, np.arange(len(speed)), same, same, same, same).frontier()
    unbeaten = {
        one for one in rows if not any(other != one and other[0] >= one[0] and other[1] >= one[1] for other in rows)
    }
    assert set(zip(front.speed.tolist(), front.density.tolist(), strict=True)) == unbeaten
    for at in (0.5, 3.0, 5.5, 9.0, 10.0):
        most = max((one[1] for one in rows if one[0] >= at), default=0.0)
        assert float(front.density_at(np.array(at))) == most
