"""`EngineLink`: one engine that is connected, its rows, its open jobs and what is sent to it."""

import asyncio
import logging
import mmap
import os
import select
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec

from penstock.kernel.errors import ConfigError
from penstock_kv.blocks.block_key import BlockKey, KeyIdentity, engine_keys
from penstock_kv.inside.tier_protocol import RequestHints, TierHello
from penstock_kv.tiers.tier_frames import FrameStream

log = logging.getLogger("penstock.kv_tiers")

ROWS_MAX = 1 << 32
"""Rows that a region may have, so that a number of one engine's row fits below the engine's own number."""
_GONE = select.POLLHUP | select.POLLERR | select.POLLRDHUP


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


class EngineJob(msgspec.Struct, frozen=True):
    """A job that an engine waits for.

    Args:
        id: the engine's own.
        kind: ``store`` or ``load``.
    """

    link: "EngineLink"
    id: int
    kind: str


class EngineLink:
    """A connection of an engine; ``number`` is unique while this process runs."""

    def __init__(self, number: int, hello: TierHello, region: EngineRegion, stream: FrameStream) -> None:
        self.number = number
        self.hello = hello
        self.region = region
        self.jobs: dict[int, int] = {}
        """The engine's job -> the machine's."""
        self.lost = False
        self.untouched = asyncio.Event()
        """Set while no copy touches its rows."""
        self.untouched.set()
        self._copies = 0
        self._stream = stream
        self._poll = select.poll()
        self._poll.register(stream.descriptor, _GONE)

    @property
    def alive(self) -> bool:
        """Whether the engine still has its side open: what it closed and we have not read yet counts, too."""
        return not self.lost and not self._poll.poll(0)

    @contextmanager
    def touched(self) -> Iterator[None]:
        """Count a copy that touches its rows: they stay mapped meanwhile."""
        self._copies += 1
        self.untouched.clear()
        try:
            yield
        finally:
            self._copies -= 1
            if not self._copies:
                self.untouched.set()

    def row(self, number: int) -> memoryview:
        return self.region.row(number)

    def keys(self, hashes: Sequence[bytes], group: int, hints: RequestHints) -> list[BlockKey]:
        """Return our keys of an engine's hashes."""
        return engine_keys(hashes, self.hello.hash_algorithm, identity_of(self.hello, hints), group=group)

    def send(self, message: msgspec.Struct) -> None:
        """Send a frame; one that is not read in time ends the connection, since memory is bounded."""
        if self.lost:
            return
        if not self._stream.send(message):
            log.warning("engine %s reads nothing, and is cut off", self.name)
            self.lose()

    def lose(self) -> None:
        """Begin no copy from now on; whoever reads its frames gets to their end."""
        self.lost = True
        self._stream.end()

    @property
    def name(self) -> str:
        return self.hello.worker or f"number {self.number}"


def identity_of(hello: TierHello, hints: RequestHints) -> KeyIdentity:
    """Return all that decides the bytes of a request's blocks besides its tokens."""
    return KeyIdentity(
        model=hello.model,
        dtype=hello.dtype,
        layout=hello.layout,
        weights=hello.weights,
        block_size=hello.block_tokens,
        lora=hints.lora,
        tenant=hints.tenant,
    )
