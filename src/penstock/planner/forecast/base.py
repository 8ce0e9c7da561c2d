"""What does every classic predictor do? It takes in one value per interval and says the next one, never below zero.

What they share is here: a gap in the metrics counts as nothing, the quiet before the first request teaches nothing,
and prompt and output lengths of an interval without requests are those of the one before.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

MODEL_ERRORS = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What libraries raise on a series that they can't fit: they have no common base."""

VALUE_MAX = 1e15
"""Larger ones are taken for this: their squares must stay numbers."""


class Predictor(Protocol):
    """Forecasts one number per interval."""

    name: str

    def add(self, value: float) -> None:
        """Take in what the interval that is over had."""
        ...

    def predict(self) -> float:
        """Return what the next interval is expected to have; 0 while nothing is known."""
        ...

    def skip_idle_again(self) -> None:
        """Pass over zeros until the next value above 0, as at the start: a warm-up is over, traffic has yet to come."""
        ...

    def snapshot(self) -> Any:
        """Return the state as plain data."""
        ...

    def restore(self, state: Any) -> None:
        """Become the predictor that wrote ``state``."""
        ...


class Series:
    """What predictors share: values cleaned, leading zeros passed over, forecasts clamped.

    Args:
        log1p: work on log(1 + value), which keeps a forecast of a falling series above 0 and tames bursts.
        kept: values that are remembered.
    """

    name = "series"

    def __init__(self, *, log1p: bool = False, kept: int = 1024) -> None:
        self.log1p = log1p
        self.kept = kept
        self.values: list[float] = []
        """As they came, cleaned."""
        self.failures: dict[str, int] = {}
        """How often the last value was told because the model failed, by reason."""
        self._idle = True

    def add(self, value: float) -> None:
        cleaned = min(VALUE_MAX, max(0.0, value)) if math.isfinite(value) else 0.0
        if self._idle and cleaned == 0.0:
            return
        self._idle = False
        self.values.append(cleaned)
        del self.values[: -self.kept]
        self._learn(math.log1p(cleaned) if self.log1p else cleaned)

    def predict(self) -> float:
        if not self.values:
            return 0.0
        found = self._next()
        if found is None or not math.isfinite(found):
            return self.values[-1]
        # A steep end of a logarithm must not overflow.
        return max(0.0, math.expm1(min(found, 700.0)) if self.log1p else found)

    def skip_idle_again(self) -> None:
        self._idle = True

    def snapshot(self) -> dict[str, Any]:
        return {
            "values": list(self.values),
            "idle": self._idle,
            "failures": dict(self.failures),
            "own": self._state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self.values, self._idle = list(state["values"]), state["idle"]
        self.failures = dict(state["failures"])
        self._become(state["own"])

    def failed(self, error: Exception) -> None:
        """Count why the last value is told instead of a forecast."""
        reason = type(error).__name__
        self.failures[reason] = self.failures.get(reason, 0) + 1

    def _learn(self, value: float) -> None:
        """Take in one value, as log(1 + value) where that is asked for."""

    def _next(self) -> float | None:
        """Return the next value in the same terms; None is the last one."""
        return None

    def _state(self) -> Any:
        return None

    def _become(self, state: Any) -> None:
        return None


class Interval(NamedTuple):
    """What one interval had, or is expected to have: requests, and mean tokens of prompt and output."""

    requests: float
    isl: float
    osl: float


class Shape:
    """Requests and both mean lengths, each by a predictor of its own.

    Args:
        make: makes one predictor.
    """

    def __init__(self, make: Callable[[], Predictor]) -> None:
        self.requests, self.isl, self.osl = make(), make(), make()
        self._last: Interval | None = None

    @property
    def seen(self) -> bool:
        """Whether there was any traffic."""
        return self._last is not None

    def add(self, seen: Interval) -> None:
        """Take in one interval; one without requests says nothing of lengths, so the ones before go on."""
        requests = seen.requests if math.isfinite(seen.requests) else 0.0
        if requests <= 0.0:
            self.requests.add(0.0)
            if self._last is not None:
                self.isl.add(self._last.isl)
                self.osl.add(self._last.osl)
            return
        before = self._last or Interval(0.0, 0.0, 0.0)
        isl = seen.isl if math.isfinite(seen.isl) and seen.isl > 0.0 else before.isl
        osl = seen.osl if math.isfinite(seen.osl) and seen.osl > 0.0 else before.osl
        self._last = Interval(requests, isl, osl)
        self.requests.add(requests)
        self.isl.add(isl)
        self.osl.add(osl)

    def predict(self) -> Interval:
        """Return what the next interval is expected to have."""
        return Interval(self.requests.predict(), self.isl.predict(), self.osl.predict())

    def warmed_up(self) -> None:
        """Say that what was added so far came from a trace: idle time until the first request counts for nothing."""
        for predictor in (self.requests, self.isl, self.osl):
            predictor.skip_idle_again()

    def snapshot(self) -> dict[str, Any]:
        return {
            "requests": self.requests.snapshot(),
            "isl": self.isl.snapshot(),
            "osl": self.osl.snapshot(),
            "last": None if self._last is None else list(self._last),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        for name in ("requests", "isl", "osl"):
            getattr(self, name).restore(state[name])
        self._last = None if state["last"] is None else Interval(*state["last"])
