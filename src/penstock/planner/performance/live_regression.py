"""Live regression: a performance model learnt from engines' passes, which forgets slowly.

With a prior (a benchmark, a profile) the observed passes correct it; without one they give their own line. The ratio
of measured to modelled time, before the model learns from it, is kept, so that the model reports its own error.
"""

import math

import numpy as np

from penstock.kernel.machine import Snapshot
from penstock.kernel.statistics import percentile
from penstock.kernel.values import StepStats
from penstock.planner.performance.performance_model import Floats, Numbers, PerformanceModel, numbers
from penstock.planner.performance.regressions import LEAST
from penstock.planner.remembering import Remembering

RATIOS_MAX = 256
"""Most ratios of measured to modelled seconds that are kept for quantiles."""
CORRECTED_MAX = 4.0
"""A prior is corrected by at most this factor either way: with a larger error, it describes something else."""


def is_informative(steps: StepStats | None) -> bool:
    """Return whether an engine reports enough of its passes to learn from: how long they took, and of what."""
    if steps is None or steps.wall is None or "wall" in steps.estimated:
        return False
    return None not in (steps.prefill_tokens, steps.decode_seqs, steps.decode_kv)


class LiveRegression(Remembering):
    """Seconds of a pass as base + a x prompt tokens + b x sequences + c x KV tokens, none of them below 0.

    Args:
        prior: the model before any pass, and the shape of the result: passes only learn a factor on it then.
        memory: windows of passes after which an old one counts for 1/e.
        needed: fewest windows for an answer without a prior.
    """

    learnt_of: str
    count: int
    _normal: Floats
    _right: Floats
    _most: list[float]
    _log_ratio: float
    _weight: float
    _ratios: list[float]

    def __init__(self, prior: PerformanceModel | None = None, *, memory: float = 400.0, needed: int = 8) -> None:
        self.prior = prior
        self.needed = needed
        self.learnt_of = "live passes"
        self.count = 0
        self._fade = math.exp(-1.0 / memory)
        self._normal = np.zeros((4, 4))
        self._right = np.zeros(4)
        self._most = [0.0, 0.0, 0.0]
        self._log_ratio = 0.0
        self._weight = 0.0
        self._ratios = []
        self._fit: tuple[float, ...] | None = None

    @property
    def source(self) -> str:
        if self.prior is None:
            return f"{self.learnt_of} ({self.count} windows)"
        return self.prior.source if not self.count else f"{self.prior.source}, corrected by {self.factor:.2f} from live"

    @property
    def ready(self) -> bool:
        """Whether it can answer."""
        return self.prior is not None or self._solved() is not None

    @property
    def factor(self) -> float:
        """Factor on the prior; it needs some windows to move far from 1."""
        if not self._weight:
            return 1.0
        trust = self._weight / (self._weight + self.needed)
        return min(CORRECTED_MAX, max(1.0 / CORRECTED_MAX, math.exp(self._log_ratio / self._weight * trust)))

    def learn(self, steps: StepStats) -> bool:
        """Add one window of passes of one engine; False where it reports too little."""
        if not is_informative(steps) or steps.passes <= 0:
            return False
        assert steps.wall is not None and steps.decode_kv is not None
        assert steps.prefill_tokens is not None and steps.decode_seqs is not None
        if steps.wall < LEAST * steps.passes:  # no engine is so fast: the clock was wrong
            return False
        n = float(steps.passes)
        self.learnt_of = "live passes"
        self.add(steps.prefill_tokens / n, steps.decode_seqs / n, steps.decode_kv / n, steps.wall / n)
        if self.prior is not None:
            self._correct(steps.wall, self._prior_seconds(steps, self.prior))
        return True

    @staticmethod
    def _prior_seconds(steps: StepStats, prior: PerformanceModel) -> float:
        """Return the prior's seconds for a window: its prompts as they came, and a decode step in each pass.

        A mean pass would be wrong: a few long prompts cost less than their tokens spread over all passes.
        """
        assert steps.prefill_tokens is not None and steps.decode_seqs is not None and steps.decode_kv is not None
        seconds = 0.0
        prompts = steps.passes if steps.prefill_requests is None else steps.prefill_requests
        if prompts and steps.prefill_tokens:
            seconds += prompts * float(prior.prefill(steps.prefill_tokens / prompts))
        if steps.decode_seqs:
            n = steps.passes
            seconds += n * float(prior.decode(steps.decode_seqs / n, steps.decode_kv / n))
        return seconds

    def _correct(self, wall: float, predicted: float) -> None:
        if predicted > 0.0:
            self._log_ratio = self._log_ratio * self._fade + math.log(wall / predicted)
            self._weight = self._weight * self._fade + 1.0

    def add(self, tokens: float, seqs: float, kv: float, seconds: float) -> None:
        """Add one pass, or the mean pass of a window."""
        if seconds < LEAST or (tokens <= 0.0 and seqs <= 0.0):
            return
        if self.ready:
            self._ratios.append(seconds / max(LEAST, float(self.mixed(tokens, seqs, kv))))
            del self._ratios[:-RATIOS_MAX]
        row = np.asarray([1.0, tokens, seqs, kv])
        # Relative errors count: else the passes with long prompts would hide the decode steps.
        weight = 1.0 / seconds**2
        self._normal = self._normal * self._fade + weight * np.outer(row, row)
        self._right = self._right * self._fade + weight * seconds * row
        self.count += 1
        self._most = [max(a, b) for a, b in zip(self._most, (tokens, seqs, kv), strict=True)]
        self._fit = None

    def prefill(self, tokens: Numbers) -> Floats:
        if self.prior is not None:
            return np.asarray(self.factor * self.prior.prefill(tokens))
        return self.mixed(tokens, 0.0, 0.0)

    def decode(self, seqs: Numbers, kv: Numbers) -> Floats:
        if self.prior is not None:
            return np.asarray(self.factor * self.prior.decode(seqs, kv))
        return self.mixed(0.0, seqs, kv)

    def mixed(self, tokens: Numbers, seqs: Numbers, kv: Numbers) -> Floats:
        if self.prior is not None:
            return np.asarray(self.factor * self.prior.mixed(tokens, seqs, kv))
        fit = self._solved()
        if fit is None:
            raise ValueError(f"{self.count} windows of passes were seen; {self.needed} of different load are needed")
        base, per_token, per_seq, per_kv = fit
        tokens, seqs, kv = numbers(tokens), numbers(seqs), numbers(kv)
        seconds = base + per_token * tokens + per_seq * seqs + per_kv * kv
        return np.asarray(np.where((tokens > 0.0) | (seqs > 0.0), np.maximum(LEAST, seconds), 0.0))

    def extrapolating(self, tokens: float, seqs: float, kv: float) -> bool:
        if self.prior is not None:
            return self.prior.extrapolating(tokens, seqs, kv)
        return any(value > 1.25 * most for value, most in zip((tokens, seqs, kv), self._most, strict=True))

    def ratio(self, q: float) -> float:
        if self._ratios:
            return percentile(sorted(self._ratios), q)
        return 1.0 if self.prior is None else self.prior.ratio(q)

    def _solved(self) -> tuple[float, ...] | None:
        """Return the coefficients, none below 0: inputs with a negative one are left out, the worst one first."""
        if self.count < self.needed:
            return None
        if self._fit is not None:
            return self._fit
        able = [each for each in range(4) if self._normal[each, each] > 0.0]
        scale = np.sqrt(np.maximum(np.diag(self._normal), 1e-300))
        while True:
            part = self._normal[np.ix_(able, able)] / np.outer(scale[able], scale[able])
            # A little ridge: loads that always varied together share their effect.
            solved = np.linalg.solve(part + 1e-9 * np.eye(len(able)), self._right[able] / scale[able])
            worst = int(np.argmin(solved))
            if solved[worst] >= 0.0 or len(able) == 1:
                break
            del able[worst]
        coefficients = [0.0] * 4
        for place, value in zip(able, solved, strict=True):
            coefficients[place] = max(0.0, float(value / scale[place]))
        self._fit = tuple(coefficients)
        return self._fit

    def restore(self, state: Snapshot) -> None:
        super().restore(state)
        self._fit = None
