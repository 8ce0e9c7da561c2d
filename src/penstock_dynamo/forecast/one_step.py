"""One-step predictors: the ensemble and its experts behind the classic predictors' protocol, one interval ahead."""

from collections.abc import Callable

from penstock.planner.forecast.ensemble import RateForecast
from penstock.planner.forecast.experts import Expert, SeasonalExpert, TrendExpert, usual
from penstock.planner.forecast.predictor import PredictionSeries


class ExpertPredictor(PredictionSeries):
    """One expert, applied to the values themselves.

    Args:
        name: its name in the settings.
        make: makes the expert.
    """

    _expert: Expert

    def __init__(self, name: str, make: Callable[[], Expert], *, log1p: bool = False) -> None:
        super().__init__(log1p=log1p, values_max=1)
        self.name = name
        self._expert = make()

    def _learn(self, value: float) -> None:
        self._expert.add(value)

    def _next(self) -> float | None:
        path = self._expert.path((1,))
        return None if path is None else float(path[0])


class EnsemblePredictor(PredictionSeries):
    """All experts, weighted by their errors one interval ahead; the middle of the forecast counts."""

    name = "ensemble"

    _forecast: RateForecast

    def __init__(self, *, log1p: bool = False) -> None:
        super().__init__(log1p=log1p, values_max=1)
        self._forecast = RateForecast(width=1.0, experts=usual(group=1))  # a bin is an interval, and a rate is a value

    def _learn(self, value: float) -> None:
        self._forecast.add(value, 1.0)

    def _next(self) -> float | None:
        return float(self._forecast.quantiles((1.0,), (0.5,))[0, 0])


def seasonal(*, log1p: bool = False) -> ExpertPredictor:
    """Return the seasonal naive forecast: the value of one period ago, once two periods were seen; else the last."""
    return ExpertPredictor("seasonal", lambda: SeasonalExpert(group=1), log1p=log1p)


def damped_trend(*, log1p: bool = False) -> ExpertPredictor:
    """Return the damped trend: the last slope, fading."""
    return ExpertPredictor("trend", lambda: TrendExpert(0.5, 0.2, 0.9), log1p=log1p)
