"""Workload mix: a joint sketch over prompt, output and share of cache, in bins whose counts add up.

Means alone hide what sizes a fleet: at the same mean a long tail of prompts needs more prefill.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.kernel.latency_bins import Bins
from penstock.planner.remembering import Remembering

PER_OCTAVE = 4
"""Bins per doubling of a length: a bin's middle is at most 9 % off."""
HITS = 8
"""Steps of the share of a prompt that came from cache."""
_LENGTHS = 128
_SHARES = HITS + 1

Floats = npt.NDArray[np.float64]


def length_bin(tokens: int) -> int:
    """Return the bin of a length in tokens."""
    return round(PER_OCTAVE * math.log2(tokens)) if tokens > 1 else 0


def shape_bin(isl: int, osl: int, hit: float) -> int:
    """Return the bin of one request. ``hit``: share of its prompt that came from cache, 0..1."""
    share = min(HITS, max(0, round(hit * HITS)))
    return (length_bin(isl) * _LENGTHS + length_bin(osl)) * _SHARES + share


def count_into(bins: Bins, place: int) -> None:
    """Count one request."""
    bins[place] = bins.get(place, 0) + 1


class WorkloadMix(NamedTuple):
    """A mix of requests: per kind its prompt and output (tokens), its share of cache (0..1) and its share of the whole;
    the weights sum to 1. Arrays of shape (n,)."""

    isl: Floats
    osl: Floats
    hit: Floats
    weight: Floats

    @property
    def fresh(self) -> Floats:
        """Prompt tokens that must be computed: at least one, since the last one always is."""
        return np.maximum(1.0, self.isl * (1.0 - self.hit))

    def mean(self, values: Floats) -> float:
        """Return the weighted mean of some values per kind."""
        return float(np.dot(self.weight, values))

    def quantile(self, values: Floats, rank: float) -> float:
        """Return the least of some values per kind that a share ``rank`` of the requests does not exceed."""
        order = np.argsort(values)
        place = int(np.searchsorted(np.cumsum(self.weight[order]), rank))
        return float(values[order][min(place, len(order) - 1)])

    @classmethod
    def of_bins(cls, bins: Mapping[int, float]) -> "WorkloadMix":
        """Return the mix of the counts.

        Raises:
            ValueError: the bins are empty.
        """
        if not bins:
            raise ValueError("no requests: a mix of nothing is unknown")
        places = np.fromiter(bins, dtype=np.int64, count=len(bins))
        counts = np.fromiter(bins.values(), dtype=np.float64, count=len(bins))
        rest, share = np.divmod(places, _SHARES)
        first, second = np.divmod(rest, _LENGTHS)
        return cls(
            2.0 ** (first / PER_OCTAVE), 2.0 ** (second / PER_OCTAVE), share / HITS, counts / float(counts.sum())
        )

    @classmethod
    def of_means(cls, isl: float, osl: float, hit: float = 0.0) -> "WorkloadMix":
        """Return a mix of identical requests, for sources that report means only."""
        one = np.ones(1)
        return cls(one * max(1.0, isl), one * max(1.0, osl), one * min(0.95, max(0.0, hit)), one)

    def scaled(self, isl: float | None, osl: float | None) -> "WorkloadMix":
        """Return the same mix with these means, where they are given: bins are coarse, sums are exact."""
        mix = self
        if isl:
            mix = mix._replace(isl=mix.isl * (isl / mix.mean(mix.isl)))
        if osl:
            mix = mix._replace(osl=np.maximum(1.0, mix.osl * (osl / mix.mean(mix.osl))))
        return mix


class DecayedWorkloadMix(Remembering):
    """Recent mix: each count fades by half in ``half_life`` seconds."""

    half_life: float
    _bins: dict[int, float]
    _at: float | None

    def __init__(self, half_life: float) -> None:
        self.half_life = half_life
        self._bins = {}
        self._at = None

    def add(self, at: float, bins: Bins) -> None:
        """Add the counts up to second ``at``."""
        if self._at is not None and at > self._at:
            fade = 0.5 ** ((at - self._at) / self.half_life)
            self._bins = {place: count * fade for place, count in self._bins.items() if count * fade > 1e-3}
        self._at = at
        for place, count in bins.items():
            self._bins[place] = self._bins.get(place, 0.0) + count

    @property
    def count(self) -> float:
        """Requests in it, faded ones with their remaining weight."""
        return sum(self._bins.values())

    def shapes(self) -> WorkloadMix | None:
        """Return the mix; None where it is empty."""
        return WorkloadMix.of_bins(self._bins) if self._bins else None
