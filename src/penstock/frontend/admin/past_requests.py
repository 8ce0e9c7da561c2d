"""Past requests and decisions, older than this process or its memory: read from the run folder."""

from itertools import islice
from pathlib import Path

import msgspec

from penstock.frontend.admin.request_lists import DecisionKey
from penstock.kernel.machine import Nanos
from penstock.kernel.request_record import Explanation, RequestEnd, RequestRecord
from penstock.router.requests.request_close import closed_of
from penstock.router.selection.decision_summary import whole
from penstock.runtime.records import segments

LISTED_SCAN = 16 << 20
"""Bytes from the newest on that are read for a list."""
ATTEMPTS_MAX = 64
"""Most decisions of one request that are searched."""

_record = msgspec.json.Decoder(RequestRecord).decode
_moment = msgspec.json.Decoder(DecisionKey).decode


def explain(run: Path, request: str) -> Explanation[msgspec.Raw] | None:
    """Return a request's end and its decisions, or None where neither is found; blocks."""
    name = msgspec.json.encode(request)
    mark = b'{"id":' + name + b","
    files = (run / file for file in ("requests.jsonl", "copies.jsonl"))
    ends = next((line for file in files if (line := segments.newest(file, 1, mark=mark))), [])
    lines = segments.newest(run / "decisions.jsonl", ATTEMPTS_MAX, mark=b'"request":' + name + b",")
    if not ends and not lines:
        return None
    return Explanation(
        closed_of(_record(ends[0])) if ends else None,
        [msgspec.Raw(whole(line)) for line in reversed(lines)],
    )


def last_closed(run: Path, limit: int, before: Nanos | None) -> list[RequestEnd]:
    """Return the newest ends first, of those until ``before``, a time of the run; blocks."""
    records = (closed_of(_record(line)) for line in _newest(run / "requests.jsonl", limit, before))
    until = (each for each in records if each.closed is not None and (before is None or each.closed <= before))
    return list(islice(until, limit))


def last_decisions(run: Path, limit: int, before: Nanos | None, worker: str | None) -> list[msgspec.Raw]:
    """Return the newest decisions first, of those until ``before`` and for one worker; blocks."""
    mark = b"" if worker is None else b'"chosen":[' + msgspec.json.encode(worker) + b","
    lines = _newest(run / "decisions.jsonl", limit, before, mark)
    until = (msgspec.Raw(line) for line in lines if before is None or _moment(line).at <= before)
    return list(islice(until, limit))


def _newest(path: Path, limit: int, before: Nanos | None, mark: bytes = b"") -> list[bytes]:
    # Where a time is given, the number of lines after it is unknown.
    most = limit if before is None else LISTED_SCAN
    return segments.newest(path, most, mark=mark, scanned_max=LISTED_SCAN)
