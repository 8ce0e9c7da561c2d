"""Frames of the tier process: reads and writes the length-prefixed messages of `penstock_kv.inside.tier_protocol`."""

import asyncio

import msgspec

from penstock.kernel.errors import PenstockError
from penstock_kv.inside.tier_protocol import FRAME_MAX

LENGTH = 4
"""Bytes of a frame's length, u32le."""
UNREAD_MAX = 16 << 20
"""Bytes that may wait for the other side to read them: memory is bounded."""

_encode = msgspec.msgpack.Encoder().encode


class FrameError(PenstockError):
    """What came is no frame of this protocol; the connection ends."""


def frame(message: msgspec.Struct) -> bytes:
    """Return a message with its length before it."""
    raw = _encode(message)
    return len(raw).to_bytes(LENGTH, "little") + raw


def frame_length(head: bytes) -> int:
    """Return the bytes of a frame after its head.

    Raises:
        FrameError: there are more than a frame may have.
    """
    length = int.from_bytes(head, "little")
    if length > FRAME_MAX:
        raise FrameError(f"a frame of {length} bytes is longer than {FRAME_MAX}")
    return length


class FrameStream:
    """The two directions of a connection, as frames."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self.descriptor: int = writer.get_extra_info("socket").fileno()

    async def read(self) -> bytes | None:
        """Return the next frame; None at the end of the stream, also where it ends within a frame.

        Raises:
            FrameError: it is too long.
        """
        try:
            return await self._reader.readexactly(frame_length(await self._reader.readexactly(LENGTH)))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    def send(self, message: msgspec.Struct) -> bool:
        """Send a frame; return False where too much waits for the other side to read it."""
        self._writer.write(frame(message))
        return self._writer.transport.get_write_buffer_size() <= UNREAD_MAX

    async def drain(self) -> None:
        """Wait until most of what was sent has left."""
        try:
            await self._writer.drain()
        except ConnectionError:
            return  # the next read finds the end

    def end(self) -> None:
        """Read no more: a `read` that waits gets the end of the stream."""
        self._writer.transport.pause_reading()  # type: ignore[attr-defined]
        self._reader.feed_eof()

    async def close(self) -> None:
        """Close both directions, once what was sent has left."""
        self._writer.close()
        try:
            await self._writer.wait_closed()
        except ConnectionError:
            return  # it is closed
