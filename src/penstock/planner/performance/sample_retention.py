"""Retention of pass samples for regressions: a bounded number, spread over the range of loads.

Keeping only the newest would forget a busy engine in every quiet hour: the range is cut into buckets, and where
there are too many samples the fullest bucket loses its oldest.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from penstock.planner.performance.performance_model import Floats
from penstock.planner.remembering import Remembering

SAMPLES_MAX = 64
BUCKETS = 16
"""How many are kept, over how many buckets: Dynamo's defaults."""


class PassSample(NamedTuple):
    """One pass, or the mean pass of a window: inputs of a regression, and seconds."""

    inputs: tuple[float, ...]
    seconds: float


class SampleRetention(Remembering):
    """A bounded set of samples.

    Args:
        samples: most that are kept; ``buckets``: of equal width over the observed range, in two dimensions a
            square of them.
    """

    _samples: list[PassSample]

    def __init__(self, dimensions: int, samples: int = SAMPLES_MAX, buckets: int = BUCKETS) -> None:
        self._dimensions, self._most = dimensions, samples
        self._per_axis = buckets if dimensions == 1 else round(buckets ** (1.0 / dimensions))
        self._samples = []

    def __len__(self) -> int:
        return len(self._samples)

    def add(self, inputs: Sequence[float], seconds: float) -> None:
        """Add one sample; where there are too many, the oldest of the fullest bucket is dropped."""
        self._samples.append(PassSample(tuple(float(each) for each in inputs), float(seconds)))
        if len(self._samples) > self._most:
            places = self._places()
            counts: dict[tuple[int, ...], int] = {}
            for place in places:
                counts[place] = counts.get(place, 0) + 1
            fullest = max(counts.values())
            del self._samples[next(i for i, place in enumerate(places) if counts[place] == fullest)]

    def arrays(self) -> tuple[Floats, Floats]:
        """Return inputs of shape (n, dimensions), and seconds of shape (n,)."""
        inputs = np.asarray([sample.inputs for sample in self._samples], dtype=np.float64)
        return inputs.reshape(-1, self._dimensions), np.asarray([s.seconds for s in self._samples], dtype=np.float64)

    def _places(self) -> list[tuple[int, ...]]:
        inputs, _ = self.arrays()
        low, width = inputs.min(axis=0), np.ptp(inputs, axis=0)
        share = (inputs - low) / np.where(width > 0.0, width, 1.0)
        places = np.minimum(self._per_axis - 1, (share * self._per_axis).astype(np.int64))
        return [tuple(place) for place in places.tolist()]
