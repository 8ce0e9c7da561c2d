"""Kalman filter over a level and its trend; it weighs each value by its noise."""

import numpy as np

from penstock.planner.forecast.experts import Floats
from penstock.planner.forecast.predictor import PredictionSeries

UNSURE = 1000.0
"""Variance of level and trend at the start: the first few values decide."""
_STEP = np.array([[1.0, 1.0], [0.0, 1.0]])


class KalmanPredictor(PredictionSeries):
    """Local linear trend.

    Args:
        q_level, q_trend: variance by which level and trend wander per interval; ``r``: of one value, as noise.
        min_points: values below which the last one is told.

    Source: Harvey (1989), local linear trend model.
    """

    name = "kalman"

    _count: int
    _mean: Floats
    _spread: Floats

    def __init__(
        self,
        *,
        log1p: bool = False,
        q_level: float = 1.0,
        q_trend: float = 0.1,
        r: float = 10.0,
        min_points: int = 5,
    ) -> None:
        super().__init__(log1p=log1p)
        self._wander = np.diag([q_level, q_trend])
        self._noise, self._least = r, min_points
        self._mean = np.zeros(2)
        self._spread = UNSURE * np.eye(2)
        self._count = 0

    def _learn(self, value: float) -> None:
        self._count += 1
        if self._count == 1:
            self._mean = np.array([value, 0.0])
            return
        mean = _STEP @ self._mean
        spread = _STEP @ self._spread @ _STEP.T + self._wander
        gain = spread[:, 0] / (spread[0, 0] + self._noise)
        self._mean = mean + gain * (value - mean[0])
        self._spread = spread - np.outer(gain, spread[0])

    def _next(self) -> float | None:
        return None if self._count < self._least else float((_STEP @ self._mean)[0])
