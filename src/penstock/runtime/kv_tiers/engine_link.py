"""`EngineLink`: one engine that is connected, its rows, its open jobs and what is sent to it."""

import asyncio
import logging
import select
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec

from penstock.blocks.block_key import BlockKey, KeyIdentity, engine_keys
from penstock.inside.tier_protocol import RequestHints, TierHello
from penstock.runtime.kv_tiers.engine_region import EngineRegion
from penstock.runtime.kv_tiers.tier_frames import FrameStream

log = logging.getLogger("penstock.kv_tiers")

_GONE = select.POLLHUP | select.POLLERR | select.POLLRDHUP


class EngineJob(msgspec.Struct, frozen=True):
    """A job that an engine waits for.

    Args:
        id: the engine's own.
        kind: ``store`` or ``load``.
    """

    link: "EngineLink"
    id: int
    kind: str


class EngineLink:
    """A connection of an engine; ``number`` is unique while this process runs."""

    def __init__(self, number: int, hello: TierHello, region: EngineRegion, stream: FrameStream) -> None:
        self.number = number
        self.hello = hello
        self.region = region
        self.jobs: dict[int, int] = {}
        """The engine's job -> the machine's."""
        self.lost = False
        self.untouched = asyncio.Event()
        """Set while no copy touches its rows."""
        self.untouched.set()
        self._copies = 0
        self._stream = stream
        self._poll = select.poll()
        self._poll.register(stream.descriptor, _GONE)

    @property
    def alive(self) -> bool:
        """Whether the engine still has its side open: what it closed and we have not read yet counts, too."""
        return not self.lost and not self._poll.poll(0)

    @contextmanager
    def touched(self) -> Iterator[None]:
        """Count a copy that touches its rows: they stay mapped meanwhile."""
        self._copies += 1
        self.untouched.clear()
        try:
            yield
        finally:
            self._copies -= 1
            if not self._copies:
                self.untouched.set()

    def row(self, number: int) -> memoryview:
        return self.region.row(number)

    def keys(self, hashes: Sequence[bytes], group: int, hints: RequestHints) -> list[BlockKey]:
        """Return our keys of an engine's hashes."""
        return engine_keys(hashes, self.hello.hash_algorithm, identity_of(self.hello, hints), group=group)

    def send(self, message: msgspec.Struct) -> None:
        """Send a frame; one that is not read in time ends the connection, since memory is bounded."""
        if self.lost:
            return
        if not self._stream.send(message):
            log.warning("engine %s reads nothing, and is cut off", self.name)
            self.lose()

    def lose(self) -> None:
        """Begin no copy from now on; whoever reads its frames gets to their end."""
        self.lost = True
        self._stream.end()

    @property
    def name(self) -> str:
        return self.hello.worker or f"number {self.number}"


def identity_of(hello: TierHello, hints: RequestHints) -> KeyIdentity:
    """Return all that decides the bytes of a request's blocks besides its tokens."""
    return KeyIdentity(
        model=hello.model,
        dtype=hello.dtype,
        layout=hello.layout,
        weights=hello.weights,
        block_size=hello.block_tokens,
        lora=hints.lora,
        tenant=hints.tenant,
    )
