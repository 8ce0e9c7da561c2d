"""Lengths are drawn as they are distributed, and the same ones on every build."""

import math
import random

import pytest

from penstock_lab.traffic.lengths import Lognormal


@pytest.mark.parametrize("seed", range(5))
def test_a_lognormal_length_takes_the_draws_of_pythons_normal_deviate(seed: int) -> None:
    """So the traffic of a seed is what it was while `random.Random.normalvariate` drew it."""
    lengths = Lognormal(median=120, sigma=0.9, least=4, most=4096)
    ours, pythons = random.Random(seed), random.Random(seed)
    for _ in range(2000):
        drawn = round(math.exp(pythons.normalvariate(math.log(120), 0.9)))
        assert lengths.sample(ours) == min(max(drawn, 4), 4096)
    assert ours.getstate() == pythons.getstate()


def test_lengths_are_cut_at_both_ends() -> None:
    rng = random.Random(1)
    drawn = {Lognormal(median=100, sigma=2.0, least=50, most=200).sample(rng) for _ in range(500)}
    assert min(drawn) == 50 and max(drawn) == 200
