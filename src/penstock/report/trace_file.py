"""How is a trace read from the disk? By one way for every command, with errors that name the file."""

import gzip
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.kernel.errors import ConfigError
from penstock.traffic.formats import Format, reader
from penstock.traffic.rows import Trace


@contextmanager
def opened(path: Path, format_name: Format | None, *, block_size: int | None, skip_bad: bool) -> Iterator[Trace]:
    """Open a trace, whose requests are read as they are asked for; ``.gz`` is unpacked.

    Raises:
        ConfigError: the file can't be read, looks like no format, or has a bad row that is not to be skipped.
    """
    with reading(path), gzip.open(path) if path.name.endswith(".gz") else path.open("rb") as file:
        yield reader(format_name, file, name=str(path), skip_bad=skip_bad, block_size=block_size)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn what goes wrong with a file while the block runs into a `ConfigError` that names it."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror or error}") from error
    except (EOFError, zlib.error, tarfile.TarError) as error:
        raise ConfigError(f"{path} can't be unpacked: {error}", hint="the file may have been cut off") from error
