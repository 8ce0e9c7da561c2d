"""Event loop monitor: measures how long the loop is blocked.

Budget: 5 ms. Work that takes longer belongs into a thread.
"""

import asyncio
import time
from collections.abc import Callable

PERIOD = 0.005
"""Seconds between checks: a shorter block may go unmeasured, and does not matter."""
BUDGET = 0.005


class LoopMonitor:
    """Read the clock every 5 ms and measure how late that is.

    Being late by d has two causes: this process held the loop, or the machine gave it no CPU. The *delay* is both; the
    *block* is the part that this process can have caused, the lesser of the delay and the CPU time that it used
    meanwhile (all its threads: one that holds the interpreter's lock holds the loop, too).
    """

    def __init__(self) -> None:
        self.longest = 0.0
        """Longest block in seconds, since the start."""
        self.longest_recent = 0.0
        """Longest block in seconds, since `take_recent` was last called."""
        self.longest_delay = 0.0
        """Longest delay in seconds, since the start."""
        self.over_budget = 0
        """Blocks over 5 ms."""
        self.samples = 0
        self.observe: Callable[[float], None] | None = None
        """Called with the delay of each check, in seconds."""
        self._used = 0.0
        """CPU time of this process at the last check..."""
        self._due = 0.0
        """... and when the next one should be."""

    async def run(self) -> None:
        """Watch until cancelled."""
        self._loop = loop = asyncio.get_running_loop()
        self._used = time.process_time()
        self._due = time.perf_counter() + PERIOD
        # A timer that sets itself again: a task that sleeps makes a future as well, 200 times a second.
        self._timer = loop.call_later(PERIOD, self._measure_delay)
        try:
            await loop.create_future()
        finally:
            self._timer.cancel()

    def _measure_delay(self) -> None:
        now = time.perf_counter()
        delay = now - self._due
        before, self._used = self._used, time.process_time()
        self.samples += 1
        if self.observe is not None:
            self.observe(delay)
        if delay > self.longest_delay:
            self.longest_delay = delay
        block = min(delay, self._used - before)
        if block > self.longest_recent:
            self.longest_recent = block
            self.longest = max(self.longest, block)
        if block > BUDGET:
            self.over_budget += 1
        self._due = time.perf_counter() + PERIOD
        self._timer = self._loop.call_later(PERIOD, self._measure_delay)

    def take_recent(self) -> float:
        """Return the longest block since the last call, and start over."""
        recent, self.longest_recent = self.longest_recent, 0.0
        return recent
