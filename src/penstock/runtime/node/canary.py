"""Canary probes: request one token from an idle worker; two misses in a row cordon it, a token lifts the cordon.

A health route shows that a server's web part runs; a token shows that its engine does. Every frontend probes by
itself, so that it tests its own path to the worker.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from penstock.adapters.engines.probe import Verdict, one_token
from penstock.adapters.http_session import HttpSession
from penstock.adapters.task_cancel import cancel_all
from penstock.config.settings.cluster_settings import CanarySettings
from penstock.kernel.values import WorkerCard, WorkerId
from penstock.router.status_rows import CanaryStatus

log = logging.getLogger("penstock.canary")

Busy = Callable[[WorkerId], tuple[int, int] | None]
"""Returns (requests running, requests ever sent) of a worker; None: no probe, since it drains or is gone."""
Cordon = Callable[[WorkerId, bool, str], None]
"""Takes a worker out of the candidates or puts it back, for a reason."""
LOOKS = 4
"""Checks for idle workers per idle time, so that a canary comes at most a quarter late."""
MISSES = 2
"""Misses in a row that cordon a worker; the next answer lifts it."""
SENT_MAX = 20.0
"""Canaries per second to workers that missed none: those of a large fleet come later."""
RETRY_MAX = 5.0
"""Longest wait, in seconds, before a worker that missed is probed again."""


@dataclass(slots=True)
class CanaryTarget:
    """One worker as the canary knows it. Times in monotonic seconds."""

    card: WorkerCard
    quiet_since: float
    """Time of its last request, or of our last canary."""
    sent_before: int = 0
    sent: int = 0
    missed: int = 0
    """Canaries without a token, ever."""
    misses: int = 0
    """Of these, those in a row at the end."""
    cordoned: str | None = None
    """The reason of our cordon, while there is one."""
    unfit: bool = False
    last: Verdict | None = None
    seconds: float | None = None
    """How long the last token took."""
    task: asyncio.Task[None] | None = None


class Canary:
    """Request a token from idle workers."""

    def __init__(self, settings: CanarySettings, busy: Busy, cordon: Cordon, http: HttpSession | None = None) -> None:
        self._settings = settings
        self._retry = min(RETRY_MAX, settings.idle)
        """Seconds after which one that missed is asked again."""
        self._busy = busy
        self._cordon = cordon
        self._watched: dict[WorkerId, CanaryTarget] = {}
        self._http = http or HttpSession()

    def start(self, card: WorkerCard) -> None:
        """Begin to watch a worker, unless its server is of no known kind: there each token may cost money."""
        self.stop(card)
        if self._settings.idle and card.engine != "openai":
            self._watched[card.id] = CanaryTarget(card, time.monotonic())

    def stop(self, card: WorkerCard) -> None:
        """Watch a worker no more. Its cordon ends as well: a worker that comes back is a new one."""
        watched = self._watched.pop(card.id, None)
        if watched is not None and watched.task is not None:
            watched.task.cancel()

    async def run(self) -> None:
        """Check for idle workers until cancelled."""
        if not self._settings.idle:
            return
        while True:
            await asyncio.sleep(self._retry / LOOKS)
            self.look(time.monotonic())

    def look(self, now: float) -> None:
        """Send a canary to every worker that missed one, and to those that have been idle for longest."""
        missed, idle = list[CanaryTarget](), list[CanaryTarget]()
        for worker, watched in self._watched.items():
            if watched.unfit or (watched.task is not None and not watched.task.done()):
                continue
            load = self._busy(worker)
            if load is None:
                continue
            running, ever = load
            if not watched.misses and (running or ever != watched.sent_before):
                watched.quiet_since = now
            watched.sent_before = ever
            # One that missed is asked even with requests on it: only a probe shows when it is back.
            if now - watched.quiet_since >= (self._retry if watched.misses else self._settings.idle):
                (missed if watched.misses else idle).append(watched)
        idle.sort(key=lambda watched: watched.quiet_since)
        for watched in missed + idle[: math.ceil(SENT_MAX * self._retry / LOOKS)]:
            watched.quiet_since = now
            watched.task = asyncio.create_task(self._ask(watched), name=f"canary-{watched.card.id}")

    def status(self, worker: WorkerId) -> CanaryStatus | None:
        """Return a worker's canary state for status; None where it is not watched."""
        watched = self._watched.get(worker)
        if watched is None:
            return None
        return CanaryStatus(
            sent=watched.sent,
            missed=watched.missed,
            verdict="unfit" if watched.unfit else watched.last,
            wall_s=None if watched.seconds is None else round(watched.seconds, 4),
        )

    @property
    def counts(self) -> dict[str, int]:
        """Canaries sent, missed, and workers that they hold cordoned now."""
        watched = self._watched.values()
        return {
            "sent": sum(one.sent for one in watched),
            "missed": sum(one.missed for one in watched),
            "cordoned": sum(one.cordoned is not None for one in watched),
        }

    async def close(self) -> None:
        tasks = [watched.task for watched in self._watched.values() if watched.task is not None]
        await cancel_all(tasks)
        await self._http.close()

    async def _ask(self, watched: CanaryTarget) -> None:
        card = watched.card
        watched.sent += 1
        began = time.monotonic()
        request = f"canary-{card.id}-{watched.sent}"
        verdict, text = await one_token(self._http.session, card, self._settings.timeout, request)
        if self._watched.get(card.id) is not watched:
            return  # it left meanwhile, or came back as a new worker
        watched.last = verdict
        if verdict == "missed":
            self._missed(watched, text)
        elif verdict == "unfit":
            watched.unfit = True
            log.warning("worker %s is not asked for tokens any more: %s", card.id, text)
        else:
            watched.seconds = time.monotonic() - began if verdict == "alive" else watched.seconds
            self._answered(watched)

    def _missed(self, watched: CanaryTarget, text: str) -> None:
        watched.missed += 1
        watched.misses += 1
        log.warning("worker %s missed a canary, %d in a row: %s", watched.card.id, watched.misses, text)
        if watched.misses >= MISSES and watched.cordoned is None:
            watched.cordoned = f"{watched.misses} canaries in a row brought no token, the last: {text}"
            self._cordon(watched.card.id, True, watched.cordoned)

    def _answered(self, watched: CanaryTarget) -> None:
        watched.misses = 0
        if watched.cordoned is not None:
            reason, watched.cordoned = watched.cordoned, None
            log.info("worker %s makes tokens again", watched.card.id)
            self._cordon(watched.card.id, False, reason)
