"""HTTP/2 connection of a gRPC server: the frames that Envoy and other gRPC clients need, and none besides.

grpc.aio takes 0.33 ms of CPU for a stream of four messages, h2 more than that alone; this takes a tenth. Messages
pass as bytes. One write to the socket carries what all streams of a turn have to say.
"""

import asyncio
import logging
import struct
from collections import deque
from collections.abc import Callable
from typing import Protocol, cast

from hpack import Decoder
from hpack.exceptions import HPACKError

log = logging.getLogger("penstock.picker")

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM, ACK, END_HEADERS, PADDED, PRIORITISED = 0x1, 0x1, 0x4, 0x8, 0x20
NO_ERROR, PROTOCOL_ERROR, SIZE_ERROR, REFUSED = 0x0, 0x1, 0x6, 0x7
OK, TOO_LARGE, UNIMPLEMENTED, INTERNAL = 0, 8, 12, 13
"""Statuses of gRPC."""

FRAME_MAX = 1 << 20
"""Longest frame that we take: a chunk of a body in one frame instead of four of the usual 16 KiB."""
WINDOW = 1 << 20
"""Bytes that a stream may be ahead of us; an echo that is not taken yet counts, so a slow client slows its engine."""
CONNECTION_WINDOW = (1 << 31) - 1
BLOCK_MAX = 1 << 16
"""Longest block of headers."""
STREAMS_MAX = 16_384
"""Most open streams of one connection; each is a request that the gateway carries."""
UNSENT_MAX = 64 << 20
"""Bytes that may wait for a peer that does not read; beyond it the connection is cut."""
BLOCKS_MAX = 256
"""Blocks of headers whose path is remembered; a gateway sends the same few over and over."""

_HEAD = struct.Struct(">BHBBI")
_LENGTH = struct.Struct(">I")
_SETTING = struct.Struct(">HI")
_TABLE_SIZE, _STREAMS, _INITIAL_WINDOW, _FRAME_SIZE = 0x1, 0x3, 0x4, 0x5


def _encode_frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    size = len(payload)
    return _HEAD.pack(size >> 16, size & 0xFFFF, kind, flags, stream) + payload


def _literal_header(name: bytes, value: bytes) -> bytes:
    return b"\x00" + bytes([len(name)]) + name + bytes([len(value)]) + value


_RESPONSE = b"\x88" + _literal_header(b"content-type", b"application/grpc")
"""The block of a response's head: status 200 has an index of its own."""
_GREETING = _encode_frame(
    SETTINGS,
    0,
    0,
    # No table: then a block of headers means the same each time, and is decoded once.
    _SETTING.pack(_TABLE_SIZE, 0)
    + _SETTING.pack(_STREAMS, STREAMS_MAX)
    + _SETTING.pack(_INITIAL_WINDOW, WINDOW)
    + _SETTING.pack(_FRAME_SIZE, FRAME_MAX),
) + _encode_frame(WINDOW_UPDATE, 0, 0, _LENGTH.pack(CONNECTION_WINDOW - 65_535))


class StreamHandler(Protocol):
    """What answers one call."""

    def message(self, data: bytes) -> None:
        """A message has come."""
        ...

    def half_closed(self) -> None:
        """The caller sends nothing more."""
        ...

    def reset(self) -> None:
        """The call is over before we ended it."""
        ...


OpenCall = Callable[[str, "GrpcStream"], StreamHandler | None]
"""Makes the handler of a call to a path such as ``/package.Service/Method``; None where there is no such method."""


class ProtocolBroken(Exception):
    """The peer broke a rule of HTTP/2; the connection ends with this code."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class GrpcStream:
    """One call: takes messages in, sends messages out, and ends with a status."""

    __slots__ = (
        "_buffer",
        "_connection",
        "_ending",
        "_queue",
        "_uncredited",
        "begun",
        "handler",
        "id",
        "open",
        "window",
    )

    def __init__(self, connection: "Http2Connection", id: int, window: int) -> None:
        self.id = id
        self.handler: StreamHandler | None = None
        self.window = window
        self.begun = False
        self.open = True
        self._connection = connection
        self._buffer = b""
        self._queue: deque[bytes] = deque()
        """Bytes of messages that wait for the peer's window."""
        self._ending: bytes | None = None
        self._uncredited = 0

    def send(self, message: bytes) -> None:
        """Send a message as soon as the peer has room for it."""
        if not self.open or self._ending is not None:
            return
        size = len(message) + 5
        connection = self._connection
        data = b"\x00" + _LENGTH.pack(size - 5) + message
        if not self.begun:
            self.begun = True
            connection.write(_encode_frame(HEADERS, END_HEADERS, self.id, _RESPONSE))
        if not self._queue and size <= connection.peer_frame and size <= self.window and size <= connection.window:
            self.window -= size
            connection.window -= size
            connection.write(_HEAD.pack(size >> 16, size & 0xFFFF, DATA, 0, self.id) + data)
            return
        self._queue.append(data)
        self.flush()

    def finish(self, status: int = OK, text: str = "") -> None:
        """End the call, after what was sent before."""
        if not self.open or self._ending is not None:
            return
        trailers = _literal_header(b"grpc-status", str(status).encode())
        if text:
            trailers += _literal_header(b"grpc-message", text.encode()[:100])
        if not self.begun:
            trailers = _RESPONSE + trailers
        self._ending = _encode_frame(HEADERS, END_HEADERS | END_STREAM, self.id, trailers)
        self.flush()

    def flush(self) -> None:
        """Send what waits, as far as the windows reach; then the end."""
        connection, queue = self._connection, self._queue
        while queue:
            data = queue[0]
            room = min(connection.peer_frame, self.window, connection.window)
            if room <= 0:
                connection.blocked[self.id] = self
                return
            piece = data if len(data) <= room else data[:room]
            self.window -= len(piece)
            connection.window -= len(piece)
            connection.write(_encode_frame(DATA, 0, self.id, piece))
            if len(piece) == len(data):
                queue.popleft()
            else:
                queue[0] = data[room:]
        connection.blocked.pop(self.id, None)
        self._credit()
        if self._ending is not None:
            connection.write(self._ending)
            self.open = False
            connection.forget(self)

    def received(self, data: bytes) -> None:
        """Bytes of messages have come."""
        self._uncredited += len(data)
        if not self._queue:
            self._credit()
        if self._buffer:
            data = self._buffer + data
        at, size = 0, len(data)
        while size - at >= 5:
            end = at + 5 + _LENGTH.unpack_from(data, at + 1)[0]
            if data[at]:
                return self.finish(UNIMPLEMENTED, "compressed messages are not taken")
            if end - at > self._connection.message_max:
                return self.finish(TOO_LARGE, "the message is too long")
            if end > size:
                break
            if self.handler is not None and self.open:
                self.handler.message(data[at + 5 : end])
            at = end
        self._buffer = data[at:]

    def _credit(self) -> None:
        if self._uncredited > WINDOW // 2 and self.open:
            self._connection.write(_encode_frame(WINDOW_UPDATE, 0, self.id, _LENGTH.pack(self._uncredited)))
            self._uncredited = 0


class Http2Connection(asyncio.Protocol):
    """One connection.

    Args:
        open_call: finds the handler of a call.
        message_max: bytes of the longest message.
        connections: where the connection is while it is open.
    """

    def __init__(self, open_call: OpenCall, message_max: int, connections: set["Http2Connection"]) -> None:
        self.message_max = message_max
        self.window = 65_535
        self.peer_frame = 16_384
        self.streams: dict[int, GrpcStream] = {}
        self.blocked: dict[int, GrpcStream] = {}
        """Streams that wait for a window."""
        self._open_call = open_call
        self._connections = connections
        self._transport: asyncio.Transport | None = None
        self._buffer = b""
        self._greeted = False
        self._out: list[bytes] = []
        self._writing = False
        self._decoder = Decoder()
        self._paths: dict[bytes, str] = {}
        self._block: tuple[int, int, bytes] | None = None
        """Stream, flags and bytes of headers whose end has not come."""
        self._last = 0
        self._peer_window = 65_535
        self._uncredited = 0
        self._leaving = False

    # --- asyncio ----------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is of no class of asyncio's
        self._connections.add(self)
        self._transport.write(_GREETING)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)
        self._transport = None
        for stream in list(self.streams.values()):
            self._reset(stream)

    def data_received(self, data: bytes) -> None:
        self._writing = True
        try:
            self._take(self._buffer + data if self._buffer else data)
        except (ProtocolBroken, HPACKError) as error:
            code = error.code if isinstance(error, ProtocolBroken) else PROTOCOL_ERROR
            log.warning("a gateway's connection ends: %s", error)
            self.write(_encode_frame(GOAWAY, 0, 0, _LENGTH.pack(self._last) + _LENGTH.pack(code)))
            self._flush()
            self.close()
        finally:
            self._writing = False
            self._flush()

    # --- for streams ------------------------------------------------------------------------------------------------

    def write(self, data: bytes) -> None:
        """Send bytes at the end of this turn of the event loop."""
        self._out.append(data)
        if not self._writing:
            self._writing = True
            asyncio.get_running_loop().call_soon(self._turned)

    def forget(self, stream: GrpcStream) -> None:
        """A call has ended."""
        self.streams.pop(stream.id, None)
        self.blocked.pop(stream.id, None)

    def leave(self) -> None:
        """Ask the peer to open its next calls elsewhere; those that are open go on."""
        if not self._leaving:
            self._leaving = True
            self.write(_encode_frame(GOAWAY, 0, 0, _LENGTH.pack((1 << 31) - 1) + _LENGTH.pack(NO_ERROR)))

    def close(self) -> None:
        """Cut the connection after what was written."""
        if self._transport is not None:
            self._flush()
            self._transport.close()

    # --- frames -----------------------------------------------------------------------------------------------------

    def _take(self, data: bytes) -> None:
        at, size = 0, len(data)
        if not self._greeted:
            if size < len(PREFACE) and PREFACE.startswith(data):
                self._buffer = data
                return
            if not data.startswith(PREFACE):
                raise ProtocolBroken(PROTOCOL_ERROR, "the peer does not speak HTTP/2")
            self._greeted = True
            at = len(PREFACE)
        while size - at >= 9:
            high, low, kind, flags, stream = _HEAD.unpack_from(data, at)
            length = high << 16 | low
            if length > FRAME_MAX:
                raise ProtocolBroken(SIZE_ERROR, f"a frame of {length} bytes")
            end = at + 9 + length
            if end > size:
                break
            self._frame(kind, flags, stream & 0x7FFFFFFF, data[at + 9 : end])
            at = end
        self._buffer = data[at:]

    def _frame(self, kind: int, flags: int, id: int, payload: bytes) -> None:
        if self._block is not None and kind != CONTINUATION:
            raise ProtocolBroken(PROTOCOL_ERROR, "headers were broken off")
        if kind == DATA:
            self._data(flags, id, payload)
        elif kind == HEADERS:
            payload = _unpadded(payload) if flags & PADDED else payload
            self._headers(id, flags, payload[5:] if flags & PRIORITISED else payload)
        elif kind == CONTINUATION:
            if self._block is None or self._block[0] != id:
                raise ProtocolBroken(PROTOCOL_ERROR, "a continuation of nothing")
            _, first, block = self._block
            self._block = None
            self._headers(id, first | flags & END_HEADERS, block + payload)
        elif kind == RST_STREAM:
            stream = self.streams.get(id)
            if stream is not None:
                self._reset(stream)
        elif kind == SETTINGS and not flags & ACK:
            self._settings(payload)
        elif kind == PING and not flags & ACK:
            self.write(_encode_frame(PING, ACK, 0, payload))
        elif kind == WINDOW_UPDATE:
            self._widened(id, payload)
        elif kind == PUSH_PROMISE:
            raise ProtocolBroken(PROTOCOL_ERROR, "a client can't push")

    def _data(self, flags: int, id: int, payload: bytes) -> None:
        self._uncredited += len(payload)
        if self._uncredited > CONNECTION_WINDOW // 2:
            self.write(_encode_frame(WINDOW_UPDATE, 0, 0, _LENGTH.pack(self._uncredited)))
            self._uncredited = 0
        stream = self.streams.get(id)
        if stream is None:
            return  # ended by us, while this was on its way
        if payload:
            stream.received(_unpadded(payload) if flags & PADDED else payload)
        if flags & END_STREAM and stream.open and stream.handler is not None:
            stream.handler.half_closed()

    def _headers(self, id: int, flags: int, block: bytes) -> None:
        if not flags & END_HEADERS:
            if len(block) > BLOCK_MAX:
                raise ProtocolBroken(SIZE_ERROR, "too many headers")
            self._block = (id, flags, block)
            return
        path = self._path(block)
        stream = self.streams.get(id)
        if stream is not None:  # trailers, which a gRPC client does not send
            if flags & END_STREAM and stream.handler is not None:
                stream.handler.half_closed()
            return
        if id <= self._last or not id & 1:
            return  # of a call that has ended
        self._last = id
        if len(self.streams) >= STREAMS_MAX:
            self.write(_encode_frame(RST_STREAM, 0, id, _LENGTH.pack(REFUSED)))
            return
        stream = self.streams[id] = GrpcStream(self, id, self._peer_window)
        stream.handler = self._open_call(path, stream)
        if stream.handler is None:
            stream.finish(UNIMPLEMENTED, f"there is no method {path}")
        elif flags & END_STREAM:
            stream.handler.half_closed()

    def _path(self, block: bytes) -> str:
        path = self._paths.get(block)
        if path is not None:
            return path
        path = ""
        for name, value in self._decoder.decode(block, raw=True):
            if name == b":path":
                path = bytes(value).decode("latin-1")
        # Until the peer knows that there is no table, what a block means depends on those before it.
        if not self._decoder.header_table.dynamic_entries and len(self._paths) < BLOCKS_MAX and self._stateless(block):
            self._paths[block] = path
        return path

    def _stateless(self, block: bytes) -> bool:
        """Return whether the peer has taken our table size of 0, and this block does not tell so itself."""
        return self._decoder.header_table_size == 0 and block[0] & 0xE0 != 0x20

    def _settings(self, payload: bytes) -> None:
        for at in range(0, len(payload) - 5, 6):
            name, value = _SETTING.unpack_from(payload, at)
            if name == _INITIAL_WINDOW:
                grown, self._peer_window = value - self._peer_window, value
                for stream in self.streams.values():
                    stream.window += grown
            elif name == _FRAME_SIZE:
                self.peer_frame = value
        self.write(_encode_frame(SETTINGS, ACK, 0))
        self._unblock()

    def _widened(self, id: int, payload: bytes) -> None:
        (more,) = _LENGTH.unpack(payload)
        if id == 0:
            self.window += more
            self._unblock()
        elif (stream := self.streams.get(id)) is not None:
            stream.window += more
            if id in self.blocked:
                stream.flush()

    def _unblock(self) -> None:
        for stream in list(self.blocked.values()):
            stream.flush()

    def _reset(self, stream: GrpcStream) -> None:
        stream.open = False
        self.forget(stream)
        if stream.handler is not None:
            stream.handler.reset()

    def _turned(self) -> None:
        self._writing = False
        self._flush()

    def _flush(self) -> None:
        if self._out and self._transport is not None:
            self._transport.write(b"".join(self._out))
            if self._transport.get_write_buffer_size() > UNSENT_MAX:
                log.warning("a gateway does not read its answers; its connection is cut")
                self._transport.abort()
        self._out.clear()


def _unpadded(payload: bytes) -> bytes:
    pad = payload[0] if payload else 0
    if pad >= len(payload):
        raise ProtocolBroken(PROTOCOL_ERROR, "more padding than bytes")
    return payload[1 : len(payload) - pad]
