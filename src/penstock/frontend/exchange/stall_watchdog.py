"""Stall watchdog: stops attempts at engines that fall silent, by one sweep over all instead of a timer per chunk."""

import asyncio
import time
from typing import Protocol

PERIOD = 0.25
"""Seconds between sweeps: how exact the limits on silence are."""


class WatchedAttempt(Protocol):
    """An attempt that may fall silent."""

    async def look(self, now: float) -> None:
        """Act where it has been silent for too long; ``now`` is `time.monotonic`."""
        ...


class StallWatchdog:
    """Checks all attempts four times a second."""

    def __init__(self, watched: set[WatchedAttempt]) -> None:
        self._watched = watched

    async def run(self) -> None:
        """Sweep until cancelled."""
        while True:
            await asyncio.sleep(PERIOD)
            now = time.monotonic()
            for item in list(self._watched):
                await item.look(now)
