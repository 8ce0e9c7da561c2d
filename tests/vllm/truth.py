"""What does a server hold by its own account? A replay of all its KV events, applied in the plainest way.

Nothing of the router's is used but the hash function that names a block: a counter of copies per block, in Python.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
import zmq

from penstock.kernel.hashing import chain, extra_bytes, local_hashes

END = b"\xff" * 8
REPLAY_LIMIT = 30_000
"""Milliseconds until a replay must have ended."""


class Replayed(Protocol):
    """A server that tells its events again. ``block``: tokens of its blocks."""

    block: int

    @property
    def replay_endpoint(self) -> str: ...


class Truth:
    """The blocks of one server, by replay from sequence 0."""

    def __init__(self, server: Replayed) -> None:
        self.server = server
        self.next = 0
        """The sequence that comes next."""
        self.events: Counter[str] = Counter()
        self._copies: Counter[int] = Counter()
        self._ours: dict[int, int] = {}
        """The engine's hash -> ours; kept for good, since the same prefix has the same hash again."""

    @property
    def total(self) -> int:
        """Events, not batches, up to now."""
        return self.events.total()

    @property
    def held(self) -> set[int]:
        """Our hashes of the blocks that it holds."""
        return {block for block, copies in self._copies.items() if copies > 0}

    def catch_up(self) -> "Truth":
        """Apply what the server has announced since."""
        for sequence, (_, events, *_) in replay(self.server, self.next):
            assert sequence == self.next, f"the server's buffer begins at {sequence}, not at {self.next}"
            self.next += 1
            for event in events:
                self._apply(event)
        return self

    def depth(self, blocks: Sequence[int]) -> int:
        """Return how many leading blocks of a prompt it holds."""
        held = self.held
        return next((i for i, block in enumerate(blocks) if block not in held), len(blocks))

    def _apply(self, event: dict[str, Any]) -> None:
        self.events[event["type"]] += 1
        if event["type"] == "AllBlocksCleared":
            self._copies.clear()
        elif event["type"] == "BlockRemoved":
            for name in event["block_hashes"]:
                block = self._ours[name]
                self._copies[block] -= 1
                assert self._copies[block] >= 0, "a block was removed more often than it was stored"
        else:
            assert event["type"] == "BlockStored" and event["block_size"] == self.server.block
            names = event["block_hashes"]
            first = event["parent_block_hash"]
            extras = [
                extra_bytes(
                    lora=event.get("lora_name"),
                    salt=keys[-1] if keys and first is None and i == 0 and keys[-1] != event.get("lora_name") else None,
                )
                for i, keys in enumerate(event.get("extra_keys") or [None] * len(names))
            ]
            local = local_hashes(event["token_ids"], self.server.block, extras)
            blocks = chain(local, None if first is None else self._ours[first])
            self._ours.update(zip(names, blocks, strict=True))
            self._copies.update(blocks)


def replay(server: Replayed, first: int) -> list[tuple[int, Any]]:
    """Ask a server for its batches from a sequence on."""
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    socket.linger = 0
    socket.rcvtimeo = REPLAY_LIMIT
    try:
        socket.connect(server.replay_endpoint)
        socket.send_multipart((b"", first.to_bytes(8, "big")))
        found: list[tuple[int, Any]] = []
        while True:
            frames = socket.recv_multipart()
            if frames[-2] == END:
                return found
            found.append((int.from_bytes(frames[-2], "big"), msgspec.msgpack.decode(frames[-1])))
    finally:
        socket.close()
