"""Pool statuses of the whole cluster: what each supervisor last reported of its replicas, as a frontend follows it."""

from collections.abc import Collection

import msgspec

from penstock.adapters.seams import Store
from penstock.kernel.values import ReplicaState
from penstock.runtime.cluster_state.desired_state import POOLS, PoolStatus, decode
from penstock.runtime.cluster_state.store_watch import follow


class AbsentReplica(msgspec.Struct, frozen=True, kw_only=True):
    """A replica that a pool has, and that is no worker now: it starts, crashed or is drained. ``reason``: why."""

    id: str
    model: str
    state: ReplicaState
    reason: str | None


class PoolStatuses:
    """Follows the pools of every supervisor."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._pools: dict[str, PoolStatus] = {}

    async def run(self) -> None:
        """Follow until cancelled."""
        await follow(
            self._store,
            POOLS,
            known=lambda: self._pools,
            put=self._put,
            deleted=self._deleted,
            frozen=lambda error: None,
        )

    def absent(self, workers: Collection[str]) -> list[AbsentReplica]:
        """Return the replicas that are not among ``workers``, but for those that sleep, or leave for good."""
        return [
            AbsentReplica(id=replica.id, model=each.pool.model, state=replica.state, reason=replica.reason)
            for each in self._pools.values()
            for replica in each.pool.replicas or ()
            if replica.id not in workers and not replica.asleep and replica.state not in ("ready", "stopping")
        ]

    async def _put(self, key: str, raw: bytes) -> None:
        status = decode(PoolStatus, raw)
        if status is not None:
            self._pools[key] = status

    async def _deleted(self, key: str) -> None:
        self._pools.pop(key, None)
