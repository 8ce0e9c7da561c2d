"""Interpolators of Dynamo's early SLA planner: TTFT, ITL and throughput of a profile, between its measured points.

A profile is a sweep of one configuration: TTFT and throughput per GPU over prompt length, and ITL and throughput per
GPU over KV cache usage and context length. Beyond the sweep its edge counts.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from penstock.planner.performance.performance_model import Floats

STEPS = 100
"""Fill levels of the cache that a search for the best throughput tries."""


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
        """Return prompt tokens per second and GPU."""
        return float(np.interp(isl, self._isl, self._per_gpu))


class DecodeInterpolator:
    """ITL and throughput over fill level and context length.

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
        columns = [np.asarray(each, dtype=np.float64) for each in (usage, context, itl, per_gpu)]
        self._contexts = np.unique(columns[1])
        self._rows: list[tuple[Floats, Floats, Floats]] = []
        for each in self._contexts:
            at = np.flatnonzero(columns[1] == each)
            at = at[np.argsort(columns[0][at], kind="stable")]
            self._rows.append((columns[0][at], columns[2][at], columns[3][at]))

    def itl(self, usage: float, context: float) -> float:
        """Return seconds per token."""
        return self._between(usage, context, 1)

    def throughput_per_gpu(self, usage: float, context: float) -> float:
        """Return output tokens per second and GPU."""
        return self._between(usage, context, 2)

    def itl_at(self, sequences: float, context: float) -> float:
        """Return seconds per token where one engine decodes so many sequences."""
        return self.itl(sequences * context / self.kv_tokens if self.kv_tokens else 1.0, context)

    def find_best_throughput_per_gpu(self, itl: float, context: float) -> BestThroughput:
        """Return the throughput at the highest fill level whose ITL is within ``itl`` seconds.

        Where there is none, that of the lowest level: the pool has to serve, as well as it can.
        """
        for level in np.linspace(1.0, 0.0, STEPS):
            usage = float(level)
            gap = self.itl(usage, context)
            if gap <= itl:
                return BestThroughput(self.throughput_per_gpu(usage, context), usage, gap, True)
        usage = float(self._rows[self._near(context)][0][0])
        return BestThroughput(self.throughput_per_gpu(usage, context), usage, self.itl(usage, context), False)

    def _near(self, context: float) -> int:
        return int(np.argmin(np.abs(self._contexts - context)))

    def _between(self, usage: float, context: float, column: int) -> float:
        """Interpolate along the fill level for both neighbouring contexts, and linearly between them."""
        values = np.asarray([np.interp(usage, row[0], row[column]) for row in self._rows])
        return float(np.interp(context, self._contexts, values))
