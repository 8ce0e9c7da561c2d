"""Kubernetes connector: reads pools from an API server, and scales them so that no ceiling is passed on the way.

One decision of the planner is several writes here, some of which may fail, come late or meet a writer of others. So
what shrinks is written first, and nothing grows before that is done; each write is on the condition that its object is
as the planner observed it; and after a write without an answer nothing else grows until it can't count any more.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import msgspec

from penstock.kernel.errors import PenstockError
from penstock.kernel.values import Pool, Replica
from penstock.planner.plugins.proposals import Flip, Reason
from penstock_kubernetes.connector.scale_target import (
    LIST_PODS,
    ClusterAccess,
    OutcomeUnknown,
    PoolReading,
    RightMissing,
    ScaleTarget,
    TargetError,
    WriteConflict,
)

log = logging.getLogger("penstock.planner")

TRIES = 3
"""How often a write that met another writer is tried on the fresh object: the next tick writes again anyway."""
FENCE = 60.0
"""Seconds in which a write without an answer may still be carried out: the API server's own limit of a request."""
WAIT_MAX = 1800.0
"""Longest wait for the pods of a decision, where the planner waits for them: Dynamo's 180 polls of 10 s."""


class UnansweredWrite(NamedTuple):
    """A write that may still be carried out."""

    replicas: int
    until: float


class KubernetesConnector:
    """A `penstock.adapters.connectors.scale_connector.ScaleConnector` over an API server.

    Args:
        targets: the objects that hold the pools; no two have a pool of the same name.
        access: pods and rights; owned by this from here on.
        namespace: in words.
        wait: write a decision only once the pods of the one before are ready, at most `WAIT_MAX` seconds later.
        clock: seconds, any origin.
    """

    def __init__(
        self,
        targets: Sequence[ScaleTarget],
        access: ClusterAccess,
        *,
        namespace: str,
        wait: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._targets = targets
        self._access = access
        self._namespace = namespace
        self._wait = wait
        self._clock = clock
        self._observed: dict[str, int] = {}
        """Pool -> replicas that the planner knows: as last looked at, or written since."""
        self._ready: dict[str, bool] = {}
        """Pool -> whether its pods were as wanted when they were last looked at."""
        self._owner: dict[str, ScaleTarget] = {}
        self._unanswered: dict[str, UnansweredWrite] = {}
        self._decided: float | None = None
        """When the last decision was written."""
        self._denied = ""
        """Rights that were missing when last asked, in a sentence; empty where none is."""
        self._reviewed = False
        self._busy = asyncio.Lock()

    async def validate(self) -> None:
        """Check that the objects are what the settings say; an API server that is away is not waited for.

        Raises:
            ConfigError: they are not.
        """
        try:
            await self._read()
        except TargetError as error:
            log.warning("the pools can't be checked at the start: %s", error)

    async def look(self) -> Mapping[str, Pool]:
        async with self._busy:  # what is being written would be half in it, and the next decision would not know
            return await self._look()

    async def scale(
        self,
        targets: Mapping[str, int],
        flips: Sequence[Flip],
        reasons: Sequence[Reason],
        *,
        without: Collection[str] = (),
    ) -> dict[str, str]:
        """Scale as `ScaleConnector` does; ``without``: workers that a smaller number should end first."""
        if self._busy.locked():
            return dict.fromkeys(targets, "the decision before it is still being written")
        async with self._busy:
            if flips:
                log.warning("roles can't be changed by %s: it only takes numbers", self.describe())
            if self._denied:
                return dict.fromkeys(targets, self._denied)
            if (awaited := self._awaited()) is not None:
                return dict.fromkeys(targets, awaited)
            try:
                readings = await self._read()
            except PenstockError as error:
                return dict.fromkeys(targets, str(error))
            return await self._scale(targets, readings, without)

    def describe(self) -> str:
        return f"{', '.join(target.describe() for target in self._targets)} in namespace {self._namespace}"

    async def close(self) -> None:
        await self._access.close()

    async def _look(self) -> Mapping[str, Pool]:
        readings = await self._read()
        if not self._reviewed or self._denied:
            await self._review()
        pods = await asyncio.gather(*(self._pods(reading) for reading in readings.values()))
        pools = {}
        for (name, reading), replicas in zip(readings.items(), pods, strict=True):
            pool = msgspec.structs.replace(reading.pool, replicas=replicas, problem=self._denied or None)
            self._ready[name] = pool.acknowledged and (replicas is None or pool.settled)
            pools[name] = pool
        self._observed = {name: pool.desired for name, pool in pools.items()}
        for name, write in list(self._unanswered.items()):
            if write.replicas == self._observed.get(name):
                del self._unanswered[name]  # it was carried out
        return pools

    # --- one decision -------------------------------------------------------------------------------------------------

    async def _scale(
        self, targets: Mapping[str, int], readings: Mapping[str, PoolReading], without: Collection[str]
    ) -> dict[str, str]:
        problems: dict[str, str] = {}
        fewer, more = dict[str, int](), dict[str, int]()
        for name, replicas in targets.items():
            if name not in readings:
                problems[name] = f"there is no such pool: there are {', '.join(readings)}"
            elif replicas < readings[name].pool.desired:
                fewer[name] = replicas
            elif replicas > readings[name].pool.desired:
                more[name] = replicas
        blocked = self._grown_by_others(readings)
        for name, replicas in fewer.items():
            why = await self._write(name, replicas, readings[name].labels, without)
            if why is not None:
                problems[name] = why
                blocked = blocked or f"nothing grows before {name} has shrunk: {why}"
        for name, replicas in more.items():
            why = blocked or self._pending(name) or await self._write(name, replicas, readings[name].labels, ())
            if why is not None:
                problems[name] = why
        return problems

    def _grown_by_others(self, readings: Mapping[str, PoolReading]) -> str | None:
        """Return which pool another writer has made larger than the planner knows, or None."""
        for name, reading in readings.items():
            present, before = reading.pool.desired, self._observed.get(name)
            write = self._unanswered.get(name)
            if before is not None and present > before and (write is None or present != write.replicas):
                return f"somebody set {name} from {before} to {present}; the next observation counts"
        return None

    def _pending(self, name: str) -> str | None:
        """Return which write without an answer forbids that a pool grows, or None."""
        now = self._clock()
        self._unanswered = {pool: write for pool, write in self._unanswered.items() if write.until > now}
        for pool, write in self._unanswered.items():
            if pool != name:
                seconds = write.until - now
                return f"{pool} may still become {write.replicas}, since a write had no answer; {seconds:.0f} s more"
        return None

    async def _write(self, name: str, replicas: int, labels: Mapping[str, str], without: Collection[str]) -> str | None:
        """Set one pool, if it still has the number that the planner knows; return why that failed, or None."""
        target = self._owner[name]
        try:
            if without:
                await self._access.mark_victims(labels, without)
            for tries_left in range(TRIES - 1, -1, -1):
                readings = await target.read()
                present = readings[name].pool.desired
                if present == replicas:
                    self._observed[name] = replicas
                    return None
                if present != self._observed.get(name, present):
                    return f"somebody set it from {self._observed[name]} to {present}; the next observation counts"
                try:
                    await target.write(name, replicas, readings)
                    break
                except WriteConflict:
                    if not tries_left:
                        raise
                except OutcomeUnknown:
                    self._unanswered[name] = UnansweredWrite(replicas, self._clock() + FENCE)
                    raise
        except RightMissing as error:
            self._denied = f"{error}; the planner only observes"
            log.warning("%s", self._denied)
            return self._denied
        except PenstockError as error:
            return str(error)
        self._unanswered.pop(name, None)  # an older write is of an older version of the object now
        self._observed[name], self._ready[name] = replicas, False
        self._decided = self._clock()
        return None

    def _awaited(self) -> str | None:
        """Return what the decision before waits for, or None where the next one may be written."""
        late = [name for name, ready in self._ready.items() if not ready]
        if not self._wait or self._decided is None or not late:
            return None
        waited = self._clock() - self._decided
        if waited >= WAIT_MAX:
            log.warning("%s did not become ready in %.0f s; the next decision is written", ", ".join(late), waited)
            return None
        return f"the pods of {', '.join(late)} are not ready; the next decision waits for at most {WAIT_MAX:g} s"

    # --- what there is ------------------------------------------------------------------------------------------------

    async def _read(self) -> dict[str, PoolReading]:
        readings: dict[str, PoolReading] = {}
        for target, pools in zip(
            self._targets, await asyncio.gather(*(target.read() for target in self._targets)), strict=True
        ):
            self._owner |= dict.fromkeys(pools, target)
            readings |= pools
        return readings

    async def _pods(self, reading: PoolReading) -> tuple[Replica, ...] | None:
        """Return the pods of a pool; None where we may not list any."""
        try:
            return await self._access.replicas(reading.labels)
        except RightMissing:
            return None

    async def _review(self) -> None:
        """Ask which rights are missing, and say so where that has changed."""
        rights = [LIST_PODS, *(right for target in self._targets for right in target.rights)]
        try:
            missing = await self._access.missing(rights)
        except TargetError as error:
            log.info("the rights of this account can't be asked for: %s", error)
            return
        self._reviewed = True
        denied = [str(right) for right in missing if right.verb == "patch"]
        if LIST_PODS in missing:
            log.warning("the planner may not %s in namespace %s: it counts no pods", LIST_PODS, self._namespace)
        before = self._denied
        self._denied = ""
        if denied:
            verbs = " and ".join(denied)
            self._denied = f"the planner may not {verbs} in namespace {self._namespace}, so it only observes"
        if self._denied != before:
            log.warning("%s", self._denied or "the planner has all rights now, and scales")
