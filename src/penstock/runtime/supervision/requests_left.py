"""Requests left on a draining worker: adds up what the frontends report of it."""

import logging
from collections.abc import AsyncIterator

from penstock.adapters.seams import Store, StoreUnavailable
from penstock.kernel.values import WorkerCard
from penstock.runtime.cluster_state.desired_state import LEAVING, DrainAck, decode_all
from penstock.runtime.cluster_state.placement_sync import FRONTENDS
from penstock.runtime.cluster_state.shared_reading import SharedReading
from penstock.runtime.supervision.fleet_driver import RequestCount

log = logging.getLogger("penstock.fleet")

EVERY = 0.1
"""Seconds between reads of the frontends' reports."""


Reports = SharedReading[tuple[set[str], dict[str, dict[str, DrainAck]]]]
"""Readings of the frontends there are, and of what each reports of a draining worker: by worker, then by frontend."""


def reports_in(store: Store) -> Reports:
    """Return readings of all reports on draining workers in a store."""

    async def read() -> tuple[set[str], dict[str, dict[str, DrainAck]]]:
        frontends = {key.removeprefix(FRONTENDS) for key in await store.list(FRONTENDS)}
        workers: dict[str, dict[str, DrainAck]] = {}
        for name, report in decode_all(DrainAck, await store.list(LEAVING), LEAVING).items():
            worker, _, frontend = name.rpartition("/")
            workers.setdefault(worker, {})[frontend] = report
        return frontends, workers

    return SharedReading(read, EVERY)


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
