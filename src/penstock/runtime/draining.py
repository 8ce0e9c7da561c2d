"""When may a drained worker be ended? Once no frontend has anything running there, or the time is over."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from penstock.adapters.seams import Store, StoreUnavailable
from penstock.kernel.values import WorkerCard
from penstock.runtime.peers import FRONTENDS
from penstock.runtime.wishes import DRAINED, LEAVING, DrainReport, Leaving, decode_all, put

log = logging.getLogger("penstock.fleet")

EVERY = 0.1
"""Seconds between looks at what the frontends say."""


async def drained(
    store: Store,
    card: WorkerCard,
    timeout: float,
    *,
    revision: str | None = None,
    say: Callable[[DrainReport], Awaitable[None]],
) -> DrainReport:
    """Wait until nothing runs on a worker whose entry in the store says that it is draining.

    A frontend that has not reported yet may still be sending it requests, so it counts as busy. A store that can't be
    read is waited for: nothing is known of the frontends then.

    Args:
        timeout: seconds after which what still runs is given up.
        say: told how it goes, whenever that changes.
    Returns: the end of it, which is also written to the store.
    """
    started = time.monotonic()
    finished, active, heard = 0, 0, False
    told: tuple[int, int] | None = None
    while True:
        try:
            frontends = {key.removeprefix(FRONTENDS) for key in await store.list(FRONTENDS)}
            prefix = f"{LEAVING}{card.id}/"
            reports = {
                name: report
                for name, report in decode_all(Leaving, await store.list(prefix), prefix).items()
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
            report = DrainReport(
                name=card.id, state="done", finished=finished, active=0, cut=cut, seconds=seconds, revision=revision
            )
            await say(report)
            if cut:
                log.warning("%s was drained for %.1f s; %d requests still ran there", card.id, seconds, cut)
            elif not idle:
                log.warning("%s was drained for %.1f s, but not all frontends have said so", card.id, seconds)
            return report
        if told != (active, finished):
            told = (active, finished)
            await say(
                DrainReport(
                    name=card.id,
                    state="draining",
                    finished=finished,
                    active=active,
                    seconds=seconds,
                    revision=revision,
                )
            )
        await asyncio.sleep(EVERY)


async def tell(store: Store, report: DrainReport, ttl: float) -> None:
    """Write a drain's report; a store that can't be written costs the report, not the drain."""
    try:
        await put(store, DRAINED + report.name, report, ttl=ttl)
    except StoreUnavailable as error:
        log.warning("how the drain of %s goes can't be said: %s", report.name, error)
