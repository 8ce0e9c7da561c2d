"""Inputs of a policy beside settings and observations: known speeds of the engines, and an earlier trace."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from penstock.kernel.values import Role, Slo
from penstock.planner.forecast.arima import ArimaPredictor
from penstock.planner.forecast.constant import ConstantPredictor
from penstock.planner.forecast.kalman import KalmanPredictor
from penstock.planner.forecast.one_step import EnsemblePredictor, damped_trend, seasonal
from penstock.planner.forecast.predictor import IntervalShape, Predictor
from penstock.planner.forecast.prophet import ProphetPredictor
from penstock.planner.forecast.warm_up import TraceInterval, warm_up
from penstock.planner.performance.speed_sources import KnownSpeeds
from penstock.planner.settings import PlannerSettings


@dataclass(frozen=True, slots=True)
class PolicyInputs:
    """Data that is set, read or measured elsewhere, as plain data.

    Args:
        slo: the cluster's.
        speeds: by model and role, known speeds of an engine before it serves; model "" stands for all others.
        traces: by model, requests of an earlier time, for predictors to begin with; "" likewise.
    """

    slo: Slo = Slo()
    speeds: Mapping[str, Mapping[Role, KnownSpeeds]] = field(default_factory=dict)
    traces: Mapping[str, Sequence[TraceInterval]] = field(default_factory=dict)

    @property
    def ttft(self) -> float:
        """Seconds of TTFT that are kept."""
        return self.slo.planned[0]

    @property
    def itl(self) -> float:
        """Seconds of mean ITL that are kept."""
        return self.slo.planned[1]

    def of(self, model: str) -> Mapping[Role, KnownSpeeds]:
        """Return the known speeds of a model's engines."""
        return self.speeds.get(model, self.speeds.get("", {}))

    def trace(self, model: str) -> Sequence[TraceInterval]:
        """Return a model's earlier requests."""
        return self.traces.get(model, self.traces.get("", ()))


def predictor_of(settings: PlannerSettings, step: float) -> Callable[[], Predictor]:
    """Return a function that makes a predictor for intervals of ``step`` seconds, as set in planner.classic.forecast.

    Raises:
        ConfigError: it needs a library that is not installed.
    """
    forecast = settings.classic.forecast
    window = settings.classic.sla.load_prediction_window_size
    makers: dict[str, Callable[[], Predictor]] = {
        "constant": ConstantPredictor,
        "kalman": lambda: KalmanPredictor(
            log1p=forecast.log1p,
            q_level=forecast.kalman_q_level,
            q_trend=forecast.kalman_q_trend,
            r=forecast.kalman_r,
            min_points=forecast.kalman_min_points,
        ),
        "arima": lambda: ArimaPredictor(window, log1p=forecast.log1p),
        "prophet": lambda: ProphetPredictor(step, window, log1p=forecast.log1p),
        "seasonal": lambda: seasonal(log1p=forecast.log1p),
        "trend": lambda: damped_trend(log1p=forecast.log1p),
        "ensemble": lambda: EnsemblePredictor(log1p=forecast.log1p),
    }
    make = makers[forecast.predictor]
    make()  # a missing library is reported at the start, not at the first request
    return make


def shape_of(make: Callable[[], Predictor], trace: Sequence[TraceInterval], step: float) -> IntervalShape:
    """Return the predictors of one model, warmed up where there is a trace."""
    shape = IntervalShape(make)
    if trace:
        warm_up(shape, trace, step)
    return shape
