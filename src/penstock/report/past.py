"""What happened to the requests of a run that is over? Its records and decisions, read from the run folder."""

from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from penstock.kernel.errors import ConfigError
from penstock.kernel.machine import nanos
from penstock.kernel.records import RequestRecord
from penstock.report.run_files import lines


def explain(folder: Path, request: str) -> dict[str, Any]:
    """Return a request's end and its decisions, in the shape that a running cluster tells them.

    Raises:
        ConfigError: the folder is none of a run's, or knows no such request.
    """
    closed = next((closed_of(record) for record in _records(folder) if record.id == request), None)
    # A decision's line begins with its request: the others need not be decoded.
    mark = b'"request":' + msgspec.json.encode(request) + b","
    decisions = [msgspec.json.decode(line) for line in lines(folder / "decisions.jsonl", needed=False) if mark in line]
    if closed is None and not decisions:
        raise ConfigError(
            f"the run {folder} has no request {request!r}",
            hint=f"'penstock explain --run {folder}' lists the last ones",
        )
    return {"request": closed, "decisions": decisions}


def newest(folder: Path, limit: int) -> list[dict[str, Any]]:
    """Return the last requests that ended, the newest first.

    Raises:
        ConfigError: the folder is none of a run's.
    """
    return [closed_of(record) for record in reversed(deque(_records(folder), maxlen=limit))]


def _records(folder: Path) -> Iterator[RequestRecord]:
    decode = msgspec.json.Decoder(RequestRecord).decode
    for line in lines(folder / "requests.jsonl", needed=True):
        yield decode(line)


def closed_of(record: RequestRecord) -> dict[str, Any]:
    """Return a record as a running cluster tells an end: times in nanoseconds since the start of the run."""

    def after(seconds: float | None) -> int | None:
        return None if seconds is None else nanos(record.arrival + seconds)

    return {
        "id": record.id,
        "model": record.model,
        "outcome": record.outcome,
        "fault": record.fault,
        "status": record.status,
        "reason": record.reason,
        "arrived": nanos(record.arrival),
        "first": after(record.ttft),
        "closed": after(record.e2e),
        "isl": record.isl,
        "osl": record.osl,
        "cached": record.cached,
        "expected_cached": record.expected_cached,
        "queued": record.queued,
        "attempts": record.attempts,
        "legs": [{"target": leg.worker, "failure": leg.failure} for leg in record.legs],
    }
