"""How is a log of ended requests read as a trace? Its rows stand in the order of their ends, not of arrivals."""

from collections.abc import Iterator
from typing import NamedTuple

from msgspec.structs import replace

from penstock.traffic.request import TrafficRequest
from penstock.traffic.rows import Rows
from penstock.traffic.sessions import Turns


class Ended(NamedTuple):
    """One row: the request, whose turn and pause are not known yet, and when its answer was there in seconds."""

    request: TrafficRequest
    end: float | None


class LogRows(Rows[Ended]):
    """Iterate over the requests of a log, in order of arrival; the log is kept whole for that."""

    def __iter__(self) -> Iterator[TrafficRequest]:
        turns = Turns()
        found = list(self.good())
        found.sort(key=lambda ended: ended.request.at)
        for request, end in found:
            if request.session is None:
                yield request
            else:
                turn, think = turns.next(request.session, request.at, end)
                yield replace(request, turn=turn, think=think)
