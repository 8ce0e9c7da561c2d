"""What does a planner see of pools? Replicas with their ages, how long those that came took, and who serves in them.

A connector tells states; how long one has been in a state only somebody who keeps looking knows.
"""

from collections.abc import Iterable, Mapping

import msgspec

from penstock.adapters.connectors.scaling_seam import PoolFound, ReplicaFound
from penstock.adapters.sources.reading import WorkerRead
from penstock.planner.seen import PoolSeen


class _State(msgspec.Struct):
    """What is kept from look to look. Times in seconds of the run."""

    begun: dict[str, float] = {}
    """Replica that starts -> since when."""
    ready: dict[str, list[str]] = {}
    """Pool -> replicas that served at the last look."""
    warm: list[str] = []
    """Pools of which some replica has served: what it needs is on the machine."""
    said: dict[str, float] = {}
    """Pool -> when it was last told to have more."""
    at: float | None = None


class Pools:
    """Looks at pools, again and again."""

    def __init__(self) -> None:
        self._state = _State()

    def said(self, at: float, pools: Iterable[str]) -> None:
        """These pools have just been told other numbers: what is new from now on began now."""
        for pool in pools:
            self._state.said[pool] = at

    def look(
        self, at: float, found: Mapping[str, PoolFound], workers: Mapping[str, WorkerRead] | None
    ) -> dict[str, dict[str, PoolSeen]]:
        """Return model -> pool -> what there is to see of it.

        Args:
            workers: those who serve requests, where the source knows them.
        """
        state, there = self._state, set[str]()
        seen: dict[str, dict[str, PoolSeen]] = {}
        for name, pool in found.items():
            mine = _workers_of(name, pool, workers)
            replicas = _replicas(pool, mine)
            came = []
            before = set(state.ready.get(name, ()))
            for replica in replicas:
                if replica.state == "ready":
                    begun = state.begun.pop(replica.id, None)
                    if begun is None and state.at is not None and replica.id not in before:
                        begun = self._begun(name)  # it came between two looks
                    if begun is not None:
                        came.append(at - begun)
                elif replica.state in ("starting", "failed"):
                    there.add(replica.id)
                    state.begun.setdefault(replica.id, self._begun(name) if state.at is not None else at)
            state.ready[name] = [replica.id for replica in replicas if replica.state == "ready"]
            seen.setdefault(pool.model, {})[name] = self._seen(at, name, pool, replicas, came, mine)
            if state.ready[name] and name not in state.warm:
                state.warm.append(name)
        state.begun = {id: since for id, since in state.begun.items() if id in there}
        state.at = at
        return seen

    def snapshot(self) -> bytes:
        """Return what is kept from look to look."""
        return msgspec.json.encode(self._state)

    def restore(self, state: bytes) -> None:
        """Go on from where the one that wrote ``state`` was."""
        self._state = msgspec.json.decode(state, type=_State)

    def _begun(self, pool: str) -> float:
        """Return since when a replica starts that was not there at the look before."""
        before = self._state.at or 0.0
        said = self._state.said.get(pool)
        return before if said is None or said < before else said

    def _seen(
        self,
        at: float,
        name: str,
        pool: PoolFound,
        replicas: list[ReplicaFound],
        came: list[float],
        workers: list[WorkerRead],
    ) -> PoolSeen:
        states = [replica.state for replica in replicas]
        failed = [replica for replica in replicas if replica.state == "failed"]
        reasons = [replica.reason for replica in failed if replica.reason]
        starting = sorted(
            (at - self._state.begun[replica.id] for replica in replicas if replica.state == "starting"), reverse=True
        )
        return PoolSeen(
            role=pool.role,
            variant=pool.variant,
            gpus=pool.gpus,
            desired=pool.desired,
            ready=states.count("ready"),
            starting=tuple(starting),
            draining=states.count("draining") + states.count("stopping"),
            failed=len(failed),
            problem=pool.problem or (reasons[0] if reasons else None),
            limit=pool.limit if pool.scalable else pool.desired,
            came=tuple(came),
            warm=name in self._state.warm,
            flips=any(worker.flips for worker in workers),
            engines=tuple(engine for worker in workers for engine in worker.engines),
        )


def _workers_of(name: str, pool: PoolFound, workers: Mapping[str, WorkerRead] | None) -> list[WorkerRead]:
    """Return the workers of a pool that take requests: by the connector's word, else by model and role."""
    if workers is None:
        return []
    if pool.replicas is None:
        return [worker for worker in workers.values() if worker.model == pool.model and worker.role == pool.role]
    ids = [replica.id for replica in pool.replicas if replica.state == "ready"]
    return [workers[id] for id in ids if id in workers]


def _replicas(pool: PoolFound, workers: list[WorkerRead]) -> list[ReplicaFound]:
    """Return a pool's replicas. Where the connector does not know them they are those who serve; where nobody does,
    as many as are wanted are taken to be there once the connector says that it is done."""
    if pool.replicas is not None:
        return list(pool.replicas)
    if workers:
        return [ReplicaFound(id=worker.id, state="ready" if worker.ready else "draining") for worker in workers]
    state = "ready" if pool.settled else "starting"
    return [ReplicaFound(id=f"{pool.model}-{pool.role}-{n}", state=state) for n in range(pool.desired)]  # type: ignore[arg-type]
