"""`TableTrace`: reads a trace by its table of columns."""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from penstock.kernel.errors import ConfigError
from penstock.kernel.values import JsonObject
from penstock_lab.traffic.formats.time_units import PER_SECOND, TimeUnit
from penstock_lab.traffic.formats.timed_rows import TimedRow, TimedRows
from penstock_lab.traffic.formats.trace_rows import (
    TIME_MOST,
    BadRow,
    Lines,
    RowProblem,
    hashes_of,
    number_of,
    object_of,
    split_cells,
    text_of,
    tokens_of,
)
from penstock_lab.traffic.formats.trace_tables import Container, TimeColumn, TraceTable, plain_table
from penstock_lab.traffic.traffic_request import TRACE_BLOCK, TrafficRequest

DELIMITERS = ",;\t"
HEAD = 20
"""Lines that show a trace's format, and the fields of one with named columns."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_NANOSECONDS = PER_SECOND["ns"]
_DECIMALS = 9
_PART = TrafficRequest(at=0.0, isl=1, osl=1)
"""Stands for a span that is no request."""


class TableTrace(TimedRows):
    """Iterate over the requests of a trace, in order of arrival; ``at`` counts from the first of them.

    Args:
        table: of its format.
        header: of a CSV file, whose line ``lines`` still has; ``delimiter``: of its cells.
        block_size: tokens per hash id, where a row does not say it.
        lines, time_unit, name, skip_bad: see `TimedRows`.
    """

    def __init__(
        self,
        lines: Lines,
        table: TraceTable,
        *,
        header: Sequence[str] = (),
        delimiter: str = ",",
        block_size: int | None = None,
        time_unit: TimeUnit | None = None,
        name: str | None = None,
        skip_bad: bool = False,
    ) -> None:
        super().__init__(lines, time_unit=time_unit, name=name, skip_bad=skip_bad)
        self.format = table.format
        self.timed = bool(table.at)
        self._table = table
        self._header = header
        self._delimiter = delimiter
        self._block_size = block_size
        self._unit_known = False
        """Whether a row has shown what kind of times there are."""

    def _items(self) -> Iterator[tuple[int, Any]]:
        lines = super()._items()
        if self._table.container == "csv":
            yield from itertools.islice(lines, 1, None)
            return
        for number, line in lines:
            try:
                row = object_of(line)
                for each in (row,) if self._table.unpack is None else self._table.unpack(row):
                    yield number, each
            except RowProblem as problem:
                yield number, problem

    # --- one row ------------------------------------------------------------------------------------------------------

    def _arrival(self, item: Any) -> TimedRow | None:
        if isinstance(item, RowProblem):
            raise item
        table = self._table
        row = self._cells(item) if table.container == "csv" else item
        if any(value_of(row, (name,))[1] not in values for name, values in table.only.items()):
            return None
        at = self._at(row, table)
        span, inside = _first_name(row, table.span), _first_name(row, table.inside)
        if row.get("passed"):
            return TimedRow(at=at, request=_PART, counts=False, span=span, inside=inside)
        lengths = self._lengths(row, table)
        if lengths is None:
            self.unanswered += 1
            return None
        prompt, answer = lengths
        if "note" in row and row["note"] not in self.notes:
            self.notes.append(row["note"])
        lasted, raw = self._lasted(row, table)
        return TimedRow(
            at=at,
            end=self._moment(row, table.end, at),
            lasted=lasted,
            lasted_raw=raw,
            request=self._request(row, table, prompt, answer),
            id=_first_name(row, table.id) if table.parent and value_of(row, table.session)[1] is None else None,
            parent=None if value_of(row, table.parent)[1] in table.roots else _first_name(row, table.parent),
            span=span,
            inside=inside,
        )

    def _cells(self, line: str | bytes) -> JsonObject:
        cells = split_cells(line, self._delimiter)
        if len(cells) != len(self._header):
            problem = f"the header has {len(self._header)} columns, this row {len(cells)}"
            raise RowProblem("(whole row)", text_of(line).strip(), problem)
        return {name: cell or None for name, cell in zip(self._header, cells, strict=True)}

    def _lengths(self, row: JsonObject, table: TraceTable) -> tuple[int, int] | None:
        """Return the tokens of prompt and answer; None where the request was never answered."""
        failed = any(value_of(row, (name,))[1] for name in table.failed)
        name, value = value_of(row, table.answer)
        if failed and not value:
            return None
        answer = tokens_of(name, _number_or_same(value), least=0)
        prompt_name, prompt_value = value_of(row, table.prompt)
        prompt = tokens_of(prompt_name, _number_or_same(prompt_value), least=0)
        if answer == 0:
            return None
        if prompt == 0:
            raise RowProblem(prompt_name, prompt, "a prompt that was answered has at least 1 token")
        return prompt, answer

    def _request(self, row: JsonObject, table: TraceTable, prompt: int, answer: int) -> TrafficRequest:
        size_name, size = value_of(row, table.block_size)
        block = self._block_size or table.block if size is None else tokens_of(size_name, size)
        hashes_name, hashes = value_of(row, table.hash_ids)
        ids = [] if hashes is None else hashes_of(hashes_name, hashes, -(-prompt // block), block, prompt)
        kind_name, kind = value_of(row, table.kind)
        if table.kinds is not None and kind is not None:
            if kind not in table.kinds:
                raise RowProblem(kind_name, kind, f"one of {', '.join(table.kinds)} is needed")
            kind = table.kinds[kind]
        return TrafficRequest(
            at=0.0,
            isl=prompt,
            osl=answer,
            hash_ids=ids,
            block_size=block if ids else TRACE_BLOCK,
            session=_first_name(row, table.session),
            kind=None if kind is None else str(kind),
        )

    # --- times --------------------------------------------------------------------------------------------------------

    def _at(self, row: JsonObject, table: TraceTable) -> int | float:
        column, value = _first_column(row, table.at)
        if table.untimed and value is None and not self._unit_known:
            self.timed = False
        if not self.timed:
            return self.rows
        at, unit = _time_and_unit(column.name, value, column.unit)
        if not self._unit_known:
            self._unit_known, self.unit, self.time_field = True, unit, column.name
            if unit != column.unit:
                self._given_unit = None  # a moment as text has no unit that anybody could say
        elif unit != self.unit:
            raise RowProblem(column.name, value, "moments as text and times in numbers, or of two units, stand in one")
        return at

    def _moment(self, row: JsonObject, columns: Sequence[TimeColumn], at: int | float) -> int | float | None:
        """Return a moment on the clock of the arrivals; None where the row has none."""
        column, value = _first_column(row, columns)
        if value is None:
            return None
        moment, unit = _time_and_unit(column.name, value, column.unit)
        return moment if unit == self.unit and moment >= at else None

    def _lasted(self, row: JsonObject, table: TraceTable) -> tuple[float | None, bool]:
        """Return how long an answer took, and whether its unit is unknown."""
        column, value = _first_column(row, table.lasted)
        if value is None:
            return None, False
        number = number_of(column.name, _number_or_same(value), "seconds" if column.unit == "s" else "times in numbers")
        return (number, True) if column.unit is None else (number / PER_SECOND[column.unit], False)


def table_trace(
    table: TraceTable | Container,
    lines: Lines,
    *,
    columns: Mapping[str, str] | None = None,
    block_size: int | None = None,
    time_unit: TimeUnit | None = None,
    name: str | None = None,
    skip_bad: bool = False,
) -> TableTrace:
    """Return the requests of a file by its table.

    Args:
        table: None of the known ones but that of named columns, where it is the kind of the file.
        columns: what a column stands for -> its name, where the user says it.
        lines, block_size, time_unit, name, skip_bad: see `TableTrace`.
    Raises:
        BadRow: the header lacks a column, or no column has the lengths.
    """
    container = table.container if isinstance(table, TraceTable) else table
    unread = iter(lines)
    head = list(itertools.islice(unread, HEAD))
    number, first = next(((n, line) for n, line in enumerate(head, 1) if line.strip()), (1, ""))
    delimiter = ","
    header: list[str] = []
    if container == "csv" and first:
        try:
            delimiter, header = header_of(first)
        except RowProblem as problem:
            raise BadRow(number, problem.field, problem.value, problem.problem, name=name) from problem
    if not isinstance(table, TraceTable):
        names = (
            header
            if container == "csv"
            else list(dict.fromkeys(each for row in _rows_of(head) for each in names_of(row)))
        )
        plain = plain_table(container, names, columns or {})
        if plain is None and first:
            lacking = (
                "columns with the tokens of prompts and of answers are needed, such as input_tokens and output_tokens, "
                "or --trace-columns prompt=NAME,answer=NAME"
            )
            raise BadRow(number, "(header)" if container == "csv" else "(whole row)", names, lacking, name=name)
        table = plain or TraceTable(format="csv" if container == "csv" else "jsonl", container=container)
    wanted = (*table.marks, *(columns or {}).values())
    missing = [column for column in wanted if column not in header]
    if container == "csv" and first and missing:
        raise BadRow(number, "(header)", header, f"the column {missing[0]} is needed", name=name)
    trace = TableTrace(
        itertools.chain(head, unread),
        table,
        header=header,
        delimiter=delimiter,
        block_size=block_size,
        time_unit=time_unit,
        name=name,
        skip_bad=skip_bad,
    )
    if table.format in ("csv", "jsonl") and not table.at and first:
        trace.notes.append(f"none of {', '.join(names)} is known as a time; --trace-columns at=NAME names one")
    return trace


def header_of(line: str | bytes) -> tuple[str, list[str]]:
    """Return the delimiter and the names of a header."""
    text = text_of(line)
    delimiter = max(DELIMITERS, key=text.count)
    return delimiter, split_cells(line, delimiter)


def _rows_of(lines: Iterable[str | bytes]) -> Iterator[JsonObject]:
    for line in lines:
        with suppress(RowProblem):
            yield object_of(line)


def names_of(row: JsonObject, above: str = "") -> list[str]:
    """Return the names of a row's fields, those of nested objects with dots."""
    names: list[str] = []
    for name, value in row.items():
        whole = f"{above}{name}"
        names += [whole, *(names_of(value, f"{whole}.") if isinstance(value, dict) else ())]
    return names


def value_of(row: JsonObject, names: Sequence[str]) -> tuple[str, Any]:
    """Return the first of these fields that a row has, with its value; None where it has none."""
    for name in names:
        value = row.get(name)
        if value is None and "." in name:
            value = row
            for part in name.split("."):
                value = value.get(part) if isinstance(value, dict) else None
        if value is not None:
            return name, value
    return (names[0] if names else ""), None


def has(row: JsonObject, names: Sequence[str]) -> bool:
    """Tell whether a row has all of these fields, empty ones too."""
    present = names_of(row)
    return bool(names) and all(name in present for name in names)


def _first_column(row: JsonObject, columns: Sequence[TimeColumn]) -> tuple[TimeColumn, Any]:
    for column in columns:
        value = value_of(row, (column.name,))[1]
        if value is not None:
            return column, value
    return (columns[0] if columns else TimeColumn("")), None


def _first_name(row: JsonObject, names: Sequence[str]) -> str | None:
    name, value = value_of(row, names)
    if value is None or value == "":
        return None
    if not isinstance(value, str | int):
        raise RowProblem(name, value, "a name is a string or a number")
    return str(value)


def _number_or_same(value: Any) -> Any:
    """Return the number that a text is; whatever else as it is."""
    if not isinstance(value, str):
        return value
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return value


def _time_and_unit(name: str, value: Any, unit: TimeUnit | None) -> tuple[int | float, TimeUnit | None]:
    """Return a time and its unit: nanoseconds since 1970 where it is a moment as text."""
    value = _number_or_same(value)
    if isinstance(value, str):
        return _nanoseconds_of(name, value.strip()), "ns"
    number_of(name, value, "a time in numbers, or a moment such as 2023-11-16 18:15:46.6805900,", most=TIME_MOST)
    return value, unit


def _nanoseconds_of(name: str, text: str) -> int:
    """Return nanoseconds since 1970; `datetime` alone would drop the seventh decimal."""
    whole, _, rest = text.partition(".")
    zone = rest.lstrip("0123456789")
    decimals = rest.removesuffix(zone)
    try:
        moment = datetime.fromisoformat(whole + zone)
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=UTC)
        since = moment - _EPOCH
    except (ValueError, OverflowError) as error:
        raise RowProblem(name, text, "a moment such as 2023-11-16 18:15:46.6805900 is needed") from error
    return (since.days * 86_400 + since.seconds) * _NANOSECONDS + int(decimals[:_DECIMALS].ljust(_DECIMALS, "0"))


def check_columns(text: str, known: Sequence[str]) -> dict[str, str]:
    """Read ``at=NAME,prompt=NAME``: what a column stands for, and its name.

    Raises:
        ConfigError: it is not of that form, or stands for what no column can.
    """
    columns: dict[str, str] = {}
    for part in text.split(","):
        what, equals, name = part.partition("=")
        if not equals or what.strip() not in known or not name.strip():
            raise ConfigError(
                f"--trace-columns {text}: {part!r} names no column", hint=f"WHAT=NAME, of {', '.join(known)}"
            )
        columns[what.strip()] = name.strip()
    return columns
