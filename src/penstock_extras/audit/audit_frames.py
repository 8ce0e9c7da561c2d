"""Audit frames: the encrypted file format of the audit log, written whole frame by frame and read with every fault.

A file is a head and frames. The head: the magic, 16 random bytes of the file, the process's number of it. A frame:
its length (32 bits, big endian) and AES-256-GCM of a kind and its data. The key is derived from the log's by HKDF with
the file's random bytes, the nonce is the frame's number, and the head is authenticated with each: so a frame that was
changed, left out, doubled or moved to another place or file is noticed. The last frame says that it is; where it is
missing, the file is still being written or was cut.
"""

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from penstock.config.cluster_secret_file import private_text
from penstock.kernel.errors import ConfigError, PenstockError
from penstock_extras.audit.audit_entry import AuditEntry

MAGIC = b"PSAUDIT1"
SUFFIX = ".audit"
HEAD = struct.Struct(">8s16sQ")
_LENGTH = struct.Struct(">I")
FRAME_MAX = 64 << 20
"""Largest frame in bytes: a length beyond it is no length."""
ENTRY, END = b"\x01", b"\x02"


class AuditFault(PenstockError):
    """A file of the log is not as it was written."""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(AuditEntry).decode


def read_key(path: Path) -> bytes:
    """Return the log's key of 32 bytes.

    Raises:
        ConfigError: the file can't be read, others can read it, or it holds no key.
    """
    text = private_text(path, f"the audit log's key in {path}").strip()
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if len(key) != 32:
        raise ConfigError(f"{path} holds no key of 64 hexadecimal digits", hint="openssl rand -hex 32 makes one")
    return key


def _cipher(key: bytes, salt: bytes) -> AESGCM:
    return AESGCM(HKDF(algorithm=SHA256(), length=32, salt=salt, info=b"penstock audit file").derive(key))


class AuditFile:
    """A file that is being written.

    Args:
        number: the process's number of it, which goes up by one.
    Raises:
        OSError: it can't be made.
    """

    def __init__(self, path: Path, key: bytes, number: int) -> None:
        salt = os.urandom(16)
        self._head = HEAD.pack(MAGIC, salt, number)
        self._cipher = _cipher(key, salt)
        self._frames = 0
        self.size = 0
        """Bytes that are safely in it."""
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        self._file: BinaryIO = os.fdopen(handle, "wb", buffering=0)
        try:
            self._append(self._head)
        except OSError:
            self._file.close()
            path.unlink(missing_ok=True)
            raise

    def write(self, entry: AuditEntry) -> None:
        """Write one frame, whole or not at all.

        Raises:
            OSError: it could not be written; what was written of it is taken back.
        """
        self._append(self._sealed(ENTRY + _encode(entry)))
        self._frames += 1

    def close(self, *, whole: bool = True) -> None:
        """End the file; ``whole`` says in it that nothing is missing."""
        try:
            if whole:
                self._append(self._sealed(END))
        finally:
            self._file.close()

    def sync(self) -> None:
        """Have the disk keep what was written."""
        os.fsync(self._file.fileno())

    def _sealed(self, data: bytes) -> bytes:
        sealed = self._cipher.encrypt(self._frames.to_bytes(12, "big"), data, self._head)
        return _LENGTH.pack(len(sealed)) + sealed

    def _append(self, data: bytes) -> None:
        written = 0
        try:
            while written < len(data):
                written += self._file.write(data[written:])
        except OSError:
            # The same nonce may be used again only for the same data, so a part must not stay.
            os.ftruncate(self._file.fileno(), self.size)
            self._file.seek(self.size)
            raise
        self.size += len(data)


def frames(path: Path, key: bytes) -> Iterator[AuditEntry]:
    """Yield the entries of a file, in their order.

    Raises:
        AuditFault: from the iterator, where the file is not as it was written, after what could be read.
        OSError: it can't be read.
    """
    with path.open("rb") as file:
        head = file.read(HEAD.size)
        if len(head) < HEAD.size or not head.startswith(MAGIC):
            raise AuditFault(f"{path} is not a file of an audit log")
        cipher = _cipher(key, HEAD.unpack(head)[1])
        number = 0
        while length := file.read(_LENGTH.size):
            size = _LENGTH.unpack(length)[0] if len(length) == _LENGTH.size else FRAME_MAX + 1
            sealed = file.read(size) if size <= FRAME_MAX else b""
            if len(sealed) != size:
                raise AuditFault(f"{path}: frame {number} is cut off")
            try:
                data = cipher.decrypt(number.to_bytes(12, "big"), sealed, head)
            except InvalidTag:
                raise AuditFault(f"{path}: frame {number} was changed or moved, or the key is another one") from None
            if data == END:
                if file.read(1):
                    raise AuditFault(f"{path} goes on after its end")
                return
            yield _decode(data[1:])
            number += 1
    raise AuditFault(f"{path} has no end after {number} frames: it is still being written, or was cut")


def number_of(path: Path) -> int:
    """Return the process's number of a file.

    Raises:
        AuditFault: it is no file of an audit log.
    """
    with path.open("rb") as file:
        head = file.read(HEAD.size)
    if len(head) < HEAD.size or not head.startswith(MAGIC):
        raise AuditFault(f"{path} is not a file of an audit log")
    return int(HEAD.unpack(head)[2])
