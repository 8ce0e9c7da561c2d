"""SPDY/3.1 frames as far as `kubectl port-forward` needs them: kubectl 1.35 still speaks SPDY, inside a WebSocket."""

import zlib
from typing import NamedTuple

_WORDS = (
    "options head post put delete trace accept accept-charset accept-encoding accept-language accept-ranges age allow "
    "authorization cache-control connection content-base content-encoding content-language content-length "
    "content-location content-md5 content-range content-type date etag expect expires from host if-match "
    "if-modified-since if-none-match if-range if-unmodified-since last-modified location max-forwards pragma "
    "proxy-authenticate proxy-authorization range referer retry-after server te trailer transfer-encoding upgrade "
    "user-agent vary via warning www-authenticate method get status"
)
_PHRASES = ("200 OK", "version", "HTTP/1.1", "url", "public", "set-cookie", "keep-alive", "origin")
_TEXT = (
    "100101201202205206300302303304305306307402405406407408409410411412413414415416417502504505"
    "203 Non-Authoritative Information204 No Content301 Moved Permanently400 Bad Request401 Unauthorized403 Forbidden"
    "404 Not Found500 Internal Server Error501 Not Implemented503 Service UnavailableJan Feb Mar Apr May Jun Jul Aug "
    "Sept Oct Nov Dec 00:00:00 Mon, Tue, Wed, Thu, Fri, Sat, Sun, GMTchunked,text/html,image/png,image/jpg,image/gif,"
    "application/xml,application/xhtml+xml,text/plain,text/javascript,publicprivatemax-age=gzip,deflate,sdch"
    "charset=utf-8charset=iso-8859-1,utf-,*,enq=0."
)
DICTIONARY = (
    b"".join(len(name).to_bytes(4, "big") + name.encode() for name in (*_WORDS.split(), *_PHRASES)) + _TEXT.encode()
)
"""The dictionary of SPDY/3's header compression; its Adler-32 is 0xe3c6a7c2, else no peer can read a header."""
SYN_STREAM, SYN_REPLY, RST_STREAM, PING = 1, 2, 3, 6
FIN = 1
CONTROL = 0x8003


class SpdyFrame(NamedTuple):
    """A frame: its type (0 for data), its stream (or a ping's number), headers or data, and whether it is the last."""

    type: int
    stream: int
    headers: dict[str, str]
    data: bytes
    last: bool


class SpdyFrames:
    """Reads and writes the frames of one connection; both directions of its headers are one compressed stream each."""

    def __init__(self) -> None:
        self._buffer = b""
        self._inflate = zlib.decompressobj(zdict=DICTIONARY)
        self._deflate = zlib.compressobj(zdict=DICTIONARY)

    def feed(self, data: bytes) -> list[SpdyFrame]:
        """Return the frames that are complete by now."""
        self._buffer += data
        frames = []
        while len(self._buffer) >= 8:
            length = int.from_bytes(self._buffer[5:8], "big")
            if len(self._buffer) < 8 + length:
                break
            head, body, self._buffer = self._buffer[:8], self._buffer[8 : 8 + length], self._buffer[8 + length :]
            last = bool(head[4] & FIN)
            if head[0] & 0x80:
                stream = int.from_bytes(body[:4], "big")
                frame_type = int.from_bytes(head[2:4], "big")
                headers = self._headers(body[10:]) if frame_type == SYN_STREAM else {}
                frames.append(SpdyFrame(frame_type, stream, headers, b"", last))
            else:
                frames.append(SpdyFrame(0, int.from_bytes(head[:4], "big"), {}, body, last))
        return frames

    def reply(self, stream: int) -> bytes:
        """Return the frame that accepts a stream."""
        block = self._deflate.compress(bytes(4)) + self._deflate.flush(zlib.Z_SYNC_FLUSH)
        return _control(SYN_REPLY, stream.to_bytes(4, "big") + block)

    def pong(self, number: int) -> bytes:
        """Return the answer to a ping."""
        return _control(PING, number.to_bytes(4, "big"))

    def data(self, stream: int, data: bytes, *, last: bool = False) -> bytes:
        """Return a frame of data."""
        return stream.to_bytes(4, "big") + bytes([FIN if last else 0]) + len(data).to_bytes(3, "big") + data

    def _headers(self, block: bytes) -> dict[str, str]:
        text = self._inflate.decompress(block)
        headers, position = {}, 4
        for _ in range(int.from_bytes(text[:4], "big")):
            parts = []
            for _ in range(2):
                length = int.from_bytes(text[position : position + 4], "big")
                parts.append(text[position + 4 : position + 4 + length].decode())
                position += 4 + length
            headers[parts[0].lower()] = parts[1]
        return headers


def _control(frame_type: int, body: bytes) -> bytes:
    return CONTROL.to_bytes(2, "big") + frame_type.to_bytes(2, "big") + bytes(1) + len(body).to_bytes(3, "big") + body
