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
STALLED = "streams have all fallen silent, for far longer than their usual gap"
PAUSES = 10
"""Times its longest pause lately that all streams of a worker may be silent before it counts as stalled."""
STALLED_FOR = 60.0
"""Seconds that a stalled worker is in doubt without a new byte: its streams have gone elsewhere, and within this time
canaries and health checks find out whether it works."""
FADES = 0.999
"""What a sweep leaves of the memory of the longest pause: half of it after three minutes."""

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
        self.streaming: set[WorkerId] = set()
        """Workers with a stream that has begun, as the last sweep found them."""
        self._doubted: dict[WorkerId, str] = {}
        self._pauses: dict[WorkerId, float] = {}
        """The longest time lately for which all streams of a worker were silent, and went on."""
        self._paused: dict[WorkerId, float] = {}
        """For how long they were silent at the last sweep."""
        self._stalls: dict[WorkerId, tuple[float, float]] = {}
        """Stalled workers: since when, and when the last byte had come."""

    def __len__(self) -> int:
        return len(self.open)

    def stop(self, effect: Abort) -> None:
        """Stop an attempt, where it is open."""
        attempt = self.open.get((effect.id, effect.attempt))
        if attempt is not None:
            attempt.stop(effect.reason)

    def note_byte(self, worker: WorkerId, at: float) -> None:
        """A stream of a worker has begun, and its last byte came at ``at``."""
        self.streaming.add(worker)
        self.heard[worker] = max(at, self.heard.get(worker, at))

    def doubted(self, worker: WorkerId) -> bool:
        """Return whether a worker is silent for too long, as `judge` has it."""
        return worker in self._doubted

    async def watch(self, cluster: ClusterView, limit: Callable[[], float]) -> None:
        """Look at every attempt and answer four times a second, until cancelled. ``limit``: seconds of `judge`."""
        now = time.monotonic()
        while True:
            before = now
            await asyncio.sleep(PERIOD)
            now = time.monotonic()
            if now - before > 2 * PERIOD:  # the loop was late itself: what has come meanwhile is to be read first
                await asyncio.sleep(0)
                await asyncio.sleep(0)
            self.streaming.clear()
            for attempt in list(self.open.values()):
                await attempt.look(now)
            for answer in list(self.answers):
                await answer.look(now)
            self.judge(cluster, now, limit())

    def judge(self, cluster: ClusterView, now: float, limit: float) -> None:
        """Doubt workers that are silent for longer than ``limit``: to their health checks, or in all of their streams.

        The latter is measured by the worker's own pauses, since a long prefill lets some engines' streams stand.
        """
        doubts: dict[WorkerId, str] = {}
        for worker in cluster.silent:
            if now - self.heard.get(worker, 0.0) > limit:
                doubts[worker] = QUIET
        for worker in self.streaming:
            silent, before = now - self.heard[worker], self._paused.get(worker, 0.0)
            longest = FADES * self._pauses.get(worker, 0.0)
            self._pauses[worker] = max(longest, before) if silent < before else longest
            self._paused[worker] = silent
            if silent > max(2 * limit, PAUSES * self._pauses[worker]):
                self._stalls.setdefault(worker, (now, self.heard[worker]))
        for worker, (since, heard) in list(self._stalls.items()):
            if self.heard[worker] > heard or now - since > STALLED_FOR:
                del self._stalls[worker]
            else:
                doubts.setdefault(worker, STALLED)
        for worker in self._paused.keys() - self.streaming:
            del self._paused[worker]
        for worker in {*doubts, *self._doubted}:
            new, old = doubts.get(worker), self._doubted.get(worker)
            if new == old:
                continue
            if old is not None:
                del self._doubted[worker]
                cluster.doubt(worker, False, old)
            if new is not None:
                self._doubted[worker] = new
                cluster.doubt(worker, True, new)


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
