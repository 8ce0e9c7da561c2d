"""How long does a forward pass take? Constant, polynomial or table; alone, and summed over a run of decode steps.

A pass takes ``prefill(new tokens)`` plus ``decode(KV tokens read, sequences)`` where there is any of either. Nothing
here knows of a schedule. Durations are float nanoseconds inside and are rounded where they become kernel time.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from penstock.engine.settings import TimingSettings, checked_monotone
from penstock.kernel.errors import ConfigError
from penstock.kernel.machine import MILLISECOND

Array = npt.NDArray[np.float64]

TABLE_KEYS = ("prefill_isl", "prefill_ttft_ms", "decode_active_kv_tokens", "decode_context_length", "decode_itl")
FLOOR = 1.0 * MILLISECOND
"""A decode step of the fitted models takes at least this, before the speed-up: the fits say nothing below it."""


class Run(Protocol):
    """A run of equal decode steps: the same sequences, each one token longer from step to step."""

    def after(self, steps: int) -> int:
        """Return the nanoseconds that the first ``steps`` steps take together."""
        ...

    def within(self, duration: int) -> int:
        """Return how many steps are over after ``duration`` nanoseconds, at most the length of the run."""
        ...


class Timing(Protocol):
    """A timing model. ``asked`` and ``extrapolated`` count look-ups, and those outside of what was measured."""

    asked: int
    extrapolated: int

    def prefill(self, tokens: int) -> float:
        """Return nanoseconds for ``tokens`` new prompt tokens in one pass."""
        ...

    def decode(self, kv: int, seqs: int) -> float:
        """Return nanoseconds of one step of ``seqs`` sequences that read ``kv`` tokens together."""
        ...

    def run(self, kv: int, seqs: int, steps: int) -> Run:
        """Return a run of ``steps`` steps; step i reads ``kv + i * seqs`` tokens."""
        ...

    def over(self, kv: npt.NDArray[np.int64], seqs: int) -> Run:
        """Return a run whose step i reads ``kv[i]`` tokens, shape (steps,): steps that are not equal."""
        ...


def timing_of(settings: TimingSettings, capacity: int, table: Mapping[str, Any] | None = None) -> Timing:
    """Return the timing model that the settings name.

    Args:
        capacity: KV tokens of the engine.
        table: the arrays of the NPZ file, for the table kind.
    Raises:
        ConfigError: the table is absent or malformed, or the polynomial falls as load grows.
    """
    if settings.kind == "constant":
        return ConstantTiming(settings)
    if settings.kind == "polynomial":
        return PolynomialTiming(settings, capacity)
    if table is None:
        raise ConfigError("timing.kind is table, but no table was handed in", hint="set timing.table to an NPZ file")
    return TableTiming(settings, table)


class ConstantTiming:
    """Prefill by the token, decode by the step."""

    def __init__(self, settings: TimingSettings) -> None:
        self.asked = self.extrapolated = 0
        scale = MILLISECOND / settings.speed_up
        self._base = settings.constant_prefill_ms * scale
        self._token = settings.constant_prefill_token_ms * scale
        self._step = settings.constant_decode_ms * scale

    def prefill(self, tokens: int) -> float:
        return self._base + self._token * tokens if tokens else 0.0

    def decode(self, kv: int, seqs: int) -> float:
        return self._step if seqs else 0.0

    def run(self, kv: int, seqs: int, steps: int) -> Run:
        return QuadraticRun(self._step, 0.0, 0.0, steps, steps)

    def over(self, kv: npt.NDArray[np.int64], seqs: int) -> Run:
        return QuadraticRun(self._step, 0.0, 0.0, len(kv), len(kv))


class PolynomialTiming:
    """The mocker's fit: quadratic in the new tokens of a pass, and in the share of the KV cache that is read."""

    def __init__(self, settings: TimingSettings, capacity: int) -> None:
        checked_monotone(settings)
        self.asked = self.extrapolated = 0
        scale = MILLISECOND / settings.speed_up
        self._p2 = settings.prefill_quadratic * scale
        self._p1 = settings.prefill_linear * scale
        self._p0 = settings.prefill_base * scale
        self._capacity = capacity
        self._d2 = settings.decode_quadratic * scale / capacity**2
        self._d1 = settings.decode_linear * scale / capacity
        self._d0 = settings.decode_base * scale
        self._floor = FLOOR / settings.speed_up

    def prefill(self, tokens: int) -> float:
        return (self._p2 * tokens + self._p1) * tokens + self._p0 if tokens else 0.0

    def decode(self, kv: int, seqs: int) -> float:
        if not seqs:
            return 0.0
        read = min(kv, self._capacity)
        return max(self._floor, (self._d2 * read + self._d1) * read + self._d0)

    def run(self, kv: int, seqs: int, steps: int) -> Run:
        if self._d0 < self._floor:
            return self.over(kv + seqs * np.arange(steps, dtype=np.int64), seqs)
        # The step that first reads a whole cache's worth, and all after it, take the same.
        bend = min(steps, max(0, -((kv - self._capacity) // seqs)))
        return QuadraticRun(
            (self._d2 * kv + self._d1) * kv + self._d0,
            (2.0 * self._d2 * kv + self._d1) * seqs,
            self._d2 * seqs * seqs,
            bend,
            steps,
            self.decode(self._capacity, seqs),
        )

    def over(self, kv: npt.NDArray[np.int64], seqs: int) -> Run:
        read = np.minimum(kv, self._capacity).astype(np.float64)
        return ArrayRun.of(np.maximum(self._floor, (self._d2 * read + self._d1) * read + self._d0))


class TableTiming:
    """Measured points: linear between them, and on beyond the last two, which is counted as extrapolated.

    Both tables are made monotone first (running maximum), because noise that makes a longer prompt faster would let
    a planner gain from more load.
    """

    def __init__(self, settings: TimingSettings, table: Mapping[str, Any]) -> None:
        self.asked = self.extrapolated = 0
        absent = [key for key in TABLE_KEYS if key not in table]
        if absent:
            raise ConfigError(f"the timing table lacks {', '.join(absent)}", hint=f"it needs {', '.join(TABLE_KEYS)}")
        arrays = {key: np.asarray(table[key], dtype=np.float64) for key in TABLE_KEYS}
        self._isl = _axis("prefill_isl", arrays["prefill_isl"])
        self._kv = _axis("decode_active_kv_tokens", arrays["decode_active_kv_tokens"])
        self._context = _axis("decode_context_length", arrays["decode_context_length"])
        scale = MILLISECOND / settings.speed_up
        prefill, itl = arrays["prefill_ttft_ms"], arrays["decode_itl"]
        if prefill.shape != self._isl.shape:
            raise ConfigError(f"prefill_ttft_ms has shape {prefill.shape}, prefill_isl {self._isl.shape}")
        if itl.shape != (len(self._kv), len(self._context)):
            raise ConfigError(f"decode_itl has shape {itl.shape}, its axes ({len(self._kv)}, {len(self._context)})")
        if not (np.isfinite(prefill).all() and np.isfinite(itl).all() and (prefill >= 0).all() and (itl > 0).all()):
            raise ConfigError("the timing table holds a duration that is not a positive number")
        self._prefill = np.maximum.accumulate(prefill) * scale
        self._itl = np.maximum.accumulate(np.maximum.accumulate(itl, axis=0), axis=1) * scale

    def prefill(self, tokens: int) -> float:
        if not tokens:
            return 0.0
        self.asked += 1
        self.extrapolated += not self._isl[0] <= tokens <= self._isl[-1]
        low, share = _place(self._isl, np.array([float(tokens)]))
        value = self._prefill[low] * (1.0 - share) + self._prefill[low + 1] * share
        return max(0.0, float(value[0]))

    def decode(self, kv: int, seqs: int) -> float:
        return float(self._steps(np.array([kv], dtype=np.int64), seqs)[0]) if seqs else 0.0

    def run(self, kv: int, seqs: int, steps: int) -> Run:
        return self.over(kv + seqs * np.arange(steps, dtype=np.int64), seqs)

    def over(self, kv: npt.NDArray[np.int64], seqs: int) -> Run:
        return ArrayRun.of(self._steps(kv, seqs))

    def _steps(self, kv: npt.NDArray[np.int64], seqs: int) -> Array:
        read = kv.astype(np.float64)
        context = read / seqs
        self.asked += len(kv)
        inside = (self._kv[0] <= read) & (read <= self._kv[-1])
        inside &= (self._context[0] <= context) & (context <= self._context[-1])
        self.extrapolated += len(kv) - int(np.count_nonzero(inside))
        i, u = _place(self._kv, read)
        j, v = _place(self._context, context)
        grid = self._itl
        near = grid[i, j] * (1.0 - v) + grid[i, j + 1] * v
        far = grid[i + 1, j] * (1.0 - v) + grid[i + 1, j + 1] * v
        # Below the first point a line may cross zero; no step is faster than a hundredth of the fastest measured.
        floor = 0.01 * float(grid[0, 0])
        steps: Array = np.maximum(floor, near * (1.0 - u) + far * u)
        return steps


class QuadraticRun:
    """A run whose step i takes ``a + b*i + c*i*i`` up to step ``bend`` and ``flat`` from there on: a closed form."""

    __slots__ = ("_a", "_b", "_bend", "_c", "_flat", "_steps")

    def __init__(self, a: float, b: float, c: float, bend: int, steps: int, flat: float = 0.0) -> None:
        self._a, self._b, self._c = a, b, c
        self._bend, self._steps, self._flat = bend, steps, flat

    def after(self, steps: int) -> int:
        n = steps if steps < self._bend else self._bend
        total = n * (self._a + (n - 1) * (self._b * 0.5 + self._c * (2 * n - 1) / 6.0))
        return round(total + (steps - n) * self._flat)

    def within(self, duration: int) -> int:
        # Steps differ little from each other, so a secant lands within a step or two of the answer.
        low, high = 0, self._steps  # after(low) <= duration < after(high + 1)
        end = self.after(high)
        if end <= duration:
            return high
        start = 0
        while high - low > 1:
            guess = low + int((duration - start) * (high - low) / (end - start))
            guess = min(max(guess, low + 1), high - 1)
            at = self.after(guess)
            if at <= duration:
                low, start = guess, at
                step = guess + 1
                if step < high:  # the secant comes from below on a rising curve: close the other side, too
                    at = self.after(step)
                    if at > duration:
                        return guess
                    low, start = step, at
            else:
                high, end = guess, at
        return low


class ArrayRun:
    """A run whose steps were worked out one by one, all at once: ``ends[i]`` is when step i is over."""

    __slots__ = ("_ends",)

    def __init__(self, ends: Sequence[int]) -> None:
        self._ends = ends

    @classmethod
    def of(cls, steps: Array) -> "ArrayRun":
        """Return the run of steps that take so many nanoseconds each."""
        return cls(np.rint(np.cumsum(steps)).astype(np.int64).tolist())

    def after(self, steps: int) -> int:
        return self._ends[steps - 1] if steps else 0

    def within(self, duration: int) -> int:
        return bisect_right(self._ends, duration)


def _axis(name: str, values: Array) -> Array:
    if values.ndim != 1 or len(values) < 2 or not (np.diff(values) > 0).all():
        raise ConfigError(f"{name} must hold two or more rising numbers, not shape {values.shape}")
    return values


def _place(axis: Array, values: Array) -> tuple[npt.NDArray[np.int64], Array]:
    """Return, per value, the interval that it lies in (the outermost where it lies beyond) and its share of it."""
    low: npt.NDArray[np.int64] = np.clip(np.searchsorted(axis, values, side="right") - 1, 0, len(axis) - 2)
    return low, (values - axis[low]) / (axis[low + 1] - axis[low])
