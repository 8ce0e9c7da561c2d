"""What does a planner see at one moment? Traffic of its source and pools of its connector, as one observation."""

import asyncio

import msgspec

from penstock.adapters.connectors.scaling_seam import PoolFound, ScaleConnector
from penstock.adapters.sources.reading import ModelRead, Reading, Source
from penstock.planner.seen import ModelSeen, Observation
from penstock.runtime.planning.pools import Pools

UNREAD = ModelRead(traffic=None, health="stale", why="it was never told")


class _State(msgspec.Struct):
    at: float | None = None
    source: msgspec.Raw = msgspec.Raw(b"null")
    pools: msgspec.Raw = msgspec.Raw(b"null")


class Observing:
    """Looks at everything once per tick.

    Args:
        window: seconds between two looks, for the first one.
    """

    def __init__(self, source: Source, connector: ScaleConnector, *, window: float) -> None:
        self.pools = Pools()
        self.found: dict[str, PoolFound] = {}
        """Pools at the last look."""
        self.reading = Reading(models={})
        self._source = source
        self._connector = connector
        self._window = window
        self._at: float | None = None

    async def look(self, at: float) -> Observation:
        """Return what there is to see; ``at``: second of the run.

        Raises:
            PenstockError: the connector can't say what there is; what was counted meanwhile is in the next look.
        """
        # The connector first: what it can't tell must not cost what the source has counted.
        found = await self._connector.look()
        reading = await self._source.read(at)
        self.found, self.reading = dict(found), reading
        pools = self.pools.look(at, found, reading.workers)
        window = self._window if self._at is None else at - self._at
        self._at = at
        models = {}
        for model in sorted({*pools, *reading.models}):
            if model not in pools:
                continue  # nobody here can be scaled for it
            read = reading.models.get(model, UNREAD)
            models[model] = ModelSeen(
                traffic=read.traffic,
                pools=pools[model],
                queued=read.queued,
                held=read.held or (0 if any(pool.ready for pool in pools[model].values()) else read.queued or 0),
                health=read.health,
                why=read.why,
            )
        return Observation(at=at, window=max(window, 1e-3), models=models)

    def snapshot(self) -> bytes:
        """Return what the next planner needs, so that it goes on where this one ended."""
        state = _State(self._at, msgspec.Raw(self._source.snapshot()), msgspec.Raw(self.pools.snapshot()))
        return msgspec.json.encode(state)

    def restore(self, raw: bytes) -> None:
        """Go on from where the one that wrote ``raw`` was."""
        state = msgspec.json.decode(raw, type=_State)
        self._at = state.at
        self._source.restore(bytes(state.source))
        self.pools.restore(bytes(state.pools))

    async def close(self) -> None:
        """Let go of connections."""
        await asyncio.gather(self._source.close(), self._connector.close())
