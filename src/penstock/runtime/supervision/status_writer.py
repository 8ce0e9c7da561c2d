"""Status writer: writes the progress of drains and restarts into the store, in the order in which it came.

`requests_left` reads the other way: what the frontends report of a draining worker.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable

from penstock.adapters.seams import Store, StoreUnavailable
from penstock.fleet import events
from penstock.kernel.values import WorkerCard
from penstock.runtime.cluster_state.desired_state import (
    DRAINED,
    LEAVING,
    RESTARTED,
    DrainAck,
    DrainStatus,
    RestartStatus,
    decode_all,
    put,
)
from penstock.runtime.cluster_state.placement_sync import FRONTENDS
from penstock.runtime.cluster_state.store_watch import RETRY, SharedReading
from penstock.runtime.supervision.fleet_driver import RequestCount

log = logging.getLogger("penstock.fleet")

Report = events.DrainReported | events.DrainForgotten | events.RestartReported
LEFT_EVERY = 0.1
"""Seconds between reads of the frontends' reports."""
Reports = SharedReading[tuple[set[str], dict[str, dict[str, DrainAck]]]]
"""Readings of the frontends there are, and of what each reports of a draining worker: by worker, then by frontend."""


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
                await put(self._store, DRAINED + report.worker, _drain_status(report), ttl=self._ttl)
            else:
                await put(self._store, RESTARTED, _restart(report), ttl=self._ttl)
        except StoreUnavailable as error:
            log.warning("the status of a drain or restart can't be written: %s", error)
            return False
        return True


def _drain_status(report: events.DrainReported) -> DrainStatus:
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


def reports_in(store: Store) -> Reports:
    """Return readings of all reports on draining workers in a store."""

    async def read() -> tuple[set[str], dict[str, dict[str, DrainAck]]]:
        frontends = {key.removeprefix(FRONTENDS) for key in await store.list(FRONTENDS)}
        workers: dict[str, dict[str, DrainAck]] = {}
        for name, report in decode_all(DrainAck, await store.list(LEAVING), LEAVING).items():
            worker, _, frontend = name.rpartition("/")
            workers.setdefault(worker, {})[frontend] = report
        return frontends, workers

    return SharedReading(read, LEFT_EVERY)


async def requests_left(reports_of_all: Reports, card: WorkerCard) -> AsyncIterator[RequestCount]:
    """Yield the requests on a worker whose entry in the store says that it is draining, whenever they change.

    A frontend that has not reported yet may still be sending it requests. While the store can't be read nothing is
    known of the frontends, and nothing is yielded.
    """
    last: RequestCount | None = None
    finished = 0
    while True:
        try:
            frontends, workers = await reports_of_all.next()
            reports = {
                name: report
                for name, report in workers.get(card.id, {}).items()
                if report.epoch >= card.epoch and name in frontends  # above it: it left and came back (membership)
            }
        except StoreUnavailable as error:
            log.warning("whether %s is idle can't be seen: %s", card.id, error)
        else:
            finished = max(finished, sum(report.begun - report.active for report in reports.values()))
            active = sum(report.active for report in reports.values())
            count = RequestCount(active, finished, heard=reports.keys() == frontends)
            if count != last:
                last = count
                yield count
