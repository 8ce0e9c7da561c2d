"""Layout of a file store on disk: the names and contents of key files and lease files.

    keys/<key, percent-encoded>.key     one line of JSON ``{"key", "lease", "size", "version", "code"}``, then the
                                        value, ``size`` bytes; ``code`` signs all of that with the cluster's secret
    leases/<id>.lease                   one JSON object ``{"version", "ttl", "pid", "host"}``; mtime: the last renewal

Any other file is foreign and is left alone.
"""

import errno
import hashlib
import os
import socket
from pathlib import Path
from urllib.parse import quote

import msgspec

from penstock.adapters.seams import StoreUnavailable
from penstock.kernel.errors import PenstockError
from penstock.kernel.message_version import NewerVersion, VersionedDecoder
from penstock.kernel.secret import ClusterSecret

KEYS, LEASES = "keys", "leases"
KEY_SUFFIX, LEASE_SUFFIX, DRAFT_SUFFIX = ".key", ".lease", ".draft"

VALUE_LIMIT = 1 << 20
"""Bytes of a value; a larger file is foreign."""

VERSION = 1
"""Of a key's file; it grows only where an older reader would misunderstand it."""

_NAME_LIMIT = 200
_HEADER_LIMIT = 16_384
_PURPOSE = "store entry"


class FileEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A key's file. ``lease`` is None where the key stays until it is deleted."""

    key: str
    value: bytes
    lease: str | None


class FileLease(msgspec.Struct, frozen=True, kw_only=True):
    """A lease's file. ``ttl`` in seconds; ``pid`` is valid only for readers on ``host``."""

    version: int = 1
    ttl: float
    pid: int
    host: str


class ForeignEntry(PenstockError):
    """A key's file was not written by a process that knows the cluster's secret."""


class _FileHeader(msgspec.Struct, frozen=True, kw_only=True):
    key: str
    lease: str | None
    size: int
    version: int = VERSION
    code: str | None = None


_header = VersionedDecoder(_FileHeader, "a file of the store")
_lease = VersionedDecoder(FileLease, "a lease of the store")


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


def encode(entry: FileEntry, secret: ClusterSecret | None = None) -> bytes:
    """Return the bytes of a key's file, signed where there is a secret."""
    code = None if secret is None else secret.sign(_PURPOSE, *_signed(entry))
    header = _FileHeader(key=entry.key, lease=entry.lease, size=len(entry.value), code=code)
    return msgspec.json.encode(header) + b"\n" + entry.value


def decode(raw: bytes, secret: ClusterSecret | None = None) -> FileEntry | None:
    """Read a key's file; None where it is half written or foreign.

    Raises:
        ForeignEntry: there is a secret, and the file is not signed with it.
        NewerVersion: a newer release wrote it.
    """
    line, newline, value = raw.partition(b"\n")
    if not newline or len(line) > _HEADER_LIMIT:
        return None
    try:
        header: _FileHeader = _header.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    if len(value) != header.size:
        return None
    entry = FileEntry(key=header.key, value=value, lease=header.lease)
    if secret is not None and not secret.verify(header.code or "", _PURPOSE, *_signed(entry)):
        signed = "without a signature" if header.code is None else "with another secret's signature"
        raise ForeignEntry(f"{entry.key!r} stands in the store {signed}")
    return entry


def _signed(entry: FileEntry) -> tuple[bytes, ...]:
    return entry.key.encode(), b"" if entry.lease is None else entry.lease.encode(), entry.value


def decode_lease(raw: bytes) -> FileLease | None:
    """Read a lease's file; None where it can't be read, or a newer release wrote it."""
    try:
        lease: FileLease = _lease.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, NewerVersion):
        return None
    return lease


def write_whole(path: Path, raw: bytes, draft: str, *, sync: bool) -> None:
    """Write a file so that a reader gets the old one or the new one, never a part."""
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
    """Return the name of the scope in which a pid is valid: machine and pid namespace."""
    try:
        namespace = str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        namespace = ""
    return f"{socket.gethostname()} {namespace}".strip()


def is_running(pid: int) -> bool:
    """Return whether a process of this host exists."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def unavailable(doing: str, root: Path, error: OSError) -> StoreUnavailable:
    """Return the error: what could not be done, why, and what to do next."""
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
