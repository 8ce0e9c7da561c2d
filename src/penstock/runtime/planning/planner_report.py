"""Planner report: the last decision, pending changes and unreadable sources of a planner, and its records on disk.

`PlannerStatus` follows it in a frontend and derives findings for the operator.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from penstock.adapters.seams import Store
from penstock.kernel.message_version import NewerVersion, VersionedDecoder
from penstock.kernel.plurals import counted
from penstock.planner.plugins.proposals import CEILING, Reason
from penstock.planner.tick_record import PoolTick
from penstock.router.status_rows import Level, StatusFinding
from penstock.runtime.cluster_state.store_watch import follow
from penstock.runtime.records import segments

T = TypeVar("T")

REPORT = "planner/report"
"""Key in the store of the newest `PlannerReport`, for as long as its planner lives."""
RECORDS = "planner.jsonl"
"""File of the run folder with a `penstock.planner.tick_record.TickRecord` per line, in segments."""
STATE = "planner-state.msgpack"
"""File of the run folder from which a planner that takes over continues."""
ALARMS_MAX = 20
UNCHANGED = b'"outcome":"keep"'
log = logging.getLogger("penstock.planner")
PATIENCE = 3
"""Ticks without a report before that is a finding."""
STARTS_WITHIN = 60.0
"""Seconds that a planner gets for its first report."""
_LEVELS: dict[str, Level] = {"stale": "warning", "broken": "error"}


class AlarmReport(msgspec.Struct, frozen=True, kw_only=True):
    """An alarm for the operator. ``at``: second of the run."""

    at: float
    reason: Reason


class PlannerReport(msgspec.Struct, frozen=True, kw_only=True):
    """State of a planner. ``at``: second of the run of its last tick; ``wall``: seconds since 1970.

    Args:
        every: seconds between two ticks.
        plugins: id -> what it answered in the last tick.
        why: pool by pool the change and its reason, in the last tick with a change, at ``changed``
            seconds of the run; ``reason``: all reasons of that tick.
        health: of each model's traffic: fresh, stale or broken; ``unread``: why it could not be read in the last tick.
        alarms: the newest ones, the last one last.
        restarts: how often it took over from a planner that had ended.
        attainment: share of requests within the SLO in the last tick, of those that could be judged; None of none.
    """

    version: int = 1
    policy: str
    advisory: bool
    source: str
    connector: str
    pid: int
    at: float
    wall: float
    every: float
    tick: int
    outcome: str
    pools: dict[str, PoolTick]
    health: dict[str, str]
    unread: dict[str, str] = {}
    plugins: dict[str, str] = {}
    reason: tuple[Reason, ...] = ()
    why: str = ""
    changed: float | None = None
    bound: tuple[Reason, ...] = ()
    alarms: tuple[AlarmReport, ...] = ()
    gpus: int = 0
    restarts: int = 0
    attainment: float | None = None


class PlannerDecisions(msgspec.Struct, Generic[T], frozen=True):
    """A planner's last report, None where none runs; the last tick; and the newest ticks, the newest first.

    Ticks are passed on as the JSON that was recorded; a reader gets `TickRecord`.
    """

    planner: PlannerReport | None
    last: T | None
    decisions: list[T]


reports = VersionedDecoder(PlannerReport, "a planner's report")


def newest(path: Path, limit: int, *, every: bool = True) -> list[bytes]:
    """Return the last records, the newest first; where not ``every``, of ticks with a change."""
    return segments.newest(path, limit, without=None if every else UNCHANGED)


def past_decisions(run: Path, limit: int, *, every: bool = False) -> PlannerDecisions[msgspec.Raw]:
    """Return a run's last tick, and its newest decisions. Blocks."""
    last = newest(run / RECORDS, 1)
    lines = newest(run / RECORDS, limit, every=every)
    return PlannerDecisions(None, msgspec.Raw(last[0]) if last else None, [msgspec.Raw(line) for line in lines])


class PlannerStatus:
    """Follows the planner's report.

    Args:
        enabled: whether a planner should run.
    """

    def __init__(self, store: Store, enabled: Callable[[], bool]) -> None:
        self.report: PlannerReport | None = None
        self._store = store
        self._enabled = enabled
        self._since = time.monotonic()

    async def run(self) -> None:
        """Follow until cancelled."""
        await follow(
            self._store,
            REPORT,
            known=lambda: [] if self.report is None else [REPORT],
            put=self._put,
            deleted=self._deleted,
            frozen=lambda error: None,
        )

    def findings(self) -> list[StatusFinding]:
        """Return findings for the operator, with the next step."""
        report = self.report
        if report is None:
            if not self._enabled() or time.monotonic() - self._since < STARTS_WITHIN:
                return []
            return [
                StatusFinding("warning", "no planner runs, so replica counts stay as they are", "see logs/planner.log")
            ]
        findings = []
        silent = time.monotonic() - self._since
        if silent > PATIENCE * report.every + 10.0:
            text = f"the planner has not reported for {silent:.0f} s; replica counts stay as they are"
            findings.append(StatusFinding("warning", text, "see logs/planner.log in the run folder"))
        for model, health in report.health.items():
            if health in _LEVELS:
                why = f": {report.unread[model]}" if model in report.unread else ""
                text = f"the planner can't read the traffic of {model} ({health}{why}): nothing is taken away meanwhile"
                findings.append(StatusFinding(_LEVELS[health], text, "'penstock explain scale' says why"))
        for reason in report.bound:
            if reason.code == CEILING:
                findings.append(StatusFinding("warning", reason.text, "raise planner.budget.max_gpus, or shed load"))
        for name, pool in report.pools.items():
            if pool.given_up:
                given_up = counted(pool.given_up, "replica")
                text = f"{given_up} of {name} did not come to serve, and counts no more"
                findings.append(
                    StatusFinding("warning", text, f"'penstock scale' says what holds them; {name} is planned on")
                )
        return findings

    async def _put(self, key: str, raw: bytes) -> None:
        try:
            self.report = reports.decode(raw)
            self._since = time.monotonic()
        except (msgspec.DecodeError, NewerVersion) as error:
            log.warning("what the planner says can't be read: %s", error)
        await asyncio.sleep(0)

    async def _deleted(self, key: str) -> None:
        self.report, self._since = None, time.monotonic()
