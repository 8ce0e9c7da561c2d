"""How does a file store look on disk? Names of files and what stands in them.

    keys/<key, percent-encoded>.key     one line of JSON ``{"key", "lease", "size"}``, then the value, ``size`` bytes
    leases/<id>.lease                   one JSON object ``{"ttl", "pid", "host"}``; its mtime is the last renewal

Anything else in there is not ours: it is left alone.
"""

import errno
import hashlib
import os
import socket
from pathlib import Path
from urllib.parse import quote

import msgspec

from penstock.adapters.seams import StoreUnavailable

KEYS, LEASES = "keys", "leases"
KEY_SUFFIX, LEASE_SUFFIX, DRAFT_SUFFIX = ".key", ".lease", ".draft"

VALUE_LIMIT = 1 << 20
"""Bytes of a value; a file that is larger is not ours."""

_NAME_LIMIT = 200
_HEADER_LIMIT = 16_384


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """A key's file. ``lease`` is None where the key stays until somebody deletes it."""

    key: str
    value: bytes
    lease: str | None


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """A lease's file. ``ttl`` in seconds; ``host`` tells whether ``pid`` means anything to the reader."""

    ttl: float
    pid: int
    host: str


class _Header(msgspec.Struct, frozen=True, kw_only=True):
    key: str
    lease: str | None
    size: int


def file_name(key: str) -> str:
    """Return the name of a key's file: no separator, never ``.`` or ``..``, one key one name, at most 255 bytes.

    Raises:
        ValueError: the key is empty, too long or not text that UTF-8 can hold.
    """
    if not key:
        raise ValueError("a key of the store is empty")
    if len(key) > _HEADER_LIMIT // 8:
        raise ValueError(f"a key of the store has {len(key)} characters; at most {_HEADER_LIMIT // 8}")
    name = quote(key, safe="")
    if len(name) > _NAME_LIMIT:
        digest = hashlib.blake2b(key.encode(), digest_size=16).hexdigest()
        name = f"{name[: _NAME_LIMIT - 33]}%~{digest}"  # '%~' is no percent code, so no short key has this name
    return name + KEY_SUFFIX


def encode(entry: Entry) -> bytes:
    """Return the bytes of a key's file."""
    header = _Header(key=entry.key, lease=entry.lease, size=len(entry.value))
    return msgspec.json.encode(header) + b"\n" + entry.value


def decode(raw: bytes) -> Entry | None:
    """Read a key's file; None where it is half written or not ours."""
    line, newline, value = raw.partition(b"\n")
    if not newline or len(line) > _HEADER_LIMIT:
        return None
    try:
        header = msgspec.json.decode(line, type=_Header)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return Entry(key=header.key, value=value, lease=header.lease) if len(value) == header.size else None


def write_whole(path: Path, raw: bytes, draft: str, *, sync: bool) -> None:
    """Write a file so that a reader sees the old one or the new one, never a part."""
    temporary = path.with_name(draft + DRAFT_SUFFIX)
    try:
        with temporary.open("wb") as file:
            file.write(raw)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def this_host() -> str:
    """Name the set of processes in which a pid of ours has a meaning: machine and pid namespace."""
    try:
        namespace = str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        namespace = ""
    return f"{socket.gethostname()} {namespace}".strip()


def is_running(pid: int) -> bool:
    """Say whether a process of this host exists."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def unavailable(doing: str, root: Path, error: OSError) -> StoreUnavailable:
    """Say what could not be done, why, and what to do next."""
    hint = {
        errno.ENOSPC: "free some space on that disk",
        errno.EDQUOT: "free some space: the quota is used up",
        errno.EROFS: "the file system is read-only; mount it for writing",
        errno.EACCES: "give this user permission to write there",
        errno.EPERM: "give this user permission to write there",
        errno.ENOTDIR: "a file stands where the directory should be; move it away",
        errno.EEXIST: "a file stands where the directory should be; move it away",
        errno.ENOENT: "the directory is gone; it is made again as soon as an owner renews its lease",
    }.get(error.errno or 0, "membership stays as it is until this works again")
    return StoreUnavailable(f"can't {doing} the discovery directory {root}: {error.strerror or error}", hint=hint)
