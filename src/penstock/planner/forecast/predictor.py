"""Base of the classic predictors: one value in per interval, a forecast of the next one out, never below zero.

The common rules are here: a gap in the metrics counts as 0, the quiet before the first request teaches nothing,
and prompt and output lengths of an interval without requests are those of the one before.
"""

import math
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from penstock.kernel.values import RequestShape
from penstock.planner.remembering import Remembering

MODEL_ERRORS = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""Exceptions of libraries for a series that they can't fit: they have no common base."""

POINTS_MIN = 5
"""Values that a library's model needs before its first forecast."""

VALUE_MAX = 1e15
"""Larger values are cut to this: their squares must stay finite."""


class Predictor(Protocol):
    """Forecasts one number per interval."""

    name: str

    def add(self, value: float) -> None:
        """Add the value of the interval that is over."""
        ...

    def predict(self) -> float:
        """Return the forecast for the next interval; 0 while nothing is known."""
        ...

    def skip_idle_again(self) -> None:
        """Skip zeros until the next value above 0, as at the start: a warm-up is over, traffic has yet to come."""
        ...

    def snapshot(self) -> Any:
        """Return the state as plain data."""
        ...

    def restore(self, state: Any) -> None:
        """Restore the state that `snapshot` wrote."""
        ...


class PredictionSeries(Remembering):
    """Common part of predictors: values cleaned, leading zeros skipped, forecasts clamped.

    Args:
        log1p: work on log(1 + value), which keeps a forecast of a falling series above 0 and tames bursts.
        values_max: values that are remembered.
    """

    name = "series"

    values: list[float]
    """Values in order of arrival, cleaned."""
    failures: dict[str, int]
    """How often the last value was the forecast because the model failed, by reason."""
    _idle: bool

    def __init__(self, *, log1p: bool = False, values_max: int = 1024) -> None:
        self.log1p = log1p
        self.values_max = values_max
        self.values = []
        self.failures = {}
        self._idle = True

    def add(self, value: float) -> None:
        cleaned = min(VALUE_MAX, max(0.0, value)) if math.isfinite(value) else 0.0
        if self._idle and cleaned == 0.0:
            return
        self._idle = False
        self.values.append(cleaned)
        del self.values[: -self.values_max]
        self._learn(math.log1p(cleaned) if self.log1p else cleaned)

    @property
    def terms(self) -> list[float]:
        """The values as the model takes them: as log(1 + value) where ``log1p`` is set."""
        return [math.log1p(value) for value in self.values] if self.log1p else list(self.values)

    def predict(self) -> float:
        if not self.values:
            return 0.0
        value = self._next()
        if value is None or not math.isfinite(value):
            return self.values[-1]
        # A steep end of a logarithm must not overflow.
        return max(0.0, math.expm1(min(value, 700.0)) if self.log1p else value)

    def skip_idle_again(self) -> None:
        self._idle = True

    def failed(self, error: Exception) -> None:
        """Count why the last value is the forecast instead of the model's."""
        reason = type(error).__name__
        self.failures[reason] = self.failures.get(reason, 0) + 1

    def _learn(self, value: float) -> None:
        """Add one value, as log(1 + value) where ``log1p`` is set."""

    def _next(self) -> float | None:
        """Return the next value on the same scale; None means the last one."""
        return None


class IntervalCounts(msgspec.Struct, frozen=True):
    """One interval, observed or forecast: requests, and the mean of them."""

    requests: float
    shape: RequestShape[float]


class IntervalShape(Remembering):
    """Requests and both mean lengths, each with its own predictor.

    Args:
        make: makes one predictor.
    """

    _predictors: dict[str, Predictor]
    _last: RequestShape[float] | None

    def __init__(self, make: Callable[[], Predictor]) -> None:
        self._predictors = {part: make() for part in ("requests", "isl", "osl")}
        self._last = None

    @property
    def has_traffic(self) -> bool:
        """Whether there was any traffic."""
        return self._last is not None

    def add(self, requests: float, shape: RequestShape[float | None]) -> None:
        """Add one interval: its requests and the mean of them; without requests the earlier lengths continue."""
        arrived = math.isfinite(requests) and requests > 0.0
        if arrived:
            before = self._last or RequestShape(0.0, 0.0)
            self._last = RequestShape(_known_length(shape.isl, before.isl), _known_length(shape.osl, before.osl))
        self._predictors["requests"].add(requests if arrived else 0.0)
        if self._last is not None:
            self._predictors["isl"].add(self._last.isl)
            self._predictors["osl"].add(self._last.osl)

    def predict(self) -> IntervalCounts:
        """Return the forecast for the next interval."""
        requests, isl, osl = (predictor.predict() for predictor in self._predictors.values())
        return IntervalCounts(requests, RequestShape(isl, osl))

    def warmed_up(self) -> None:
        """Mark the end of a warm-up trace: idle time until the first request does not count."""
        for predictor in self._predictors.values():
            predictor.skip_idle_again()


def _known_length(length: float | None, before: float) -> float:
    return length if length is not None and math.isfinite(length) and length > 0.0 else before
