"""Pool statuses of the whole cluster: what each supervisor last reported of its replicas, as a frontend follows it."""

from collections.abc import Collection, Iterable, Mapping

import msgspec

from penstock.adapters.seams import Store
from penstock.kernel.plurals import counted
from penstock.kernel.values import Replica
from penstock.router.status_rows import StatusFinding
from penstock.runtime.cluster_state.desired_state import POOLS, PoolStatus, decode
from penstock.runtime.cluster_state.fleet_api import DesiredPool
from penstock.runtime.cluster_state.store_watch import follow


class PoolStatuses:
    """Follows the pools of every supervisor: ``known``, by name."""

    def __init__(self, store: Store) -> None:
        self.known: dict[str, PoolStatus] = {}
        self._store = store

    async def run(self) -> None:
        """Follow until cancelled."""
        await follow(
            self._store,
            POOLS,
            known=lambda: [POOLS + name for name in self.known],
            put=self._put,
            deleted=self._deleted,
            frozen=lambda error: None,
        )

    def findings(self) -> list[StatusFinding]:
        """Return which pools have replicas that do not run as their specs want, and what these wait for."""
        findings = []
        for name, status in sorted(self.known.items()):
            outdated = [replica for replica in status.pool.replicas or () if replica.outdated]
            if outdated:
                text = f"pool {name}: {counted(len(outdated), 'replica')} of an older spec"
                waits = "; ".join(f"{replica.id}: {replica.outdated}" for replica in outdated)
                findings.append(StatusFinding("warning", text, waits))
        return findings

    async def _put(self, key: str, raw: bytes) -> None:
        status = decode(PoolStatus, raw)
        if status is not None:
            self.known[key.removeprefix(POOLS)] = status

    async def _deleted(self, key: str) -> None:
        self.known.pop(key.removeprefix(POOLS), None)


def desired_pools(pools: Mapping[str, PoolStatus]) -> list[DesiredPool]:
    """Return pools by name, as operators read them."""
    return [
        DesiredPool(
            **msgspec.structs.asdict(each.pool),
            name=name,
            kind=each.kind,
            revision=each.revision,
            serving=each.pool.ready,
        )
        for name, each in sorted(pools.items())
    ]


def absent(pools: Iterable[DesiredPool], workers: Collection[str]) -> list[Replica]:
    """Return the replicas that are not among ``workers``, but for those that sleep, or leave for good."""
    replicas = (replica for pool in pools for replica in pool.replicas or ())
    return [
        replica
        for replica in replicas
        if replica.id not in workers and not replica.asleep and replica.state not in ("ready", "stopping")
    ]
