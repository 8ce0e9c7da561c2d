"""Reads BurstGPT traces: CSV with a time and two lengths per request -> `TrafficRequest`s.

Columns: ``Timestamp`` (seconds), ``Request tokens``, ``Response tokens``; where they are there, ``Log Type``
(conversation or API) becomes the request's kind, and ``Session ID`` with ``Elapsed time`` (seconds until the answer
was there) its session and pauses. A row without response tokens is a request that failed at the service: it is
counted as unanswered. The trace says nothing of shared prefixes, so its prompts share nothing.
Source: HPMLL/BurstGPT (arXiv 2401.17644), releases 1.1 and 2.0.
"""

from typing import ClassVar

from penstock.traffic.formats.csv_rows import CsvTraceRows, seconds_cell, tokens_cell
from penstock.traffic.formats.trace_rows import Lines, RowProblem
from penstock.traffic.sessions import SessionTurns
from penstock.traffic.traffic_request import TrafficRequest

KINDS = {"Conversation log": "conversation", "API log": "api"}
_DECIMALS = 9


class BurstGptTrace(CsvTraceRows):
    """Iterate over the requests of a trace; ``at`` counts from its first row."""

    format: ClassVar[str] = "burstgpt"
    columns: ClassVar[tuple[str, ...]] = ("Timestamp", "Request tokens", "Response tokens")

    def __init__(self, lines: Lines, *, name: str | None = None, skip_bad: bool = False) -> None:
        super().__init__(lines, name=name, skip_bad=skip_bad)
        self._first: float | None = None
        self._turns = SessionTurns()

    def _request(self, cells: dict[str, str]) -> TrafficRequest | None:
        now = seconds_cell(cells, "Timestamp")
        isl = tokens_cell(cells, "Request tokens", least=0)
        osl = tokens_cell(cells, "Response tokens", least=0)
        log = cells.get("Log Type")
        if log is not None and log not in KINDS:
            raise RowProblem("Log Type", log, f"one of {', '.join(KINDS)} is needed")
        session = cells.get("Session ID") or None
        elapsed = seconds_cell(cells, "Elapsed time") if session and "Elapsed time" in cells else None
        first = now if self._first is None else self._first
        if now < first:
            raise RowProblem("Timestamp", now, "rows come in order of time; this is before the first")
        self._first = first
        if osl == 0:
            self.unanswered += 1
            return None
        if isl == 0:
            raise RowProblem("Request tokens", isl, "a prompt that was answered has at least 1 token")
        at = round(now - first, _DECIMALS)
        turn, think = self._turns.next(session, at, None if elapsed is None else at + elapsed)
        kind = None if log is None else KINDS[log]
        return TrafficRequest(at=at, isl=isl, osl=osl, session=session, turn=turn, think=think, kind=kind)
