"""The classic predictors, by their golden cases, and what holds for all of them whatever comes."""

import math
import random
import sys

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.kernel.errors import ConfigError
from penstock.kernel.values import RequestShape
from penstock.planner.forecast.predictor import IntervalCounts, IntervalShape, PredictionSeries
from penstock.planner.forecast.trace_interval import TraceInterval
from penstock.planner.policies import make
from penstock.planner.settings import PlannerSettings
from penstock_dynamo.forecast.arima import ArimaPredictor
from penstock_dynamo.forecast.constant import ConstantPredictor
from penstock_dynamo.forecast.kalman import KalmanPredictor
from penstock_dynamo.forecast.predictor_makers import predictor_of
from penstock_dynamo.forecast.prophet import ProphetPredictor
from penstock_dynamo.forecast.warm_up import intervals, warm_up
from penstock_dynamo.settings_classic import ClassicSettings, ForecastSettings
from tests.depth import deep


def told(predictor, values) -> list[float]:
    """Return what is predicted after each value."""
    found = []
    for value in values:
        predictor.add(value)
        found.append(predictor.predict())
    return found


def test_constant_tells_the_last_value():
    assert told(ConstantPredictor(), [10, 20, 30]) == [10, 20, 30]
    assert told(ConstantPredictor(), [0, 0]) == [0, 0] and ConstantPredictor().predict() == 0
    assert told(ConstantPredictor(), [5, math.nan]) == [5, 0]


def test_kalman_by_its_golden_cases():
    falling = told(KalmanPredictor(), [100, 80, 60, 40, 20, 10, 0, 0])
    assert falling == pytest.approx([100, 80, 60, 40, 0.1044, 0, 0, 0], rel=1e-3)
    rising = told(KalmanPredictor(), [0, 0, 10, 20, 30, 40, 50, 60])
    assert rising == pytest.approx([0, 0, 10, 20, 30, 40, 59.9478, 69.9685], rel=1e-4)


def test_kalman_follows_as_it_is_set():
    """A trend that wanders without noise is the last step; all noise keeps the first value."""
    forecast = ForecastSettings(kalman_q_level=1e-6, kalman_q_trend=1e9, kalman_r=1e-6, kalman_min_points=2)
    predictor = predictor_of(PlannerSettings(classic=ClassicSettings(forecast=forecast)), 60.0)()
    assert told(predictor, [100, 80, 60, 70]) == pytest.approx([100, 70, 40, 80], rel=1e-3)
    calm = ForecastSettings(kalman_r=1e9, kalman_min_points=1)
    predictor = predictor_of(PlannerSettings(classic=ClassicSettings(forecast=calm)), 60.0)()
    assert told(predictor, [10, 1000]) == pytest.approx([10, 10], rel=1e-3)


@pytest.mark.parametrize("log1p", [False, True])
def test_asking_twice_changes_nothing(log1p):
    one, two = KalmanPredictor(log1p=log1p), KalmanPredictor(log1p=log1p)
    for value in (3, 9, 4, 7, 7, 2, 8):
        one.add(value)
        two.add(value)
        one.predict()
        one.predict()
    assert one.predict() == two.predict()


values = st.lists(st.floats(allow_nan=True, allow_infinity=True) | st.floats(0, 1e6), max_size=30)


@given(values, st.sampled_from([ConstantPredictor, KalmanPredictor, lambda: KalmanPredictor(log1p=True)]))
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
    assert told(ArimaPredictor(), [10] * 6)[-1] == 10
    assert told(ArimaPredictor(), [0, 0, 5, 6, 7]) == [0, 0, 5, 6, 7]
    trend = ArimaPredictor()
    for value in range(10, 110, 10):
        trend.add(value)
    assert trend.predict() == pytest.approx(110, rel=0.2)
    other = ArimaPredictor()
    other.restore(trend.snapshot())
    assert other.predict() == pytest.approx(trend.predict(), rel=0.05)


def test_arima_whose_model_fails_tells_the_last_value_and_counts_why(monkeypatch):
    pytest.importorskip("pmdarima", reason="pmdarima is not installed")
    predictor = ArimaPredictor()
    for value in (1, 5, 2, 8, 3):
        predictor.add(value)

    def broken(terms):
        raise FloatingPointError("singular")

    monkeypatch.setattr(predictor, "_auto", broken)
    assert predictor.predict() == 3 and predictor.failures == {"FloatingPointError": 1}


@pytest.mark.parametrize("seed", range(deep(3)))
def test_arima_follows_a_level_shift(seed):
    pytest.importorskip("pmdarima", reason="pmdarima is not installed")
    predictor, noise = ArimaPredictor(), random.Random(seed)
    found = told(predictor, [max(0.0, noise.gauss(level, level**0.5)) for level in [120] * 6 + [720] * 8])
    assert found[5] == pytest.approx(120, rel=0.3) and not predictor.failures
    # A fit that was chosen of steady traffic and then only updated says the mean of everything: some 460.
    assert found[-1] > 0.7 * 720


def test_arima_fits_the_window_and_tries_few_orders(monkeypatch):
    library = pytest.importorskip("pmdarima", reason="pmdarima is not installed")
    fitted, steps = [], []
    choose, bound = library.auto_arima, library.StepwiseContext

    def auto_arima(terms, **options):
        fitted.append(list(terms))
        return choose(terms, **options)

    def limited(**options):
        steps.append(options["max_steps"])
        return bound(**options)

    monkeypatch.setattr(library, "auto_arima", auto_arima)
    monkeypatch.setattr(library, "StepwiseContext", limited)
    predictor = ArimaPredictor(window=6)
    told(predictor, [3, 1, 4, 1, 5])
    for value in (9, 2, 6):
        predictor.add(value)
    predictor.predict()
    assert predictor.predict() == predictor.predict()
    assert fitted == [[3, 1, 4, 1, 5], [4, 1, 5, 9, 2, 6]], "one fit per forecast, and none without new values"
    assert steps == [10, 10]


@pytest.mark.parametrize("name", ["arima", "prophet"])
def test_the_window_of_the_settings_reaches_those_that_fit(name):
    pytest.importorskip({"arima": "pmdarima"}.get(name, name), reason=f"{name} is not installed")
    classic = {"forecast": {"predictor": name}, "sla": {"load_prediction_window_size": 7}}
    predictor = predictor_of(msgspec.convert({"classic": classic}, PlannerSettings), 180.0)()
    assert isinstance(predictor, PredictionSeries) and predictor.values_max == 7


def test_prophet_follows_a_line_in_its_window():
    pytest.importorskip("prophet", reason="prophet is not installed")
    predictor = ProphetPredictor(step=180.0, window=20)
    found = told(predictor, [float(value) for value in range(1, 5)])
    assert found == [1, 2, 3, 4]
    for value in range(5, 40):
        predictor.add(float(value))
    assert predictor.predict() == pytest.approx(40.0, rel=0.05)
    assert len(predictor.values) == 20 and not predictor.failures


def test_lengths_of_an_idle_interval_are_those_before():
    shape = IntervalShape(ConstantPredictor)
    shape.add(0, RequestShape(0, 0))
    assert not shape.has_traffic and shape.predict() == IntervalCounts(0, RequestShape(0, 0))
    shape.add(10, RequestShape(1000, 100))
    shape.add(0, RequestShape(math.nan, math.nan))
    assert shape.predict() == IntervalCounts(0, RequestShape(1000, 100))
    other = IntervalShape(ConstantPredictor)
    other.restore(shape.snapshot())
    assert other.predict() == shape.predict()


def test_a_trace_is_cut_into_intervals_with_its_gaps():
    rows = [
        TraceInterval(5.0, RequestShape(100, 10)),
        TraceInterval(1.0, RequestShape(300, 30)),
        TraceInterval(35.0, RequestShape(50, 5)),
    ]
    assert list(intervals(rows, 10.0)) == [
        IntervalCounts(2, RequestShape(200, 20)),
        IntervalCounts(0, RequestShape(0, 0)),
        IntervalCounts(0, RequestShape(0, 0)),
        IntervalCounts(1, RequestShape(50, 5)),
    ]
    assert list(intervals([], 10.0)) == []
    with pytest.raises(ValueError, match="in seconds"):
        list(intervals([TraceInterval(0.0, RequestShape(1, 1)), TraceInterval(1e12, RequestShape(1, 1))], 10.0))


def test_after_a_warm_up_the_wait_for_the_first_request_teaches_nothing():
    shape = IntervalShape(ConstantPredictor)
    rows = [TraceInterval(1.0, RequestShape(300, 30)), TraceInterval(2.0, RequestShape(100, 10))]
    assert warm_up(shape, rows, 10.0) == 1
    shape.add(0, RequestShape(0, 0))
    assert shape.predict() == IntervalCounts(2, RequestShape(200, 20))
    shape.add(4, RequestShape(10, 10))
    shape.add(0, RequestShape(0, 0))
    assert shape.predict().requests == 0


@pytest.mark.parametrize(("name", "library"), [("arima", "pmdarima"), ("prophet", "prophet")])
def test_a_predictor_without_its_library_says_what_to_install(monkeypatch, name, library):
    monkeypatch.setitem(sys.modules, library, None)
    settings = msgspec.convert({"classic": {"forecast": {"predictor": name}}}, PlannerSettings)
    with pytest.raises(ConfigError, match=r"penstock\[forecast\]"):
        make("throughput-fpm", settings)
