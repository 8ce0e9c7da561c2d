"""Does the factor on the rate find by how much a model of engines errs, and forget it when that is over?"""

import random

import msgspec
import numpy as np
import pytest

from penstock.planner.sizing.load_correction import LoadCorrection


def kept_at(load: float):
    """Return the share kept at a load (1 is full), for factors on it: flat, then a cliff."""
    return lambda factors: 1.0 / (1.0 + np.exp((np.asarray(factors) * load - 1.0) * 14.0))


def learn(stress: LoadCorrection, true: float, windows: int, seed: int, loads=(0.6, 0.75, 0.9)) -> None:
    dice = random.Random(seed)
    for _ in range(windows):
        expected = kept_at(dice.choice(loads))
        share = float(expected(np.array([true]))[0])
        stress.learn(sum(dice.random() < share for _ in range(100)), 100, expected)


def test_at_first_the_model_is_thought_right():
    assert LoadCorrection().factor == pytest.approx(1.0, abs=0.03)


@pytest.mark.parametrize("true", [0.85, 1.0, 1.15, 1.35])
def test_a_known_error_is_found(true):
    found = []
    for seed in range(5):
        stress = LoadCorrection()
        learn(stress, true, 60, seed)
        found.append(stress.factor)
    assert sum(found) / len(found) == pytest.approx(true, rel=0.08)


def test_what_is_over_is_forgotten():
    stress = LoadCorrection()
    learn(stress, 1.35, 60, 1)
    hard = stress.factor
    learn(stress, 1.0, 80, 2)
    assert hard > 1.2 and stress.factor < 1.1


def test_a_quiet_fleet_says_hardly_anything():
    stress = LoadCorrection()
    learn(stress, 1.35, 60, 1, loads=(0.2,))
    assert stress.factor == pytest.approx(1.0, abs=0.06)


def test_a_window_without_requests_and_one_of_which_nothing_is_known_teach_nothing():
    stress = LoadCorrection()
    stress.learn(0, 0, kept_at(0.9))
    assert stress.windows == 0 and stress.factor == LoadCorrection().factor


def test_a_lost_window_does_not_carry_it_away():
    stress = LoadCorrection()
    stress.learn(0, 10_000, kept_at(0.1))
    assert 0.7 <= stress.factor <= 1.9 and np.isfinite(stress.factor)


def test_what_is_kept_and_read_again_is_the_same():
    stress, twin = LoadCorrection(), LoadCorrection()
    learn(stress, 1.3, 20, 1)
    twin.restore(msgspec.json.decode(msgspec.json.encode(stress.snapshot())))
    learn(stress, 1.0, 5, 2)
    learn(twin, 1.0, 5, 2)
    assert twin.factor == stress.factor
