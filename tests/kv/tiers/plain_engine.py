"""A plain engine for tests: speaks the tier protocol over a blocking socket, with rows in a file of shared memory."""

import contextlib
import hashlib
import mmap
import os
import secrets
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from penstock_kv.inside.tier_protocol import (
    AnswerBlocks,
    AskBlocks,
    FromTiers,
    JobDone,
    LoadBlocks,
    RemovedBlocks,
    RequestHints,
    StoreBlocks,
    StoredBlocks,
    TierHello,
    TierWelcome,
)

ROW_BYTES = 64 << 10
PATIENCE = 20.0
"""Seconds after which a test gives up on an answer."""

T = TypeVar("T")


def block_hash(number: int, prompt: str = "") -> bytes:
    """Return the engine's hash of a block."""
    return hashlib.sha256(f"{prompt}{number}".encode()).digest()


def block_hashes(count: int, prompt: str = "") -> list[bytes]:
    return [block_hash(number, prompt) for number in range(count)]


def block_bytes(hash: bytes, size: int = ROW_BYTES) -> bytes:
    """Return what a block contains: it follows from its hash, so that a wrong block shows."""
    return hashlib.shake_128(hash).digest(256) * (size // 256)


class PlainEngine:
    """An engine with ``rows`` rows; made connected."""

    def __init__(self, path: Path, *, rows: int = 64, row_bytes: int = ROW_BYTES, **hello: object) -> None:
        self.region = Path("/dev/shm") / f"penstock-test-{secrets.token_hex(6)}"
        with self.region.open("xb") as file:
            file.truncate(rows * row_bytes)
        with self.region.open("r+b") as file:
            self.memory = mmap.mmap(file.fileno(), rows * row_bytes)
        self.row_bytes = row_bytes
        self.stored: dict[str, set[bytes]] = {}
        self.removed: dict[str, set[bytes]] = {}
        self._jobs = 0
        self._raw = b""
        self._others: list[object] = []
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(PATIENCE)
        self.socket.connect(str(path))
        usual = {
            "worker": "w0",
            "model": "m",
            "dtype": "bfloat16",
            "layout": "plain",
            "block_tokens": 16,
            "hash_algorithm": "sha256_cbor",
            "region": str(self.region),
            "rows": rows,
            "row_bytes": row_bytes,
        }
        self.send(msgspec.convert({"t": "hello", **usual, **hello}, TierHello))
        self.welcome = self.wait(TierWelcome)

    def __enter__(self) -> "PlainEngine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.socket.close()
        with contextlib.suppress(FileNotFoundError):
            self.region.unlink()

    # --- frames

    def send(self, message: msgspec.Struct) -> None:
        raw = msgspec.msgpack.encode(message)
        self.socket.sendall(len(raw).to_bytes(4, "little") + raw)

    def read(self) -> object | None:
        """Return the next frame; None at the end of the stream."""
        while len(self._raw) < 4 or len(self._raw) < 4 + int.from_bytes(self._raw[:4], "little"):
            try:
                more = self.socket.recv(1 << 20)
            except ConnectionError:
                return None
            if not more:
                return None
            self._raw += more
        end = 4 + int.from_bytes(self._raw[:4], "little")
        raw, self._raw = self._raw[4:end], self._raw[end:]
        message = msgspec.msgpack.decode(raw, type=FromTiers)
        if isinstance(message, StoredBlocks):
            self.stored.setdefault(message.tier, set()).update(message.hashes)
            self.removed.setdefault(message.tier, set()).difference_update(message.hashes)
        elif isinstance(message, RemovedBlocks):
            self.removed.setdefault(message.tier, set()).update(message.hashes)
            self.stored.setdefault(message.tier, set()).difference_update(message.hashes)
        return message

    def wait(self, kind: type[T], **fields: object) -> T:
        """Return the next frame of a kind, with these fields; others are remembered for later."""
        for number, message in enumerate(self._others):
            if isinstance(message, kind) and all(getattr(message, name) == value for name, value in fields.items()):
                del self._others[number]
                return message
        while True:
            message = self.read()
            if message is None:
                raise EOFError("the tier process closed the connection")
            if isinstance(message, kind) and all(getattr(message, name) == value for name, value in fields.items()):
                return message
            self._others.append(message)

    # --- blocks

    def fill(self, row: int, data: bytes) -> None:
        self.memory[row * self.row_bytes : (row + 1) * self.row_bytes] = data

    def row(self, row: int) -> bytes:
        return self.memory[row * self.row_bytes : (row + 1) * self.row_bytes]

    def store(self, hashes: Sequence[bytes], *, first_row: int = 0, hints: RequestHints = RequestHints()) -> list[bool]:
        """Fill rows with what blocks contain, and store them."""
        self.begin_store(hashes, first_row=first_row, hints=hints)
        return self.wait(JobDone, job=self._jobs).done

    def begin_store(self, hashes: Sequence[bytes], *, first_row: int = 0, hints: RequestHints = RequestHints()) -> int:
        for row, value in enumerate(hashes, first_row):
            self.fill(row, block_bytes(value, self.row_bytes))
        self._jobs += 1
        rows = list(range(first_row, first_row + len(hashes)))
        self.send(StoreBlocks(job=self._jobs, hashes=list(hashes), rows=rows, hints=hints))
        return self._jobs

    def ask(self, hashes: Sequence[bytes], *, hints: RequestHints = RequestHints()) -> AnswerBlocks:
        self._jobs += 1
        self.send(AskBlocks(id=self._jobs, hashes=list(hashes), hints=hints))
        return self.wait(AnswerBlocks, id=self._jobs)

    def load(self, hashes: Sequence[bytes], *, first_row: int = 0, hints: RequestHints = RequestHints()) -> list[bool]:
        """Load blocks into rows that are filled with something else before."""
        self.begin_load(hashes, first_row=first_row, hints=hints)
        return self.wait(JobDone, job=self._jobs).done

    def begin_load(self, hashes: Sequence[bytes], *, first_row: int = 0, hints: RequestHints = RequestHints()) -> int:
        for row in range(first_row, first_row + len(hashes)):
            self.fill(row, b"\xee" * self.row_bytes)
        self._jobs += 1
        rows = list(range(first_row, first_row + len(hashes)))
        self.send(LoadBlocks(job=self._jobs, hashes=list(hashes), rows=rows, hints=hints))
        return self._jobs

    def untouched(self, row: int) -> bool:
        return self.row(row) == b"\xee" * self.row_bytes

    def right(self, hashes: Sequence[bytes], done: Sequence[bool], *, first_row: int = 0) -> bool:
        """Return whether every block that is done has the right bytes."""
        return all(
            not arrived or self.row(row) == block_bytes(value, self.row_bytes)
            for row, (value, arrived) in enumerate(zip(hashes, done, strict=True), first_row)
        )

    def until(self, what: "object", seconds: float = PATIENCE) -> None:
        """Read announcements until something holds: ``what`` is called after each."""
        end = time.monotonic() + seconds
        while not what():  # type: ignore[operator]
            assert time.monotonic() < end, "it did not come true in time"
            self.socket.settimeout(0.05)
            try:
                message = self.read()
                assert message is not None, "the connection ended"
                self._others.append(message)
            except TimeoutError:
                pass
            finally:
                self.socket.settimeout(PATIENCE)


def pid_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
