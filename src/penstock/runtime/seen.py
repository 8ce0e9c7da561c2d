"""Do all frontends know a worker? Each says in the store whom it knows, so that a supervisor need not guess.

An engine counts as ready once every frontend may send it requests: a command that waited for it can rely on it, and a
forerunner is drained no earlier.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping

from penstock.adapters.seams import Store, StoreUnavailable
from penstock.kernel.values import WorkerCard
from penstock.runtime.follow import RETRY
from penstock.runtime.peers import FRONTENDS
from penstock.runtime.wishes import SEEN, Seen, decode_all, put

log = logging.getLogger("penstock.membership")

EVERY = 0.05
"""Seconds between looks at what the frontends know."""
PATIENCE = 3.0
"""Seconds after which a worker counts as known: a frontend that died may stand in the store for a while."""


class Acquaintance:
    """Keeps what stands in the store of whom this frontend knows up to date.

    Args:
        name: of this frontend.
        cards: whom it knows now.
        ttl: seconds after which it goes when this process dies.
    """

    def __init__(self, store: Store, name: str, cards: Callable[[], Iterable[WorkerCard]], ttl: float) -> None:
        self._store = store
        self._name = name
        self._cards = cards
        self._ttl = ttl
        self._changed = asyncio.Event()

    def changed(self) -> None:
        """Look again at whom it knows."""
        self._changed.set()

    async def run(self) -> None:
        """Write until cancelled."""
        told: Mapping[str, int] | None = None
        while True:
            await self._changed.wait()
            self._changed.clear()
            known: dict[str, int] = {card.id: card.epoch for card in self._cards()}
            if known == told:
                continue
            try:
                await put(self._store, SEEN + self._name, Seen(workers=known), ttl=self._ttl)
                told = known
            except StoreUnavailable as error:
                log.warning("whom this frontend knows can't be said: %s", error)
                await asyncio.sleep(RETRY)
                self._changed.set()


async def known_to_all(store: Store, card: WorkerCard) -> None:
    """Return when every frontend knows a worker, or after `PATIENCE` seconds."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        try:
            frontends = {key.removeprefix(FRONTENDS) for key in await store.list(FRONTENDS)}
            seen = decode_all(Seen, await store.list(SEEN), SEEN)
        except StoreUnavailable:
            return  # membership is frozen; nothing is known of the frontends
        if all(name in seen and seen[name].workers.get(card.id, 0) >= card.epoch for name in frontends):
            return
        await asyncio.sleep(EVERY)
    log.info("not every frontend has said that it knows %s", card.id)
