"""Token bucket of a tenant: tokens per minute, reserved when a request arrives and settled when it ends."""


class TokenBucket:
    """A bucket that holds one minute's tokens at most.

    A request that needs more than the whole bucket is let in by a full one, so that none is refused for ever; what it
    takes beyond is owed, and the next ones wait for it.

    Args:
        per_minute: tokens that come in a minute.
        now: seconds, any origin.
    """

    def __init__(self, per_minute: float, now: float) -> None:
        self.per_minute = per_minute
        self.level = per_minute
        self._at = now

    def use(self, per_minute: float) -> None:
        """Go on with another rate: that of this process's part."""
        if per_minute != self.per_minute:
            self.level *= per_minute / self.per_minute
            self.per_minute = per_minute

    def fill(self, now: float) -> None:
        """Add what has come since the last time."""
        self.level = min(self.per_minute, self.level + (now - self._at) * self.per_minute / 60)
        self._at = now

    def wait(self, tokens: int) -> float:
        """Return the seconds until so many tokens may be taken; 0 where they may be now."""
        return max(0.0, min(float(tokens), self.per_minute) - self.level) * 60 / self.per_minute

    def take(self, tokens: float) -> None:
        """Take tokens, or give them back where the number is negative."""
        self.level = min(self.per_minute, self.level - tokens)

    @property
    def until_full(self) -> float:
        """Seconds until the bucket is full."""
        return max(0.0, self.per_minute - self.level) * 60 / self.per_minute
