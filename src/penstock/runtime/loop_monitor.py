"""For how long does the event loop do nothing else? Measures its longest block.

Budget: 5 ms. Whatever takes longer belongs into a thread.
"""

import asyncio
import time
from collections.abc import Callable

PERIOD = 0.005
"""Seconds between looks: a block that is shorter than this may go unseen, and those do not matter."""


class LoopMonitor:
    """Look at the clock every 5 ms; being late by d means that something held the loop for about d."""

    def __init__(self) -> None:
        self.longest = 0.0
        """Seconds, since the start."""
        self.longest_recent = 0.0
        """Seconds, since `take_recent` was last called."""
        self.over_budget = 0
        """Looks that were late by more than 5 ms."""
        self.looks = 0
        self.observe: Callable[[float], None] | None = None
        """Told how late each look was, in seconds."""

    async def run(self) -> None:
        """Watch until cancelled."""
        while True:
            due = time.perf_counter() + PERIOD
            await asyncio.sleep(PERIOD)
            late = time.perf_counter() - due
            self.looks += 1
            if self.observe is not None:
                self.observe(late)
            if late > self.longest_recent:
                self.longest_recent = late
                self.longest = max(self.longest, late)
            if late > 0.005:
                self.over_budget += 1

    def take_recent(self) -> float:
        """Return the longest block since the last call, and start over."""
        recent, self.longest_recent = self.longest_recent, 0.0
        return recent
