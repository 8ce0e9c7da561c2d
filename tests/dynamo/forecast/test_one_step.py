"""Do the ensemble and its experts serve as predictors of one interval ahead?"""

import math
from collections.abc import Callable

import msgspec
import pytest

from penstock.planner.forecast.predictor import Predictor
from penstock_dynamo.forecast.constant import ConstantPredictor
from penstock_dynamo.forecast.one_step import EnsemblePredictor, damped_trend, seasonal

MAKERS: dict[str, Callable[[], Predictor]] = {
    "seasonal": seasonal,
    "trend": damped_trend,
    "ensemble": EnsemblePredictor,
    "log": lambda: EnsemblePredictor(log1p=True),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_what_is_level_stays_so_and_nothing_is_below_zero(make: Callable[[], Predictor]) -> None:
    predictor = make()
    assert predictor.predict() == 0.0
    for value in [0.0, 0.0, *[20.0] * 30]:
        predictor.add(value)
    assert predictor.predict() == pytest.approx(20.0, rel=0.05)
    for value in (10.0, 5.0, 1.0, 0.0, 0.0, math.nan, 0.0):
        predictor.add(value)
        assert predictor.predict() >= 0.0


def test_a_period_is_found_and_followed() -> None:
    wave = [50.0 + 40.0 * math.sin(2 * math.pi * n / 24) for n in range(24 * 4)]
    found, last = seasonal(), ConstantPredictor()
    errors = {found: 0.0, last: 0.0}
    for n, value in enumerate(wave):
        for predictor in errors:
            if n >= 72:
                errors[predictor] += abs(predictor.predict() - value)
            predictor.add(value)
    assert errors[found] < 0.5 * errors[last]


def test_a_trend_goes_on() -> None:
    predictor = damped_trend()
    for n in range(20):
        predictor.add(10.0 * n)
    assert 190.0 < predictor.predict() <= 205.0


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_who_is_restored_says_the_same(make: Callable[[], Predictor]) -> None:
    one, other = make(), make()
    for n in range(40):
        one.add(10.0 + n % 7)
    other.restore(msgspec.msgpack.decode(msgspec.msgpack.encode(one.snapshot()), strict=False))
    for n in range(10):
        assert one.predict() == other.predict()
        one.add(float(n))
        other.add(float(n))


@pytest.mark.parametrize("period", [4, 6, 10, 12, 20])
def test_a_square_pattern_is_followed_by_the_ensemble(period: int) -> None:
    found = EnsemblePredictor()
    ours = last = 0.0
    values = [100.0 if number % period < period // 2 else 20.0 for number in range(8 * period)]
    for number, value in enumerate(values):
        if number > 4 * period:
            expected = found._next()
            assert expected is not None
            ours, last = ours + abs(expected - value), last + abs(values[number - 1] - value)
        found._learn(value)
    assert ours < 0.6 * last
