"""Benchmark tables of an engine as a performance model: prefill over tokens, decode over sequences and KV, monotone.

More work never takes less time, despite noise: isotonic fits ensure that. A mixed pass takes the sum of both
parts, which our engines take and others take at most; their common overhead is counted twice.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from penstock.kernel.errors import ConfigError
from penstock.kernel.statistics import percentile
from penstock.planner.performance.isotonic import IsotonicCurve, rising
from penstock.planner.performance.performance_model import Floats, Numbers, numbers

LINE_MIN = 2
"""Points of one batch size that make a line of a grid; if any has fewer, the points are not treated as a grid."""


class BenchmarkTable:
    """A performance model from measured points.

    Args:
        prefill: (tokens, seconds) of lone prompts, shape (n, 2).
        decode: (sequences, KV tokens of all of them, seconds) of decode passes, shape (m, 3).
        source: where the measurements come from.
    Raises:
        ConfigError: neither has a point, or a number is negative or not finite.
    """

    def __init__(
        self,
        prefill: Sequence[tuple[float, float]],
        decode: Sequence[tuple[float, float, float]],
        *,
        source: str = "table",
    ) -> None:
        self.source = source
        first = _points(prefill, 2, "prefill", source)
        second = _points(decode, 3, "decode", source)
        if not len(first) and not len(second):
            raise ConfigError(f"{source}: has no point of prefill or decode", hint="measure the engine again")
        self._prefill = IsotonicCurve(first[:, 0], first[:, 1], origin=0.0) if len(first) else None
        self._decode: TableGrid | TableIndex | None = None
        if len(second):
            _, counts = np.unique(second[:, 0], return_counts=True)
            self._decode = TableGrid(second) if counts.min() >= LINE_MIN else TableIndex(second)
        self._most = (
            float(first[:, 0].max(initial=0.0)),
            float(second[:, 0].max(initial=0.0)),
            float(second[:, 1].max(initial=0.0)),
        )
        self._ratios = sorted(_repeated(first, self.prefill) + _repeated(second, self.decode))

    @classmethod
    def of_metrics(cls, metrics: Mapping[str, Any], source: str = "self-benchmark") -> "BenchmarkTable":
        """Return the model of an engine's own measurement (`penstock_lab.engine.self_benchmark.perf_metrics`).

        Raises:
            ConfigError: a part is missing or is not as it must be.
        """
        try:
            prefill = [(point["tokens"], point["seconds"]) for point in metrics.get("prefill", ())]
            decode = [(point["batch"], point["kv_tokens"], point["seconds"]) for point in metrics.get("decode", ())]
        except (TypeError, KeyError) as error:
            raise ConfigError(
                f"{source}: a point lacks {error}", hint="prefill has tokens, seconds; decode batch, kv_tokens, seconds"
            ) from error
        return cls(prefill, decode, source=source)

    @property
    def has_prefill(self) -> bool:
        return self._prefill is not None

    @property
    def has_decode(self) -> bool:
        return self._decode is not None

    def prefill(self, tokens: Numbers) -> Floats:
        if self._prefill is None:
            raise ValueError(f"{self.source} says nothing of prefill")
        tokens = numbers(tokens)
        return np.asarray(np.where(tokens > 0.0, self._prefill(tokens), 0.0))

    def decode(self, seqs: Numbers, kv: Numbers) -> Floats:
        if self._decode is None:
            raise ValueError(f"{self.source} says nothing of decode")
        seqs, kv = np.broadcast_arrays(numbers(seqs), numbers(kv))
        return np.asarray(np.where(seqs > 0.0, self._decode(seqs, kv), 0.0))

    def mixed(self, tokens: Numbers, seqs: Numbers, kv: Numbers) -> Floats:
        both = np.zeros(())
        if self._prefill is not None:
            both = both + self.prefill(tokens)
        return both if self._decode is None else both + self.decode(seqs, kv)

    def extrapolating(self, tokens: float, seqs: float, kv: float) -> bool:
        return any(value > most * (1.0 + 1e-9) for value, most in zip((tokens, seqs, kv), self._most, strict=True))

    def ratio(self, q: float) -> float:
        return percentile(self._ratios, q) if self._ratios else 1.0


class TableGrid:
    """Decode seconds where each batch size was measured over several KV sizes: curves, and lines between them."""

    def __init__(self, points: Floats) -> None:
        self.seqs = np.unique(points[:, 0])
        self.kv = np.unique(points[:, 1])
        lines = [points[points[:, 0] == seqs] for seqs in self.seqs]
        rows = [IsotonicCurve(line[:, 1], line[:, 2])(self.kv) for line in lines]
        # Each batch was measured over its own KV range. Beyond it a row continues in parallel with its neighbour,
        # which was measured there; a straight line of its own would soon cross it.
        for row in range(len(rows) - 2, -1, -1):
            end = int(np.searchsorted(self.kv, lines[row][:, 1].max()))
            rows[row][end:] = rows[row][end] + rows[row + 1][end:] - rows[row + 1][end]
        for row in range(1, len(rows)):
            first = int(np.searchsorted(self.kv, lines[row][:, 1].min()))
            rows[row][:first] = np.maximum(0.0, rows[row][first] - rows[row - 1][first] + rows[row - 1][:first])
        # Per column: more sequences never take less. The highest of rising rows rises too.
        self.seconds = np.maximum.accumulate(np.stack(rows), axis=0)

    def __call__(self, seqs: Floats, kv: Floats) -> Floats:
        down, right = _places_between_edges(self.seqs, seqs), _places_between_edges(self.kv, kv)
        rows, columns = len(self.seqs), len(self.kv)
        low, left = (
            np.clip(down.astype(np.int64), 0, max(0, rows - 2)),
            np.clip(right.astype(np.int64), 0, max(0, columns - 2)),
        )
        high, end = np.minimum(low + 1, rows - 1), np.minimum(left + 1, columns - 1)
        y, x = np.maximum(0.0, down - low), np.maximum(0.0, right - left)
        # Above the grid the last cell's slopes continue; both are at least 0, so it keeps rising.
        corner = self.seconds[low, left]
        below = np.maximum(0.0, self.seconds[high, left] - corner)
        beside = np.maximum(0.0, self.seconds[low, end] - corner)
        twist = self.seconds[high, end] - corner - below - beside
        return np.asarray(corner + below * y + beside * x + twist * np.minimum(y, 1.0) * np.minimum(x, 1.0))


class TableIndex:
    """Decode seconds where points are scattered: a rising curve over one index, base + a x sequences + b x KV.

    Rising in both by construction, since neither coefficient is below 0.
    """

    def __init__(self, points: Floats) -> None:
        self.weights = nonnegative(points[:, :2], points[:, 2])
        self._curve = IsotonicCurve(self._index(points[:, 0], points[:, 1]), points[:, 2])

    def _index(self, seqs: Floats, kv: Floats) -> Floats:
        base, per_seq, per_token = self.weights
        return np.asarray(base + per_seq * seqs + per_token * kv)

    def __call__(self, seqs: Floats, kv: Floats) -> Floats:
        return self._curve(self._index(seqs, kv))


def nonnegative(inputs: Floats, seconds: Floats) -> tuple[float, ...]:
    """Return (base, coefficient per input), none below 0, by least squares of relative errors.

    Args:
        inputs: shape (n, k); ``seconds``: shape (n,). Inputs that would count below 0 are left out one by one.
    """
    weights = 1.0 / np.maximum(seconds, 1e-9)
    whole = np.column_stack([np.ones(len(seconds)), inputs])
    able = list(range(whole.shape[1]))
    while True:
        # Columns of very different size: scaled, or the least-norm answer to collinear ones would prefer the large.
        scale = np.maximum(np.abs(whole[:, able]).max(axis=0), 1e-12)
        solved = np.linalg.lstsq(whole[:, able] / scale * weights[:, None], seconds * weights, rcond=1e-10)[0] / scale
        worst = int(np.argmin(solved))
        if solved[worst] >= 0.0 or len(able) == 1:
            break
        del able[worst]
    coefficients = np.zeros(whole.shape[1])
    coefficients[able] = np.maximum(solved, 0.0)
    return tuple(float(each) for each in coefficients)


def _places_between_edges(edges: Floats, values: Floats) -> Floats:
    """Return the place of values between edges, in edges; beyond the last one it continues, below the first it is 0."""
    if len(edges) < 2:
        return np.zeros_like(values)
    within = np.interp(values, edges, np.arange(len(edges), dtype=np.float64))
    beyond = np.maximum(0.0, values - edges[-1]) / (edges[-1] - edges[-2])
    return np.asarray(within + beyond)


def _points(points: Sequence[Sequence[float]], width: int, what: str, source: str) -> Floats:
    array = np.asarray(list(points), dtype=np.float64).reshape(-1, width)
    if not np.isfinite(array).all() or (array < 0.0).any():
        raise ConfigError(f"{source}: a {what} point is negative or no number", hint="measure the engine again")
    return array[array[:, -1] > 0.0]


def _repeated(points: Floats, model: Any) -> list[float]:
    """Return measured over modelled seconds of points that were measured more than once."""
    if not len(points):
        return []
    _, place, counts = np.unique(points[:, :-1], axis=0, return_inverse=True, return_counts=True)
    again = points[counts[place.reshape(-1)] > 1]
    if not len(again):
        return []
    return [float(ratio) for ratio in again[:, -1] / model(*again[:, :-1].T)]


__all__ = ["BenchmarkTable", "IsotonicCurve", "TableGrid", "TableIndex", "nonnegative", "rising"]
