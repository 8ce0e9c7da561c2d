"""Prophet predictor for trend and seasons, of the extra ``forecast``: fitted to a window for each forecast."""

import importlib
import logging
import warnings
from typing import Any

from penstock.kernel.errors import ConfigError
from penstock.planner.forecast.predictor import MODEL_ERRORS, POINTS_MIN, PredictionSeries

HINT = "pip install 'penstock[forecast]', or choose constant or kalman"
EPOCH = "2024-01-01"
"""Start of its time axis: only distances count."""


class ProphetPredictor(PredictionSeries):
    """Trend and seasons.

    Args:
        step: seconds between two values.
        window: values for the fit; with fewer than `POINTS_MIN` the last one is the forecast.
    Raises:
        ConfigError: prophet is not installed.
    Cost: some 100 ms per forecast.
    """

    name = "prophet"

    _first: int
    """Place of the oldest value on the time axis: a season keeps its place while the window moves on."""

    def __init__(self, step: float, window: int = 50, *, log1p: bool = False) -> None:
        super().__init__(log1p=log1p, values_max=max(window, POINTS_MIN))
        try:
            self._library: Any = importlib.import_module("prophet")
            self._tables: Any = importlib.import_module("pandas")
        except ImportError as error:
            raise ConfigError("the predictor is prophet, which is not installed", hint=HINT) from error
        self._step = step
        self._first = 0

    def _learn(self, value: float) -> None:
        if len(self.values) == self.values_max:
            self._first += 1

    def _next(self) -> float | None:
        if len(self.values) < POINTS_MIN:
            return None
        terms = self.terms
        step = self._tables.Timedelta(seconds=self._step)
        start = self._tables.Timestamp(EPOCH) + self._first * step
        times = [start + place * step for place in range(len(terms) + 1)]
        logging.getLogger("cmdstanpy").setLevel(logging.WARNING)  # it logs every fit at level INFO
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model = self._library.Prophet()
                model.fit(self._tables.DataFrame({"ds": times[:-1], "y": terms}))
                forecast = model.predict(self._tables.DataFrame({"ds": times[-1:]}))
                return float(forecast["yhat"].iloc[0])
        except MODEL_ERRORS as error:  # the last value is the forecast, and the reason is counted
            self.failed(error)
            return None
