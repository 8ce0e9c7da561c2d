"""Reads and writes Mooncake traces: JSON lines with hash ids of 512-token blocks <-> `TrafficRequest`s.

A row has ``timestamp`` (milliseconds, unless the rows show another unit, see `time_units`), ``input_length``,
``output_length`` (tokens) and ``hash_ids``; the names that
other tools write (``created_time``, ``input_tokens``, ``output_tokens``) are taken as well, and so are ``session_id``
and ``delay`` (milliseconds after the session's turn before). A later turn with a delay may leave its timestamp out:
it then counts from that of the turn before. We also write, and take, ``block_size`` where it is not 512, ``kind`` and
``program_id``, and in the first row ``time_unit``. Other fields are ignored.
"""

from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

import msgspec

from penstock.kernel.values import JsonObject
from penstock_lab.traffic.formats.time_units import PER_SECOND, TimeUnit
from penstock_lab.traffic.formats.timed_rows import TimedRow, TimedRows
from penstock_lab.traffic.formats.trace_rows import (
    TIME_MOST,
    Lines,
    RowProblem,
    hashes_of,
    number_of,
    numbered,
    object_of,
    tokens_of,
)
from penstock_lab.traffic.traffic_request import TRACE_BLOCK, TrafficRequest


class MooncakeTrace(TimedRows):
    """Iterate over the requests of a trace, in order of arrival; ``at`` counts from 0 of its clock.

    Args:
        block_size: tokens per hash id, where a row does not say it.
        lines, time_unit, name, skip_bad: see `TimedRows`.
    """

    format = "mooncake"
    documented: ClassVar[TimeUnit | None] = "ms"
    from_first = False

    def __init__(
        self,
        lines: Lines,
        *,
        block_size: int = TRACE_BLOCK,
        time_unit: TimeUnit | None = None,
        name: str | None = None,
        skip_bad: bool = False,
    ) -> None:
        if block_size < 1:
            raise ValueError(f"a trace block has at least 1 token, not {block_size}")
        super().__init__(lines, time_unit=time_unit, name=name, skip_bad=skip_bad)
        self._block_size = block_size
        self._last: dict[str, float] = {}
        """Session -> time of its latest row."""

    @staticmethod
    def recognises(line: str | bytes) -> bool:
        """Tell whether a line of a file looks like a row of this format."""
        try:
            return "hash_ids" in object_of(line)
        except RowProblem:
            return False

    def _arrival(self, item: Any) -> TimedRow:
        row = object_of(item)
        if self.rows == 1 and row.get("time_unit") in PER_SECOND:
            self.unit = row["time_unit"]
        session = row.get("session_id")
        if session is not None and not isinstance(session, str | int):
            raise RowProblem("session_id", session, "a session is a string or a number")
        name = None if session is None else str(session)
        before = None if name is None else self._last.get(name)
        pause = _pause_of(row)
        at = _timestamp_of(row, before, pause)
        isl = tokens_of(*_first_field(row, "input_length", "input_tokens"))
        osl = tokens_of(*_first_field(row, "output_length", "output_tokens"))
        size = self._block_size
        if "block_size" in row:
            size = tokens_of("block_size", row["block_size"])
        kind = row.get("kind")
        if kind is not None and not isinstance(kind, str):
            raise RowProblem("kind", kind, "a kind is a string")
        program = row.get("program_id")
        if program is not None and not isinstance(program, str):
            raise RowProblem("program_id", program, "a program is a string")
        hash_ids = hashes_of("hash_ids", row.get("hash_ids"), -(-isl // size), size, isl)
        if name is not None:
            self._last[name] = at
        request = TrafficRequest(
            at=0.0,
            isl=isl,
            osl=osl,
            hash_ids=hash_ids,
            block_size=size,
            session=name,
            program=program,
            kind=kind,
        )
        return TimedRow(at=at, request=request, think=pause)


def mooncake_lines(requests: Iterable[TrafficRequest]) -> Iterator[bytes]:
    """Yield a line for each request; ids are numbered anew (see `numbered`), and times keep nanoseconds.

    A session's first row has no delay, even where the requests begin amid the session: there is no turn before it.

    Raises:
        ValueError: a prompt is not given by hash ids.
    """
    begun: set[str] = set()
    first = True
    for request in numbered(requests):
        row: JsonObject = {
            "timestamp": _to_milliseconds(request.at),
            "input_length": request.isl,
            "output_length": request.osl,
            "hash_ids": request.hash_ids,
        }
        if first:
            row["time_unit"] = "ms"
            first = False
        if request.block_size != TRACE_BLOCK:
            row["block_size"] = request.block_size
        if request.session is not None:
            row["session_id"] = request.session
            if request.think is not None and request.session in begun:
                row["delay"] = _to_milliseconds(request.think)
            begun.add(request.session)
        if request.program is not None:
            row["program_id"] = request.program
        if request.kind is not None:
            row["kind"] = request.kind
        yield msgspec.json.encode(row) + b"\n"


def _to_milliseconds(seconds: float) -> float | int:
    exact = round(seconds * 1000, 6)
    return int(exact) if exact.is_integer() else exact


def _pause_of(row: JsonObject) -> float | None:
    name, value = _first_field(row, "delay", "delay_ms")
    return None if value is None else number_of(name, value, "a time in numbers")


def _timestamp_of(row: JsonObject, before: float | None, pause: float | None) -> float:
    name, value = _first_field(row, "timestamp", "created_time")
    if value is None and before is not None and pause is not None:
        return before + pause
    return number_of(name, value, "a time in numbers", most=TIME_MOST)


def _first_field(row: JsonObject, *names: str) -> tuple[str, Any]:
    """Return the first of these fields that the row has, with its value."""
    for name in names:
        if row.get(name) is not None:
            return name, row[name]
    return names[0], None
