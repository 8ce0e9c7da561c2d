"""Files of a run folder: its lines, numbers, JSON and requests; parts cut off by a crash are left out."""

import contextlib
import json
from collections import deque
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

from penstock.kernel.errors import ConfigError
from penstock.kernel.plurals import counted
from penstock.kernel.request_record import Explanation, RequestEnd, RequestRecord
from penstock.router.requests.request_close import closed_of
from penstock.router.selection.decision_summary import whole
from penstock.runtime.records import segments


def lines(path: Path, *, needed: bool) -> Iterator[bytes]:
    """Yield the whole lines of all segments of a file; a last line cut off by a crash is left out.

    Raises:
        ConfigError: it can't be read, or is needed and absent.
    """
    if not segments.there(path):
        if not needed:
            return
        raise ConfigError(
            f"{path.parent} is not a folder of a run: it has no {path.name}", hint="a run says its folder at its start"
        )
    try:
        yield from segments.lines(path)
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}") from error


def last_line(path: Path) -> bytes | None:
    """Return a file's last whole line; None where there is none."""
    return next(iter(segments.newest(path, 1)), None)


def deleted_records(folder: Path) -> list[str]:
    """Return which records of a run were deleted because there were too many (`runs.records_bytes`)."""
    notes = []
    for name in ("requests.jsonl", "decisions.jsonl"):
        count = segments.dropped(folder / name)
        if count:
            those = counted(count, "segment")
            notes.append(f"The oldest {those} of {name} {'is' if count == 1 else 'are'} deleted (runs.records_bytes)")
    return notes


def number_rows(path: Path) -> list[dict[str, float]]:
    """Read a CSV file of numbers; cells that are empty or cut off are left out."""
    try:
        head, *lines = path.read_text().splitlines() or [""]
    except FileNotFoundError:
        return []
    names = head.split(",")
    read = []
    for line in lines:
        row: dict[str, float] = {}
        for name, cell in zip(names, line.split(",")):
            with contextlib.suppress(ValueError):
                row[name] = float(cell)
        read.append(row)
    return read


def json_of(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; an empty one where there is no such file."""
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    return value if isinstance(value, dict) else {}


def recorded_explanation(folder: Path, request: str) -> Explanation[msgspec.Raw]:
    """Return a request's end and its decisions.

    Raises:
        ConfigError: the folder is no run folder, or has no such request.
    """
    records = chain(_recorded_requests(folder), _recorded_requests(folder, "copies.jsonl", needed=False))
    closed = next((closed_of(record) for record in records if record.id == request), None)
    # A decision's line begins with its request id: the other lines need not be decoded.
    mark = b'"request":' + msgspec.json.encode(request) + b","
    decisions = [msgspec.Raw(whole(line)) for line in lines(folder / "decisions.jsonl", needed=False) if mark in line]
    if closed is None and not decisions:
        raise ConfigError(
            f"the run {folder} has no request {request!r}",
            hint=f"'penstock explain --run {folder}' lists the last ones",
        )
    return Explanation(closed, decisions)


def newest_ends(folder: Path, limit: int) -> list[RequestEnd]:
    """Return the last requests that ended, the newest first.

    Raises:
        ConfigError: the folder is no run folder.
    """
    return [closed_of(record) for record in reversed(deque(_recorded_requests(folder), maxlen=limit))]


def _recorded_requests(folder: Path, name: str = "requests.jsonl", *, needed: bool = True) -> Iterator[RequestRecord]:
    decode = msgspec.json.Decoder(RequestRecord).decode
    for line in lines(folder / name, needed=needed):
        yield decode(line)
