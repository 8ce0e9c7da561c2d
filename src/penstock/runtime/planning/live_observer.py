"""Live observer of a planner: joins the source's traffic and the connector's pools into one observation.

It follows replicas: their ages, start-up times of new ones, and the workers that serve in each pool.
"""

import asyncio
from collections.abc import Iterable, Mapping

import msgspec

from penstock.adapters.connectors.scale_connector import ScaleConnector
from penstock.adapters.sources.traffic_source import ModelReading, Reading, TrafficSource, WorkerReading
from penstock.kernel.values import Pool, Replica, ReplicaState, StartRecord
from penstock.planner.observation import ModelState, Observation, PoolState

UNREAD = ModelReading(traffic=None, health="stale", why="it was never told")


class _ObserverState(msgspec.Struct):
    at: float | None = None
    source: msgspec.Raw = msgspec.Raw(b"null")
    pools: msgspec.Raw = msgspec.Raw(b"null")


class LiveObserver:
    """Makes one observation per tick.

    Args:
        window: seconds that the first observation covers.
    """

    def __init__(self, source: TrafficSource, connector: ScaleConnector, *, window: float) -> None:
        self.pool_observer = PoolObserver()
        self.pools: dict[str, Pool] = {}
        """Pools of the last observation."""
        self.reading = Reading(models={})
        self._source = source
        self._connector = connector
        self._window = window
        self._at: float | None = None

    async def look(self, at: float) -> Observation:
        """Return the observation; ``at``: second of the run.

        Raises:
            PenstockError: the connector can't report the pools; the traffic meanwhile is in the next observation.
        """
        # The connector first: its failure must not cost the counts of the source.
        reported = await self._connector.look()
        reading = await self._source.read(at)
        self.pools, self.reading = dict(reported), reading
        pools = self.pool_observer.look(at, reported, reading.workers)
        window = self._window if self._at is None else at - self._at
        self._at = at
        models = {}
        for model in sorted({*pools, *reading.models}):
            if model not in pools:
                continue  # no pool here can be scaled for it
            read = reading.models.get(model, UNREAD)
            models[model] = ModelState(
                traffic=read.traffic,
                pools=pools[model],
                queued=read.queued,
                without_worker=read.without_worker
                or (0 if any(pool.ready for pool in pools[model].values()) else read.queued or 0),
                health=read.health,
                why=read.why,
            )
        return Observation(at=at, window=max(window, 1e-3), models=models)

    def snapshot(self) -> bytes:
        """Return the state for the next planner, so that it continues where this one ended."""
        state = _ObserverState(
            self._at, msgspec.Raw(self._source.snapshot()), msgspec.Raw(self.pool_observer.snapshot())
        )
        return msgspec.json.encode(state)

    def restore(self, raw: bytes) -> None:
        """Continue where the observer that wrote ``raw`` was."""
        state = msgspec.json.decode(raw, type=_ObserverState)
        self._at = state.at
        self._source.restore(bytes(state.source))
        self.pool_observer.restore(bytes(state.pools))

    async def close(self) -> None:
        """Close connections."""
        await asyncio.gather(self._source.close(), self._connector.close())


class _PoolTimes(msgspec.Struct):
    """State between observations. Times in seconds of the run."""

    begun: dict[str, float] = {}
    """Replica that starts -> since when."""
    ready: dict[str, list[str]] = {}
    """Pool -> replicas that served at the last observation."""
    warm: list[str] = []
    """Pools of which some replica has served: its files are on the machine."""
    scaled_at: dict[str, float] = {}
    """Pool -> when it was last scaled."""
    starts: dict[str, StartRecord] = {}
    """Replica -> its start that was counted last."""
    at: float | None = None


class PoolObserver:
    """Observes pools repeatedly."""

    def __init__(self) -> None:
        self._state = _PoolTimes()

    def scaled(self, at: float, pools: Iterable[str]) -> None:
        """These pools have just been scaled: their new replicas from now on began now."""
        for pool in pools:
            self._state.scaled_at[pool] = at

    def look(
        self, at: float, pools: Mapping[str, Pool], workers: Mapping[str, WorkerReading] | None
    ) -> dict[str, dict[str, PoolState]]:
        """Return model -> pool -> its observation.

        Args:
            workers: those that serve requests, where the source knows them.
        """
        state, there = self._state, set[str]()
        states: dict[str, dict[str, PoolState]] = {}
        for name, reported in pools.items():
            mine = _workers_of(reported, workers)
            pool = _with_replicas(reported, mine)
            replicas = pool.replicas or ()
            start_ups: list[float] = []
            wakes: list[float] = []
            before = set(state.ready.get(name, ()))
            for replica in replicas:
                if replica.state == "ready":
                    begun = state.begun.pop(replica.id, None)
                    if begun is None and state.at is not None and replica.id not in before:
                        begun = self._begun(name)  # it came between two observations
                    if begun is None or (replica.start is not None and state.starts.get(replica.id) == replica.start):
                        continue
                    if replica.start is None:
                        start_ups.append(at - begun)
                        continue
                    state.starts[replica.id] = replica.start
                    (wakes if replica.start.woken else start_ups).append(replica.start.seconds)
                elif replica.state in ("starting", "failed"):
                    there.add(replica.id)
                    state.begun.setdefault(replica.id, self._begun(name) if state.at is not None else at)
            state.ready[name] = [replica.id for replica in replicas if replica.state == "ready"]
            states.setdefault(pool.model, {})[name] = self._pool_state(at, name, pool, start_ups, wakes, mine)
            if state.ready[name] and name not in state.warm:
                state.warm.append(name)
        state.begun = {id: since for id, since in state.begun.items() if id in there}
        state.at = at
        return states

    def snapshot(self) -> bytes:
        """Return the state between observations."""
        return msgspec.json.encode(self._state)

    def restore(self, state: bytes) -> None:
        """Continue where the observer that wrote ``state`` was."""
        self._state = msgspec.json.decode(state, type=_PoolTimes)

    def _begun(self, pool: str) -> float:
        """Return the start time of a replica that was not in the observation before."""
        before = self._state.at or 0.0
        scaled = self._state.scaled_at.get(pool)
        return before if scaled is None or scaled < before else scaled

    def _pool_state(
        self,
        at: float,
        name: str,
        pool: Pool,
        start_ups: list[float],
        wakes: list[float],
        workers: list[WorkerReading],
    ) -> PoolState:
        replicas = pool.replicas or ()
        reasons = [replica.reason for replica in replicas if replica.state == "failed" and replica.reason]
        starting = (at - self._state.begun[replica.id] for replica in replicas if replica.state == "starting")
        memory = [replica.host_memory for replica in replicas if replica.asleep]
        problem = pool.problem or (reasons[0] if reasons else None)
        return PoolState(
            pool=msgspec.structs.replace(pool, problem=problem, replicas=None),
            ready=pool.ready,
            starting=tuple(sorted(starting, reverse=True)),
            draining=pool.count("draining", "stopping"),
            failed=pool.count("failed"),
            start_up_times=tuple(start_ups),
            asleep=pool.asleep,
            host_memory=None if None in memory else sum(bytes for bytes in memory if bytes is not None),
            wake_times=tuple(wakes),
            warm=name in self._state.warm,
            flips=any(worker.flips for worker in workers),
            engines=tuple(engine for worker in workers for engine in worker.engines),
        )


def _workers_of(pool: Pool, workers: Mapping[str, WorkerReading] | None) -> list[WorkerReading]:
    """Return the workers of a pool that take requests: by the connector's replicas, else by model and role."""
    if workers is None:
        return []
    if pool.replicas is None:
        return [worker for worker in workers.values() if worker.model == pool.model and worker.role == pool.role]
    ids = [replica.id for replica in pool.replicas if replica.state == "ready"]
    return [workers[id] for id in ids if id in workers]


def _with_replicas(pool: Pool, workers: list[WorkerReading]) -> Pool:
    """Return a pool with its replicas. Where the connector does not know them they are those that serve; where none are
    known, the desired number counts as present once it is acknowledged."""
    if pool.replicas is not None:
        return pool
    if workers:
        replicas = [Replica(id=each.id, state="ready" if each.ready else "draining") for each in workers]
    else:
        state: ReplicaState = "ready" if pool.acknowledged else "starting"
        replicas = [Replica(id=f"{pool.model}-{pool.role}-{n}", state=state) for n in range(pool.desired)]
    return msgspec.structs.replace(pool, replicas=tuple(replicas))
