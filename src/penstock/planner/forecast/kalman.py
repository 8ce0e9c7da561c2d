"""Kalman filter over a level and its trend; it weighs each value by its noise."""

import numpy as np

from penstock.planner.forecast.experts import Floats
from penstock.planner.forecast.predictor import PredictionSeries

UNSURE = 1000.0
"""Variance of level and trend at the start: the first few values decide."""
LEVEL_VARIANCE = 1.0
TREND_VARIANCE = 0.1
"""Variance by which both wander per interval; larger follows faster. Dynamo's defaults, like the next two."""
NOISE_VARIANCE = 10.0
"""Of one value; larger smooths more."""
VALUES_MIN = 5
"""Values below which the last one is told."""
_STEP = np.array([[1.0, 1.0], [0.0, 1.0]])
_WANDER = np.diag([LEVEL_VARIANCE, TREND_VARIANCE])


class KalmanPredictor(PredictionSeries):
    """Local linear trend.

    Source: Harvey (1989), local linear trend model.
    """

    name = "kalman"

    _count: int
    _mean: Floats
    _spread: Floats

    def __init__(self, *, log1p: bool = False) -> None:
        super().__init__(log1p=log1p)
        self._mean = np.zeros(2)
        self._spread = UNSURE * np.eye(2)
        self._count = 0

    def _learn(self, value: float) -> None:
        self._count += 1
        if self._count == 1:
            self._mean = np.array([value, 0.0])
            return
        mean = _STEP @ self._mean
        spread = _STEP @ self._spread @ _STEP.T + _WANDER
        gain = spread[:, 0] / (spread[0, 0] + NOISE_VARIANCE)
        self._mean = mean + gain * (value - mean[0])
        self._spread = spread - np.outer(gain, spread[0])

    def _next(self) -> float | None:
        return None if self._count < VALUES_MIN else float((_STEP @ self._mean)[0])
