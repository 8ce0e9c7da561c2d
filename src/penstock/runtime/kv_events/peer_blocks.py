"""Blocks of an engine as another frontend's index has them: asked for by a frontend that joins late.

An engine replays what happened, of which it keeps the last 10,000 steps; another frontend knows what is held, after
which of the engine's batches, and by which names of the engine. That is less, and has no beginning that is lost.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from urllib.parse import quote

import aiohttp
import msgspec
from yarl import URL

from penstock.adapters.http_session import within
from penstock.adapters.seams import Store, StoreUnavailable
from penstock.kernel.message_version import NewerVersion, VersionedDecoder
from penstock.kernel.secret import ClusterSecret
from penstock.kernel.values import KvEvent, Target, WorkerCard
from penstock.router.kv_index.exact_index import ExactIndex
from penstock.router.router_state import RouterState
from penstock.runtime.cluster_state.peer_signature import signed
from penstock.runtime.cluster_state.placement_sync import FRONTENDS, FrontendCard

log = logging.getLogger("penstock.feeds")

PATH = "/peer/kv-blocks/{worker}/{rank}"
TIMEOUT = 10.0
"""Seconds that another frontend has to answer: an engine of a million blocks is 20 MB."""
AT_ONCE = 2
"""Engines asked for at once: each holds the other frontend up for some milliseconds."""
KNOWN_FOR = 5.0
"""Seconds for which the list of the other frontends is used."""


class PeerBlocks(msgspec.Struct, frozen=True, kw_only=True):
    """All that an engine's rank holds after its batch ``sequence``, as events with which an empty index begins.

    ``digest``: of that batch, where it is known: whoever has another batch of that number hears another process.
    """

    version: int = 1
    endpoint: str
    incarnation: int
    sequence: int
    digest: int | None
    events: list[KvEvent]


_decoder = VersionedDecoder(PeerBlocks, "another frontend's knowledge of an engine", binary=True)


def blocks_of(router: RouterState, target: Target, digest: Callable[[Target, int], int | None]) -> PeerBlocks | None:
    """Return what a router knows of a rank; None where it is not all.

    Args:
        digest: returns that of a batch of a target.

    Cost: walks the spans of its model's index.
    """
    worker = router.roster.get(target.worker)
    pool = None if worker is None else router.pools[worker.card.model]
    stream = None if pool is None else pool.index.streams.get(target)
    if worker is None or pool is None or stream is None or stream.state != "exact" or not stream.next:
        return None
    if not isinstance(pool.index.exact, ExactIndex):
        return None
    return PeerBlocks(
        endpoint=worker.card.events[target.rank],
        incarnation=worker.card.incarnation,
        sequence=stream.next - 1,
        digest=digest(target, stream.next - 1),
        events=list(pool.index.exact.dump(target)),
    )


class PeerBlocksClient:
    """Asks the other frontends of a cluster.

    Args:
        name: of this frontend.
        secret: of the cluster.
    """

    def __init__(self, store: Store, name: str, secret: ClusterSecret | None) -> None:
        self.taken = 0
        """Ranks of which another frontend knew all."""
        self._store = store
        self._name = name
        self._secret = secret
        self._http = within(TIMEOUT)
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._urls: list[str] = []
        self._read = -KNOWN_FOR

    async def ask(self, card: WorkerCard, rank: int) -> PeerBlocks | None:
        """Return what another frontend knows of a rank of this very worker; None where none knows all."""
        async with self._slots:
            for url in await self._peers():
                blocks = await self._ask(url, card, rank)
                if blocks is None or blocks.endpoint != card.events[rank] or blocks.incarnation != card.incarnation:
                    continue
                self.taken += 1
                return blocks
        return None

    async def close(self) -> None:
        await self._http.close()

    async def _peers(self) -> list[str]:
        """Return the admin URLs of the others, from our own name on, so that each of many asks another first."""
        if time.monotonic() - self._read >= KNOWN_FOR:
            try:
                entries = await self._store.list(FRONTENDS)
                cards = [msgspec.json.decode(raw, type=FrontendCard) for raw in entries.values()]
            except (StoreUnavailable, msgspec.DecodeError) as error:
                log.debug("the other frontends can't be seen: %s", error)
                cards = []
            others = sorted((card.id < self._name, card.id, card.admin_url) for card in cards if card.id != self._name)
            self._urls = [url for _, _, url in others]
            self._read = time.monotonic()
        return list(self._urls)

    async def _ask(self, peer: str, card: WorkerCard, rank: int) -> PeerBlocks | None:
        path = PATH.format(worker=quote(card.id, safe=""), rank=rank)
        url = URL(peer.rstrip("/") + path, encoded=True)
        try:
            async with self._http.session.get(url, headers=signed(self._secret, url), allow_redirects=False) as answer:
                raw = await answer.read() if answer.status == 200 else None
            return None if raw is None else _decoder.decode(raw)
        except (aiohttp.ClientError, OSError, TimeoutError, msgspec.DecodeError, NewerVersion) as error:
            log.info("the frontend at %s can't be asked for what engines hold: %s", peer, error)
            self._urls = [url for url in self._urls if url != peer]  # until the list is read again
            return None
