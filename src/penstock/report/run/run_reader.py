"""Reads the requests of a finished run, with their records and decisions, from the run folder."""

from collections import deque
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import msgspec

from penstock.kernel.errors import ConfigError
from penstock.kernel.request_record import Explanation, RequestEnd, RequestRecord
from penstock.report.run.run_files import lines
from penstock.router.requests.request_close import closed_of
from penstock.router.selection.decision_summary import whole


def explain(folder: Path, request: str) -> Explanation[msgspec.Raw]:
    """Return a request's end and its decisions.

    Raises:
        ConfigError: the folder is no run folder, or has no such request.
    """
    records = chain(_records(folder), _records(folder, "copies.jsonl", needed=False))
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


def newest(folder: Path, limit: int) -> list[RequestEnd]:
    """Return the last requests that ended, the newest first.

    Raises:
        ConfigError: the folder is no run folder.
    """
    return [closed_of(record) for record in reversed(deque(_records(folder), maxlen=limit))]


def _records(folder: Path, name: str = "requests.jsonl", *, needed: bool = True) -> Iterator[RequestRecord]:
    decode = msgspec.json.Decoder(RequestRecord).decode
    for line in lines(folder / name, needed=needed):
        yield decode(line)
