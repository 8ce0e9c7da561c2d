"""`LogRows`: reads a log of ended requests as a trace; its rows stand in the order of ends, not of arrivals."""

from collections.abc import Iterator
from typing import NamedTuple

from msgspec.structs import replace

from penstock.traffic.formats.trace_rows import Rows
from penstock.traffic.sessions import SessionTurns
from penstock.traffic.traffic_request import TrafficRequest


class EndedRequest(NamedTuple):
    """One row: the request, whose turn and pause are not known yet, and when its answer was there in seconds."""

    request: TrafficRequest
    end: float | None


class LogRows(Rows[EndedRequest]):
    """Iterate over the requests of a log, in order of arrival; the log is kept whole for that."""

    def __iter__(self) -> Iterator[TrafficRequest]:
        turns = SessionTurns()
        rows = list(self.good())
        rows.sort(key=lambda ended: ended.request.at)
        for request, end in rows:
            if request.session is None:
                yield request
            else:
                turn, think = turns.next(request.session, request.at, end)
                yield replace(request, turn=turn, think=think)
