"""The classic predictors, by their golden cases, and what holds for all of them whatever comes."""

import math
import sys

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.kernel.errors import ConfigError
from penstock.planner.forecast.arima import Arima
from penstock.planner.forecast.base import Interval, Shape
from penstock.planner.forecast.constant import Constant
from penstock.planner.forecast.kalman import Kalman
from penstock.planner.forecast.prophet import Prophet
from penstock.planner.forecast.warm_up import Row, intervals, warm_up
from penstock.planner.policies import make
from penstock.planner.settings import PlannerSettings


def told(predictor, values) -> list[float]:
    """Return what is predicted after each value."""
    found = []
    for value in values:
        predictor.add(value)
        found.append(predictor.predict())
    return found


def test_constant_tells_the_last_value():
    assert told(Constant(), [10, 20, 30]) == [10, 20, 30]
    assert told(Constant(), [0, 0]) == [0, 0] and Constant().predict() == 0
    assert told(Constant(), [5, math.nan]) == [5, 0]


def test_kalman_by_its_golden_cases():
    falling = told(Kalman(), [100, 80, 60, 40, 20, 10, 0, 0])
    assert falling == pytest.approx([100, 80, 60, 40, 0.1044, 0, 0, 0], rel=1e-3)
    rising = told(Kalman(), [0, 0, 10, 20, 30, 40, 50, 60])
    assert rising == pytest.approx([0, 0, 10, 20, 30, 40, 59.9478, 69.9685], rel=1e-4)


@pytest.mark.parametrize("log1p", [False, True])
def test_asking_twice_changes_nothing(log1p):
    one, two = Kalman(log1p=log1p), Kalman(log1p=log1p)
    for value in (3, 9, 4, 7, 7, 2, 8):
        one.add(value)
        two.add(value)
        one.predict()
        one.predict()
    assert one.predict() == two.predict()


values = st.lists(st.floats(allow_nan=True, allow_infinity=True) | st.floats(0, 1e6), max_size=30)


@given(values, st.sampled_from([Constant, Kalman, lambda: Kalman(log1p=True)]))
def test_never_negative_never_nan_and_a_restart_changes_nothing(series, make):
    predictor = make()
    for value in series:
        predictor.add(value)
        found = predictor.predict()
        assert math.isfinite(found) and found >= 0.0
    other = make()
    other.restore(predictor.snapshot())
    for value in (1.0, 2.0):
        predictor.add(value)
        other.add(value)
        assert other.predict() == predictor.predict()


def test_arima_by_its_golden_cases():
    pytest.importorskip("pmdarima", reason="pmdarima is not installed")
    assert told(Arima(), [10] * 6)[-1] == 10
    assert told(Arima(), [0, 0, 5, 6, 7]) == [0, 0, 5, 6, 7]
    trend = Arima()
    for value in range(10, 110, 10):
        trend.add(value)
    assert trend.predict() == pytest.approx(110, rel=0.2)
    other = Arima()
    other.restore(trend.snapshot())
    assert other.predict() == pytest.approx(trend.predict(), rel=0.05)


def test_arima_whose_model_fails_tells_the_last_value_and_counts_why(monkeypatch):
    pytest.importorskip("pmdarima", reason="pmdarima is not installed")
    predictor = Arima()
    for value in (1, 5, 2, 8, 3):
        predictor.add(value)

    def broken(terms):
        raise FloatingPointError("singular")

    monkeypatch.setattr(predictor, "_auto", broken)
    assert predictor.predict() == 3 and predictor.failures == {"FloatingPointError": 1}


def test_arima_without_structure_is_fitted_on_logarithms():
    pytest.importorskip("pmdarima", reason="pmdarima is not installed")
    predictor = Arima()
    for value in (1, 50, 1, 50, 1, 1, 50, 1, 50, 50):
        predictor.add(value)
    assert 0.0 <= predictor.predict() < 500.0


def test_prophet_follows_a_line_in_its_window():
    pytest.importorskip("prophet", reason="prophet is not installed")
    predictor = Prophet(step=180.0, window=20)
    found = told(predictor, [float(value) for value in range(1, 5)])
    assert found == [1, 2, 3, 4]
    for value in range(5, 40):
        predictor.add(float(value))
    assert predictor.predict() == pytest.approx(40.0, rel=0.05)
    assert len(predictor.values) == 20 and not predictor.failures


def test_lengths_of_an_idle_interval_are_those_before():
    shape = Shape(Constant)
    shape.add(Interval(0, 0, 0))
    assert not shape.seen and shape.predict() == (0, 0, 0)
    shape.add(Interval(10, 1000, 100))
    shape.add(Interval(0, math.nan, math.nan))
    assert shape.predict() == (0, 1000, 100)
    other = Shape(Constant)
    other.restore(shape.snapshot())
    assert other.predict() == shape.predict()


def test_a_trace_is_cut_into_intervals_with_its_gaps():
    rows = [Row(5.0, 100, 10), Row(1.0, 300, 30), Row(35.0, 50, 5)]
    assert list(intervals(rows, 10.0)) == [(2, 200, 20), (0, 0, 0), (0, 0, 0), (1, 50, 5)]
    assert list(intervals([], 10.0)) == []
    with pytest.raises(ValueError, match="in seconds"):
        list(intervals([Row(0.0, 1, 1), Row(1e12, 1, 1)], 10.0))


def test_after_a_warm_up_the_wait_for_the_first_request_teaches_nothing():
    shape = Shape(Constant)
    assert warm_up(shape, [Row(1.0, 300, 30), Row(2.0, 100, 10)], 10.0) == 1
    shape.add(Interval(0, 0, 0))
    assert shape.predict() == (2, 200, 20)
    shape.add(Interval(4, 10, 10))
    shape.add(Interval(0, 0, 0))
    assert shape.predict().requests == 0


@pytest.mark.parametrize(("name", "library"), [("arima", "pmdarima"), ("prophet", "prophet")])
def test_a_predictor_without_its_library_says_what_to_install(monkeypatch, name, library):
    monkeypatch.setitem(sys.modules, library, None)
    settings = msgspec.convert({"classic": {"forecast": {"predictor": name}}}, PlannerSettings)
    with pytest.raises(ConfigError, match=r"penstock\[forecast\]"):
        make("throughput-fpm", settings)
