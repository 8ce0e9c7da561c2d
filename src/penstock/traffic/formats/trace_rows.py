"""`Rows`: base of the trace readers: yields what each row means, and raises or counts the bad ones.

Each format has a class of its own over `Rows`, which says what one row means; all of them are a `TraceRequests`.
"""

from collections.abc import Iterable, Iterator
from typing import ClassVar, Generic, Protocol, TypeVar

import msgspec

from penstock.kernel.errors import ConfigError
from penstock.kernel.values import JsonObject
from penstock.traffic.traffic_request import TrafficRequest

ERRORS_MAX = 10
"""Skipped rows that are kept with their reason; all are counted."""
TOKENS_MOST = 1 << 31

Row = TypeVar("Row")
Lines = Iterable[str | bytes]


class BadRow(ConfigError):
    """A row of a trace can't be used; says file, line (from 1), field and value."""

    def __init__(self, line: int, field: str, value: object, problem: str, *, name: str | None = None) -> None:
        shown = repr(value)
        if len(shown) > 60:
            shown = shown[:57] + "..."
        super().__init__(
            f"{name or 'trace'} line {line}, field {field}: {problem}, got {shown}",
            hint="correct the row, or skip bad rows and have them counted",
        )
        self.line = line
        self.field = field
        self.value = value


class RowProblem(ValueError):
    """What is wrong with a row, before it is known where it stands."""

    def __init__(self, field: str, value: object, problem: str) -> None:
        super().__init__(problem)
        self.field = field
        self.value = value
        self.problem = problem


class TraceRequests(Protocol):
    """The requests of a trace, and how many of its rows were none; the counts are final after the last request."""

    format: ClassVar[str]
    name: str | None
    rows: int
    skipped: int
    unanswered: int
    errors: list[BadRow]

    def __iter__(self) -> Iterator[TrafficRequest]:
        """Go through the requests, once."""
        ...


class Rows(Generic[Row]):
    """Go through rows, and raise or count the bad ones.

    ``unanswered`` counts rows of requests that got no answer, so that its length is not known: they are
    neither bad nor requests that could be sent again.

    Args:
        lines: the file's lines; blank ones are passed over.
        name: of the file, for errors.
        skip_bad: leave bad rows out and count them in ``skipped`` instead of raising `BadRow`.
    """

    def __init__(self, lines: Lines, *, name: str | None = None, skip_bad: bool = False) -> None:
        self.name = name
        self.rows = 0
        self.skipped = 0
        self.unanswered = 0
        self.errors: list[BadRow] = []
        self._lines = enumerate(lines, 1)
        self._skip_bad = skip_bad

    def good(self) -> Iterator[Row]:
        """Yield what each row means.

        Raises:
            BadRow: where bad rows are not skipped.
        """
        for number, line in self._lines:
            if not line.strip():
                continue
            self.rows += 1
            try:
                row = self._row(line)
            except RowProblem as problem:
                error = BadRow(number, problem.field, problem.value, problem.problem, name=self.name)
                if not self._skip_bad:
                    raise error from problem
                self.skipped += 1
                if len(self.errors) < ERRORS_MAX:
                    self.errors.append(error)
                continue
            if row is not None:
                yield row

    def _row(self, line: str | bytes) -> Row | None:
        """Return what a row means, or None where it is no request; raise `RowProblem` where it is bad."""
        raise NotImplementedError


def text_of(line: str | bytes) -> str:
    """Return a line as text, without a byte order mark."""
    try:
        text = line if isinstance(line, str) else line.decode()
    except UnicodeDecodeError as error:
        raise RowProblem("(whole row)", line, f"not UTF-8 ({error.reason})") from error
    return text.removeprefix("\ufeff")


def object_of(line: str | bytes) -> JsonObject:
    """Read a line that is a JSON object."""
    try:
        row = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RowProblem("(whole row)", line, f"not JSON ({error})") from error
    if not isinstance(row, dict):
        raise RowProblem("(whole row)", row, "a row is a JSON object")
    return row


def number_of(name: str, value: object, unit: str, *, most: float = 1e15) -> float:
    """Check a number from 0 on; ``unit`` is for the error."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
        raise RowProblem(name, value, f"{unit} from 0 on are needed")
    return float(value)


def tokens_of(name: str, value: object, *, least: int = 1) -> int:
    """Check a whole number of tokens."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if type(value) is not int or not least <= value <= TOKENS_MOST:
        raise RowProblem(name, value, f"a whole number of tokens from {least} on is needed")
    return value


def hashes_of(name: str, value: object, wanted: int, size: int, isl: int) -> list[int]:
    """Check the ids of a prompt's blocks: ``wanted`` whole numbers of 64 bits."""
    if not isinstance(value, list):
        raise RowProblem(name, value, "a list of whole numbers is needed")
    for each in value:
        if type(each) is not int or not 0 <= each < 1 << 64:
            raise RowProblem(name, each, "each is a whole number from 0 to 2^64 - 1")
    if len(value) != wanted:
        raise RowProblem(name, value, f"{isl} tokens in blocks of {size} have {wanted} ids, not {len(value)}")
    return value
