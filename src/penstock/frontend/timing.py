"""When did a request's tokens pass? Arrival, first, last, and the gaps between them."""

import time
from dataclasses import dataclass, field

from penstock.adapters.telemetry.exposition import Observations
from penstock.kernel.records import ItlSummary, summarise_gaps

CHUNKS_MAX = 65_536
"""Most chunks of a stream whose times are kept for its summary."""


@dataclass(slots=True)
class Timing:
    """Times of `time.monotonic`, in seconds; counts in tokens."""

    arrived: float = field(default_factory=time.monotonic)
    first: float | None = None
    last: float | None = None
    output: int = 0
    cached: int | None = None
    _seen: int = 0
    _chunks: list[tuple[float, int]] = field(default_factory=list)

    def chunk(self, now: float, tokens: int, gaps: Observations) -> None:
        """Output reached ``tokens``: a chunk of k of them is k gaps of a k-th each; the first one k - 1 of zero."""
        fresh = tokens - self._seen
        if fresh <= 0:
            return
        if self.last is not None:
            gaps.observe((now - self.last) / fresh, fresh)
        elif fresh > 1:
            gaps.observe(0.0, fresh - 1)
        self._seen = tokens
        self.last = now
        if len(self._chunks) < CHUNKS_MAX:
            self._chunks.append((now, fresh))

    @property
    def ttft(self) -> float | None:
        """First output token less arrival; None where no token was seen passing."""
        return None if self.first is None else self.first - self.arrived

    @property
    def itl(self) -> float | None:
        """Mean gap between output tokens; None below 2."""
        if self.first is None or len(self._chunks) < 2:
            return None
        return (self._chunks[-1][0] - self.first) / max(1, self._seen - 1)

    @property
    def e2e(self) -> float | None:
        """Last output token less arrival."""
        return None if self.last is None else self.last - self.arrived

    def summary(self) -> ItlSummary | None:
        """Sum up the gaps."""
        if self.first is None:
            return None
        return summarise_gaps([(at - self.first, tokens) for at, tokens in self._chunks])
