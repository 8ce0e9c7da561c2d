"""Performance model protocol: seconds of prompts and of passes, and whether they are measured or extrapolated.

Arrays in, arrays out, and they broadcast; a number is an array of no dimension. The caller handles share of cache and
tokens per speculated step: a model gets the tokens that are really computed, and passes.
"""

from typing import Protocol

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Numbers = float | Floats


class PerformanceModel(Protocol):
    """One kind of engine."""

    @property
    def source(self) -> str:
        """Source of the model, for display."""
        ...

    def prefill(self, tokens: Numbers) -> Floats:
        """Return seconds of a lone prompt until its first token, in as many passes as it needs.

        Args:
            tokens: prompt tokens to be computed, those from cache left out.
        """
        ...

    def decode(self, seqs: Numbers, kv: Numbers) -> Floats:
        """Return seconds of a pass in which ``seqs`` sequences, which read ``kv`` tokens together, get a token."""
        ...

    def mixed(self, tokens: Numbers, seqs: Numbers, kv: Numbers) -> Floats:
        """Return seconds of one pass that computes ``tokens`` of prompts and decodes beside it."""
        ...

    def extrapolating(self, tokens: float, seqs: float, kv: float) -> bool:
        """Return whether such a pass lies outside the measured range."""
        ...

    def ratio(self, q: float) -> float:
        """Return the q-quantile (0..1) of measured over modelled seconds; 1 where nothing was measured twice."""
        ...


def numbers(value: Numbers) -> Floats:
    """Return a number or an array as an array of floats."""
    return np.asarray(value, dtype=np.float64)
