"""Trace formats by name: recognised by a file's first lines, read into `TrafficRequest`s, and written again.

| format | is | says of prefixes |
|---|---|---|
| mooncake | JSON lines with hash ids (`mooncake`) | hash ids |
| dynamo | Dynamo request traces (`dynamo`) | hashes of the prompt's blocks |
| records | a run's ``requests.jsonl`` (`run_records`) | hashes of the prompt's full blocks |
| others | one table of columns for each (`trace_tables`) | hash ids of bailian, turns of sharegpt, else nothing |

ServeGen's archives are no trace of requests but rates and lengths, from which `servegen` draws requests.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Literal, get_args

import msgspec

from penstock.kernel.errors import ConfigError
from penstock.kernel.values import JsonObject
from penstock_lab.traffic.formats.dynamo import DynamoTrace
from penstock_lab.traffic.formats.mooncake import MooncakeTrace, mooncake_lines
from penstock_lab.traffic.formats.run_records import RunRecordsTrace, record_lines
from penstock_lab.traffic.formats.table_trace import HEAD, has, header_of, names_of, table_trace
from penstock_lab.traffic.formats.time_units import TimeUnit
from penstock_lab.traffic.formats.trace_rows import Lines, RowProblem, TraceRequests, object_of, text_of
from penstock_lab.traffic.formats.trace_tables import TABLES, Container, plain_table
from penstock_lab.traffic.traffic_request import TRACE_BLOCK, TrafficRequest

Format = Literal[
    "mooncake",
    "azure",
    "burstgpt",
    "dynamo",
    "records",
    "bailian",
    "aiperf",
    "genai-perf",
    "vllm",
    "guidellm",
    "otel",
    "sharegpt",
    "jsonl",
    "csv",
]
Written = Literal["mooncake", "records"]
"""Formats that a trace can be written in: those that keep what is known of prefixes."""
PLAIN: Mapping[str, Container] = {"jsonl": "json", "csv": "csv"}
"""Formats whose columns are known by their names alone."""
_TABLES = {table.format: table for table in TABLES}
_LINES: dict[Format, Callable[[str | bytes], bool]] = {
    "dynamo": DynamoTrace.recognises,
    "records": RunRecordsTrace.recognises,
}
_WRITE: dict[Written, Callable[[Iterable[TrafficRequest]], Iterator[bytes]]] = {
    "mooncake": mooncake_lines,
    "records": record_lines,
}


def guess(head: Lines, name: str | None = None) -> Format:
    """Return the format of a file by its first lines; `HEAD` of them are enough, and of a document of JSON all.

    Raises:
        ConfigError: they look like none.
    """
    lines = [line for line in _json_lines(head)[0] if line.strip()]
    for line in lines:
        found = _format_of(line)
        if found is not None:
            return found
    for line in lines:
        found = _plain_format_of(line)
        if found is not None:
            return found
    raise ConfigError(
        f"{name or 'the trace'} looks like none of the formats {', '.join(get_args(Format))}",
        hint="name its format, and the error will name the row and the field",
    )


def reader(
    format_name: Format | None,
    lines: Lines,
    *,
    name: str | None = None,
    skip_bad: bool = False,
    block_size: int | None = None,
    time_unit: TimeUnit | None = None,
    columns: Mapping[str, str] | None = None,
) -> TraceRequests:
    """Return the requests of a file, read lazily but for documents of JSON.

    Args:
        format_name: recognised by the first lines where None.
        lines: of the file, the first one included.
        name: of the file, for errors.
        skip_bad: leave bad rows out and count them instead of raising `BadRow`.
        block_size: tokens per hash id, where the format does not say it: 512 in Mooncake traces, and in records the
            power of two that fits.
        time_unit: of the rows' times, where they do not say it and do not show it.
        columns: what a column stands for -> its name, of a file with named columns.

    Raises:
        ConfigError: no format was given, and the lines look like none.
    """
    lines, whole = _json_lines(lines)
    if format_name is None:
        unread = iter(lines)
        head = list(itertools.islice(unread, HEAD))
        lines = itertools.chain(head, unread)
        format_name = _format_of_head(head) if columns else guess(head, name)
    trace: TraceRequests
    if format_name == "mooncake":
        size = block_size or TRACE_BLOCK
        trace = MooncakeTrace(lines, block_size=size, time_unit=time_unit, name=name, skip_bad=skip_bad)
    elif format_name == "records":
        trace = RunRecordsTrace(lines, block_size=block_size, name=name, skip_bad=skip_bad)
    elif format_name == "dynamo":
        trace = DynamoTrace(lines, name=name, skip_bad=skip_bad)
    else:
        trace = table_trace(
            PLAIN.get(format_name) or _TABLES[format_name],
            lines,
            columns=columns,
            block_size=block_size,
            time_unit=time_unit,
            name=name,
            skip_bad=skip_bad,
        )
    if whole:
        trace.place = "row"
    return trace


def written(format_name: Written, requests: Iterable[TrafficRequest]) -> Iterator[bytes]:
    """Yield the lines of a file of that format.

    Raises:
        ValueError: a prompt is not given by hash ids.
    """
    return _WRITE[format_name](requests)


def _json_lines(lines: Lines) -> tuple[Lines, bool]:
    """Return a document of JSON, or a list of objects, as lines; other files as they are. And whether it was one."""
    unread = iter(lines)
    before = []
    for line in unread:
        before.append(line)
        if line.strip():
            break
    first = before[-1].strip() if before else b""
    text = first.encode() if isinstance(first, str) else first
    text = text.removeprefix(b"\xef\xbb\xbf")
    if not text.startswith((b"{", b"[")) or (text.startswith(b"{") and _object_or_none(text) is not None):
        return itertools.chain(before, unread), False
    before += unread
    encoded = b"".join(line.encode() if isinstance(line, str) else line for line in before)
    try:
        document = msgspec.json.decode(encoded.removeprefix(b"\xef\xbb\xbf"))
    except (msgspec.DecodeError, UnicodeDecodeError):
        return before, False
    return [msgspec.json.encode(each) for each in (document if isinstance(document, list) else [document])], True


def _object_or_none(line: str | bytes) -> JsonObject | None:
    try:
        return object_of(line)
    except RowProblem:
        return None


def _format_of(line: str | bytes) -> Format | None:
    """Return the format that has a mark in a line; None where it has none."""
    for format_name, recognises in _LINES.items():
        if recognises(line):
            return format_name
    row = _object_or_none(line)
    names = [] if row is not None else _header_names(line)
    for table in TABLES:
        if (
            has(row, table.marks)
            if row is not None and table.container == "json"
            else (table.container == "csv" and bool(names) and set(table.marks) <= set(names))
        ):
            return table.format  # type: ignore[return-value]  # the tables have names of `Format`
    return "mooncake" if MooncakeTrace.recognises(line) else None


def _plain_format_of(line: str | bytes) -> Format | None:
    """Return the format whose columns a line names; None where it names no lengths."""
    row = _object_or_none(line)
    if row is not None:
        return "jsonl" if plain_table("json", names_of(row), {}) is not None else None
    return "csv" if plain_table("csv", _header_names(line), {}) is not None else None


def _format_of_head(head: list[str | bytes]) -> Format:
    first = next((line for line in head if line.strip()), "")
    return "csv" if _object_or_none(first) is None else "jsonl"


def _header_names(line: str | bytes) -> list[str]:
    try:
        return header_of(text_of(line))[1]
    except RowProblem:
        return []
