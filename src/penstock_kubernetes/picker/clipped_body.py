"""Clipped body: the beginning of a JSON body that did not fit into a gateway's buffer, closed so that it can be read.

What is lost is the end of the prompt. Its beginning is what routing by prefix needs, so that is enough to choose by.
"""

import re

_TOKENS = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*(?P<open>\\?\Z)?|[\[\]{},:]', re.DOTALL)
_CLOSERS = {b"{": b"}", b"[": b"]"}
_PART_OF_ESCAPE = re.compile(rb"\\(?:u[0-9a-fA-F]{0,3})?\Z")
_LONE_SURROGATE = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}\Z")


def closed(body: bytes) -> bytes:
    """Close a JSON object that was cut: a value that is a string is ended where it was cut, any other is left out."""
    closers: list[bytes] = []
    whole, ends = 0, b""
    before = b""
    at = 0
    while (found := _TOKENS.search(body, at)) is not None:
        token, at = found.group(), found.end()
        if token[:1] == b'"':
            if found.group("open") is not None or body[at : at + 1] != b'"':
                if before == b":" or closers[-1:] == [b"]"]:
                    return _string(body) + b'"' + b"".join(reversed(closers))
                break
            at += 1
            token = b'"'
        elif token in _CLOSERS:
            closers.append(_CLOSERS[token])
            whole, ends = at, b"".join(reversed(closers))
        elif token in (b"}", b"]"):
            if closers:
                closers.pop()
            whole, ends = at, b"".join(reversed(closers))
        elif token == b",":
            whole, ends = at - 1, b"".join(reversed(closers))
        before = token
    return body[:whole] + ends


def _string(body: bytes) -> bytes:
    """Return a text that ends within a string, without half a character at its end."""
    body = _LONE_SURROGATE.sub(b"", _PART_OF_ESCAPE.sub(b"", body) if _odd(body) else body)
    return body.decode("utf-8", "ignore").encode()


def _odd(body: bytes) -> bool:
    """Return whether the last escape of a text is cut: whether its backslash is not itself escaped."""
    found = _PART_OF_ESCAPE.search(body)
    if found is None:
        return False
    before = body[: found.start()]
    return (len(before) - len(before.rstrip(b"\\"))) % 2 == 0
