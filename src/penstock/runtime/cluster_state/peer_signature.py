"""Peer signature: signs each request of a cluster process to a frontend with the cluster's secret."""

import secrets
import time

from yarl import URL

from penstock.kernel.secret import ClusterSecret

HEADER = "x-penstock-peer"
"""``version time nonce code``: time in whole seconds since 1970, nonce and code hexadecimal."""
VERSION = 1
PURPOSE = "frontend peer"


def signed(secret: ClusterSecret | None, url: URL, method: str = "GET") -> dict[str, str]:
    """Return the headers of a request that a frontend accepts from its cluster; none without a secret."""
    if secret is None:
        return {}
    host = url.raw_authority
    return {HEADER: signature(secret, method, host, url.raw_path_qs, int(time.time()), secrets.token_hex(16))}


def signature(secret: ClusterSecret, method: str, host: str, target: str, at: int, nonce: str) -> str:
    """Return the header's value for a request to ``host``, as in its Host header, and ``target`` (path, query)."""
    return f"{VERSION} {at} {nonce} {secret.sign(PURPOSE, *parts(method, host, target, at, nonce))}"


def parts(method: str, host: str, target: str, at: int, nonce: str) -> tuple[bytes, ...]:
    fields = (str(VERSION), method, host, target, str(at), nonce)
    return tuple(part.encode("utf-8", "surrogateescape") for part in fields)
