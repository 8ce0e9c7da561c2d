"""Interpolators of Dynamo's early SLA planner: TTFT, ITL and throughput of a profile, between its measured points.

A profile is a sweep of one configuration: TTFT and throughput per GPU over prompt length, and ITL and throughput per
GPU over KV cache usage and context length. Beyond the sweep its edge counts. Throughput for a target is monotone: a
longer prompt or context never makes an engine do more.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from penstock.planner.performance.performance_model import Floats

STEPS = 100
"""Fill levels of the cache at which a row is looked up beside its measured ones, and contexts likewise."""
ALIKE = 1.25
"""Longest over shortest context of the points that make a row: a sweep measures each at its own mean context."""
ALIKE_AGAIN = 1.1
"""The same where a load would stand in the row twice, or where the points are mostly a grid."""
SAME_LOAD = 0.02
"""Logarithm of the ratio of two loads that count as the same one."""
LEAST = 1e-12
USAGE, CONTEXT, ITL, PER_GPU = range(4)
"""Columns of decode points."""


class BestThroughput(NamedTuple):
    """Tokens per second and GPU, at which fill level (0..1) with which ITL (s); ``met``: whether that is the target."""

    per_gpu: float
    usage: float
    itl: float
    met: bool


class PrefillInterpolator:
    """TTFT and throughput over prompt length.

    Args:
        isl: tokens, ascending after sorting, shape (n,); ``ttft`` seconds; ``per_gpu`` tokens/s/GPU.
    """

    def __init__(self, isl: Sequence[float], ttft: Sequence[float], per_gpu: Sequence[float]) -> None:
        if not len(isl) or not len(isl) == len(ttft) == len(per_gpu):
            raise ValueError("a prefill profile needs points, and as many of each")
        order = np.argsort(np.asarray(isl, dtype=np.float64), kind="stable")
        self._isl, self._ttft, self._per_gpu = (
            np.asarray(each, dtype=np.float64)[order] for each in (isl, ttft, per_gpu)
        )

    def ttft(self, isl: float) -> float:
        """Return seconds until the first token of a lone prompt."""
        return float(np.interp(isl, self._isl, self._ttft))

    def throughput_per_gpu(self, isl: float) -> float:
        """Return prompt tokens per second and GPU, so that a longer prompt never takes less of a GPU.

        Where measured points contradict that, a prompt takes as much as the shorter one did.
        """
        rate = float(np.interp(isl, self._isl, self._per_gpu))
        shorter = (self._isl <= isl) & (self._per_gpu > 0.0)
        taken = (self._isl[shorter] / self._per_gpu[shorter]).max(initial=0.0)
        return min(rate, isl / float(taken)) if taken else rate


class DecodeInterpolator:
    """ITL and throughput over fill level and context length.

    Points of like contexts make a row, a curve over the fill level which has a context of its own at each. A grid,
    whose rows have one context each, is interpolated along the fill level and then between contexts.

    Args:
        usage: share of the KV cache that is in use, 0..1, shape (m,); ``context``: tokens per sequence; ``itl``
            seconds; ``per_gpu`` tokens/s/GPU.
        kv_tokens: capacity of the cache.
    """

    def __init__(
        self,
        usage: Sequence[float],
        context: Sequence[float],
        itl: Sequence[float],
        per_gpu: Sequence[float],
        kv_tokens: float,
    ) -> None:
        if not len(usage) or not len(usage) == len(context) == len(itl) == len(per_gpu):
            raise ValueError("a decode profile needs points, and as many of each")
        self.kv_tokens = float(kv_tokens)
        points = np.column_stack([np.asarray(each, dtype=np.float64) for each in (usage, context, itl, per_gpu)])
        self._rows = rows_of(points)
        contexts = points[:, CONTEXT]
        self._levels = np.unique(np.concatenate([np.linspace(0.0, 1.0, STEPS), points[:, USAGE]]))
        self._contexts = np.unique(np.concatenate([np.linspace(contexts.min(), contexts.max(), STEPS), contexts]))
        self._itl, self._per_gpu = (self._between(self._levels, self._contexts, column) for column in (ITL, PER_GPU))

    def itl(self, usage: float, context: float) -> float:
        """Return seconds per token."""
        return float(self._between(np.array([usage]), np.array([context]), ITL)[0, 0])

    def throughput_per_gpu(self, usage: float, context: float) -> float:
        """Return output tokens per second and GPU."""
        return float(self._between(np.array([usage]), np.array([context]), PER_GPU)[0, 0])

    def itl_at(self, sequences: float, context: float) -> float:
        """Return seconds per token where one engine decodes so many sequences."""
        return self.itl(sequences * context / self.kv_tokens if self.kv_tokens else 1.0, context)

    def find_best_throughput_per_gpu(self, itl: float, context: float) -> BestThroughput:
        """Return the best throughput of fill levels whose ITL is within ``itl`` seconds, up to the highest one.

        Where there is none, that of the lowest level: the pool has to serve, as well as it can. What an engine does
        with longer contexts it does with shorter ones, too, whatever noise is in the points.
        """
        rates = _best_within_target(self._levels, self._itl, self._per_gpu, itl)[0]
        rates = np.maximum.accumulate(rates[::-1])[::-1]
        seconds, here = (self._between(self._levels, np.array([context]), column) for column in (ITL, PER_GPU))
        _, (usage,), (gap,) = _best_within_target(self._levels, seconds, here, itl)
        per_gpu = float(np.interp(context, self._contexts, rates))
        return BestThroughput(per_gpu, float(usage), float(gap), bool(gap <= itl))

    def _between(self, usage: Floats, context: Floats, column: int) -> Floats:
        """Interpolate along the fill level in every row, and linearly between rows; shape (contexts, levels)."""
        contexts, values = (
            np.array([np.interp(usage, row[:, USAGE], row[:, each]) for row in self._rows]).T
            for each in (CONTEXT, column)
        )
        return np.column_stack([np.interp(context, *each) for each in zip(contexts, values, strict=True)])


def rows_of(points: Floats) -> list[Floats]:
    """Return points as rows of like contexts, in order of context; no two rows overlap in context.

    Nearest neighbours are joined first: what a sweep measured at one context lies closer together than its contexts.
    A load that stands in both of two neighbours is a sign of two rows. Rows of a grid stay as they are.

    Args:
        points: fill level and context of each, and what is known there, shape (m, k).
    """
    contexts, counts = np.unique(points[:, CONTEXT], return_counts=True)
    rows = [points[points[:, CONTEXT] == context] for context in contexts]
    grid = 2 * int(counts[counts > 1].sum()) > len(points)
    while len(rows) > 1:
        spans = [high[:, CONTEXT].max() / max(1.0, low[:, CONTEXT].min()) for low, high in pairwise(rows)]
        able = [place for place, pair in enumerate(pairwise(rows)) if spans[place] <= _one_row_span(*pair, grid=grid)]
        if not able:
            break
        at = min(able, key=lambda place: spans[place])
        rows[at : at + 2] = [np.concatenate(rows[at : at + 2])]
    return [row[np.lexsort((row[:, CONTEXT], row[:, USAGE]))] for row in rows]


def _one_row_span(low: Floats, high: Floats, *, grid: bool) -> float:
    """Return the longest over the shortest context up to which two neighbours are one row; below 1 they never are."""
    again = any(
        (np.abs(np.log(np.maximum(LEAST, one)[:, None] / np.maximum(LEAST, other))) < SAME_LOAD).any()
        for one, other in zip(_row_loads(low), _row_loads(high), strict=True)
    )
    if again:
        return 0.0 if grid else ALIKE_AGAIN
    return ALIKE_AGAIN if grid and min(len(low), len(high)) > 1 else ALIKE


def _row_loads(row: Floats) -> tuple[Floats, Floats]:
    """Return the fill levels of a row, and a measure of its sequences."""
    return row[:, USAGE], row[:, USAGE] / np.maximum(1.0, row[:, CONTEXT])


def _best_within_target(levels: Floats, seconds: Floats, rates: Floats, target: float) -> tuple[Floats, Floats, Floats]:
    """Return the best throughput within a target, with its fill level and seconds, each of shape (k,).

    Between a level within the target and one beyond it, the line is cut where it meets the target.

    Args:
        levels: ascending, shape (n,); ``seconds``, ``rates``: at each of them, shape (k, n).
    """
    within = seconds <= target
    low, high = seconds[:, :-1], seconds[:, 1:]
    cut = within[:, :-1] != within[:, 1:]
    share = np.where(cut, (target - low) / np.where(cut, high - low, 1.0), 0.0)

    def all_of(values: Floats) -> Floats:
        return np.hstack([values, values[:, :-1] + share * np.diff(values)])

    able = np.hstack([within, cut])
    able[:, 0] |= ~within.any(axis=1)  # none is within the target: the least load serves
    usage = all_of(np.broadcast_to(levels, seconds.shape))
    candidates = np.where(able, all_of(rates), -np.inf)
    best = candidates.max(axis=1)
    at = np.where(candidates == best[:, None], usage, -1.0).argmax(axis=1)
    each = np.arange(len(seconds))
    return best, usage[each, at], all_of(seconds)[each, at]
