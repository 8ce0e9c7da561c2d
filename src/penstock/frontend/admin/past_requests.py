"""Past requests and decisions, older than this process or its memory: read from the run folder."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from penstock.kernel.machine import Nanos
from penstock.kernel.request_record import RequestRecord
from penstock.router.requests.closed_record import closed_of
from penstock.runtime.records import segments

LISTED_SCAN = 16 << 20
"""Bytes from the newest on that are read for a list."""
ATTEMPTS_MAX = 64
"""Most decisions of one request that are searched."""

_record = msgspec.json.Decoder(RequestRecord).decode


def explain(run: Path, request: str) -> dict[str, Any] | None:
    """Return a request's end and its decisions as plain data, or None where neither is found; blocks."""
    name = msgspec.json.encode(request)
    ends = segments.newest(run / "requests.jsonl", 1, mark=b'{"id":' + name + b",")
    lines = segments.newest(run / "decisions.jsonl", ATTEMPTS_MAX, mark=b'"request":' + name + b",")
    if not ends and not lines:
        return None
    return {
        "request": closed_of(_record(ends[0])) if ends else None,
        "decisions": [msgspec.json.decode(line) for line in reversed(lines)],
    }


def last_closed(run: Path, limit: int, before: Nanos | None) -> list[dict[str, Any]]:
    """Return the newest ends first, of those until ``before``, a time of the run; blocks."""
    records = (closed_of(_record(line)) for line in _newest(run / "requests.jsonl", limit, before))
    return _until(records, "closed", limit, before)


def last_decisions(run: Path, limit: int, before: Nanos | None, worker: str | None) -> list[dict[str, Any]]:
    """Return the newest decisions first, of those until ``before`` and for one worker; blocks."""
    mark = b"" if worker is None else b'"chosen":[' + msgspec.json.encode(worker) + b","
    lines = _newest(run / "decisions.jsonl", limit, before, mark)
    return _until((msgspec.json.decode(line) for line in lines), "at", limit, before)


def _newest(path: Path, limit: int, before: Nanos | None, mark: bytes = b"") -> list[bytes]:
    # Where a time is given, the number of lines after it is unknown.
    most = limit if before is None else LISTED_SCAN
    return segments.newest(path, most, mark=mark, scanned_max=LISTED_SCAN)


def _until(records: Iterator[dict[str, Any]], when: str, limit: int, before: Nanos | None) -> list[dict[str, Any]]:
    newest: list[dict[str, Any]] = []
    for record in records:
        if record[when] is not None and (before is None or record[when] <= before):
            newest.append(record)
            if len(newest) == limit:
                break
    return newest
