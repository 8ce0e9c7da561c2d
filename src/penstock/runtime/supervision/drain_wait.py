"""Drain wait: waits until no frontend has a request on a draining worker, or until the timeout."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from penstock.adapters.seams import Store, StoreUnavailable
from penstock.kernel.values import WorkerCard
from penstock.runtime.cluster_state.desired_state import DRAINED, LEAVING, DrainAck, DrainStatus, decode_all, put
from penstock.runtime.cluster_state.placement_sync import FRONTENDS

log = logging.getLogger("penstock.fleet")

EVERY = 0.1
"""Seconds between reads of the frontends' reports."""


async def drained(
    store: Store,
    card: WorkerCard,
    timeout: float,
    *,
    revision: str | None = None,
    say: Callable[[DrainStatus], Awaitable[None]],
) -> DrainStatus:
    """Wait until nothing runs on a worker whose entry in the store says that it is draining.

    A frontend that has not reported yet may still be sending it requests, so it counts as busy. A store that can't
    be read makes it wait: the frontends' state is unknown then.

    Args:
        timeout: seconds after which running requests are given up.
        say: called with the progress, whenever that changes.
    Returns: the last status, which is also written to the store.
    """
    started = time.monotonic()
    finished, active, heard = 0, 0, False
    reported: tuple[int, int] | None = None
    while True:
        try:
            frontends = {key.removeprefix(FRONTENDS) for key in await store.list(FRONTENDS)}
            prefix = f"{LEAVING}{card.id}/"
            reports = {
                name: report
                for name, report in decode_all(DrainAck, await store.list(prefix), prefix).items()
                if report.epoch >= card.epoch and name in frontends  # above it: it left and came back (membership)
            }
            heard = set(reports) == frontends
            active = sum(report.active for report in reports.values())
            finished = max(finished, sum(report.begun - report.active for report in reports.values()))
        except StoreUnavailable as error:
            log.warning("whether %s is idle can't be seen: %s", card.id, error)
        seconds = time.monotonic() - started
        idle = heard and active == 0
        if idle or seconds >= timeout:
            cut = 0 if idle else active
            report = DrainStatus(
                name=card.id, state="done", finished=finished, active=0, cut=cut, seconds=seconds, revision=revision
            )
            await say(report)
            if cut:
                log.warning("%s was drained for %.1f s; %d requests still ran there", card.id, seconds, cut)
            elif not idle:
                log.warning("%s was drained for %.1f s, but not all frontends have acknowledged it", card.id, seconds)
            return report
        if reported != (active, finished):
            reported = (active, finished)
            await say(
                DrainStatus(
                    name=card.id,
                    state="draining",
                    finished=finished,
                    active=active,
                    seconds=seconds,
                    revision=revision,
                )
            )
        await asyncio.sleep(EVERY)


async def report_drain(store: Store, report: DrainStatus, ttl: float) -> None:
    """Write a drain's report; a store that can't be written costs the report, not the drain."""
    try:
        await put(store, DRAINED + report.name, report, ttl=ttl)
    except StoreUnavailable as error:
        log.warning("the status of the drain of %s can't be written: %s", report.name, error)
