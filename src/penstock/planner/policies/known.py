"""What does a policy have beside the settings and what it sees? What is known of the engines, and an earlier trace."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from penstock.kernel.values import Role
from penstock.planner.forecast.arima import Arima
from penstock.planner.forecast.base import Predictor, Shape
from penstock.planner.forecast.constant import Constant
from penstock.planner.forecast.kalman import Kalman
from penstock.planner.forecast.one_step import Ensemble, damped_trend, seasonal
from penstock.planner.forecast.prophet import Prophet
from penstock.planner.forecast.warm_up import Row, warm_up
from penstock.planner.performance.sources import Known
from penstock.planner.settings import PlannerSettings


@dataclass(frozen=True, slots=True)
class Inputs:
    """What is read or measured elsewhere, as plain data.

    Args:
        known: by model and role, what is known of an engine before it serves; "" as a model is for all others.
        traces: by model, requests of an earlier time, for predictors to begin with; "" likewise.
    """

    known: Mapping[str, Mapping[Role, Known]] = field(default_factory=dict)
    traces: Mapping[str, Sequence[Row]] = field(default_factory=dict)

    def of(self, model: str) -> Mapping[Role, Known]:
        """Return what is known of a model's engines."""
        return self.known.get(model, self.known.get("", {}))

    def trace(self, model: str) -> Sequence[Row]:
        """Return a model's earlier requests."""
        return self.traces.get(model, self.traces.get("", ()))


def predictor_of(settings: PlannerSettings, step: float) -> Callable[[], Predictor]:
    """Return what makes a predictor of intervals of ``step`` seconds, as planner.classic.forecast asks for it.

    Raises:
        ConfigError: it needs a library that is not installed.
    """
    told = settings.classic.forecast
    window = settings.classic.sla.load_prediction_window_size
    makers: dict[str, Callable[[], Predictor]] = {
        "constant": Constant,
        "kalman": lambda: Kalman(
            told.kalman_q_level, told.kalman_q_trend, told.kalman_r, told.kalman_min_points, log1p=told.log1p
        ),
        "arima": lambda: Arima(log1p=told.log1p),
        "prophet": lambda: Prophet(step, window, log1p=told.log1p),
        "seasonal": lambda: seasonal(log1p=told.log1p),
        "trend": lambda: damped_trend(log1p=told.log1p),
        "ensemble": lambda: Ensemble(log1p=told.log1p),
    }
    make = makers[told.predictor]
    make()  # what is not installed is told at the start, not at the first request
    return make


def shape_of(make: Callable[[], Predictor], trace: Sequence[Row], step: float) -> Shape:
    """Return the predictors of one model, warmed up where there is a trace."""
    shape = Shape(make)
    if trace:
        warm_up(shape, trace, step)
    return shape
