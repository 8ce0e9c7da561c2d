"""What does somebody send who wants one connection's bytes to be taken for another's request? Each as raw bytes.

Every attack carries a second request whose prompt is `SMUGGLED`; it must never reach an engine.
"""

import json

SMUGGLED = "SMUGGLED"
PATH = b"/v1/chat/completions"


def chat(text: str, *, stream: bool = False) -> bytes:
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": text}], "stream": stream}).encode()


def post(body: bytes, *headers: bytes, path: bytes = PATH, length: int | None = None) -> bytes:
    """Return a request; ``length`` is announced instead of the body's own."""
    lines = [b"POST " + path + b" HTTP/1.1", b"host: 127.0.0.1", b"content-type: application/json", *headers]
    size = len(body) if length is None else length
    return b"\r\n".join([*lines, b"content-length: %d" % size, b"", b""]) + body


def head(*headers: bytes, path: bytes = PATH) -> bytes:
    """Return a request's head without any length."""
    return b"\r\n".join([b"POST " + path + b" HTTP/1.1", b"host: 127.0.0.1", *headers, b"", b""])


def chunked(body: bytes, size: bytes | None = None, after: bytes = b"\r\n") -> bytes:
    return (b"%x" % len(body) if size is None else size) + b"\r\n" + body + after + b"0\r\n\r\n"


HIDDEN = post(chat(SMUGGLED))
GOOD = chat("in front")
BOTH = [b"content-length: 4", b"transfer-encoding: chunked"]
TE = b"transfer-encoding: chunked"

FRAMING: dict[str, bytes] = {
    "CL.TE": head(*BOTH) + b"0\r\n\r\n" + HIDDEN,
    "TE.CL": head(*reversed(BOTH)) + chunked(HIDDEN),
    "CL.CL": head(b"content-length: %d" % len(GOOD), b"content-length: 0") + GOOD + HIDDEN,
    "same CL twice": head(b"content-length: 0", b"content-length: 0") + HIDDEN,
    "CL in a list": head(b"content-length: 0, %d" % len(GOOD)) + GOOD + HIDDEN,
    **{
        f"CL {value!r}": head(b"content-length: " + value) + HIDDEN
        for value in (
            b"+0",
            b"-0",
            b"0x0",
            b"0 0",
            b"0;",
            b"1e1",
            b"\x0b0",
            b"18446744073709551616",
            b"",
            b"0\x00",
            b"\xd9\xa0",
        )
    },
    **{
        f"TE {value!r}": head(b"transfer-encoding: " + value, b"content-length: 0") + HIDDEN
        for value in (b"identity", b"xchunked", b"chunked\x0b", b"chunked;q=1", b"gzip", b"")
    },
    **{
        f"only TE {value!r}": head(b"transfer-encoding: " + value) + b"0\r\n\r\n" + HIDDEN
        for value in (
            b"xchunked",
            b"\x0bchunked",
            b"chunked\x00",
            b"gzip",
            b"identity",
            b"chunked, identity",
            b"chunked, chunked",
        )
    },
    "TE twice": head(TE, b"transfer-encoding: identity") + b"0\r\n\r\n" + HIDDEN,
    "TE folded": head(b"transfer-encoding:\r\n chunked") + b"0\r\n\r\n" + HIDDEN,
    "TE before a blank": head(b"transfer-encoding : chunked") + b"0\r\n\r\n" + HIDDEN,
    "TE behind a blank line of its own": head(b" transfer-encoding: chunked") + b"0\r\n\r\n" + HIDDEN,
    "CL folded": head(b"content-length:\r\n 0") + HIDDEN,
    "CL behind a bare LF": head(b"a: b\ncontent-length: 0") + HIDDEN,
    "CL behind a bare CR": head(b"a: b\rcontent-length: 0") + HIDDEN,
    "CL behind a NUL": head(b"a: b\x00content-length: 0") + HIDDEN,
    "HTTP/1.0 with chunks": head(TE).replace(b"HTTP/1.1", b"HTTP/1.0") + b"0\r\n\r\n" + HIDDEN,
    "lines end in LF": head(b"content-length: 0").replace(b"\r\n", b"\n") + HIDDEN,
}
"""Heads that two parsers could understand differently; each is refused, and ends its connection."""

CHUNKS: dict[str, bytes] = {
    **{
        f"size {size!r}": head(TE) + chunked(GOOD, size) + HIDDEN
        for size in (
            b"zz",
            b"-1",
            b"0x10",
            b"+10",
            b"1 0",
            b" 10",
            b"",
            b"10000000000000000",
            b"\xd9\xa1",
        )
    },
    "extension with a bare LF": head(TE) + chunked(GOOD, b"%x;a\nb" % len(GOOD)) + HIDDEN,
    "extension with a bare CR": head(TE) + chunked(GOOD, b"%x;a\rb" % len(GOOD)) + HIDDEN,
    "no end of a chunk": head(TE) + chunked(GOOD, after=b"") + HIDDEN,
    "a chunk ends in LF": head(TE) + chunked(GOOD, after=b"\n") + HIDDEN,
    "all lines end in LF": head(TE) + chunked(GOOD).replace(b"\r\n", b"\n") + HIDDEN,
    "longer than its size": head(TE) + chunked(GOOD, b"%x" % (len(GOOD) - 1)) + HIDDEN,
}
"""Bodies whose chunks are none; each is refused, and ends its connection."""

LINES: dict[str, bytes] = {
    "HTTP/0.9": b"GET /v1/models\r\n\r\n" + HIDDEN,
    "HTTP/9.9": HIDDEN.replace(b"HTTP/1.1", b"HTTP/9.9"),
    "HTTP/2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + HIDDEN,
    "no version": HIDDEN.replace(b" HTTP/1.1", b""),
    "two blanks": HIDDEN.replace(b" HTTP/1.1", b"  HTTP/1.1"),
    "a tab": HIDDEN.replace(b" HTTP/1.1", b"\tHTTP/1.1"),
    "a blank in the target": HIDDEN.replace(b"/v1/", b"/v1 /"),
    "a NUL in the target": HIDDEN.replace(b"/v1/", b"/v1\x00/"),
    "a bare CR in the target": HIDDEN.replace(b"/v1/", b"/v1\r/"),
    "a long target": b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n" + HIDDEN,
    "a long header": post(b"", b"a: " + b"b" * 200_000) + HIDDEN,
    "a long name": post(b"", b"a" * 200_000 + b": b") + HIDDEN,
    "no colon": head(b"abc", b"content-length: 0") + HIDDEN,
    "no name": head(b": abc", b"content-length: 0") + HIDDEN,
    "a NUL in a header": head(b"a: \x00", b"content-length: 0") + HIDDEN,
    "a folded header": head(b"a: b\r\n c", b"content-length: 0") + HIDDEN,
    "no host": b"GET /v1/models HTTP/1.1\r\n\r\n" + HIDDEN,
    "two hosts": b"GET /v1/models HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n" + HIDDEN,
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
    "binary": bytes(range(256)) * 4,
}
"""What is no HTTP/1.1, or more of it than anybody needs; each is refused, and ends its connection."""

ODD: dict[str, bytes] = {
    "absolute form": post(GOOD, path=b"http://evil.example/v1/chat/completions"),
    "absolute form with a user": post(GOOD, path=b"http://a:b@evil.example/v1/chat/completions"),
    "asterisk": b"OPTIONS * HTTP/1.1\r\nhost: x\r\n\r\n",
    "authority form": b"CONNECT evil.example:443 HTTP/1.1\r\nhost: evil.example\r\n\r\n",
    "two slashes": post(GOOD, path=b"//v1/chat/completions"),
    "dots": post(GOOD, path=b"/v1/../v1/chat/completions"),
    "encoded dots": post(GOOD, path=b"/v1/%2e%2e/%2e%2e/etc/passwd"),
    "encoded line breaks": post(GOOD, path=b"/v1/%0d%0ax-evil:%201/x"),
    "an encoded NUL": post(GOOD, path=b"/v1/models/%00"),
    "broken encoding": post(GOOD, path=b"/v1/%zz%"),
    "bytes that are no UTF-8": b"GET /v1/models/\xff\xfe HTTP/1.1\r\nhost: x\r\n\r\n",
    "a query": post(GOOD, path=PATH + b"?a=%0d%0a&b=;c"),
    "a fragment": post(GOOD, path=PATH + b"#x"),
    "another host": b"GET /v1/models HTTP/1.1\r\nhost: evil.example\r\n\r\n",
    "upgrade to h2c": post(GOOD, b"connection: Upgrade, HTTP2-Settings", b"upgrade: h2c", b"http2-settings: AA"),
    "upgrade to a websocket": b"GET /v1/models HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
    b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\nsec-websocket-version: 13\r\n\r\n",
    "an unknown expectation": post(GOOD, b"expect: 200-ok"),
    "a body of GET": b"GET /v1/models HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(GOOD) + GOOD,
    "chunks of GET": b"GET /v1/models HTTP/1.1\r\nhost: x\r\n" + TE + b"\r\n\r\n" + chunked(GOOD),
    "lower case method": post(GOOD).replace(b"POST", b"post"),
    "a made-up method": post(GOOD).replace(b"POST", b"BREW"),
    "empty lines in front": b"\r\n\r\n" + post(GOOD),
    "a body that is compressed": post(GOOD, b"content-encoding: gzip"),
    "trailers": head(TE) + chunked(GOOD)[:-2] + b"content-length: 5\r\nhost: evil\r\n\r\n",
    "upper case chunked": head(b"Transfer-Encoding: CHUNKED") + chunked(GOOD),
    "extensions": head(TE) + chunked(GOOD, b'%x;a=b;c="d"' % len(GOOD)),
}
"""What is well formed, or nearly, and unusual: answered or refused, and what follows is a request of its own."""
