"""How does a planner say to `penstock up` how many replicas there should be? By wishes in the cluster's store.

The supervisor's operator does the rest: who goes is taken from the routers first, and ended once it is idle.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence

from penstock.adapters.connectors.scaling_seam import PoolFound, ReplicaFound
from penstock.adapters.seams import Store, StoreUnavailable
from penstock.planner.proposals import Because, Flip
from penstock.runtime.wishes import (
    DESIRED,
    PLANNER,
    POOLS,
    ROLES,
    PoolReport,
    PoolWish,
    RoleWish,
    decode_all,
    put,
)

log = logging.getLogger("penstock.planner")


class WishConnector:
    """A `penstock.adapters.connectors.scaling_seam.ScaleConnector` over the store of a cluster.

    Args:
        patience: seconds that workers which go get to finish: as long as any request may take, so that none is cut.
        gpus: of a replica of a pool, as the config has it; of the others counts what their replicas have of their own.
    """

    def __init__(self, store: Store, *, patience: float | None = None, gpus: Mapping[str, int] | None = None) -> None:
        self._store = store
        self._gpus = gpus or {}
        self._patience = patience
        self._pools: dict[str, PoolReport] = {}

    async def look(self) -> Mapping[str, PoolFound]:
        self._pools = decode_all(PoolReport, await self._store.list(POOLS), POOLS)
        wishes = decode_all(PoolWish, await self._store.list(DESIRED), DESIRED)
        found = self._pools.items()
        return {name: pool_found(report, wishes.get(name), self._gpus.get(name)) for name, report in found}

    async def scale(
        self, targets: Mapping[str, int], flips: Sequence[Flip], because: Sequence[Because]
    ) -> dict[str, str]:
        problems: dict[str, str] = {}
        try:
            for name, replicas in targets.items():
                problem = refusal(self._pools.get(name), replicas)
                if problem is None:
                    wish = PoolWish(replicas=replicas, timeout=self._patience, by=PLANNER)
                    await put(self._store, DESIRED + name, wish)
                else:
                    problems[name] = problem
            for flip in flips:
                for worker in to_flip(self._pools.values(), flip):
                    wanted = RoleWish(role=flip.to, timeout=self._patience, by=PLANNER)
                    await put(self._store, ROLES + worker, wanted)
        except StoreUnavailable as error:
            log.warning("what should be can't be said: %s", error)
            return {name: str(error) for name in targets}
        return problems

    def describe(self) -> str:
        return "penstock up, by wishes in its store"

    async def close(self) -> None:
        """The store is closed by whoever opened it."""


def pool_found(report: PoolReport, wish: PoolWish | None, gpus: int | None = None) -> PoolFound:
    """Return a pool as a planner's connector tells it.

    What is wished counts as desired, not what the supervisor makes of it for now: a restart has one more for a while,
    and neither is that anybody's number.
    """
    return PoolFound(
        model=report.model,
        role=report.role,
        desired=report.desired if wish is None else wish.replicas,
        by="" if wish is None else wish.by,
        replicas=[
            ReplicaFound(
                id=replica.id,
                state=replica.state,
                reason=replica.reason,
                gpus=len(replica.gpus),
                role=replica.role,
            )
            for replica in report.replicas
        ],
        gpus=gpus or max([1, *(len(replica.gpus) for replica in report.replicas)]),
        limit=report.limit,
        problem=report.problem,
        scalable=report.kind == "process",
    )


def refusal(pool: PoolReport | None, replicas: int) -> str | None:
    """Say why a pool can't have so many replicas, or None where it can."""
    if pool is None:
        return "its supervisor does not report it any more"
    if pool.kind == "urls":
        return "its servers are run by somebody else, who alone can add and remove some"
    if pool.limit is not None and replicas > pool.limit:
        return f"it can have at most {pool.limit} replicas on this machine, not {replicas}"
    return None


def to_flip(pools: Iterable[PoolReport], flip: Flip) -> list[str]:
    """Return the workers that a change of role takes: the youngest first, whose caches are the emptiest."""
    found: list[str] = []
    for pool in pools:
        if pool.model == flip.model:
            found += [each.id for each in pool.replicas if each.state == "ready" and each.role == flip.frm]
    return sorted(found, key=_number, reverse=True)[: flip.count]


def _number(worker: str) -> tuple[int, str]:
    base, _, number = worker.rpartition("-")
    return (int(number) if number.isdigit() else 0, base)
