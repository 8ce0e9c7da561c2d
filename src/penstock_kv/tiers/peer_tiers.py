"""`PeerTiers`: blocks of other engines' host tiers, and ours for them; all have the cluster's secret.

A tier process says where it listens in a file beside its socket, ``WORKER.peer``, so those of one supervisor know each
other; peers on other machines are named. A peer whose KV is of another kind has none of our keys.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from penstock.kernel.errors import ConfigError, bind_hint
from penstock.kernel.secret import ClusterSecret
from penstock_kv.blocks.block_key import BlockKey
from penstock_kv.tiers.block_carrier import SlabStore
from penstock_kv.tiers.tier_contents import RecordPlace, TierContents
from penstock_kv.transfer.backends.nixl_agent import load_nixl
from penstock_kv.transfer.peer_slabs import BlockPlace, PeerSlabs
from penstock_kv.transfer.storage.block_store import BlockResult

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


class HostPlaces:
    """Where blocks of the host slab are, for peers; called from the threads of their connections.

    A slot's block leaves `TierContents` before anything else is written into the slot, so the checksum is that of the
    block that was there before and after it was looked up.
    """

    def __init__(self, contents: TierContents, slab: SlabStore) -> None:
        self.block_bytes = slab.block_bytes
        self.slab = slab
        self._contents = contents

    def place(self, key: bytes) -> BlockPlace | None:
        record = self._host_record(key)
        if record is None:
            return None
        checksum = self.slab.checksum(record.slot)
        if checksum is None or self._host_record(key) != record:
            return None
        return BlockPlace(record.slot * self.slab.stride, record.generation, checksum)

    def _host_record(self, key: bytes) -> RecordPlace | None:
        block = self._contents.blocks.get(BlockKey(key))
        return None if block is None else block.places.get("host")


class PeerTiers:
    """The peers of one tier process: `open`, then `close`.

    Args:
        name: of our engine; peers ask for it.
        listen: where peers reach us; port 0 is any free one.
        folder: where tier processes say where they listen; None is nowhere.
        named: name -> address of peers elsewhere.
        nixl: read peers' slabs by NIXL where they have it, too.
        changed: called with all peers when they change.
    Raises:
        ConfigError: NIXL is wanted and not installed.
    """

    def __init__(
        self,
        name: str,
        secret: ClusterSecret,
        listen: Address,
        folder: Path | None,
        named: Mapping[str, Address],
        *,
        nixl: bool = False,
    ) -> None:
        self.changed: Callable[[list[str]], None] = lambda peers: None
        self._name = name
        self._secret = secret
        self._listen = listen
        self._folder = folder
        self._named = dict(named)
        self._nixl = nixl
        if nixl:
            load_nixl()  # rather than when the first engine comes
        self._blocks: PeerSlabs | None = None
        self._stride = 0
        self._looking: asyncio.Task[None] | None = None

    async def open(self, places: HostPlaces) -> None:
        """Let peers read our blocks, and look for them from now on.

        Raises:
            ConfigError: the address can't be bound.
        """
        blocks = self._blocks = PeerSlabs(
            self._name, self._secret, places, places.slab.shared(), self._listen, nixl=self._nixl, log=log.warning
        )
        self._stride = places.slab.stride
        try:
            host, port = await blocks.start()
        except OSError as error:
            self._blocks = None
            await blocks.close()
            raise ConfigError(
                f"peers can't be listened to at {self._listen[0]}:{self._listen[1]}: {error.strerror or error}",
                hint=bind_hint(error, "choose one with --peer-listen"),
            ) from error
        if self._folder is not None:
            draft = self._folder / f"{self._name}.draft"
            draft.write_bytes(msgspec.json.encode(PeerPlace(self._name, host, port)))
            draft.replace(self._own_place)
        self._looking = asyncio.create_task(self._look_for_peers(blocks), name="peers")

    async def ask(self, peer: str, keys: Sequence[bytes]) -> int:
        """Return how many leading blocks a peer has; 0 where it does not answer."""
        return 0 if self._blocks is None else (await self._blocks.ask(peer, keys, ASK)).blocks

    async def read(self, peer: str, keys: Sequence[bytes], slots: Sequence[int], seconds: float) -> list[BlockResult]:
        """Read blocks of a peer into our slots, with their checksums; nothing touches the slots afterwards."""
        assert self._blocks is not None, "the machine knows peers once they are open"
        return await self._blocks.read(peer, keys, [slot * self._stride for slot in slots], seconds)

    async def close(self) -> None:
        """Lend and read nothing from now on."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)
        if self._folder is not None:
            self._own_place.unlink(missing_ok=True)
        if self._blocks is not None:
            await self._blocks.close()

    @property
    def _own_place(self) -> Path:
        assert self._folder is not None
        return self._folder / f"{self._name}{SUFFIX}"

    async def _look_for_peers(self, blocks: PeerSlabs) -> None:
        while True:
            wanted, known = {**self._named, **self._neighbours()}, blocks.known
            gone = [name for name, address in known.items() if wanted.get(name) != address]
            news = [name for name in wanted if name in gone or name not in known]
            for name in gone:
                blocks.remove(name)
            for name in news:
                blocks.add(name, wanted[name])
            # The first question connects, which takes longer than a request should wait.
            await asyncio.gather(*(blocks.ask(name, (bytes(KEY_BYTES),), ASK) for name in news))
            if gone or news:
                log.info("peers are now: %s", ", ".join(blocks.known) or "none")
                self.changed(list(blocks.known))
            await asyncio.sleep(LOOK)

    def _neighbours(self) -> dict[str, Address]:
        """Return the tier processes that say in our folder where they listen."""
        places: dict[str, Address] = {}
        for path in () if self._folder is None else self._folder.glob(f"*{SUFFIX}"):
            with contextlib.suppress(OSError, msgspec.DecodeError):  # it went, or another version wrote it
                place = msgspec.json.decode(path.read_bytes(), type=PeerPlace)
                if place.name != self._name:
                    places[place.name] = (place.host, place.port)
        return places
