"""Membership acknowledgement: each frontend writes into the store which workers it knows, for supervisors to wait on.

An engine counts as ready once every frontend may send it requests: a command that waited for it can rely on it, and a
predecessor is drained no earlier. A drained engine ends once every frontend has reported that nothing runs there any
more; from its first report on the worker gets no new request of that frontend.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from penstock.adapters.seams import Store, StoreUnavailable
from penstock.adapters.task_cancel import cancel_all
from penstock.kernel.values import WorkerCard
from penstock.router.router_state import RouterState
from penstock.runtime.cluster_state.desired_state import ACKS, LEAVING, DrainAck, MembershipAcks, decode_all, put
from penstock.runtime.cluster_state.placement_sync import FRONTENDS
from penstock.runtime.cluster_state.store_watch import RETRY, SharedReading

log = logging.getLogger("penstock.membership")

ACK_EVERY = 0.05
"""Seconds between reads of the frontends' acknowledgements, and between writes of one: it names all workers, so that a
write for each of many that join would cost the square of their number."""

Acks = SharedReading[tuple[set[str], dict[str, MembershipAcks]]]
"""Readings of the frontends there are, and of what each has acknowledged."""
COUNT_EVERY = 0.1
"""Seconds between counts while a worker is drained; nothing is counted otherwise."""


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
            await asyncio.sleep(ACK_EVERY)


def acks_in(store: Store) -> Acks:
    """Return readings of all acknowledgements in a store."""

    async def read() -> tuple[set[str], dict[str, MembershipAcks]]:
        frontends = {key.removeprefix(FRONTENDS) for key in await store.list(FRONTENDS)}
        return frontends, decode_all(MembershipAcks, await store.list(ACKS), ACKS)

    return SharedReading(read, ACK_EVERY)


async def acknowledged_by_all(acks: Acks, card: WorkerCard) -> None:
    """Return when every frontend knows a worker; callers bound the wait, since a dead frontend may stay for a while."""
    while True:
        try:
            frontends, known = await acks.next()
        except StoreUnavailable:
            return  # membership is frozen; the frontends' state is unknown
        if all(name in known and known[name].workers.get(card.id, 0) >= card.epoch for name in frontends):
            return


class DrainProgress:
    """Reports on every draining worker.

    Args:
        name: of this frontend.
        ttl: seconds after which the reports go when this process dies.
    """

    def __init__(self, store: Store, router: RouterState, name: str, ttl: float) -> None:
        self._store = store
        self._router = router
        self._name = name
        self._ttl = ttl
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._counted: Counter[str] | None = None
        """Requests by worker, counted once for all that drain; a worker that drains gets no more of them."""
        self._count_again = 0.0

    def began(self, card: WorkerCard) -> None:
        """A worker takes no new requests; called after the router knows that."""
        self._counted = None  # which was made before the router knew
        self._tasks[card.id] = asyncio.create_task(self._report(card), name=f"leaving-{card.id}")

    async def ended(self, card: WorkerCard) -> None:
        """The worker is gone, or back with a newer epoch."""
        task = self._tasks.pop(card.id, None)
        if task is None:
            return
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        try:
            await self._store.delete(self._key(card))
        except StoreUnavailable as error:
            log.warning("the report on %s stays until its lease ends: %s", card.id, error)

    async def close(self) -> None:
        await cancel_all(self._tasks.values())

    def _key(self, card: WorkerCard) -> str:
        return f"{LEAVING}{card.id}/{self._name}"

    async def _report(self, card: WorkerCard) -> None:
        begun = self._active(card)
        reported: int | None = None
        while reported != 0:
            active = self._active(card)
            if active != reported:
                try:
                    report = DrainAck(worker=card.id, epoch=card.epoch, active=active, begun=begun)
                    await put(self._store, self._key(card), report, ttl=self._ttl)
                    reported = active
                except StoreUnavailable as error:
                    log.warning("what still runs on %s can't be written to the store: %s", card.id, error)
            await asyncio.sleep(COUNT_EVERY)

    def _active(self, card: WorkerCard) -> int:
        now = asyncio.get_running_loop().time()
        if self._counted is None or now >= self._count_again:
            self._counted, self._count_again = running(self._router), now + COUNT_EVERY / 2
        return self._counted[card.id]


def running(router: RouterState) -> Counter[str]:
    """Count this frontend's requests by the workers on which they run."""
    counts: Counter[str] = Counter()
    for request in router.requests.values():
        targets = {request.target} if request.on_worker else set()
        if request.hedge is not None:
            targets.add(request.hedge.target)
        if request.remote is not None:  # it makes, or holds, KV that another worker has not fetched yet
            targets.add(request.remote.target)
        counts.update({target.worker for target in targets if target is not None})
    return counts
