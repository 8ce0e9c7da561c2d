"""A plain tier process: one connection at a time, blocks in a dict, as little as the wire asks for.

usage: python plain_tiers.py SOCKET      with the sources on PYTHONPATH
"""

import mmap
import os
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec

from penstock_kv.inside.tier_protocol import (
    AnswerBlocks,
    AskBlocks,
    JobDone,
    LoadBlocks,
    RemovedBlocks,
    StoreBlocks,
    StoredBlocks,
    TierHello,
    TierWelcome,
    ToTiers,
)

_decode = msgspec.msgpack.Decoder(ToTiers).decode


class PlainTiers:
    """Serves in a thread. ``delay``: seconds before each load; ``mute``: questions get no answer."""

    def __init__(self, path: Path, *, error: str = "") -> None:
        self.blocks: dict[bytes, bytes] = {}
        self.messages: list[Any] = []
        self.error = error
        self.delay = 0.0
        self.mute = False
        self.link: socket.socket | None = None
        self._listener = socket.socket(socket.AF_UNIX)
        path.unlink(missing_ok=True)
        self._listener.bind(str(path))
        self._listener.listen()
        self.thread = threading.Thread(target=self._accept, daemon=True)
        self.thread.start()

    def close(self) -> None:
        """End it, as a process that is killed does."""
        self._listener.close()
        self.cut()

    def cut(self) -> None:
        """End the connection."""
        if self.link is not None:
            try:
                self.link.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def send(self, message: msgspec.Struct) -> None:
        assert self.link is not None
        raw = msgspec.msgpack.encode(message)
        self.link.sendall(len(raw).to_bytes(4, "little") + raw)

    def _accept(self) -> None:
        while True:
            try:
                link, _ = self._listener.accept()
            except OSError:
                return
            with link:
                self.link = link
                try:
                    self._serve(link)
                except OSError:
                    continue

    def _serve(self, link: socket.socket) -> None:
        stream = link.makefile("rb")
        region, rows = None, 0
        while head := stream.read(4):
            message = _decode(stream.read(int.from_bytes(head, "little")))
            self.messages.append(message)
            if isinstance(message, TierHello):
                self.send(TierWelcome(error=self.error, tiers=["host"]))
                file = os.open(message.region, os.O_RDWR)
                region, rows = mmap.mmap(file, 0), message.row_bytes
                os.close(file)
            elif isinstance(message, AskBlocks):
                if not self.mute:
                    known = [value in self.blocks for value in message.hashes]
                    self.send(AnswerBlocks(id=message.id, blocks=[*known, False].index(False)))
            elif isinstance(message, StoreBlocks):
                assert region is not None
                for value, row in zip(message.hashes, message.rows, strict=True):
                    self.blocks[value] = region[row * rows : (row + 1) * rows]
                self.send(JobDone(job=message.job, done=[True] * len(message.rows)))
                self.send(StoredBlocks(tier="host", hashes=message.hashes, group=message.group))
            elif isinstance(message, LoadBlocks):
                assert region is not None
                time.sleep(self.delay)
                done = []
                for value, row in zip(message.hashes, message.rows, strict=True):
                    block = self.blocks.get(value)
                    if block is not None:
                        region[row * rows : (row + 1) * rows] = block
                    done.append(block is not None)
                self.send(JobDone(job=message.job, done=done))

    def remove(self, *hashes: bytes) -> None:
        """Lose blocks, and say so."""
        for value in hashes:
            del self.blocks[value]
        self.send(RemovedBlocks(tier="host", hashes=list(hashes)))


if __name__ == "__main__":
    PlainTiers(Path(sys.argv[1])).thread.join()
