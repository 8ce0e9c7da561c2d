"""Timeline view: a cluster's or a run's time windows as columns, for the page's charts."""

from pathlib import Path
from typing import Literal

import msgspec

from penstock.kernel.time_windows import WorkerColumns, WorkerLoad
from penstock.runtime.records.change_log import CRASH, SHOWN_BYTES, changes_in


class RunEvent(msgspec.Struct, frozen=True):
    """What happened at one moment, in words. ``wall``: seconds since 1970; ``bad``: a process ended by itself."""

    wall: float
    text: str
    bad: bool


class TimelineView(msgspec.Struct, frozen=True, kw_only=True):
    """Windows in the order of time. A column has a number per window, None where it is not known.

    Args:
        zero: seconds since 1970 at the run's start; None where a run is simulated.
        now: second of the run.
        width: seconds of a window.
        windows_max: most windows that are kept; None where all are.
        first: number of the first window.
        frontends: process -> second since which it has counted.
        events: what operators, the planner and the supervisor did of late.
        notes, decisions, planner: of a finished run: what is missing, and whether it has decisions and a planner.
    """

    kind: Literal["live", "recorded"]
    name: str
    run: str
    zero: float | None
    now: float
    width: float
    windows_max: int | None = msgspec.field(name="kept")
    first: int
    columns: dict[str, list[float | int | None]]
    pools: dict[str, dict[str, list[int | None]]]
    frontends: dict[str, float]
    events: list[RunEvent] = []
    notes: list[str] | msgspec.UnsetType = msgspec.UNSET
    decisions: bool | msgspec.UnsetType = msgspec.UNSET
    planner: bool | msgspec.UnsetType = msgspec.UNSET


def events_of(run: Path) -> list[RunEvent]:
    """Return what happened in a run, the oldest first, as far as its newest changes go."""
    changes = changes_in(run, SHOWN_BYTES)
    return [RunEvent(change.wall, change.text, change.key.partition(" ")[0] == CRASH) for change in changes]


class LoadsView(msgspec.Struct, frozen=True):
    """Load of each worker in the window that begins at second ``at``; None where no sample was taken."""

    at: float
    workers: dict[str, WorkerLoad] | None


class RecordedWorker(msgspec.Struct, frozen=True, kw_only=True):
    """What a finished run's files tell of a worker; seconds of the run."""

    id: str
    pool: str
    kv_blocks: int | None
    decisions_for_it: int | None
    first_s: float | None = msgspec.field(name="first_seen_s")
    last_s: float | None = msgspec.field(name="last_seen_s")


class RecordedColumns(WorkerColumns, frozen=True, kw_only=True):
    """One worker's load over a finished run."""

    card: RecordedWorker
