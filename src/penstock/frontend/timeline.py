"""What has this process seen over the last hour? A window every few seconds, kept for the page."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from penstock.kernel.machine import SECOND, Nanos
from penstock.kernel.records import RequestRecord
from penstock.kernel.windows import Load, Timeline

log = logging.getLogger("penstock.frontend")

WIDTH = 5.0
"""Seconds of a window."""
KEPT = 720
"""Windows: an hour of them. Older ones are in the run folder, which ``penstock ui`` shows."""


class Seen:
    """The last windows of one frontend process: counted as requests go by, and looked at once in each window.

    Args:
        now: the router's time.
        status: what an operator sees of it.
        offset: nanoseconds from the start of the run to the router's time 0.
    """

    def __init__(self, now: Callable[[], Nanos], status: Callable[[], dict[str, Any]], offset: Nanos) -> None:
        self.timeline = Timeline(WIDTH, KEPT)
        self._now = now
        self._status = status
        self._offset = offset
        self.since = self.now
        """From when on it has seen."""

    @property
    def now(self) -> float:
        """Seconds since the start of the run."""
        return (self._now() + self._offset) / SECOND

    def arrived(self, isl: int) -> None:
        """A request is here, with so many prompt tokens."""
        self.timeline.arrived(self.now, isl)

    def first(self, ttft: float) -> None:
        """A stream has its first output token, so many seconds after it arrived."""
        self.timeline.first(self.now, ttft)

    def ended(self, record: RequestRecord, slo_ttft: float | None, slo_itl: float | None) -> None:
        """A request is over."""
        self.timeline.ended(self.now, record, slo_ttft, slo_itl)

    def look(self, slo_ttft: float | None, slo_itl: float | None) -> None:
        """See what runs and waits, and how loaded each worker is."""
        status = self._status()
        window = self.timeline.window(self.now)
        window.queued = sum(queue["length"] for queue in status["queue"].values())
        window.running = status["requests"]["inflight"] - window.queued
        window.slo_ttft, window.slo_itl = slo_ttft, slo_itl
        loads = {
            worker["id"]: Load(
                worker["active_requests"],
                worker["active_prefill_tokens"],
                worker["active_blocks"],
                worker["kv_blocks"],
                worker["why_not"] is None,
            )
            for worker in status["workers"]
        }
        window.take_loads(loads, self.timeline.before(window))

    async def run(self, slo: Callable[[], tuple[float | None, float | None]]) -> None:
        """Look once at start, then in the middle of each window, until cancelled."""
        while True:
            try:
                self.look(*slo())
            except Exception:  # supervision boundary: what can't be looked at once must not end the page's history
                log.exception("the cluster could not be looked at for the page")
            now = self.now
            await asyncio.sleep((now // WIDTH + 1.5) * WIDTH - now)
