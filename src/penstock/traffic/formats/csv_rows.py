"""`CsvTraceRows`: base of the CSV trace readers: a header that names the columns, then one request per row."""

import csv
from collections.abc import Iterator
from typing import ClassVar

from penstock.traffic.formats.trace_rows import BadRow, RowProblem, Rows, number_of, text_of, tokens_of
from penstock.traffic.traffic_request import TrafficRequest


class CsvTraceRows(Rows[TrafficRequest]):
    """Iterate over the requests of a CSV file; a subclass names its columns and reads their cells.

    Columns are found by their names, so their order and further ones do not matter. The header is needed whatever is
    skipped: without it nothing says what a column means.
    """

    columns: ClassVar[tuple[str, ...]]
    """Columns that must be there."""
    _header: list[str]

    def __iter__(self) -> Iterator[TrafficRequest]:
        for number, line in self._lines:
            if line.strip():
                self._header = self._head(number, line)
                break
        yield from self.good()

    @classmethod
    def recognises(cls, line: str | bytes) -> bool:
        """Tell whether a line of a file looks like the header of this format."""
        try:
            return set(cls.columns) <= set(split_cells(line))
        except RowProblem:
            return False

    def _head(self, number: int, line: str | bytes) -> list[str]:
        try:
            cells = split_cells(line)
        except RowProblem as problem:
            raise BadRow(number, problem.field, problem.value, problem.problem, name=self.name) from problem
        for column in self.columns:
            if column not in cells:
                raise BadRow(number, "(header)", cells, f"the column {column} is needed", name=self.name)
        return cells

    def _row(self, line: str | bytes) -> TrafficRequest | None:
        cells = split_cells(line)
        if len(cells) != len(self._header):
            problem = f"the header has {len(self._header)} columns, this row {len(cells)}"
            raise RowProblem("(whole row)", text_of(line).strip(), problem)
        return self._request(dict(zip(self._header, cells, strict=True)))

    def _request(self, cells: dict[str, str]) -> TrafficRequest | None:
        """Return the request of a row, or None where it was never answered; raise `RowProblem` where it is bad."""
        raise NotImplementedError


def seconds_cell(cells: dict[str, str], column: str) -> float:
    """Read seconds from 0 on."""
    try:
        value: object = float(cells[column])
    except ValueError:
        value = cells[column]
    return number_of(column, value, "seconds")


def tokens_cell(cells: dict[str, str], column: str, *, least: int = 1) -> int:
    """Read a whole number of tokens."""
    try:
        value: object = float(cells[column])
    except ValueError:
        value = cells[column]
    return tokens_of(column, value, least=least)


def split_cells(line: str | bytes) -> list[str]:
    """Cut a line of CSV into its cells."""
    text = text_of(line).strip()
    if '"' not in text:
        return [cell.strip() for cell in text.split(",")]
    try:
        return [cell.strip() for cell in next(csv.reader([text], strict=True))]
    except (csv.Error, StopIteration) as error:
        raise RowProblem("(whole row)", text, f"not a row of CSV ({error})") from error
