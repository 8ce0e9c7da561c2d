"""Request bodies of the hand-written server: chunked ones, parsed by llhttp, and compressed ones."""

import zlib

import httptools

from penstock.frontend.http.http1_head import END, BadHead

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
