"""A planner machine on the live driver, whose cluster is a value: what it sees is given, what it wants is kept."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from penstock.adapters.telemetry.planner_metrics import PlannerMetrics
from penstock.kernel.machine import Event, Woken
from penstock.kernel.values import UNKNOWN_LIMITS, Traffic
from penstock.planner.events import Alarm, AskPlugin, Observe, Observed, PluginRegistered, Scale, Scaled, Ticked
from penstock.planner.observation import EngineState, ModelState, Observation
from penstock.planner.planner import Planner
from penstock.planner.plugins.plugin_context import PluginContext
from penstock.planner.plugins.plugin_registry import PlannerPlugin, PluginSlot, PluginSpec, StatelessPlugin
from penstock.planner.plugins.proposals import Override, PoolTarget, Result
from penstock.planner.settings import PlannerSettings
from penstock.planner.settings_plugins import PluginSettings
from penstock.planner.tick_record import TickRecord
from penstock.runtime.live_driver import LiveDriver
from penstock_extras.plugins.plugin_host import PluginHost
from tests.planner.pool_states import pool_state

TOKEN = "a-token-of-the-tests"
OTHER = "another-token-of-the-tests"
PATIENCE = 30.0


class Wants(StatelessPlugin):
    """PROPOSE: always so many."""

    def __init__(self, replicas: int) -> None:
        self.spec = PluginSpec(id="wants", stage="propose", priority=10)
        self.replicas = replicas

    def evaluate(self, context: PluginContext) -> Result:
        return Override(targets=tuple(PoolTarget(pool=name, replicas=self.replicas) for name in context.baseline))


class Stand:
    """A cluster that does at once what it is told."""

    def __init__(self, settings: PlannerSettings, plugins: Sequence[PlannerPlugin]) -> None:
        self.planner = Planner(settings, plugins, strict=True)
        self.live = LiveDriver({"planner": self.planner})
        self.desired = {"decode": 2}
        self.ticks: list[TickRecord] = []
        self.alarms: list[Alarm] = []
        self.metrics = PlannerMetrics()
        self.changed = asyncio.Event()
        self.host = PluginHost(
            settings.plugins,
            lambda event: self.live.post("planner", event),
            tick=settings.base,
            refuses=self.planner.refuses,
            seats=lambda: self.planner.registry.seats,
            refused=self.metrics.refused,
        )
        self.live.on(Observe, lambda now, _, look: self.live.post("planner", self.look(now / 1e9, look)))
        self.live.on(AskPlugin, lambda _, __, ask: self.host.ask(ask))
        self.live.on(Scale, self._scale)
        self.live.on(Ticked, self._ticked)
        self.live.on(Alarm, lambda _, __, alarm: self.alarms.append(alarm))

    async def __aenter__(self) -> "Stand":
        await self.host.start()
        self.live.post("planner", Woken())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.host.close()
        self.live.close()

    def look(self, at: float, look: Observe) -> Observed:
        return Observed(id=look.id, observation=observation(at, self.desired))

    def _scale(self, _: int, __: str, scale: Scale) -> None:
        self.desired |= scale.targets
        self.live.post("planner", Scaled(id=scale.id))

    def _ticked(self, _: int, __: str, effect: Ticked) -> None:
        self.ticks.append(effect.record)
        self.changed.set()

    async def until(self, holds: Callable[[], Any]) -> Any:
        """Return what ``holds`` gives as soon as it is true, looked at after every tick."""

        async def wait() -> Any:
            while not (found := holds()):
                self.changed.clear()
                await self.changed.wait()
            return found

        return await asyncio.wait_for(wait(), PATIENCE)

    def seat(self, id: str) -> PluginSlot | None:
        return self.planner.registry.seats.get(id)


def observation(at: float, desired: dict[str, int]) -> Observation:
    limits = msgspec.structs.replace(UNKNOWN_LIMITS, kv_tokens=100_000)
    engine = EngineState(worker="w-0", role="decode", running=0, decode_kv=512, limits=limits)  # type: ignore[arg-type]
    pools = {
        name: pool_state(role="decode", desired=count, ready=count, engines=(engine,), limit=None)
        for name, count in desired.items()
    }
    traffic = Traffic(seconds=5.0, arrived=20, prompt_tokens=2000, answered=18, output_tokens=900, ttft={100: 3, -5: 2})
    return Observation(at=at, window=5.0, models={"m": ModelState(traffic=traffic, pools=pools, queued=0)})


def settings(folder: Path, **plugins: Any) -> PlannerSettings:
    """A planner that ticks quickly, and listens on a socket file."""
    given = {"listen": f"unix://{folder}/p.sock", "tokens": {"p": TOKEN, "q": OTHER}, **plugins}
    return PlannerSettings(
        load_interval=0.05, throughput_interval=0.05, plugins=msgspec.structs.replace(PluginSettings(), **given)
    )


def came(events: Sequence[Event]) -> list[str]:
    return [event.spec.id for event in events if isinstance(event, PluginRegistered)]
