"""`EngineRegion`: the rows of an engine's shared memory file, mapped for as long as its connection lasts."""

import mmap
import os
import stat
from collections.abc import Sequence

from penstock.kernel.errors import ConfigError

ROWS_MAX = 1 << 32
"""Rows that a region may have, so that a number of one engine's row fits below the engine's own number."""


class EngineRegion:
    """A mapped region; its rows are memory of ``row_bytes`` each.

    Args:
        offset: bytes before the first row.
    Raises:
        ConfigError: there is no such file, or it is shorter than the rows.
    """

    def __init__(self, path: str, *, offset: int, rows: int, row_bytes: int) -> None:
        if offset < 0 or row_bytes <= 0 or not 0 < rows < ROWS_MAX:
            raise ConfigError(f"a region of {rows} rows of {row_bytes} bytes from {offset} on is none")
        self.rows, self.row_bytes = rows, row_bytes
        self._offset = offset
        end = offset + rows * row_bytes
        try:
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigError(f"the region {path} can't be opened: {error.strerror}") from error
        try:
            status = os.fstat(file)
            # A mapping beyond the end of a file kills whoever touches it.
            if not stat.S_ISREG(status.st_mode) or status.st_size < end:
                raise ConfigError(f"the region {path} has {status.st_size} bytes, and its rows end at {end}")
            self._map = mmap.mmap(file, end)
        except OSError as error:
            raise ConfigError(f"the region {path} can't be mapped: {error.strerror}") from error
        finally:
            os.close(file)
        self._memory = memoryview(self._map)

    def valid(self, rows: Sequence[int]) -> bool:
        """Return whether these are different rows of the region."""
        return len(set(rows)) == len(rows) and all(0 <= row < self.rows for row in rows)

    def row(self, number: int) -> memoryview:
        """Return the memory of a row."""
        start = self._offset + number * self.row_bytes
        return self._memory[start : start + self.row_bytes]

    def close(self) -> None:
        """Unmap; no copy may be under way, and nobody may have a row's memory."""
        self._memory.release()
        self._map.close()
