"""Trace formats by name: recognised by a file's first lines, read into `TrafficRequest`s, and written again.

| format | is | says of prefixes |
|---|---|---|
| mooncake | JSON lines with hash ids (`mooncake`) | hash ids |
| azure | Azure LLM inference CSV (`azure`) | nothing |
| burstgpt | BurstGPT CSV (`burstgpt`) | nothing |
| dynamo | Dynamo request traces (`dynamo`) | hashes of the prompt's blocks |
| records | a run's ``requests.jsonl`` (`run_records`) | hashes of the prompt's full blocks |

ServeGen's archives are no trace of requests but rates and lengths, from which `servegen` draws requests.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from typing import Literal, get_args

from penstock.kernel.errors import ConfigError
from penstock.traffic.formats.azure import AzureTrace
from penstock.traffic.formats.burstgpt import BurstGptTrace
from penstock.traffic.formats.dynamo import DynamoTrace
from penstock.traffic.formats.mooncake import MooncakeTrace, mooncake_lines
from penstock.traffic.formats.run_records import RunRecordsTrace, record_lines
from penstock.traffic.formats.trace_rows import Lines, TraceRequests
from penstock.traffic.traffic_request import TRACE_BLOCK, TrafficRequest

Format = Literal["mooncake", "azure", "burstgpt", "dynamo", "records"]
Written = Literal["mooncake", "records"]
"""Formats that a trace can be written in: those that keep what is known of prefixes."""
HEAD = 20
"""Lines that are enough for `guess`."""


_RECOGNISE: dict[Format, Callable[[str | bytes], bool]] = {
    "mooncake": MooncakeTrace.recognises,
    "azure": AzureTrace.recognises,
    "burstgpt": BurstGptTrace.recognises,
    "dynamo": DynamoTrace.recognises,
    "records": RunRecordsTrace.recognises,
}
_WRITE: dict[Written, Callable[[Iterable[TrafficRequest]], Iterator[bytes]]] = {
    "mooncake": mooncake_lines,
    "records": record_lines,
}


def guess(head: Lines, name: str | None = None) -> Format:
    """Return the format of a file by its first lines; `HEAD` of them are enough.

    Raises:
        ConfigError: they look like none.
    """
    for line in head:
        for format_name, recognises in _RECOGNISE.items():
            if recognises(line):
                return format_name
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
) -> TraceRequests:
    """Return the requests of a file, read lazily.

    Args:
        format_name: recognised by the first lines where None.
        lines: of the file, the first one included.
        name: of the file, for errors.
        skip_bad: leave bad rows out and count them instead of raising `BadRow`.
        block_size: tokens per hash id, where the format does not say it: 512 in Mooncake traces, and in records the
            power of two that fits.

    Raises:
        ConfigError: no format was given, and the lines look like none.
    """
    if format_name is None:
        unread = iter(lines)
        head = list(islice(unread, HEAD))
        format_name, lines = guess(head, name), chain(head, unread)
    if format_name == "mooncake":
        return MooncakeTrace(lines, block_size=block_size or TRACE_BLOCK, name=name, skip_bad=skip_bad)
    if format_name == "records":
        return RunRecordsTrace(lines, block_size=block_size, name=name, skip_bad=skip_bad)
    if format_name == "azure":
        return AzureTrace(lines, name=name, skip_bad=skip_bad)
    if format_name == "burstgpt":
        return BurstGptTrace(lines, name=name, skip_bad=skip_bad)
    return DynamoTrace(lines, name=name, skip_bad=skip_bad)


def written(format_name: Written, requests: Iterable[TrafficRequest]) -> Iterator[bytes]:
    """Yield the lines of a file of that format.

    Raises:
        ValueError: a prompt is not given by hash ids.
    """
    return _WRITE[format_name](requests)
