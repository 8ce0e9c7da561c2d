"""`Rows`: base of the trace readers: yields what each row means, and raises or counts the bad ones.

A class over `Rows` says what one row means; those of requests are over `timed_rows`, and each is a `TraceRequests`.
"""

import csv
from collections.abc import Iterable, Iterator
from typing import Any, Generic, Protocol, TypeVar

import msgspec
from msgspec.structs import replace

from penstock.kernel.errors import ConfigError
from penstock.kernel.values import JsonObject
from penstock_lab.traffic.traffic_request import TrafficRequest

ERRORS_MAX = 10
"""Skipped rows that are kept with their reason; all are counted."""
TOKENS_MOST = 1 << 31
TIME_MOST = 1e19
"""Nanoseconds since 1970 are below it."""
SIZES = tuple(1 << power for power in range(3, 13))
"""Sizes of blocks, one of which is named where a prompt's ids don't fit the size that was taken."""

Row = TypeVar("Row")
Lines = Iterable[str | bytes]


class BadRow(ConfigError):
    """A row of a trace can't be used; says file, line (from 1), field and value.

    ``place``: what the rows are counted in: lines, or rows of a document.
    """

    def __init__(
        self, line: int, field: str, value: object, problem: str, *, name: str | None = None, place: str = "line"
    ) -> None:
        shown = repr(value)
        if len(shown) > 60:
            shown = shown[:57] + "..."
        super().__init__(
            f"{name or 'trace'} {place} {line}, field {field}: {problem}, got {shown}",
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
    """The requests of a trace, and how many of its rows were none; the counts are final after the last request.

    ``timed``: whether rows say when they arrived; where not, every request has ``at`` 0. ``notes``: what was taken for
    granted, for people to read. ``clock``: in which unit the times were read, as a sentence's end; empty where the
    format leaves no choice.
    """

    format: str
    name: str | None
    place: str
    timed: bool
    notes: list[str]
    clock: str
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

    place = "line"

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
        for number, item in self._items():
            self.rows += 1
            try:
                row = self._row(item)
            except RowProblem as problem:
                error = BadRow(number, problem.field, problem.value, problem.problem, name=self.name, place=self.place)
                if not self._skip_bad:
                    raise error from problem
                self.skipped += 1
                if len(self.errors) < ERRORS_MAX:
                    self.errors.append(error)
                continue
            if row is not None:
                yield row

    def _items(self) -> Iterator[tuple[int, Any]]:
        """Yield what stands for a row, with its number: a line that is not blank."""
        return ((number, line) for number, line in self._lines if line.strip())

    def _row(self, item: Any) -> Row | None:
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
        problem = f"{isl} tokens in blocks of {size} have {wanted} ids, not {len(value)}"
        fitting = next((each for each in SIZES if -(-isl // each) == len(value)), None)
        hint = "" if fitting is None else f" (blocks of {fitting} would fit: --trace-block-size {fitting})"
        raise RowProblem(name, value, problem + hint)
    return value


def split_cells(line: str | bytes, delimiter: str = ",") -> list[str]:
    """Cut a line of CSV into its cells."""
    text = text_of(line).strip("\r\n ")
    if '"' not in text:
        return [cell.strip() for cell in text.split(delimiter)]
    try:
        return [cell.strip() for cell in next(csv.reader([text], strict=True, delimiter=delimiter))]
    except (csv.Error, StopIteration) as error:
        raise RowProblem("(whole row)", text, f"not a row of CSV ({error})") from error


def numbered(requests: Iterable[TrafficRequest]) -> Iterator[TrafficRequest]:
    """Number blocks 0, 1, 2, ... in the order in which they first appear, as the Mooncake traces do.

    Prompts share what they shared before. Blocks that a request has no id for, all of them in traces that know only
    lengths, get numbers that no other block has: from here on every prompt can be made into tokens.

    Raises:
        ValueError: a prompt is given as text or as tokens, not by hash ids.
    Cost: one entry of a dict per id that was given.
    """
    numbers: dict[tuple[int, int], int] = {}
    following = 0
    for request in requests:
        if request.messages is not None or request.token_ids is not None:
            raise ValueError("blocks are numbered where a prompt is given by hash ids, not as text or tokens")
        size = request.block_size
        ids: list[int] = []
        for value in request.hash_ids:
            number = numbers.get((size, value))
            if number is None:
                numbers[size, value] = number = following
                following += 1
            ids.append(number)
        missing = -(-request.isl // size) - len(ids)
        if missing > 0:
            ids += range(following, following + missing)
            following += missing
        yield replace(request, hash_ids=ids)
