"""Does the series lean on its own past? ARIMA with orders chosen by pmdarima, of the extra ``forecast``.

It is fitted once, when there are enough values, and goes on from there: choosing orders anew for every value is slow
and lets the forecast jump.
"""

import importlib
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.kernel.errors import ConfigError
from penstock.planner.forecast.base import MODEL_ERRORS, Series

HINT = "pip install 'penstock[forecast]', or choose constant or kalman"


class Arima(Series):
    """Automatic ARIMA.

    Args:
        min_points: values at which it is fitted; before, the last one is told.
    Raises:
        ConfigError: pmdarima is not installed.
    """

    name = "arima"

    def __init__(self, min_points: int = 5, *, log1p: bool = False) -> None:
        super().__init__(log1p=log1p)
        try:
            self._library: Any = importlib.import_module("pmdarima")
        except ImportError as error:
            raise ConfigError("the predictor is arima, which needs pmdarima", hint=HINT) from error
        self._min_points = min_points
        self._fitted: Any = None
        self._logged = False
        """Whether the fit is of log(1 + value) though that was not asked for."""

    def _terms(self, values: Sequence[float]) -> list[float]:
        return [math.log1p(value) for value in values] if self.log1p or self._logged else list(values)

    def _learn(self, value: float) -> None:
        if self._fitted is None:
            return
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self._fitted.update(self._terms(self.values[-1:]))
        except MODEL_ERRORS as error:  # the next forecast fits anew
            self.failed(error)
            self._fitted = None

    def _next(self) -> float | None:
        if len(self.values) < self._min_points:
            return None
        if min(self.values) == max(self.values):
            return self._terms(self.values[-1:])[0] if self.log1p else self.values[-1]
        try:
            if self._fitted is None:
                self._fit()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = float(self._fitted.predict(n_periods=1)[0])
        except MODEL_ERRORS as error:  # the last value is told, and why is counted
            self.failed(error)
            return None
        return math.expm1(min(found, 700.0)) if self._logged else found

    def _fit(self) -> None:
        self._logged = False
        self._fitted = self._auto(self._terms(self.values))
        p, _, q = self._fitted.order
        if p == 0 and q == 0 and not self.log1p:
            # Nothing but differences: it sees no structure in a bursty series; in logarithms there may be some.
            self._logged = True
            self._fitted = self._auto(self._terms(self.values))

    def _auto(self, terms: Sequence[float]) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return self._library.auto_arima(
                list(terms), seasonal=False, suppress_warnings=True, error_action="ignore", stepwise=True
            )

    def _state(self) -> dict[str, Any]:
        # The fit is not plain data: it is made anew of the values that were kept, when it is asked next.
        return {"logged": self._logged}

    def _become(self, state: Mapping[str, Any]) -> None:
        self._logged, self._fitted = state["logged"], None
