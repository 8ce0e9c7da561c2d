"""Planner report: the last decision, pending changes and unreadable sources of a planner, and its records on disk."""

from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from penstock.kernel.message_version import VersionedDecoder
from penstock.planner.plugins.proposals import Reason
from penstock.planner.tick_record import PoolTick
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
