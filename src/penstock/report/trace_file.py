"""Reads a trace from disk, in one way for every command, with errors that name the file."""

import gzip
import tarfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.kernel.errors import ConfigError
from penstock.kernel.plurals import counted
from penstock.runtime.records import segments
from penstock.traffic.formats.table_trace import check_columns
from penstock.traffic.formats.time_units import TimeUnit
from penstock.traffic.formats.trace_format import Format, reader
from penstock.traffic.formats.trace_rows import TraceRequests
from penstock.traffic.formats.trace_tables import NAMED


@contextmanager
def opened(
    path: Path,
    format_name: Format | None,
    *,
    block_size: int | None,
    skip_bad: bool,
    time_unit: TimeUnit | None = None,
    columns: str | None = None,
) -> Iterator[TraceRequests]:
    """Open a trace, whose requests are read on demand; ``.gz`` is unpacked.

    The records of a run are read with all their segments. ``columns``: ``WHAT=NAME,...``, see `check_columns`.

    Raises:
        ConfigError: the file can't be read, matches no format, or has a bad row that is not to be skipped.
    """
    named = None if columns is None else check_columns(columns, NAMED)
    with reading(path), _lines(path) as file:
        yield reader(
            format_name,
            file,
            name=str(path),
            skip_bad=skip_bad,
            block_size=block_size,
            time_unit=time_unit,
            columns=named,
        )


def trace_notes(trace: TraceRequests) -> list[str]:
    """Return what is to be said aloud of a trace that was read to its end: what was taken for granted and left out."""
    notes = list(trace.notes)
    if trace.unanswered:
        notes.append(f"left out: {counted(trace.unanswered, 'request')} of the trace without an answer")
    if trace.skipped:
        notes.append(f"skipped: {counted(trace.skipped, 'bad row')} of the trace; the first: {trace.errors[0].message}")
    return notes


@contextmanager
def _lines(path: Path) -> Iterator[Iterable[bytes]]:
    if path.name == "requests.jsonl" and (path.parent / "run.json").exists() and segments.there(path):
        # Only in a run folder: elsewhere a file of a similar name is another trace.
        yield (line for file in segments.opened(path) for line in file)
        return
    with gzip.open(path) if path.name.endswith(".gz") else path.open("rb") as file:
        yield file


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn errors of a file while the block runs into a `ConfigError` that names it."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror or error}") from error
    except (EOFError, zlib.error, tarfile.TarError) as error:
        raise ConfigError(f"{path} can't be unpacked: {error}", hint="the file may have been cut off") from error
