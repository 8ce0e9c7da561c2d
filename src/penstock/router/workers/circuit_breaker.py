"""Circuit breaker per worker: failures take it out of the candidates for a while."""

from typing import Literal

import msgspec

from penstock.kernel.machine import Nanos, nanos
from penstock.router.settings import OPEN_MAX, BreakerSettings

State = Literal["closed", "open", "half_open"]


class CircuitBreaker(msgspec.Struct):
    """Closed lets all through; open none until a time; half-open exactly one, whose end decides.

    The wait doubles with each failed try up to `OPEN_MAX` and is forgotten at the first success.
    """

    failures: int = 0
    """Failures in a row."""
    opened: int = 0
    """Times in a row that it opened."""
    until: Nanos | None = None
    """Open before this time; None when closed."""
    trying: bool = False
    """The one request of the half-open state is on its way."""

    def state(self, now: Nanos) -> State:
        if self.until is None:
            return "closed"
        return "open" if now < self.until else "half_open"

    def allows(self, now: Nanos) -> bool:
        """Tell whether a request may go there now."""
        return self.until is None or (now >= self.until and not self.trying)

    def dispatched(self) -> None:
        """A request goes there although it is not closed: the one that tries."""
        self.trying = True

    def succeeded(self) -> None:
        """A request got its first token: the worker works."""
        self.failures = self.opened = 0
        self.until = None
        self.trying = False

    def released(self) -> None:
        """A request ended without a verdict (its client left): let another try."""
        self.trying = False

    def failed(self, now: Nanos, settings: BreakerSettings) -> bool:
        """A request failed through the worker's fault; return True where that opens the breaker."""
        self.failures += 1
        if not self.trying and (self.until is not None or self.failures < settings.failures):
            return False
        wait = min(OPEN_MAX, settings.open_for * 2.0**self.opened)
        self.opened += 1
        self.trying = False
        self.until = now + nanos(wait)
        return True
