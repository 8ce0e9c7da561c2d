"""Isotonic regression: the nearest rising curve to some points, by pooling neighbours that violate the order."""

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


def rising(values: Floats, weights: Floats) -> Floats:
    """Return the nondecreasing values nearest to ``values`` in weighted squares, shape (n,).

    Cost: O(n). Source: pool adjacent violators (Ayer et al. 1955).
    """
    means: list[float] = []
    sums: list[float] = []
    counts: list[int] = []
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        mean, total, count = value, weight, 1
        while means and means[-1] >= mean:
            before = sums.pop()
            mean = (mean * total + means.pop() * before) / (total + before)
            total += before
            count += counts.pop()
        means.append(mean)
        sums.append(total)
        counts.append(count)
    return np.repeat(np.asarray(means, dtype=np.float64), counts)


class IsotonicCurve:
    """A nondecreasing line through points; beyond its last point it continues with `slope`, below
    its first it goes straight to ``origin`` at 0.

    Points with the same x are averaged.
    """

    def __init__(self, x: Floats, y: Floats, origin: float | None = None) -> None:
        if len(x) == 0:
            raise ValueError("no points: a curve through nothing is unknown")
        self.x, place = np.unique(np.asarray(x, dtype=np.float64), return_inverse=True)
        counts = np.bincount(place).astype(np.float64)
        means = np.bincount(place, np.asarray(y, dtype=np.float64)) / counts
        self.y = rising(means, counts)
        self.origin = origin

    def __call__(self, x: Floats) -> Floats:
        """Return the curve at ``x``."""
        values = np.interp(x, self.x, self.y)
        if self.origin is not None and self.x[0] > 0.0:
            low = min(self.origin, float(self.y[0]))
            values = np.where(x < self.x[0], low + (self.y[0] - low) * np.maximum(x, 0.0) / self.x[0], values)
        return np.asarray(values + self.slope * np.maximum(0.0, x - self.x[-1]))

    @property
    def slope(self) -> float:
        """Slope beyond the last point: that of the curve's upper half, since the last two points alone may lie flat."""
        if len(self.x) < 2:
            return float(self.y[-1] / self.x[-1]) if self.x[-1] > 0.0 else 0.0
        middle = (len(self.x) - 1) // 2
        return float((self.y[-1] - self.y[middle]) / (self.x[-1] - self.x[middle]))
