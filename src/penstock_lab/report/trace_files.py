"""Trace files: ServeGen's archives of rates read, and traces written whole or not at all."""

import math
import re
import tarfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from penstock.kernel.errors import ConfigError
from penstock_lab.report.traffic_options import reading
from penstock_lab.traffic.formats.servegen import RateRows, ServegenClient, make_client, read_spans
from penstock_lab.traffic.formats.trace_format import Written, written
from penstock_lab.traffic.traffic_request import TrafficRequest

_MEMBER = re.compile(r"chunk-(\d+)-(trace\.csv|dataset\.json)$")


@dataclass(slots=True)
class RateTally:
    """Totals of the requests passed: how many, and their first and last arrival in seconds."""

    count: int = 0
    first: float = math.inf
    last: float = -math.inf

    @property
    def span(self) -> float | None:
        """Seconds from first to last arrival."""
        return self.last - self.first if self.count else None

    def watch(self, requests: Iterable[TrafficRequest]) -> Iterator[TrafficRequest]:
        """Yield the requests unchanged, and count them."""
        for request in requests:
            self.count += 1
            self.first = min(self.first, request.at)
            self.last = max(self.last, request.at)
            yield request


def save(path: Path, format_name: Written, requests: Iterable[TrafficRequest]) -> RateTally:
    """Write a file whole or not at all, and return its totals.

    Raises:
        ConfigError: it can't be written, or there is no request to write.
    """
    tally = RateTally()
    part = path.with_name(f".{path.name}.part")
    lines = written(format_name, tally.watch(requests))
    try:
        with _naming_write_errors(path):
            file = part.open("wb")
        with file:
            for line in lines:  # errors of reading the trace meanwhile are raised by the reader
                with _naming_write_errors(path):
                    file.write(line)
            with _naming_write_errors(path):
                file.flush()
        if not tally.count:
            raise ConfigError(
                f"no request is left to write to {path}", hint="penstock trace info says what the trace has"
            )
        with _naming_write_errors(path):
            part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return tally


def is_archive(path: Path) -> bool:
    """Return whether a path is of ServeGen's kind: a folder or a tar file, of many small files."""
    with reading(path):
        return path.is_dir() or tarfile.is_tarfile(path)


def load_archive(path: Path, *, skip_bad: bool) -> tuple[list[ServegenClient], list[RateRows]]:
    """Read ServeGen's clients, in the order of their numbers, and the rows of their rates.

    Raises:
        ConfigError: it can't be read, has no ``chunk-N-trace.csv``, or one of its files is wrong.
    """
    with reading(path):
        members = _archive_members(path)
    clients: list[ServegenClient] = []
    read: list[RateRows] = []
    for number in sorted({number for number, _ in members}):
        trace, dataset = members.get((number, "trace.csv")), members.get((number, "dataset.json"))
        name = f"{path}: chunk-{number}"
        if trace is None:
            raise ConfigError(f"{name}-trace.csv is not there", hint="its lengths alone say no rate")
        rows = RateRows(trace.splitlines(), name=f"{name}-trace.csv", skip_bad=skip_bad)
        spans = [] if dataset is None else read_spans(dataset, f"{name}-dataset.json")
        clients.append(make_client(f"chunk-{number}", rows, spans))
        read.append(rows)
    if not clients:
        raise ConfigError(
            f"{path} has no chunk-N-trace.csv", hint="a folder or tar file of one ServeGen model is needed"
        )
    return clients, read


def _archive_members(path: Path) -> dict[tuple[int, str], bytes]:
    """Return (number, kind of file) -> its content, read in the order of a packed archive."""
    if path.is_dir():
        return {key: file.read_bytes() for file in path.rglob("chunk-*") if (key := _member_key(file.name)) is not None}
    contents: dict[tuple[int, str], bytes] = {}
    with tarfile.open(path) as archive:
        for member in archive:
            key = _member_key(member.name)
            content = archive.extractfile(member) if key is not None and member.isfile() else None
            if key is not None and content is not None:
                contents[key] = content.read()
    return contents


def _member_key(name: str) -> tuple[int, str] | None:
    match = _MEMBER.search(name)
    return None if match is None else (int(match.group(1)), match.group(2))


@contextmanager
def _naming_write_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{path} can't be written: {error.strerror}") from error
