"""ARIMA predictor for a series that depends on its own past; pmdarima, of the extra ``forecast``, chooses the orders.

The orders are chosen again for every forecast, from a window of values. A fit that is only updated keeps the orders of
its first values: those of steady traffic are often none at all, and then a rise moves the forecast no more than it
moves the mean of everything.
"""

import importlib
import warnings
from collections.abc import Sequence
from typing import Any

from penstock.kernel.errors import ConfigError
from penstock.kernel.machine import Snapshot
from penstock.planner.forecast.predictor import MODEL_ERRORS, POINTS_MIN, PredictionSeries

HINT = "pip install 'penstock[forecast]', or choose constant or kalman"
STEPS_MAX = 10
"""Orders that are tried for one forecast. It bounds the time without a clock: the search starts with four of them, and
more than ten took up to 13 s of a window of 50 values where ten took 3, and changed the forecast by 1 % or less."""


class ArimaPredictor(PredictionSeries):
    """Automatic ARIMA.

    Args:
        window: values for the fit; with fewer than `POINTS_MIN` the last one is the forecast.
    Raises:
        ConfigError: pmdarima is not installed.
    Cost: some 100 ms to a few seconds per forecast.
    """

    name = "arima"

    def __init__(self, window: int = 50, *, log1p: bool = False) -> None:
        super().__init__(log1p=log1p, values_max=max(window, POINTS_MIN))
        try:
            self._library: Any = importlib.import_module("pmdarima")
        except ImportError as error:
            raise ConfigError("the predictor is arima, which needs pmdarima", hint=HINT) from error
        self._forecast: float | None = None
        """Forecast for the present values; None where it is not made yet."""

    def _learn(self, value: float) -> None:
        self._forecast = None

    def _next(self) -> float | None:
        if len(self.values) < POINTS_MIN:
            return None
        terms = self.terms
        if min(terms) == max(terms):
            return terms[-1]  # pmdarima forecasts 0 for a constant series
        if self._forecast is None:
            try:
                self._forecast = self._auto(terms)
            except MODEL_ERRORS as error:  # the last value is the forecast, and the reason is counted
                self.failed(error)
        return self._forecast

    def _auto(self, terms: Sequence[float]) -> float:
        with warnings.catch_warnings(), self._library.StepwiseContext(max_steps=STEPS_MAX):
            warnings.simplefilter("ignore")
            fitted = self._library.auto_arima(
                list(terms), seasonal=False, suppress_warnings=True, error_action="ignore", stepwise=True
            )
            return float(fitted.predict(n_periods=1)[0])

    def restore(self, state: Snapshot) -> None:
        super().restore(state)
        self._forecast = None  # it follows from the values, so it is not stored
