"""Crashes of a cluster's processes: each supervisor writes its own into the store, and every frontend follows them all.

Engines, frontends and a planner are started again by themselves, and running requests migrate; without this record an
operator would never learn of a crash.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Literal

import msgspec

from penstock.adapters.seams import Store, StoreUnavailable
from penstock.kernel.message_version import NewerVersion, VersionedDecoder
from penstock.kernel.plurals import ordinal
from penstock.router.status_rows import StatusFinding, WorkerStatus
from penstock.runtime.cluster_state.store_watch import RETRY, follow

log = logging.getLogger("penstock.crashes")

CRASHED = "crashed/"
"""``crashed/<worker, frontend or planner>``: `Crash`."""
RECENT = 3600.0
"""Seconds after which a crash is not a finding any more; its count and reason stay in the status."""

Kind = Literal["engine", "server", "frontend", "planner", "tiers", "supervisor"]
"""A server is an engine that another party runs: it came back, and this supervisor did not start it."""


class CrashStatus(msgspec.Struct, frozen=True, kw_only=True):
    """How often a process crashed in this run, and the last time: why, and at which second since 1970."""

    name: str
    kind: Kind
    count: int
    reason: str
    at: float


class Crash(CrashStatus, frozen=True, kw_only=True):
    """The same in the store."""

    version: int = 1


_crashes = VersionedDecoder(Crash, "a report of a crash")


class CrashBook:
    """The crashes of one supervisor's processes: `add` them, and keep `run` running.

    Args:
        ttl: seconds after which the records leave the store when this process dies.
    """

    def __init__(self, store: Store, ttl: float) -> None:
        self.crashes: dict[str, Crash] = {}
        self.noted: Callable[[Crash], None] = lambda crash: None
        """Called with each crash."""
        self._store = store
        self._ttl = ttl
        self._unsaid: set[str] = set()
        self._added = asyncio.Event()

    def add(self, name: str, kind: Kind, reason: str) -> None:
        """Count one crash."""
        before = self.crashes.get(name)
        count = 1 if before is None else before.count + 1
        self.crashes[name] = Crash(name=name, kind=kind, count=count, reason=reason, at=time.time())
        self.noted(self.crashes[name])
        self._unsaid.add(name)
        self._added.set()

    async def run(self) -> None:
        """Write crashes into the store as they come, until cancelled; a store that fails is tried again."""
        while True:
            await self._added.wait()
            self._added.clear()
            while self._unsaid:
                name = next(iter(self._unsaid))
                crash = self.crashes[name]
                try:
                    await self._store.put(CRASHED + name, msgspec.json.encode(crash), ttl=self._ttl)
                except StoreUnavailable as error:
                    log.warning("the crash of %s can't be written to the store: %s", name, error)
                    await asyncio.sleep(RETRY)
                    continue
                if self.crashes[name] == crash:
                    self._unsaid.discard(name)


class Crashes:
    """The crashes of the whole cluster, as a frontend follows them. ``clock``: seconds since 1970."""

    def __init__(self, store: Store, clock: Callable[[], float] = time.time) -> None:
        self.known: dict[str, Crash] = {}
        self._store = store
        self._clock = clock

    async def run(self) -> None:
        """Follow until cancelled."""
        await follow(
            self._store,
            CRASHED,
            known=lambda: [CRASHED + name for name in self.known],
            put=self._put,
            deleted=self._deleted,
            frozen=lambda error: None,
        )

    def status(self) -> list[CrashStatus]:
        """Return every process that crashed, the newest crash first."""
        newest = sorted(self.known.values(), key=lambda crash: -crash.at)
        return msgspec.convert(newest, list[CrashStatus], from_attributes=True)

    def describe(self, workers: list[WorkerStatus]) -> None:
        """Add to each worker of a status how often it was started again, and why the last time."""
        for worker in workers:
            crash = self.known.get(worker.id)
            if crash is not None:
                worker.restarts, worker.restart_reason = crash.count, crash.reason

    def findings(self) -> list[StatusFinding]:
        """Return which processes crashed lately. The text holds no age, so that all frontends return the same."""
        findings = []
        for crash in self.known.values():
            if self._clock() - crash.at > RECENT:
                continue
            when = time.strftime("%H:%M:%S UTC", time.gmtime(crash.at))
            again = "" if crash.count == 1 else f", for the {ordinal(crash.count)} time"
            after = "it is asked again until it answers" if crash.kind == "server" else "it was started again"
            text = f"{crash.name} {crash.reason} at {when}{again}; {after}"
            places = {"server": "the server's own log", "supervisor": "the system's log"}
            place = places.get(crash.kind, f"logs/{crash.name}.log in the run folder")
            findings.append(StatusFinding("warning", text, f"see {place}"))
        return findings

    async def _put(self, key: str, raw: bytes) -> None:
        try:
            crash: Crash = _crashes.decode(raw)
            if self.known.get(crash.name) != crash:
                fields = {"kind": "crashed", "name": crash.name, "count": crash.count}
                log.warning("%s %s (crash %d)", crash.name, crash.reason, crash.count, extra={"fields": fields})
            self.known[key.removeprefix(CRASHED)] = crash
        except (msgspec.DecodeError, NewerVersion) as error:
            log.warning("a crash in the store can't be read: %s", error)

    async def _deleted(self, key: str) -> None:
        self.known.pop(key.removeprefix(CRASHED), None)
