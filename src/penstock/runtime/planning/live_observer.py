"""Live observer of a planner: joins the source's traffic and the connector's pools into one observation."""

import asyncio

import msgspec

from penstock.adapters.connectors.scale_connector import ScaleConnector
from penstock.adapters.sources.traffic_source import ModelReading, Reading, TrafficSource
from penstock.kernel.values import Pool
from penstock.planner.observation import ModelState, Observation
from penstock.runtime.planning.pool_observer import PoolObserver

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
