"""`TimedRows`: reads requests in order of arrival, whatever order their rows have, with sessions, turns and pauses.

Rows are kept until they can be dealt in order: a log of ended requests whole, other traces in a window of rows, so that
a trace of weeks does not fill the memory. Times are read in the trace's own unit, which its first window decides.
"""

import heapq
from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple

from msgspec.structs import replace

from penstock_lab.traffic.formats.time_units import (
    FLAG,
    PER_SECOND,
    ClockEvidence,
    TimeUnit,
    TraceClock,
    clock_of,
    doubt,
    unit_of_durations,
    unit_of_epoch,
)
from penstock_lab.traffic.formats.trace_rows import Lines, RowProblem, Rows
from penstock_lab.traffic.sessions import SessionTurns
from penstock_lab.traffic.traffic_request import TrafficRequest

WINDOW = 200_000
"""Rows that may come too late by as many rows: some 60 MB without hash ids."""
_DECIMALS = 9


class TimedRow(NamedTuple):
    """One row: a request whose time, turn and pause are not known yet, and what says them.

    Args:
        at: on the trace's clock; without times, the number of the row.
        end: when its answer was there, on the same clock; ``lasted``: or how long that took, in seconds, or, where
            ``lasted_raw``, in a unit that no name says.
        think: pause before it, on the trace's clock.
        id, parent: names of the row, and of the one that it continues, where those make the sessions.
        span, inside: names of a row, and of the one that it is a part of: what is part of a request is no request.
        counts: whether the row is a request.
    """

    at: int | float
    request: TrafficRequest
    end: int | float | None = None
    lasted: float | None = None
    lasted_raw: bool = False
    think: float | None = None
    id: str | None = None
    parent: str | None = None
    span: str | None = None
    inside: str | None = None
    counts: bool = True


class TimedRows(Rows[TimedRow]):
    """Iterate over the requests of a trace, in order of arrival.

    Args:
        time_unit: of the rows' times where the user says it; it counts before everything else.
    """

    format: str
    unit: TimeUnit | None = None
    """Unit that the format's rows have; None where they leave it open."""
    documented: ClassVar[TimeUnit | None] = None
    """Unit that they should have by their documentation, where they leave it open."""
    from_first: bool = True
    """Whether second 0 is the first arrival; False: 0 of the trace's clock, unless that shows dates."""
    window: ClassVar[int | None] = WINDOW
    time_field: str = "timestamp"
    """For errors."""

    def __init__(
        self, lines: Lines, *, time_unit: TimeUnit | None = None, name: str | None = None, skip_bad: bool = False
    ) -> None:
        super().__init__(lines, name=name, skip_bad=skip_bad)
        self.timed = True
        self.notes: list[str] = []
        self.clock = ""
        self._given_unit = time_unit
        self._turns = SessionTurns()
        self._roots: dict[str, str] = {}
        self._spans: dict[str, tuple[str | None, bool]] = {}
        self._latest: int | float | None = None
        self._zero: int | float = 0
        self._per_second = 1.0
        self._lasted_per_second: float | None = None

    def __iter__(self) -> Iterator[TrafficRequest]:
        waiting: list[tuple[int | float, int, TimedRow]] = []
        for number, arrival in enumerate(self.good()):
            heapq.heappush(waiting, (arrival.at, number, arrival))
            if self.window is not None and len(waiting) > self.window:
                yield from self._dealt(waiting)
        while waiting:
            yield from self._dealt(waiting)

    def _row(self, item: Any) -> TimedRow | None:
        arrival = self._arrival(item)
        if arrival is not None and self._latest is not None and arrival.at < self._latest:
            raise RowProblem(self.time_field, arrival.at, f"it comes more than {self.window:,} rows too late")
        return arrival

    def _arrival(self, item: Any) -> TimedRow | None:
        """Return what a row means, or None where it is no request; raise `RowProblem` where it is bad."""
        raise NotImplementedError

    def _dealt(self, waiting: list[tuple[int | float, int, TimedRow]]) -> Iterator[TrafficRequest]:
        if self._latest is None:
            self._begin([arrival for _, _, arrival in waiting])
        at, _, arrival = heapq.heappop(waiting)
        self._latest = at
        if not self._is_request(arrival):
            return
        request = arrival.request
        seconds = self._seconds(at) if self.timed else 0.0
        session = request.session if arrival.id is None else self._root(arrival.id, arrival.parent)
        turn, think = self._turns.next(session, seconds, self._end(arrival, seconds))
        if arrival.think is not None:
            think = arrival.think / self._per_second
        yield replace(request, at=seconds, session=session, turn=turn, think=think)

    # --- clock --------------------------------------------------------------------------------------------------------

    def _begin(self, first: list[TimedRow]) -> None:
        """Decide what the first window says of the clock."""
        counted = [each for each in first if each.counts]
        if not counted:
            return
        raw = [(each.lasted or 0.0, each.request.osl) for each in counted if each.lasted_raw]
        if self.timed:
            clock = self._clock_of(counted, raw)
            self._per_second = float(PER_SECOND[clock.unit])
            least = min(each.at for each in counted)
            dated = self._given_unit is None and self.unit is None and unit_of_epoch(least) is not None
            self._zero = least if self.from_first or dated else 0
        if raw:
            unit = unit_of_durations(raw)
            self._lasted_per_second = None if unit is None else float(PER_SECOND[unit])

    def _clock_of(self, counted: list[TimedRow], raw: list[tuple[float, int]]) -> TraceClock:
        if self._given_unit is not None:
            return TraceClock(self._given_unit, f"as {FLAG} says")
        if self.unit is not None:
            return TraceClock(self.unit, "as the format has them")
        spans = [(float(each.end - each.at), each.request.osl) for each in counted if each.end is not None]
        tokens = sum(each.request.isl + each.request.osl for each in counted) / len(counted)
        evidence = ClockEvidence([each.at for each in counted], spans or raw, tokens)
        clock = clock_of(evidence, self.documented, self.name)
        self.clock = str(clock)
        self.notes += [note for note in (doubt(clock, evidence),) if note is not None]
        return clock

    def _seconds(self, value: int | float) -> float:
        if not self._zero and self._per_second == 1:
            return float(value)
        return round((value - self._zero) / self._per_second, _DECIMALS)

    def _end(self, arrival: TimedRow, at: float) -> float | None:
        if arrival.end is not None:
            return self._seconds(arrival.end)
        if arrival.lasted is None:
            return None
        if not arrival.lasted_raw:
            return at + arrival.lasted
        return None if self._lasted_per_second is None else at + arrival.lasted / self._lasted_per_second

    # --- sessions and parts -------------------------------------------------------------------------------------------

    def _root(self, id: str, parent: str | None) -> str:
        """Return the session of a row: the first row of those that continue each other."""
        root = id if parent is None else self._roots.setdefault(parent, parent)
        self._roots[id] = root
        return root

    def _is_request(self, arrival: TimedRow) -> bool:
        """Tell whether a row is a request, and no part of another one."""
        if arrival.span is None:
            return arrival.counts
        self._spans[arrival.span] = (arrival.inside, arrival.counts)
        # Spans that say they are in each other have no end.
        above, passed, part = arrival.inside, {arrival.span}, False
        while arrival.counts and not part and above is not None and above not in passed:
            passed.add(above)
            above, part = self._spans.get(above, (None, False))
        return arrival.counts and not part
