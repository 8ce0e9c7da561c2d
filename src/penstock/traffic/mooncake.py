"""How is a Mooncake trace read? JSON lines with hash ids of 512-token blocks -> `TrafficRequest`s.

A row has ``timestamp`` (milliseconds), ``input_length``, ``output_length`` (tokens) and ``hash_ids``; the names that
other tools write (``created_time``, ``input_tokens``, ``output_tokens``) are taken as well, and so are ``session_id``
and ``delay`` (milliseconds after the session's turn before). Other fields are ignored.
"""

import math
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from penstock.kernel.errors import ConfigError
from penstock.traffic.request import TRACE_BLOCK, TrafficRequest

ERRORS_KEPT = 10
"""How many skipped rows are kept with their reason; all are counted."""


class BadRow(ConfigError):
    """A row of a trace can't be used; says line (from 1), field and value."""

    def __init__(self, line: int, field: str, value: object, problem: str) -> None:
        shown = repr(value)
        if len(shown) > 60:
            shown = shown[:57] + "..."
        super().__init__(
            f"trace line {line}, field {field}: {problem}, got {shown}",
            hint="correct the row, or skip bad rows and have them counted",
        )
        self.line = line
        self.field = field
        self.value = value


class MooncakeTrace:
    """Iterate over the requests of a trace, in the order of its rows.

    Args:
        lines: the file's lines; blank ones are passed over.
        block_size: tokens per hash id.
        skip_bad: leave bad rows out and count them in ``skipped`` instead of raising `BadRow`.
    """

    def __init__(self, lines: Iterable[str | bytes], *, block_size: int = TRACE_BLOCK, skip_bad: bool = False) -> None:
        if block_size < 1:
            raise ValueError(f"a trace block has at least 1 token, not {block_size}")
        self.rows = 0
        self.skipped = 0
        self.errors: list[BadRow] = []
        self._lines = lines
        self._block_size = block_size
        self._skip_bad = skip_bad
        self._turns: dict[str, int] = {}

    def __iter__(self) -> Iterator[TrafficRequest]:
        for number, line in enumerate(self._lines, 1):
            if not line.strip():
                continue
            self.rows += 1
            try:
                request = self._row(number, line)
            except BadRow as error:
                if not self._skip_bad:
                    raise
                self.skipped += 1
                if len(self.errors) < ERRORS_KEPT:
                    self.errors.append(error)
                continue
            yield request

    def _row(self, line: int, text: str | bytes) -> TrafficRequest:
        try:
            row = msgspec.json.decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise BadRow(line, "(whole row)", text, f"not JSON ({error})") from error
        if not isinstance(row, dict):
            raise BadRow(line, "(whole row)", row, "a row is a JSON object")
        at = _number(line, row, "timestamp", "created_time")
        isl = _count(line, row, "input_length", "input_tokens")
        osl = _count(line, row, "output_length", "output_tokens")
        session = row.get("session_id")
        if session is not None and not isinstance(session, str | int):
            raise BadRow(line, "session_id", session, "a session is a string or a number")
        name = None if session is None else str(session)
        turn = 0
        if name is not None:
            turn = self._turns.get(name, 0)
            self._turns[name] = turn + 1
        think = None
        if row.get("delay") is not None or row.get("delay_ms") is not None:
            think = _number(line, row, "delay", "delay_ms") / 1000
        return TrafficRequest(
            at=at / 1000,
            isl=isl,
            osl=osl,
            hash_ids=self._hash_ids(line, row, isl),
            block_size=self._block_size,
            session=name,
            turn=turn,
            think=think,
        )

    def _hash_ids(self, line: int, row: dict[str, Any], isl: int) -> list[int]:
        ids = row.get("hash_ids")
        if not isinstance(ids, list):
            raise BadRow(line, "hash_ids", ids, "a list of whole numbers is needed")
        for value in ids:
            if type(value) is not int or not 0 <= value < 1 << 64:
                raise BadRow(line, "hash_ids", value, "each is a whole number from 0 to 2^64 - 1")
        wanted = math.ceil(isl / self._block_size)
        if len(ids) != wanted:
            problem = f"{isl} tokens in blocks of {self._block_size} have {wanted} ids, not {len(ids)}"
            raise BadRow(line, "hash_ids", ids, problem)
        return ids


def _field(row: dict[str, Any], names: tuple[str, ...]) -> tuple[str, Any]:
    for name in names:
        if name in row:
            return name, row[name]
    return names[0], None


def _number(line: int, row: dict[str, Any], *names: str) -> float:
    name, value = _field(row, names)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1e15:
        raise BadRow(line, name, value, "milliseconds from 0 on are needed")
    return float(value)


def _count(line: int, row: dict[str, Any], *names: str) -> int:
    name, value = _field(row, names)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if type(value) is not int or not 1 <= value <= 1 << 31:
        raise BadRow(line, name, value, "a whole number of tokens from 1 on is needed")
    return value
