"""Entry codec: the bytes in which a store keeps a value, with its key, its lease and the cluster's signature.

One line of JSON ``{"key", "lease", "size", "version", "code"}``, then the value, ``size`` bytes; ``code`` signs key,
lease and value with the cluster's secret.
"""

import logging

import msgspec

from penstock.kernel.errors import PenstockError
from penstock.kernel.message_version import NewerVersion, VersionedDecoder
from penstock.kernel.secret import ClusterSecret

log = logging.getLogger(__name__)

VALUE_LIMIT = 1 << 20
"""Bytes of a value."""
ENTRY_LIMIT = 2 * VALUE_LIMIT
"""Bytes of a value with its header; what is larger is foreign, and is not read."""
VERSION = 1
"""Of the header; it grows only where an older reader would misunderstand it."""

_KEY_LIMIT = 2048
_PURPOSE = "store entry"


class ForeignEntry(PenstockError):
    """An entry was not written by a process that knows the cluster's secret."""


class _EntryHeader(msgspec.Struct, frozen=True, kw_only=True):
    key: str
    lease: str | None
    size: int
    version: int = VERSION
    code: str | None = None


_header = VersionedDecoder(_EntryHeader, "an entry of the store")


def check_entry(key: str, value: bytes, ttl: float | None) -> None:
    """Refuse what no store takes.

    Raises:
        ValueError: the key can't be one, the value is larger than 1 MiB, or ttl is not above 0.
    """
    if len(value) > VALUE_LIMIT:
        raise ValueError(f"the value of {key} has {len(value)} bytes; at most {VALUE_LIMIT}")
    if ttl is not None and not ttl > 0:
        raise ValueError(f"ttl is {ttl} s; it must be above 0")
    check_key(key)


def check_key(key: str) -> None:
    """Refuse a key that is empty, too long or not text that UTF-8 can hold.

    Raises:
        ValueError: it is.
    """
    if not key:
        raise ValueError("a key of the store is empty")
    if len(key) > _KEY_LIMIT:
        raise ValueError(f"a key of the store has {len(key)} characters; at most {_KEY_LIMIT}")
    key.encode()


class EntryCodec:
    """Encodes and decodes the entries of one store.

    Args:
        where: the store's name in the log.
        secret: of the cluster. With it entries are signed, and foreign ones are left out.
    """

    def __init__(self, where: str, secret: ClusterSecret | None = None) -> None:
        self.ignored = 0
        """Entries that are half written, or stand under another key or lease than their own."""
        self.foreign = 0
        """Entries that were not written with our secret."""
        self.newer = 0
        """Entries of a newer release."""
        self._where = where
        self._secret = secret

    def encode(self, key: str, value: bytes, lease: str | None) -> bytes:
        """Return the bytes of an entry; ``lease`` is None where the key stays until it is deleted."""
        code = None if self._secret is None else self._secret.sign(_PURPOSE, *_signed(key, lease, value))
        header = _EntryHeader(key=key, lease=lease, size=len(value), code=code)
        return msgspec.json.encode(header) + b"\n" + value

    def decode(self, key: str, raw: bytes, lease: str | None) -> bytes | None:
        """Return the value; None, and counted, where it is not this cluster's value of this key and lease."""
        try:
            value = self.verify(key, raw, lease)
        except ForeignEntry as error:
            self.foreign += 1
            self._warn(self.foreign, error)
            return None
        except NewerVersion as error:
            self.newer += 1
            self._warn(self.newer, error)
            return None
        self.ignored += value is None
        return value

    def verify(self, key: str, raw: bytes, lease: str | None) -> bytes | None:
        """Return the value; None where it is half written, or was copied to this key or lease.

        Raises:
            ForeignEntry: there is a secret, and the entry is not signed with it.
            NewerVersion: a newer release wrote it.
        """
        line, newline, value = raw.partition(b"\n")
        try:
            header: _EntryHeader = _header.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None
        if not newline or len(value) != header.size:
            return None
        signed = _signed(header.key, header.lease, value)
        if self._secret is not None and not self._secret.verify(header.code or "", _PURPOSE, *signed):
            how = "without a signature" if header.code is None else "with another secret's signature"
            raise ForeignEntry(f"{header.key!r} stands in the store {how}")
        return value if (header.key, header.lease) == (key, lease) else None

    def _warn(self, count: int, error: PenstockError) -> None:
        if count & (count - 1) == 0:  # the 1st, 2nd, 4th...: a foreign writer must not fill the log
            log.warning("left out of %s (%d so far): %s", self._where, count, error)


def _signed(key: str, lease: str | None, value: bytes) -> tuple[bytes, ...]:
    return key.encode(), b"" if lease is None else lease.encode(), value
