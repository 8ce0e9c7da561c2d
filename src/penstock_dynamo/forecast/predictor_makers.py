"""Predictors of Dynamo's policies by name, each made of ``planner.classic.forecast``; their warm-up."""

from collections.abc import Callable, Sequence

from penstock import extension
from penstock.planner.forecast.predictor import IntervalShape, Predictor
from penstock.planner.forecast.trace_interval import TraceInterval
from penstock.planner.settings import PlannerSettings
from penstock_dynamo.forecast.arima import ArimaPredictor
from penstock_dynamo.forecast.constant import ConstantPredictor
from penstock_dynamo.forecast.kalman import KalmanPredictor
from penstock_dynamo.forecast.one_step import EnsemblePredictor, damped_trend
from penstock_dynamo.forecast.one_step import seasonal as of_seasons
from penstock_dynamo.forecast.prophet import ProphetPredictor
from penstock_dynamo.forecast.warm_up import warm_up


def predictor_of(settings: PlannerSettings, step: float) -> Callable[[], Predictor]:
    """Return a function that makes a predictor for intervals of ``step`` seconds, as set in planner.classic.forecast.

    Raises:
        ConfigError: it needs a library that is not installed.
    """
    name = settings.classic.forecast.predictor
    maker = extension.entry("predictor", name, "planner.classic.forecast.predictor")

    def make() -> Predictor:
        predictor: Predictor = maker(settings, step)
        return predictor

    make()  # a missing library is reported at the start, not at the first request
    return make


def shape_of(make: Callable[[], Predictor], trace: Sequence[TraceInterval], step: float) -> IntervalShape:
    """Return the predictors of one model, warmed up where there is a trace."""
    shape = IntervalShape(make)
    if trace:
        warm_up(shape, trace, step)
    return shape


def constant(settings: PlannerSettings, step: float) -> Predictor:
    return ConstantPredictor()


def kalman(settings: PlannerSettings, step: float) -> Predictor:
    forecast = settings.classic.forecast
    return KalmanPredictor(
        log1p=forecast.log1p,
        q_level=forecast.kalman_q_level,
        q_trend=forecast.kalman_q_trend,
        r=forecast.kalman_r,
        min_points=forecast.kalman_min_points,
    )


def arima(settings: PlannerSettings, step: float) -> Predictor:
    return ArimaPredictor(settings.classic.sla.load_prediction_window_size, log1p=settings.classic.forecast.log1p)


def prophet(settings: PlannerSettings, step: float) -> Predictor:
    window = settings.classic.sla.load_prediction_window_size
    return ProphetPredictor(step, window, log1p=settings.classic.forecast.log1p)


def seasonal(settings: PlannerSettings, step: float) -> Predictor:
    return of_seasons(log1p=settings.classic.forecast.log1p)


def trend(settings: PlannerSettings, step: float) -> Predictor:
    return damped_trend(log1p=settings.classic.forecast.log1p)


def ensemble(settings: PlannerSettings, step: float) -> Predictor:
    return EnsemblePredictor(log1p=settings.classic.forecast.log1p)
