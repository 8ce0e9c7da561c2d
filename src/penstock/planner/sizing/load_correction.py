"""Load correction (stress): a factor on the rate, learnt from how many requests kept the service level.

The engine model errs: engines are slower than their tables, a router spreads less evenly, prompts come in bursts. One
factor on the rate covers all of that. Its grid of values carries a belief that each observed window sharpens and
that fades, so that it follows what changes.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from penstock.planner.remembering import Remembering

Floats = npt.NDArray[np.float64]

FACTORS: Floats = np.geomspace(0.7, 1.9, 24)
SPREAD = 0.12
"""Spread of the belief at the start, in the logarithm: the model is assumed right to 12 %."""
EFFECTIVE = 12.0
"""Most requests of a window that count as independent: those of one moment have the same result."""
FADE = 0.97
"""Share of the learnt belief that is left after one window, on the way back to the belief at the start."""
SLACK = 0.004
"""Share of misses that means nothing: single ones have reasons outside any model."""


class LoadCorrection(Remembering):
    """The factor for one model's fleet."""

    _belief: Floats
    windows: int

    def __init__(self) -> None:
        self._prior = -0.5 * (np.log(FACTORS) / SPREAD) ** 2
        self._belief = self._prior.copy()
        self.windows = 0

    @property
    def factor(self) -> float:
        """Present mean of the belief."""
        weight = np.exp(self._belief - self._belief.max())
        return float(np.dot(weight, FACTORS) / weight.sum())

    def learn(self, in_slo: int, judged: int, expected: Callable[[Floats], Floats]) -> None:
        """Add a window in which rate and fleet were steady.

        Args:
            in_slo, judged: requests in the service level, and all.
            expected: the model's attainment, for factors on the rate, shape (n,).
        """
        if judged <= 0:
            return
        share = np.clip(expected(FACTORS) - SLACK, 0.002, 0.998)
        weight = min(1.0, EFFECTIVE / judged)
        likely = weight * (in_slo * np.log(share) + (judged - in_slo) * np.log(1.0 - share))
        self._belief = self._prior + FADE * (self._belief - self._prior) + likely - likely.max()
        self.windows += 1
