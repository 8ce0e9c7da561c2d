"""Reads a trace from disk, in one way for every command, with errors that name the file."""

import gzip
import tarfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.kernel.errors import ConfigError
from penstock.runtime.records import segments
from penstock.traffic.formats.trace_format import Format, reader
from penstock.traffic.formats.trace_rows import TraceRequests


@contextmanager
def opened(
    path: Path, format_name: Format | None, *, block_size: int | None, skip_bad: bool
) -> Iterator[TraceRequests]:
    """Open a trace, whose requests are read on demand; ``.gz`` is unpacked.

    The records of a run are read with all their segments.

    Raises:
        ConfigError: the file can't be read, matches no format, or has a bad row that is not to be skipped.
    """
    with reading(path), _lines(path) as file:
        yield reader(format_name, file, name=str(path), skip_bad=skip_bad, block_size=block_size)


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
