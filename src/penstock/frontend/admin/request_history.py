"""Request history: the last decisions and ends of requests of one process, and older ones of its run folder.

Of a decision its summary is kept as JSON text, and the newest ones as they are too, up to so many bytes: the columns of
a large fleet's candidates, of which rows are made where somebody reads them. Ends have few parts, so they are encoded
only when read. All returned times count from the start of the run.
"""

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from penstock.frontend.admin.admin_answers import DecisionKey
from penstock.kernel.machine import Nanos
from penstock.kernel.request_record import Explanation, RequestEnd, RequestRecord
from penstock.kernel.values import JsonObject, plain
from penstock.router.events import Closed, Decision
from penstock.router.requests.request_close import closed_of
from penstock.router.selection.cost import CostTable
from penstock.router.selection.decision_summary import DecisionSummaries, whole
from penstock.runtime.records import segments

S = TypeVar("S", bound=msgspec.Struct)

DECISIONS_MAX = 4096
"""Decisions that explain knows without the run folder; the oldest go."""
WHOLE_MAX = 8 << 20
"""Bytes of candidates that are kept; of decisions before these it knows the summaries. With four times as many, the
memory of a new decision had left the processor's caches: a third of what writing its columns took."""
ROW_BYTES = 400
"""About what a candidate takes that is no column."""
CLOSED_MAX = 4096
"""Ends of requests that /admin/requests and explain know; the oldest go."""
_TIMES = ("arrived", "closed", "first", "dispatched", "last")


@dataclass(slots=True)
class _DecisionRecord:
    at: Nanos
    request: str
    worker: str
    line: bytes
    whole: Decision | None
    """With what the line leaves out; None where it has it all, or where that is too long ago..."""
    size: int
    """... and about what that takes."""


class RequestHistory:
    """Bounded memory of decisions and ends; the oldest are dropped.

    Args:
        decisions_max, closed_max: how many of each are kept.
        offset: nanoseconds from the start of the run to the router's time 0.
        share: returns the share of the requests whose decisions are recorded whole.
    """

    def __init__(
        self,
        decisions_max: int = DECISIONS_MAX,
        closed_max: int = CLOSED_MAX,
        offset: Nanos = 0,
        share: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._offset = offset
        self._summaries = DecisionSummaries(share)
        self._decisions: deque[_DecisionRecord] = deque(maxlen=decisions_max)
        self._whole: deque[_DecisionRecord] = deque()
        """Those that are kept whole..."""
        self._bytes = 0
        """... and what their candidates take."""
        self._by_request: dict[str, list[_DecisionRecord]] = {}
        self._closed: OrderedDict[str, Closed] = OrderedDict()
        self._closed_max = closed_max
        self._more: dict[str, JsonObject] = {}
        """Fields of the ends of which more is known than the router knows."""
        self._leads: dict[str, Nanos] = {}
        """Decisions of the requests that have not ended."""
        self._encode = msgspec.json.Encoder(enc_hook=plain).encode

    def decided(self, decision: Decision) -> msgspec.Raw:
        """Remember where a request went and why; return what is to be recorded of it as JSON."""
        if self._offset:
            decision = msgspec.structs.replace(decision, at=decision.at + self._offset)
        line, recorded, shortened = self._summaries.lines(decision)
        if self._decisions.maxlen:
            if len(self._decisions) == self._decisions.maxlen:
                request = self._decisions[0].request
                known = self._by_request[request]
                del known[0]  # the deque's oldest is the oldest of its request too
                if not known:
                    del self._by_request[request]
                if self._whole and self._whole[0] is self._decisions[0]:
                    self._shorten()
            whole, size = (decision, _bytes_of(decision)) if shortened else (None, 0)
            record = _DecisionRecord(decision.at, decision.request, decision.chosen.worker, line, whole, size)
            self._decisions.append(record)
            self._by_request.setdefault(decision.request, []).append(record)
            if shortened:
                self._whole.append(record)
                self._bytes += size
                while self._bytes > WHOLE_MAX:
                    self._shorten()
        return msgspec.Raw(recorded)

    def _shorten(self) -> None:
        """Keep of the oldest whole decision its summary alone."""
        record = self._whole.popleft()
        if record.whole is not None:
            self._bytes -= record.size
            record.whole = None

    def arrived(self, request: str, lead: Nanos) -> None:
        """Remember how long before `Arrived` a request had arrived here: its times count from then."""
        self._leads[request] = lead

    def closed(self, closed: Closed) -> None:
        """Remember how a request ended; an id that is used again replaces its older end."""
        if self._closed.pop(closed.id, None) is not None:
            self._more.pop(closed.id, None)
        lead = self._leads.pop(closed.id, 0)
        if lead:
            closed = msgspec.structs.replace(closed, arrived=closed.arrived - lead)
        self._closed[closed.id] = closed
        if len(self._closed) > self._closed_max:
            oldest, _ = self._closed.popitem(last=False)
            self._more.pop(oldest, None)

    def add(self, request: str, **fields: Any) -> None:
        """Remember more of an ended request: fields of its `RequestEnd`."""
        if request in self._closed:
            self._more.setdefault(request, {}).update(fields)

    @property
    def full(self) -> bool:
        """Return whether something was dropped: then older records are not here."""
        return len(self._decisions) == self._decisions.maxlen or len(self._closed) >= self._closed_max

    def explain(self, request: str) -> Explanation[msgspec.Raw] | None:
        """Return a request's end and its decisions, or None where neither is known."""
        closed, decisions = self._closed.get(request), self._by_request.get(request)
        if closed is None and decisions is None:
            return None
        return Explanation(
            None if closed is None else self._ended(closed),
            [msgspec.Raw(one.line if one.whole is None else self._encode(one.whole)) for one in decisions or ()],
        )

    def last_closed(self, limit: int, before: Nanos | None = None) -> list[RequestEnd]:
        """Return from the run folder the newest ends first, of those until ``before``, a time of the run."""
        records = (closed for closed in reversed(self._closed.values()) if not self._copied(closed.id))
        wanted = (closed for closed in records if before is None or closed.closed + self._offset <= before)
        return [self._ended(closed) for closed in islice(wanted, limit)]

    def last_decisions(self, limit: int, before: Nanos | None = None, worker: str | None = None) -> list[msgspec.Raw]:
        """Return the newest decisions first, of those until ``before``, a time of the run, and for one worker."""
        wanted = (
            decided.line
            for decided in reversed(self._decisions)
            if (before is None or decided.at <= before) and (worker is None or decided.worker == worker)
        )
        return [msgspec.Raw(line) for line in islice(wanted, limit)]

    def _copied(self, request: str) -> bool:
        """Return whether an ended request was a shadow's copy of another one: lists leave it out."""
        return self._more.get(request, {}).get("copy_of") is not None

    def _ended(self, closed: Closed) -> RequestEnd:
        legs = [self._moved(leg) for leg in closed.legs]
        end = msgspec.convert(self._moved(msgspec.structs.replace(closed, legs=legs)), RequestEnd, from_attributes=True)
        more = self._more.get(closed.id)
        return end if more is None else msgspec.structs.replace(end, **more)

    def _moved(self, part: S) -> S:
        """Return an end or an attempt with its times since the start of the run."""
        if not self._offset:
            return part
        times = ((name, getattr(part, name, None)) for name in _TIMES)
        return msgspec.structs.replace(part, **{name: at + self._offset for name, at in times if at is not None})


def _bytes_of(decision: Decision) -> int:
    """Return about what a decision's candidates take, and what excluded the others."""
    costs = decision.candidates
    rows = costs.nbytes if isinstance(costs, CostTable) else ROW_BYTES * len(costs)
    return rows + ROW_BYTES // 4 * len(decision.excluded)


LISTED_SCAN = 16 << 20
"""Bytes from the newest on that are read for a list."""
ATTEMPTS_MAX = 64
"""Most decisions of one request that are searched."""

_record = msgspec.json.Decoder(RequestRecord).decode
_moment = msgspec.json.Decoder(DecisionKey).decode


def past_explanation(run: Path, request: str) -> Explanation[msgspec.Raw] | None:
    """Return from the run folder a request's end and its decisions, or None where neither is found; blocks."""
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


def past_ends(run: Path, limit: int, before: Nanos | None) -> list[RequestEnd]:
    """Return from the run folder the newest ends first, of those until ``before``, a time of the run; blocks."""
    records = (closed_of(_record(line)) for line in _newest(run / "requests.jsonl", limit, before))
    until = (each for each in records if each.closed is not None and (before is None or each.closed <= before))
    return list(islice(until, limit))


def past_decisions(run: Path, limit: int, before: Nanos | None, worker: str | None) -> list[msgspec.Raw]:
    """Return from the run folder the newest decisions first, of those until ``before`` and for one worker; blocks."""
    mark = b"" if worker is None else b'"chosen":[' + msgspec.json.encode(worker) + b","
    lines = _newest(run / "decisions.jsonl", limit, before, mark)
    until = (msgspec.Raw(line) for line in lines if before is None or _moment(line).at <= before)
    return list(islice(until, limit))


def _newest(path: Path, limit: int, before: Nanos | None, mark: bytes = b"") -> list[bytes]:
    # Where a time is given, the number of lines after it is unknown.
    most = limit if before is None else LISTED_SCAN
    return segments.newest(path, most, mark=mark, scanned_max=LISTED_SCAN)
