"""Token timing of a request: arrival, TTFT, ITL gaps and the last token."""

import time
from dataclasses import dataclass, field

from penstock.adapters.telemetry.prometheus_text import Observations
from penstock.kernel.request_record import ItlSummary, summarise_gaps

CHUNKS_MAX = 65_536
"""Most chunks of a stream whose times are kept for its summary."""


@dataclass(slots=True)
class TokenTiming:
    """Times of `time.monotonic`, in seconds; counts in tokens."""

    arrived: float = field(default_factory=time.monotonic)
    routed: float | None = None
    """When the request reached the router, after reading and tokenising it."""
    first: float | None = None
    last: float | None = None
    output: int | None = None
    """Output tokens of a whole answer."""
    cached: int | None = None
    counted: int = 0
    """Pieces of output so far."""
    chunks: list[tuple[float, int]] = field(default_factory=list)
    """When each chunk came, and how many pieces it has: k of them are k gaps of a k-th each. At most `CHUNKS_MAX`."""

    def settle(self, gaps: Observations | None) -> None:
        """Weigh the chunks by the tokens of the whole output, and observe the gaps.

        An engine may put several tokens into one piece, so before the end a gap per piece is all that is known; the
        count from usage is then spread over the pieces evenly. ``gaps``: None where nobody waited for them.
        """
        output = self.output
        if self.counted and output is not None and output != self.counted:
            done = spread = 0
            weighed: list[tuple[float, int]] = []
            for at, pieces in self.chunks:
                done += pieces
                tokens = round(done * output / self.counted) - spread
                spread += tokens
                if tokens or not weighed:  # the first chunk is where the first token was, whatever its share
                    weighed.append((at, max(tokens, 1)))
            self.chunks = weighed
        if gaps is None:
            return
        before = self.first
        observed: list[tuple[float, int]] = []
        for at, tokens in self.chunks:
            if before is None or at == self.first:
                if tokens > 1:
                    observed.append((0.0, tokens - 1))
            else:
                observed.append(((at - before) / tokens, tokens))
            before = at
        gaps.observe_all(observed)

    @property
    def lead(self) -> float:
        """Seconds from its arrival to the router's."""
        return 0.0 if self.routed is None else self.routed - self.arrived

    @property
    def ttft(self) -> float | None:
        """First output token minus arrival; None where no token passed."""
        return None if self.first is None else self.first - self.arrived

    @property
    def itl(self) -> float | None:
        """Mean gap between output tokens; None below 2."""
        if self.first is None or len(self.chunks) < 2:
            return None
        return (self.chunks[-1][0] - self.first) / max(1, sum(tokens for _, tokens in self.chunks) - 1)

    @property
    def e2e(self) -> float | None:
        """Last output token minus arrival."""
        return None if self.last is None else self.last - self.arrived

    def summary(self) -> ItlSummary | None:
        """Sum up the gaps."""
        if self.first is None:
            return None
        return summarise_gaps([(at - self.first, tokens) for at, tokens in self.chunks])
