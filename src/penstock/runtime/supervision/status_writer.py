"""Status writer: writes the progress of drains and restarts into the store, in the order in which it came."""

import asyncio
import logging
from collections.abc import Callable

from penstock.adapters.seams import Store, StoreUnavailable
from penstock.fleet import events
from penstock.runtime.cluster_state.desired_state import DRAINED, RESTARTED, DrainStatus, RestartStatus, put
from penstock.runtime.cluster_state.store_watch import RETRY

log = logging.getLogger("penstock.fleet")

Report = events.DrainReported | events.DrainForgotten | events.RestartReported


class StatusWriter:
    """Takes reports with `add`, and writes them while `run` runs.

    Args:
        ttl: seconds after which the records go when this process dies.
    """

    def __init__(self, store: Store, ttl: float) -> None:
        self._store = store
        self._ttl = ttl
        self.noted: Callable[[Report], None] = lambda report: None
        """Called with each report."""
        self._reports: asyncio.Queue[Report] = asyncio.Queue()

    def add(self, report: Report) -> None:
        """Write a report, soon."""
        self._reports.put_nowait(report)
        self.noted(report)
        if isinstance(report, events.DrainReported) and report.cut:
            log.warning(
                "%s was drained for %.1f s; %d requests still ran there", report.worker, report.seconds, report.cut
            )
        elif isinstance(report, events.RestartReported) and report.state == "failed":
            log.error("the restart stops: %s", report.problem)

    async def run(self) -> None:
        """Write until cancelled. An outage of the store costs the reports of progress, not the last of a restart."""
        while True:
            report = await self._reports.get()
            while not await self._written(report):
                if not isinstance(report, events.RestartReported) or report.state == "running":
                    break
                await asyncio.sleep(RETRY)

    async def _written(self, report: Report) -> bool:
        try:
            if isinstance(report, events.DrainForgotten):
                await self._store.delete(DRAINED + report.worker)
            elif isinstance(report, events.DrainReported):
                await put(self._store, DRAINED + report.worker, _drain(report), ttl=self._ttl)
            else:
                await put(self._store, RESTARTED, _restart(report), ttl=self._ttl)
        except StoreUnavailable as error:
            log.warning("the status of a drain or restart can't be written: %s", error)
            return False
        return True


def _drain(report: events.DrainReported) -> DrainStatus:
    return DrainStatus(
        name=report.worker,
        state=report.state,
        finished=report.finished,
        active=report.active,
        cut=report.cut,
        seconds=report.seconds,
        revision=report.revision,
    )


def _restart(report: events.RestartReported) -> RestartStatus:
    return RestartStatus(
        revision=report.revision, state=report.state, done=report.done, left=report.left, problem=report.problem
    )
