"""Membership acknowledgement: each frontend writes into the store which workers it knows, for supervisors to wait on.

An engine counts as ready once every frontend may send it requests: a command that waited for it can rely on it, and a
predecessor is drained no earlier.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping

from penstock.adapters.seams import Store, StoreUnavailable
from penstock.kernel.values import WorkerCard
from penstock.runtime.cluster_state.desired_state import ACKS, MembershipAcks, decode_all, put
from penstock.runtime.cluster_state.placement_sync import FRONTENDS
from penstock.runtime.cluster_state.shared_reading import SharedReading
from penstock.runtime.cluster_state.store_watch import RETRY

log = logging.getLogger("penstock.membership")

EVERY = 0.05
"""Seconds between reads of the frontends' acknowledgements, and between writes of one: it names all workers, so that a
write for each of many that join would cost the square of their number."""

Acks = SharedReading[tuple[set[str], dict[str, MembershipAcks]]]
"""Readings of the frontends there are, and of what each has acknowledged."""


class MembershipAck:
    """Keeps this frontend's list of known workers in the store up to date.

    Args:
        name: of this frontend.
        cards: the workers that it knows now.
        ttl: seconds after which the list goes when this process dies.
    """

    def __init__(self, store: Store, name: str, cards: Callable[[], Iterable[WorkerCard]], ttl: float) -> None:
        self._store = store
        self._name = name
        self._cards = cards
        self._ttl = ttl
        self._changed = asyncio.Event()

    def changed(self) -> None:
        """Write the list of known workers again, soon."""
        self._changed.set()

    async def run(self) -> None:
        """Write until cancelled."""
        written: Mapping[str, int] | None = None
        while True:
            await self._changed.wait()
            self._changed.clear()
            known: dict[str, int] = {card.id: card.epoch for card in self._cards()}
            if known == written:
                continue
            try:
                await put(self._store, ACKS + self._name, MembershipAcks(workers=known), ttl=self._ttl)
                written = known
            except StoreUnavailable as error:
                log.warning("the workers that this frontend knows can't be written to the store: %s", error)
                await asyncio.sleep(RETRY)
                self._changed.set()
            await asyncio.sleep(EVERY)


def acks_in(store: Store) -> Acks:
    """Return readings of all acknowledgements in a store."""

    async def read() -> tuple[set[str], dict[str, MembershipAcks]]:
        frontends = {key.removeprefix(FRONTENDS) for key in await store.list(FRONTENDS)}
        return frontends, decode_all(MembershipAcks, await store.list(ACKS), ACKS)

    return SharedReading(read, EVERY)


async def acknowledged_by_all(acks: Acks, card: WorkerCard) -> None:
    """Return when every frontend knows a worker; callers bound the wait, since a dead frontend may stay for a while."""
    while True:
        try:
            frontends, known = await acks.next()
        except StoreUnavailable:
            return  # membership is frozen; the frontends' state is unknown
        if all(name in known and known[name].workers.get(card.id, 0) >= card.epoch for name in frontends):
            return
