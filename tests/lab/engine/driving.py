"""How do tests drive the engine? Under the kernel's Simulation, with what it told written down."""

from collections.abc import Mapping
from typing import Any

from penstock.kernel.machine import Effect, Event
from penstock.kernel.simulation import Simulation
from penstock.kernel.values import KvCleared, KvEvent, KvRemoved, KvStored
from penstock_lab.engine.block_cache import BlockCache
from penstock_lab.engine.engine import Engine
from penstock_lab.engine.events import (
    EngineFinished,
    EngineFirstToken,
    EngineRejected,
    EngineStarted,
    KvChanged,
    KvPulled,
    PullKv,
)
from penstock_lab.engine.run_cache import RunCache
from penstock_lab.engine.settings import SimSettings


class Driven:
    """An engine run to its end over timed events.

    Args:
        pulls: per request, how many nanoseconds its KV is on its way, and whether it comes; else it never does.
    """

    def __init__(
        self,
        settings: SimSettings,
        events: list[tuple[int, Event]],
        *,
        checked: bool = True,
        table: Mapping[str, Any] | None = None,
        pulls: Mapping[str, tuple[int, bool]] | None = None,
        runs: bool = False,
    ) -> None:
        self.engine = Engine(settings, table=table, cache=RunCache if runs else BlockCache)
        self._pulls = pulls or {}
        self.told: list[tuple] = []
        self.kv: list[tuple] = []
        self.kv_times: list[int] = []
        self.wakes = 0
        self.simulation = Simulation({"engine": self.engine}, self._world, checked=checked)
        for at, event in sorted(events, key=lambda pair: pair[0]):
            self.simulation.post(at, "engine", event)

    def run(self, until: int | None = None) -> "Driven":
        self.simulation.run(until=until, limit=200_000)
        return self

    def _world(self, now: int, name: str, effect: Effect) -> tuple:
        if isinstance(effect, PullKv) and effect.id in self._pulls:
            self.told.append(as_line(effect))
            wait, ok = self._pulls[effect.id]
            return ((effect.at + wait, "engine", KvPulled(id=effect.id, ok=ok)),)
        line = as_line(effect)
        if line is not None:
            assert line[2] <= now
            self.told.append(line)
        elif isinstance(effect, KvChanged):
            assert effect.at <= now
            changes = flat(effect.events)
            self.kv += changes
            self.kv_times += [effect.at] * len(changes)
        return ()


def as_line(effect: Effect) -> tuple | None:
    """Return a milestone as the oracle writes it."""
    if isinstance(effect, EngineStarted):
        return ("started", effect.id, effect.at, effect.cached)
    if isinstance(effect, EngineFirstToken):
        return ("first", effect.id, effect.at, None)
    if isinstance(effect, EngineFinished):
        return (effect.reason, effect.id, effect.at, (effect.tokens, effect.blocks_retained))
    if isinstance(effect, PullKv):
        return ("pull", effect.id, effect.at, effect.tokens)
    if isinstance(effect, EngineRejected):
        return ("rejected", effect.id, effect.at, None)
    return None


def flat(events: list[KvEvent]) -> list[tuple]:
    """Return KV events block by block, as the oracle writes them."""
    out: list[tuple] = []
    for event in events:
        if isinstance(event, KvStored):
            parent = event.parent
            for name in event.hashes:
                out.append(("stored", name, parent))
                parent = name
        elif isinstance(event, KvRemoved):
            out += [("removed", name) for name in event.hashes]
        elif isinstance(event, KvCleared):
            out.append(("cleared",))
    return out
