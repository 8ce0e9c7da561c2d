"""Regressions of pass time over load from live engines' passes, as Dynamo's load loop fits them.

Three lines by ordinary least squares: seconds over prompt tokens (prefill), over sequences and KV tokens (decode), over
prompt tokens and KV tokens (aggregated). A line that would fall is not used.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from penstock.planner.performance.performance_model import Floats
from penstock.planner.performance.sample_retention import SampleRetention
from penstock.planner.remembering import Remembering

LEAST = 1e-6
"""Least seconds of a pass; a fitted line may give less near 0."""
OBSERVATIONS_MIN = 5
"""Fewest samples for a fit: Dynamo's default."""
HIT_MAX = 0.95
"""Upper bound for a share of cache: the last token of a prompt is always computed."""


class EngineRate(NamedTuple):
    """Requests per second that one engine can do, and with which latency (s). ``met``: within the service level."""

    rate: float
    seconds: float
    batch: int = 1
    met: bool = True


class FittedLine(Remembering):
    """Seconds as a linear function of some inputs, from a bounded set of samples.

    Args:
        inputs: how many there are.
        dropped: inputs whose coefficient may be set to 0 where the fit makes it negative.
    """

    _samples: SampleRetention
    _fit: tuple[float, ...] | None
    _dirty: bool
    most: tuple[float, ...]
    """Highest observed value of each input."""

    def __init__(self, inputs: int, *, dropped: Sequence[int] = ()) -> None:
        self._dropped = tuple(dropped)
        self._inputs = inputs
        self._samples = SampleRetention(inputs)
        self._fit = None
        self._dirty = False
        self.most = (0.0,) * inputs

    def __len__(self) -> int:
        return len(self._samples)

    def add(self, inputs: Sequence[float], seconds: float) -> None:
        """Add one pass; passes that took no time, such as heartbeats, are skipped."""
        if seconds > 0.0:
            self._samples.add(inputs, seconds)
            self.most = tuple(max(a, float(b)) for a, b in zip(self.most, inputs, strict=True))
            self._dirty = True

    @property
    def fit(self) -> tuple[float, ...] | None:
        """(base, coefficient per input); None with too few samples, or where the line has always fallen.

        A falling line is not used: the earlier one stays, or the fit of an engine that was long full, whose windows
        are all alike, would be lost when it matters.
        """
        if self._dirty:
            fitted, self._dirty = self._fitted(), False
            self._fit = self._fit if fitted is None else fitted
        return self._fit

    def seconds(self, *inputs: float) -> float:
        """Return the seconds of one pass.

        Raises:
            ValueError: there is no fit.
        """
        fit = self.fit
        if fit is None:
            raise ValueError("too few passes were seen for a fit")
        return max(LEAST, fit[0] + sum(a * x for a, x in zip(fit[1:], inputs, strict=True)))

    def _fitted(self) -> tuple[float, ...] | None:
        if len(self._samples) < OBSERVATIONS_MIN:
            return None
        inputs, seconds = self._samples.arrays()
        line = least_squares(inputs, seconds)
        if any(line[1 + each] < 0.0 for each in self._dropped):
            rest = [each for each in range(self._inputs) if each not in self._dropped]
            part = least_squares(inputs[:, rest], seconds)
            slopes = dict(zip(rest, part[1:], strict=True))
            line = (part[0], *(slopes.get(each, 0.0) for each in range(self._inputs)))
        return None if any(each < -1e-15 for each in line[1:]) else line


def least_squares(inputs: Floats, seconds: Floats) -> tuple[float, ...]:
    """Return (base, coefficient per input) by ordinary least squares; of equally good ones the smallest."""
    centre, mean = inputs.mean(axis=0), float(seconds.mean())
    solved = np.linalg.lstsq(inputs - centre, seconds - mean, rcond=None)[0]
    return (mean - float(centre @ solved), *(float(each) for each in solved))


def chunked(line: FittedLine, tokens: float, chunk: int, *beside: float) -> float | None:
    """Return seconds of a prompt that is computed ``chunk`` tokens at a time.

    Args:
        beside: further inputs of the line that every pass has too, such as KV tokens that are decoded.
    Returns: 0 where there is nothing to compute; None without a fit.
    """
    if line.fit is None or chunk <= 0:
        return None
    if tokens <= 0.0:
        return 0.0
    whole, rest = divmod(tokens, chunk)
    total = whole * line.seconds(chunk, *beside) if whole else 0.0
    return total + (line.seconds(rest, *beside) if rest > 0.0 else 0.0)


def fresh(tokens: float, hit_rate: float | None) -> float:
    """Return the tokens that are not in cache."""
    return tokens * (1.0 - min(HIT_MAX, max(0.0, hit_rate or 0.0)))


class PrefillRegression(FittedLine):
    """Seconds over prompt tokens of a pass."""

    def __init__(self) -> None:
        super().__init__(1)

    def ttft(
        self, queued: float, isl: float, max_num_batched_tokens: int, hit_rate: float | None = None
    ) -> float | None:
        """Return seconds until the first token of one more prompt, behind ``queued`` waiting tokens."""
        return chunked(self, fresh(queued + isl, hit_rate), max_num_batched_tokens)

    def capacity(
        self, isl: float, max_num_batched_tokens: int, ttft: float, hit_rate: float | None = None
    ) -> EngineRate | None:
        """Return the rate of one engine, one prompt after the other. It counts even where it misses the TTFT."""
        seconds = chunked(self, fresh(isl, hit_rate), max_num_batched_tokens)
        return EngineRate(1.0 / seconds, seconds, 1, seconds <= ttft) if seconds else None


class DecodeRegression(FittedLine):
    """Seconds over sequences and KV tokens of a pass."""

    def __init__(self) -> None:
        super().__init__(2, dropped=(0,))

    def itl(self, seqs: float, kv: float, context: float) -> float | None:
        """Return the ITL that one more request of ``context`` tokens would have."""
        return None if self.fit is None else self.seconds(seqs + 1.0, kv + context)

    def capacity(
        self,
        context: float,
        osl: float,
        itl: float,
        *,
        kv_tokens: int | None = None,
        max_num_seqs: int | None = None,
        accept: float = 1.0,
    ) -> EngineRate | None:
        """Return the rate of one engine with the largest batch that keeps ``itl`` seconds; one sequence may miss it."""
        if self.fit is None or itl <= 0.0 or context <= 0.0 or osl <= 0.0:
            return None
        most = (self.most[1] if kv_tokens is None else kv_tokens) / context
        top = max(1, int(min(most or 256.0, 1e9 if max_num_seqs is None else max_num_seqs)))

        def seconds(batch: int) -> float:
            return self.seconds(batch, batch * context) / accept

        low, high = 1, top
        while low < high:  # seconds rise with the batch
            middle = (low + high + 1) // 2
            low, high = (middle, high) if seconds(middle) <= itl else (low, middle - 1)
        took = seconds(low)
        return EngineRate(low / (osl * took), took, low, took <= itl)


class AggregatedRegression(FittedLine):
    """Seconds over prompt tokens and KV tokens of a pass with both."""

    def __init__(self) -> None:
        super().__init__(2)

    def ttft(
        self, queued: float, isl: float, max_num_batched_tokens: int, kv: float, hit_rate: float | None = None
    ) -> float | None:
        """Return seconds until the first token of one more prompt, while ``kv`` tokens are decoded beside it."""
        return chunked(self, fresh(queued + isl, hit_rate), max_num_batched_tokens, kv)

    def itl(self, prefill_tokens: float, kv: float, context: float) -> float | None:
        """Return the ITL of one more request, with so many prompt tokens in the mean pass."""
        return None if self.fit is None else self.seconds(prefill_tokens, kv + context)
