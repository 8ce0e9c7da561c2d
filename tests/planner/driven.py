"""How do tests drive a planner by hand? One tick at a time: a look of plain numbers in, effects out."""

from collections.abc import Callable, Mapping
from typing import Any

from penstock.kernel.machine import Effect, Event, Wake, Woken, nanos, seconds
from penstock.kernel.values import Traffic
from penstock.planner import events as planning
from penstock.planner.observation import ModelState, Observation
from penstock.planner.planner import Planner
from penstock.planner.plugins.plugin_context import PluginContext
from penstock.planner.plugins.plugin_registry import PlannerPlugin, PluginSpec, StatelessPlugin
from penstock.planner.plugins.proposals import Override, PoolTarget, Reason, Result
from penstock.planner.settings import PlannerSettings
from penstock.planner.tick_record import TickRecord
from tests.planner.pool_states import pool_state

BASE = 5.0
"""Seconds between two ticks."""
SOME = Traffic(seconds=BASE, arrived=10, prompt_tokens=10_000, answered=10, output_tokens=1000)


class Says(StatelessPlugin):
    """A plugin that says what it is told to: a result, or a function of the context."""

    def __init__(self, id: str, answer: Result | Callable[[PluginContext], Result], **spec: Any) -> None:
        self.spec = PluginSpec(**{"id": id, "stage": "propose", **spec})
        self.answer = answer
        self.asked: list[float] = []

    def evaluate(self, context: PluginContext) -> Result:
        self.asked.append(context.at)
        return self.answer(context) if callable(self.answer) else self.answer


def wants(final: bool = False, **pools: int) -> Override:
    """Return targets, with a reason of code ``wants``."""
    targets = tuple(PoolTarget(pool=name, replicas=count) for name, count in pools.items())
    return Override(targets=targets, reasons=(Reason(code="wants", text=f"wants {pools}"),), final=final)


def outside(id: str, **spec: Any) -> planning.PluginRegistered:
    """Return the registration of a plugin in another process."""
    return planning.PluginRegistered(spec=PluginSpec(**{"id": id, "stage": "propose", "outside": True, **spec}))


class Driven:
    """A planner with one model ``m``, and a connector that does at once what it is told unless ``obeys`` is False.

    Args:
        pools: name -> what is known of it; ``ready`` and ``desired`` are each other's default.
    """

    def __init__(
        self,
        *plugins: PlannerPlugin,
        pools: Mapping[str, Mapping[str, Any]] | None = None,
        strict: bool = True,
        **settings: Any,
    ) -> None:
        self.planner = Planner(PlannerSettings(**{"tick": BASE, **settings}), plugins, strict=strict)
        self.pools = {name: dict(told) for name, told in (pools or {"main": {"ready": 2}}).items()}
        self.traffic: Traffic | None = SOME
        self.obeys = True
        self.model: dict[str, Any] = {}
        """What else is seen of the model, such as its health."""
        self.at = 0.0
        self.wake: float | None = None
        """When the planner last asked to be woken."""

    def post(self, event: Event, at: float | None = None) -> list[Effect]:
        """Give one event; return its effects but for the wake, which is kept."""
        self.at = self.at if at is None else at
        effects = list(self.planner.handle(nanos(self.at), event))
        self.planner.check()
        for effect in effects:
            if isinstance(effect, Wake):
                self.wake = seconds(effect.at)
            if isinstance(effect, planning.Scale) and self.obeys:
                for name, count in effect.targets.items():
                    self.pools[name] |= {"desired": count, "ready": count}
        return [effect for effect in effects if not isinstance(effect, Wake)]

    def begin(self, at: float | None = None) -> list[Effect]:
        """Wake it when it asked for it, or at ``at``."""
        return self.post(Woken(), at if at is not None else (self.wake or 0.0))

    def see(self, at: float | None = None) -> Observation:
        """Return what there is to see."""
        pools = {}
        for name, told in self.pools.items():
            count = told.get("desired", told.get("ready", 0))
            pools[name] = pool_state(**{"role": "aggregated", "desired": count, "ready": count, **told})
        model = ModelState(**{"traffic": self.traffic, "pools": pools, **self.model})
        return Observation(at=self.at if at is None else at, window=BASE, models={"m": model})

    def looked(self, id: int | None = None, at: float | None = None) -> list[Effect]:
        """Let it see."""
        self.at = self.at if at is None else at
        number = self.planner.memory.number if id is None else id
        return self.post(planning.Observed(id=number, observation=self.see()))

    def tick(self, at: float | None = None) -> list[Effect]:
        """Wake it and let it see; return all effects but for `Look`."""
        begun = self.begin(at)
        told = [effect for effect in begun if not isinstance(effect, planning.Observe)]
        if len(told) < len(begun):
            told += self.looked()
        return told

    def ticks(self, count: int) -> list[Effect]:
        """Do so many ticks; return the effects of all."""
        return [effect for _ in range(count) for effect in self.tick()]


def scales(effects: list[Effect]) -> list[dict[str, int]]:
    return [effect.targets for effect in effects if isinstance(effect, planning.Scale)]


def records(effects: list[Effect]) -> list[TickRecord]:
    return [effect.record for effect in effects if isinstance(effect, planning.Ticked)]


def record(effects: list[Effect]) -> TickRecord:
    (found,) = records(effects)
    return found


def alarms(effects: list[Effect]) -> list[str]:
    return [effect.reason.code for effect in effects if isinstance(effect, planning.Alarm)]


def asks(effects: list[Effect]) -> list[planning.AskPlugin]:
    return [effect for effect in effects if isinstance(effect, planning.AskPlugin)]
