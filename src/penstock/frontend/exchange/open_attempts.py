"""Open attempts of one frontend process: stopped by order of the router, and by one sweep where they fall silent.

One sweep over all costs less than a timer per chunk.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from penstock.frontend.cluster_view import ClusterView
from penstock.kernel.values import RequestId, WorkerCard, WorkerId
from penstock.router.events import Abort, Dispatch
from penstock.runtime.node.adapter_loads import LoadFailure

PERIOD = 0.25
"""Seconds between sweeps: how exact the limits on silence are."""
QUIET = "health check is not answered, and no byte has come from it for a while"

AttemptKey = tuple[str, int]
"""A request's id and the attempt's number."""


@dataclass(slots=True)
class WorkerAbsence:
    """For how long the worker of an attempt has been observed gone."""

    _cluster: ClusterView
    _card: WorkerCard
    _since: float | None = None

    def beyond(self, limit: float, now: float) -> bool:
        """Return whether it is gone for longer than ``limit``, and another worker could take its requests."""
        return self.seconds(now) > limit and not self._cluster.alone(self._card)

    def seconds(self, now: float) -> float:
        """Return the seconds since it was first found to be gone; below 0 where it is there."""
        if self._cluster.is_current(self._card):
            self._since = None
            return -1.0
        if self._since is None:
            self._since = now
        return now - self._since


class OpenAttempt(Protocol):
    """One leg of a request at one worker."""

    def stop(self, reason: str) -> None:
        """Stop, by order of the router."""
        ...

    async def look(self, now: float) -> None:
        """Act where it has been silent for too long; ``now`` is `time.monotonic`."""
        ...


class WatchedAnswer(Protocol):
    """What a client waits for."""

    async def look(self, now: float) -> None:
        """Say something where it has waited for too long; ``now`` is `time.monotonic`."""
        ...


class OpenAttempts:
    """All attempts that are open, and the answers of their clients."""

    def __init__(self) -> None:
        self.open: dict[AttemptKey, OpenAttempt] = {}
        """Each puts itself here, and takes itself out."""
        self.answers: set[WatchedAnswer] = set()
        """The answers that they are to give; the same."""
        self.heard: dict[WorkerId, float] = {}
        """When a byte of an answer last came from a worker, as far as the attempts have said."""
        self._doubted: set[WorkerId] = set()

    def __len__(self) -> int:
        return len(self.open)

    def stop(self, effect: Abort) -> None:
        """Stop an attempt, where it is open."""
        attempt = self.open.get((effect.id, effect.attempt))
        if attempt is not None:
            attempt.stop(effect.reason)

    async def watch(self, cluster: ClusterView, limit: Callable[[], float]) -> None:
        """Look at every attempt and answer four times a second, until cancelled. ``limit``: seconds of `judge`."""
        now = time.monotonic()
        while True:
            before = now
            await asyncio.sleep(PERIOD)
            now = time.monotonic()
            if now - before > 2 * PERIOD:
                continue  # the loop was late itself: what has come is to be read before anybody is called silent
            for attempt in list(self.open.values()):
                await attempt.look(now)
            for answer in list(self.answers):
                await answer.look(now)
            self.judge(cluster, now - limit())

    def judge(self, cluster: ClusterView, since: float) -> None:
        """Doubt workers that answer no health check, unless a byte has come from them ``since``."""
        for worker in {*cluster.silent, *self._doubted}:
            doubted = worker in cluster.silent and self.heard.get(worker, since) <= since
            if doubted != (worker in self._doubted):
                (self._doubted.add if doubted else self._doubted.discard)(worker)
                cluster.doubt(worker, doubted, QUIET)


STOPPED = LoadFailure("", 0)
"""The router stopped the attempt while it waited."""


class AdapterWait:
    """One attempt that waits; among the open attempts, so that the router can stop it."""

    def __init__(self, load: "asyncio.Task[LoadFailure | None]") -> None:
        self._load = load
        self._stopped: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def stop(self, reason: str) -> None:
        if not self._stopped.done():
            self._stopped.set_result(None)

    async def look(self, now: float) -> None:
        """Nothing is silent here: the load has its own time limit, and the request its deadline."""

    async def result(self) -> LoadFailure | None:
        """Wait; the load goes on for others where this attempt is stopped."""
        waiting: list[asyncio.Future[Any]] = [self._load, self._stopped]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if self._stopped.done():
            return STOPPED
        return LoadFailure("its load was given up", 503) if self._load.cancelled() else self._load.result()


async def adapter_ready(
    cluster: ClusterView, attempts: OpenAttempts, request: RequestId, dispatch: Dispatch, adapter: str
) -> LoadFailure | None:
    """Wait for the load of an adapter on the worker of an attempt, where one runs; return why it failed."""
    loads = cluster.adapters
    load = None if loads is None else loads.pending(dispatch.target.worker, adapter)
    if load is None:
        return None
    key = (request, dispatch.attempt)
    wait = attempts.open[key] = AdapterWait(load)
    try:
        return await wait.result()
    finally:
        del attempts.open[key]
