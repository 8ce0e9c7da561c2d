"""How is the planner? What it last decided, whom it waits for and what it can't read: its report and its records."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from penstock.kernel.wire import WireDecoder
from penstock.planner.proposals import Because
from penstock.planner.record import PoolTick, TickRecord
from penstock.runtime.run_folder import earlier

REPORT = "planner/report"
"""Key in the store under which the newest `PlannerReport` stands, for as long as its planner lives."""
RECORDS = "planner.jsonl"
"""File of the run folder with a `penstock.planner.record.TickRecord` per line; older ones are in its `earlier` file."""
STATE = "planner-state.msgpack"
"""File of the run folder from which a planner that takes over goes on."""
ALARMS_KEPT = 20
TAIL = 1 << 18
"""Bytes that are read of the records at a time, from their end."""
SCANNED_MAX = 64 << 20
"""Bytes that are searched for ticks that changed something."""
KEPT = b'"outcome":"keep"'


class AlarmTold(msgspec.Struct, frozen=True, kw_only=True):
    """Something that somebody should look at. ``at``: second of the run."""

    at: float
    because: Because


class PlannerReport(msgspec.Struct, frozen=True, kw_only=True):
    """How a planner is. ``at``: second of the run of its last tick; ``wall``: seconds since 1970.

    Args:
        every: seconds between two ticks.
        plugins: id -> what it answered in the last tick.
        reason: of the last tick in which something was to change, at ``changed`` seconds of the run.
        health: of each model's traffic: fresh, stale or broken.
        alarms: the newest ones, the last one last.
        restarts: how often it took over from one that had ended.
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
    plugins: dict[str, str] = {}
    reason: tuple[Because, ...] = ()
    changed: float | None = None
    bound: tuple[Because, ...] = ()
    alarms: tuple[AlarmTold, ...] = ()
    gpus: int = 0
    restarts: int = 0


reports = WireDecoder(PlannerReport, "a planner's report")


def reason_of(record: TickRecord) -> str:
    """Return why a tick came out as it did, in a sentence."""
    because = record.chosen or record.bound
    return because[0].text if because else f"all is as it should be ({record.outcome})"


def changes_of(pools: Mapping[str, PoolTick]) -> dict[str, tuple[int, int]]:
    """Return pool -> (wanted before, wanted now) of those that a tick changes."""
    return {name: (pool.desired, pool.target) for name, pool in pools.items() if pool.desired != pool.target}


def newest(path: Path, limit: int, *, every: bool = True) -> list[bytes]:
    """Return the last lines of a file of records and of its `earlier` one, the newest first. Blocks.

    Args:
        every: also those of ticks in which nothing was to change.
    Returns:
        None of a file that is not there.
    """
    found: list[bytes] = []
    for part in (path, earlier(path)):
        if len(found) < limit:
            found += _newest(part, limit - len(found), every=every)
    return found


def _newest(path: Path, limit: int, *, every: bool) -> list[bytes]:
    found: list[bytes] = []
    try:
        with path.open("rb") as file:
            end, rest, read = file.seek(0, os.SEEK_END), b"", 0
            last = True
            while end > 0 and len(found) < limit and read < SCANNED_MAX:
                start = max(0, end - TAIL)
                file.seek(start)
                lines = (file.read(end - start) + rest).split(b"\n")
                read += end - start
                end = start
                rest = lines.pop(0) if start else b""
                if last:
                    lines, last = lines[:-1], False  # empty, or still being written
                found += [line for line in reversed(lines) if line and (every or KEPT not in line)]
    except FileNotFoundError:
        return []
    return found[:limit]


def past_decisions(run: Path, limit: int, *, every: bool = False) -> dict[str, Any]:
    """Return a run's last tick, and its newest decisions, as plain data. Blocks."""
    last = newest(run / RECORDS, 1)
    found = newest(run / RECORDS, limit, every=every)
    return {
        "last": msgspec.json.decode(last[0]) if last else None,
        "decisions": [msgspec.json.decode(line) for line in found],
    }


def plain(report: PlannerReport) -> dict[str, Any]:
    """Return a report as an operator's JSON has it."""
    found: dict[str, Any] = msgspec.to_builtins(report)
    return found
