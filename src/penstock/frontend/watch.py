"""Which engine has gone silent? One sweep over all open attempts, instead of a timer per chunk."""

import asyncio
import time
from typing import Protocol

PERIOD = 0.25
"""Seconds between sweeps: how exact the limits on silence are."""


class Watched(Protocol):
    """An attempt whose silence matters."""

    async def look(self, now: float) -> None:
        """Act where it has been silent for too long; ``now`` is `time.monotonic`."""
        ...


class Watch:
    """Looks at all attempts four times a second."""

    def __init__(self, watched: set[Watched]) -> None:
        self._watched = watched

    async def run(self) -> None:
        """Sweep until cancelled."""
        while True:
            await asyncio.sleep(PERIOD)
            now = time.monotonic()
            for item in list(self._watched):
                await item.look(now)
