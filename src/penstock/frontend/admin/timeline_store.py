"""Timeline store of one frontend process: a window of counts and loads every few seconds, for the last hour."""

import asyncio
import logging
import time
from collections.abc import Callable

from penstock.kernel.machine import SECOND, Nanos
from penstock.kernel.request_record import RequestRecord
from penstock.kernel.time_windows import LoadSample, Timeline, TimeWindow
from penstock.kernel.values import Slo
from penstock.runtime.cluster_state.pool_statuses import absent
from penstock.runtime.node.node_status import NodeStatus

log = logging.getLogger("penstock.frontend")

WIDTH = 5.0
"""Seconds of a window."""
LAST_MINUTE = round(60 / WIDTH)
"""Windows whose latencies the status shows."""
WINDOWS_MAX = 720
"""Windows: an hour of them. Older ones are in the run folder, which ``penstock ui`` shows."""


class TimelineStore:
    """The last windows of one frontend process: requests counted as they pass, loads sampled once per window.

    Args:
        now: the router's time.
        status: the status for operators.
        offset: nanoseconds from the start of the run to the router's time 0.
    """

    def __init__(self, now: Callable[[], Nanos], status: Callable[[], NodeStatus], offset: Nanos) -> None:
        self.timeline = Timeline(WIDTH, WINDOWS_MAX)
        self._now = now
        self._status = status
        self._offset = offset
        self._shift = self.now - time.monotonic()
        """From a moment of `time.monotonic` to one of the run."""
        self.since = self.now
        """Time from which on it has counted."""

    @property
    def now(self) -> float:
        """Seconds since the start of the run."""
        return (self._now() + self._offset) / SECOND

    def arrived(self, moment: float, isl: int) -> None:
        """A request arrived, with so many prompt tokens; ``moment`` is of `time.monotonic`, here and below."""
        self.timeline.arrived(moment + self._shift, isl)

    def first(self, moment: float, ttft: float) -> None:
        """A stream had its first output token, so many seconds after it arrived."""
        self.timeline.first(moment + self._shift, ttft)

    def ended(self, moment: float, record: RequestRecord, slo: Slo) -> None:
        """A request was over."""
        self.timeline.ended(moment + self._shift, record, slo)

    def look(self, slo: Slo) -> None:
        """Sample running and waiting requests, and the load of each worker."""
        status = self._status()
        window = self.timeline.window(self.now)
        window.queued = sum(queue.length for queue in status.queue.values())
        window.running = status.requests.inflight - window.queued
        window.slo_ttft, window.slo_itl = slo.ttft, slo.itl
        loads = {
            worker.id: LoadSample(
                worker.active_requests,
                worker.active_prefill_tokens,
                worker.active_blocks,
                worker.kv_blocks,
                worker.why_not is None,
            )
            for worker in status.workers
        }
        # A process that is not there holds nothing, and has no room.
        loads |= {replica.id: LoadSample(0, 0, 0, 0, False) for replica in absent(status.pools, loads)}
        window.take_loads(loads, self.timeline.before(window))

    def last_minute(self) -> TimeWindow:
        """Return the windows of the last minute, the one that is being filled included, as one."""
        total = TimeWindow()
        last = int(self.now // WIDTH)
        for window in self.timeline.between(last - LAST_MINUTE, last + 1):
            if window is not None:
                total.add(window)
        return total

    async def run(self, slo: Callable[[], Slo]) -> None:
        """Sample once at start, then in the middle of each window, until cancelled."""
        while True:
            try:
                self.look(slo())
            except Exception:  # supervision boundary: one failed sample must not end the page's history
                log.exception("the cluster could not be looked at for the page")
            now = self.now
            await asyncio.sleep((now // WIDTH + 1.5) * WIDTH - now)
