"""Circuit breaker per worker: takes one out of the candidates for a while where half of its requests fail."""

from typing import Literal

import msgspec

from penstock.kernel.machine import Nanos, nanos
from penstock.router.settings import OPEN_MAX, BreakerSettings

State = Literal["closed", "open", "half_open"]


class CircuitBreaker(msgspec.Struct):
    """Closed lets all through; open none until a time; half-open exactly one, whose end decides.

    The wait doubles with each failed try up to `OPEN_MAX` and is forgotten at the first success.
    """

    recent: list[bool] = []
    """Of its last requests, twice as many failures as open it, whether each failed; it begins with one that did."""
    answered: Nanos | None = None
    """When it last gave a request its first token."""
    opened: int = 0
    """Times in a row that it opened."""
    until: Nanos | None = None
    """Open before this time; None when closed."""
    trying: bool = False
    """The one request of the half-open state is on its way."""

    @property
    def failures(self) -> int:
        """Failures among its last requests."""
        return sum(self.recent)

    def state(self, now: Nanos) -> State:
        if self.until is None:
            return "closed"
        return "open" if now < self.until else "half_open"

    def allows(self, now: Nanos) -> bool:
        """Tell whether a request may go there now."""
        return self.until is None or (now >= self.until and not self.trying)

    def dispatched(self, now: Nanos) -> None:
        """A request goes there although it is not closed: the one that tries, unless it is still open."""
        self.trying = self.trying or self.state(now) == "half_open"

    def succeeded(self, placed: Nanos, settings: BreakerSettings) -> bool:
        """A request that was placed at ``placed`` got its first token; return True where that closes the breaker."""
        if self.until is None:
            self._record(False, settings)
            return False
        if placed < self.until:
            return False  # sent before the wait was over: it says nothing about the time since
        self.recent, self.opened, self.until, self.trying = [], 0, None, False
        return True

    def released(self) -> None:
        """A request ended without a verdict (its client left): let another try."""
        self.trying = False

    def failed(self, now: Nanos, placed: Nanos, settings: BreakerSettings) -> bool:
        """A request that was placed at ``placed`` failed by the worker's fault; return True where that opens it."""
        if self.until is None:
            self._record(True, settings)
            if self.failures < settings.failures:
                return False
        elif placed < self.until:
            return False
        self.until = now + nanos(min(OPEN_MAX, settings.open_for * 2.0**self.opened))
        self.opened += 1
        self.trying = False
        return True

    def _record(self, failure: bool, settings: BreakerSettings) -> None:
        self.recent.append(failure)
        del self.recent[: -2 * settings.failures]
        while self.recent and not self.recent[0]:
            del self.recent[0]
