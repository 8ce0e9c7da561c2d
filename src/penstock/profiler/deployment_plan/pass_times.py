"""`PassTimes`: a `TimingModel` as the performance model of closed forms, for one budget of tokens per pass."""

import numpy as np

from penstock.engine.timing.timing_model import TimingModel
from penstock.kernel.machine import SECOND
from penstock.planner.performance.performance_model import Floats, Numbers, numbers

GRID = np.unique(np.geomspace(1, 4096, 64).astype(np.int64))
"""Sequences of a decode step that are asked for; between them steps are taken as linear."""


class PassTimes:
    """Seconds of prompts and decode steps.

    Args:
        timing: of one engine.
        chunk: most tokens of a pass.
        context: tokens that a decoding sequence reads, in the mean.
        beside: prompts are computed in passes that decode as well, as aggregated engines do: counted is what their
            tokens add to such a pass, since weights are read and kernels launched once for both.
    """

    source = "timing model"

    def __init__(self, timing: TimingModel, chunk: int, context: float, *, beside: bool) -> None:
        self.timing = timing
        self._chunk, self._context, self._beside = chunk, max(1, round(context)), beside
        self._step = timing.decode(self._context, 1)
        self._steps = np.array([timing.decode(int(seqs) * self._context, int(seqs)) for seqs in GRID]) / SECOND
        self._prompts: dict[int, float] = {}

    def prefill(self, tokens: Numbers) -> Floats:
        """Return seconds of lone prompts, in as many passes as they need."""
        asked = numbers(tokens)
        flat = [self._prompt(max(1, round(float(each)))) for each in asked.ravel()]
        return np.array(flat, dtype=np.float64).reshape(asked.shape)

    def decode(self, seqs: Numbers, kv: Numbers) -> Floats:
        """Return seconds of a decode step of ``seqs`` sequences; ``kv`` is that many times the context."""
        return np.asarray(np.interp(numbers(seqs), GRID, self._steps))

    def mixed(self, tokens: Numbers, seqs: Numbers, kv: Numbers) -> Floats:
        """Return seconds of a pass that does both."""
        return self.prefill(tokens) + self.decode(seqs, kv)

    def extrapolating(self, tokens: float, seqs: float, kv: float) -> bool:
        """Return whether the timing model looked beyond what was measured."""
        return self.timing.extrapolated > 0

    def ratio(self, q: float) -> float:
        """Return 1: a timing model does not tell how its measurements scatter."""
        return 1.0

    @property
    def extrapolated(self) -> float | None:
        """Share of the look-ups beyond what was measured; None where nothing is looked up."""
        return self.timing.extrapolated / self.timing.lookups if self.timing.lookups else None

    def _prompt(self, tokens: int) -> float:
        known = self._prompts.get(tokens)
        if known is None:
            total, past = 0.0, 0
            while past < tokens:
                new = min(self._chunk, tokens - past)
                if self._beside:
                    total += self.timing.mixed(new, [(past, new)], self._context, 1) - self._step
                else:
                    total += self.timing.mixed(new, [(past, new)], 0, 0)
                past += new
            known = self._prompts[tokens] = max(0.0, total) / SECOND
        return known
