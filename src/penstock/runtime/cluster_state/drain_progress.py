"""Drain progress: a frontend counts its requests on a draining worker, and reports the count in the store.

A supervisor ends a drained engine once every frontend has reported that nothing runs there any more. A report also
acknowledges the drain: from the first report on the worker gets no new request of that frontend.
"""

import asyncio
import logging
from collections import Counter

from penstock.adapters.seams import Store, StoreUnavailable
from penstock.adapters.task_cancel import cancel_all
from penstock.kernel.values import WorkerCard
from penstock.router.router_state import RouterState
from penstock.runtime.cluster_state.desired_state import LEAVING, DrainAck, put

log = logging.getLogger("penstock.membership")

EVERY = 0.1
"""Seconds between counts while a worker is drained; nothing is counted otherwise."""


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
            await asyncio.sleep(EVERY)

    def _active(self, card: WorkerCard) -> int:
        now = asyncio.get_running_loop().time()
        if self._counted is None or now >= self._count_again:
            self._counted, self._count_again = running(self._router), now + EVERY / 2
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
