"""HTTP/1.1 messages: reads the head of a request strictly, reads its body, and writes the head of an answer.

llhttp decides whether a head is well formed, so that what two parsers could understand differently (both a length and
a transfer encoding, folded lines, bare line feeds) never gets further. An accepted head is plain enough to be split.
It also parses chunked bodies; compressed ones are unpacked here.
"""

import re
import time
import zlib
from collections.abc import Mapping
from email.utils import formatdate
from http import HTTPStatus
from urllib.parse import unquote, urlsplit

import httptools

from penstock.adapters.http1_connection import header_lines

FIELDS_MAX = 128
"""Most header lines of a request."""
END = b"\r\n\r\n"
_REASONS = {status.value: status.phrase for status in HTTPStatus}
_BARE = re.compile(r"[A-Za-z0-9_./-]*")
_BODILESS = frozenset({204, 304})


class BadHead(Exception):
    """A head that is refused.

    Attributes:
        status: 400 malformed, 431 too large, 505 another version.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class RequestHead:
    """A request's head. Names of ``headers`` are lower case; of a name that comes twice the first counts.

    ``path`` is without its escapes, except where one stands for a character that must not stand in a path, or a slash.
    """

    __slots__ = ("chunked", "headers", "http10", "keep_alive", "length", "method", "path")

    def __init__(self, method: str, path: str, headers: dict[str, str], http10: bool) -> None:
        self.method = method
        self.path = path
        self.headers = headers
        self.http10 = http10
        self.chunked = "transfer-encoding" in headers
        self.length = int(headers.get("content-length", 0))
        connection = headers.get("connection")
        if connection is None:
            self.keep_alive = not http10
        else:
            words = connection.lower()
            self.keep_alive = "keep-alive" in words if http10 else "close" not in words
        if "upgrade" in headers:  # no other protocol is spoken here, and later bytes may be of one
            self.keep_alive = False


class _HeadFlags:
    """What a parser reports; apart from its feeder, so that the two are no cycle that only the collector could free."""

    head = False

    def on_headers_complete(self) -> None:
        self.head = True


class HeadCheck:
    """Checks that bytes, which may come in parts, are the start of a well-formed request."""

    __slots__ = ("_flags", "_parser")

    def __init__(self) -> None:
        self._flags = _HeadFlags()
        self._parser = httptools.HttpRequestParser(self._flags)

    def feed(self, data: bytes) -> bool:
        """Take the next part, not beyond the head's end; return whether the head is complete.

        Raises:
            BadHead: it is not HTTP.
        """
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # `read_head` decides about that
        except httptools.HttpParserError as error:
            raise BadHead(400, f"this is not a valid HTTP request: {error}") from None
        return self._flags.head


def read_head(raw: bytes) -> RequestHead:
    """Read a head.

    Args:
        raw: from the request line to the blank line.
    Raises:
        BadHead: it is malformed, of another version, or has too many lines.
    """
    done = HeadCheck().feed(raw)
    text = raw.decode("utf-8", "surrogateescape")
    lines = text.split("\r\n")
    if not done or text.count("\n") != len(lines) - 1 or text.count("\r") != len(lines) - 1:
        raise BadHead(400, "this is not a valid HTTP request: its lines do not end as they should")
    if len(lines) > FIELDS_MAX + 3:
        raise BadHead(431, f"the request has more than {FIELDS_MAX} header lines")
    first = lines[0].split(" ")
    if len(first) != 3:
        raise BadHead(400, "this is not a valid HTTP request: its first line is not method, target and version")
    method, target, version = first
    if version != "HTTP/1.1" and version != "HTTP/1.0":
        raise BadHead(505, "this server speaks HTTP/1.1")
    headers: dict[str, str] = {}
    for line in lines[1:-2]:
        name, _, value = line.partition(":")
        name = name.lower()
        if name not in headers:
            headers[name] = value.strip(" \t")
        elif name == "host":
            raise BadHead(400, "this is not a valid HTTP request: it has two Host headers")
    if "host" not in headers and version == "HTTP/1.1":
        raise BadHead(400, "this is not a valid HTTP request: it has no Host header")
    coding = headers.get("transfer-encoding")
    if coding is not None and (coding.lower() != "chunked" or version == "HTTP/1.0" or "content-length" in headers):
        raise BadHead(400, f"the transfer encoding {coding[:100]!r} is not understood here")
    path = target.partition("?")[0]
    if path[:1] != "/" or "%" in path or "#" in path:
        path = _plain_path(path)
    return RequestHead(method, path, headers, version == "HTTP/1.0")


def _plain_path(path: str) -> str:
    """Return a path without the host, the fragment and the escapes that a client may have put there."""
    if path[:1] != "/":  # a client that takes us for a proxy names the host too
        try:
            path = urlsplit(path).path or "/"
        except ValueError:
            return path
    path = path.partition("#")[0]
    bare = unquote(path)
    return bare if _BARE.fullmatch(bare) and bare.count("/") == path.count("/") else path


class _Clock:
    """The date header, made once per second."""

    __slots__ = ("_second", "_text")

    def __init__(self) -> None:
        self._second = 0
        self._text = ""

    def date(self) -> str:
        second = int(time.time())
        if second != self._second:
            self._second = second
            self._text = formatdate(second, usegmt=True)
        return self._text


_clock = _Clock()


def answer_head(status: int, headers: Mapping[str, str], id: str | None, more: str) -> bytes:
    """Write an answer's head.

    Args:
        id: of the request.
        more: lines about framing, each with its end.
    Raises:
        ValueError: a header has a line break or a NUL in it.
    """
    lines = header_lines(headers)
    marks = "" if id is None else f"x-request-id: {id}\r\nx-penstock-request-id: {id}\r\n"
    reason = _REASONS.get(status, "")
    text = f"HTTP/1.1 {status} {reason}\r\n{lines}{marks}server: penstock\r\ndate: {_clock.date()}\r\n{more}\r\n"
    return text.encode("utf-8", "surrogateescape")


def has_body(status: int) -> bool:
    """Return whether an answer of this status may have a body."""
    return status not in _BODILESS


_CUTS_MAX = 64
"""Most positions in one piece of data that are tried as the end. A body has hardly any; more are an attack."""


class ChunkedBody:
    """A body being read; bytes after its end are left to the next request.

    Args:
        head: the request's head, for the parser.
        limit: bytes that the body may have.
    """

    __slots__ = ("_again", "_limit", "_parser", "_parts", "_size", "_tail", "done")

    def __init__(self, head: bytes, limit: int) -> None:
        self.done = False
        self._again = False
        self._limit = limit
        self._parts: list[bytes] = []
        self._size = 0
        self._tail = b""
        self._parser = httptools.HttpRequestParser(self)
        self._parser.feed_data(head)

    @property
    def too_large(self) -> bool:
        return self._size > self._limit

    @property
    def sure(self) -> bool:
        """Whether its end is known; if not, the connection must not be used again."""
        return not self._again

    def feed(self, data: bytes) -> bytes:
        """Take data; return the rest behind the body's end.

        Raises:
            BadHead: it is malformed.
        """
        # The parser does not report where it stopped, so it is fed up to each possible end: a blank line.
        window = self._tail + data
        before = len(self._tail)
        start = fed = 0
        for _ in range(_CUTS_MAX):
            index = window.find(END, start)
            if index < 0:
                break
            start = index + 1
            cut = index + len(END) - before
            self._feed(data[fed:cut])
            fed = cut
            if self.done:
                return data[fed:]
        if fed < len(data):
            self._feed(data[fed:])
        self._tail = window[-3:]
        return b""

    def take(self) -> bytes:
        """Return the body."""
        parts, self._parts = self._parts, []
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _feed(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if not self.done:
                raise BadHead(400, f"the body is not chunked as it should be: {error}") from None
            self._again = True

    # --- callbacks of the parser ------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._again = self.done

    def on_body(self, data: bytes) -> None:
        self._size += len(data)
        if self._size > self._limit:
            self._parts.clear()
        elif not self.done:
            self._parts.append(data)

    def on_message_complete(self) -> None:
        self.done = True


def decompressed(body: bytes, coding: str, limit: int) -> bytes:
    """Return a body without its content-encoding, cut above ``limit`` bytes.

    Raises:
        BadHead: it is not of that coding, or the coding is not understood here.
    """
    if coding == "gzip":
        bits = 16 + zlib.MAX_WBITS
    elif coding == "deflate":  # zlib's, by the standard; some clients leave its head away
        bits = zlib.MAX_WBITS if body[:1] and body[0] & 0xF == 8 else -zlib.MAX_WBITS
    else:
        raise BadHead(400, f"the content encoding {coding[:100]!r} is not understood here")
    reader = zlib.decompressobj(bits)
    try:
        data = reader.decompress(body, limit + 1)
    except zlib.error as error:
        raise BadHead(400, f"the body is not {coding}: {error}") from None
    if len(data) <= limit and (not reader.eof or reader.unused_data):
        raise BadHead(400, f"the body does not end as {coding} does")
    return data
