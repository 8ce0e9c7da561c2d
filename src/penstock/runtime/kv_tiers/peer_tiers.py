"""`PeerTiers`: blocks of other engines' host tiers over TCP, and ours for them; all have the cluster's secret.

A tier process says where it listens in a file beside its socket, ``WORKER.peer``, so those of one supervisor know each
other; peers on other machines are named. A peer whose KV is of another kind has none of our keys.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from penstock.blocks.block_key import BlockKey
from penstock.kernel.errors import ConfigError, bind_hint
from penstock.kernel.secret import ClusterSecret
from penstock.runtime.kv_tiers.block_carrier import SlabStore
from penstock.runtime.kv_tiers.tier_contents import RecordPlace, TierContents
from penstock.transfer.peer_link import LentBlock, PeerIdentity, PeerLink, PeerServer, SlabBlock
from penstock.transfer.storage.block_store import BlockResult
from penstock.transfer.tcp.tcp_frames import MoveOutcome

log = logging.getLogger("penstock.kv_tiers")

LOOK = 2.0
"""Seconds between two looks for peers that came or went."""
ASK = 1.0
"""Seconds until an answer is given up; the tier machine waits less."""
SUFFIX = ".peer"
KEY_BYTES = 20

Address = tuple[str, int]


class PeerPlace(msgspec.Struct, frozen=True):
    """Where a tier process listens to its peers."""

    name: str
    host: str
    port: int


class HostLender:
    """Lends blocks of the host slab to peers; called from the server's threads.

    A slot's block leaves `TierContents` before anything else is written into the slot, so what is there before and
    after the sending was there all the time; the reader compares the checksum besides.
    """

    def __init__(self, contents: TierContents, slab: SlabStore) -> None:
        self.block_bytes = slab.block_bytes
        self._contents = contents
        self._slab = slab

    def leading(self, keys: Sequence[bytes]) -> list[SlabBlock]:
        blocks: list[SlabBlock] = []
        for key in keys:
            place = self._place(key)
            if place is None:
                break
            blocks.append(SlabBlock(key, *place))
        return blocks

    def lend(self, block: SlabBlock) -> LentBlock | MoveOutcome:
        if not self.returned(block) or (checksum := self._slab.checksum(block.slot)) is None:
            return "stale"
        return LentBlock(self._slab.view(block.slot), checksum)

    def returned(self, block: SlabBlock) -> bool:
        return self._place(block.key) == (block.slot, block.generation)

    def _place(self, key: bytes) -> RecordPlace | None:
        block = self._contents.blocks.get(BlockKey(key))
        return None if block is None else block.places.get("host")


class PeerTiers:
    """The peers of one tier process: `open`, then `close`.

    Args:
        name: of our engine; peers ask for it.
        listen: where peers reach us; port 0 is any free one.
        folder: where tier processes say where they listen; None is nowhere.
        named: name -> address of peers elsewhere.
        changed: called with all peers when they change.
    """

    def __init__(
        self, name: str, secret: ClusterSecret, listen: Address, folder: Path | None, named: Mapping[str, Address]
    ) -> None:
        self.changed: Callable[[list[str]], None] = lambda peers: None
        self._me = PeerIdentity(name, time.time_ns())
        self._secret = secret
        self._listen = listen
        self._folder = folder
        self._named = dict(named)
        self._links: dict[str, PeerLink] = {}
        self._server: PeerServer | None = None
        self._looking: asyncio.Task[None] | None = None

    def open(self, lender: HostLender) -> None:
        """Let peers read our blocks, and look for them from now on.

        Raises:
            ConfigError: the address can't be bound.
        """
        self._server = PeerServer(self._me, self._secret, lender, log.warning)
        try:
            host, port = self._server.start(*self._listen)
        except OSError as error:
            raise ConfigError(
                f"peers can't be listened to at {self._listen[0]}:{self._listen[1]}: {error.strerror or error}",
                hint=bind_hint(error, "choose one with --peer-listen"),
            ) from error
        if self._folder is not None:
            draft = self._folder / f"{self._me.name}.draft"
            draft.write_bytes(msgspec.json.encode(PeerPlace(self._me.name, host, port)))
            draft.replace(self._own)
        self._looking = asyncio.create_task(self._look(), name="peers")

    async def ask(self, peer: str, keys: Sequence[bytes]) -> int:
        """Return how many leading blocks a peer has; 0 where it does not answer."""
        link = self._links.get(peer)
        return 0 if link is None else (await link.ask(keys, ASK)).blocks

    async def read(
        self, peer: str, keys: Sequence[bytes], buffers: Sequence[memoryview], seconds: float
    ) -> list[BlockResult]:
        """Read blocks of a peer, with their checksums; nothing touches the buffers afterwards."""
        link = self._links.get(peer)
        if link is None:
            return [BlockResult("failed", f"there is no peer {peer} any more")] * len(keys)
        return await link.read(keys, buffers, seconds)

    async def close(self) -> None:
        """Lend and read nothing from now on."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)
        if self._folder is not None:
            self._own.unlink(missing_ok=True)
        await asyncio.gather(*(link.close() for link in self._links.values()))
        if self._server is not None:
            await asyncio.to_thread(self._server.close)

    @property
    def _own(self) -> Path:
        assert self._folder is not None
        return self._folder / f"{self._me.name}{SUFFIX}"

    async def _look(self) -> None:
        while True:
            wanted = {**self._named, **self._neighbours()}
            gone = [name for name, link in self._links.items() if wanted.get(name) != link.address]
            closing = [self._links.pop(name).close() for name in gone]
            news = [name for name in wanted if name not in self._links]
            for name in news:
                self._links[name] = PeerLink(wanted[name], self._secret, self._me, name)
            # The first question connects, which takes longer than a request should wait.
            await asyncio.gather(*(self._links[name].ask((bytes(KEY_BYTES),), ASK) for name in news))
            if gone or news:
                log.info("peers are now: %s", ", ".join(self._links) or "none")
                self.changed(list(self._links))
            await asyncio.gather(*closing)
            await asyncio.sleep(LOOK)

    def _neighbours(self) -> dict[str, Address]:
        """Return the tier processes that say in our folder where they listen."""
        places: dict[str, Address] = {}
        for path in () if self._folder is None else self._folder.glob(f"*{SUFFIX}"):
            with contextlib.suppress(OSError, msgspec.DecodeError):  # it went, or another version wrote it
                place = msgspec.json.decode(path.read_bytes(), type=PeerPlace)
                if place.name != self._me.name:
                    places[place.name] = (place.host, place.port)
        return places
