"""What can befall a planner? Looks that come, fail or are late, plugins that come and go, people and connectors that
do as they like: at random, from one seed."""

import random
from collections.abc import Callable, Sequence
from typing import Any

from penstock.kernel.latency_bins import Bins
from penstock.kernel.machine import Effect, Event, Nanos, Wake, Woken, nanos, seconds
from penstock.kernel.values import EngineLimits, RequestShape, StepStats, Traffic, WorkerId
from penstock.planner import events as planning
from penstock.planner.observation import EngineState, ModelState, Observation
from penstock.planner.planner import Planner
from penstock.planner.plugins.plugin_registry import PlannerPlugin, PluginSpec
from penstock.planner.plugins.proposals import (
    Accept,
    Flip,
    Override,
    PoolTarget,
    Predicted,
    Prediction,
    Reason,
    Reject,
    Result,
)
from penstock.planner.settings import PlannerSettings
from penstock.planner.sizing.workload_mix import count_into, shape_bin
from tests.planner.pool_states import pool_state

BASE = 5.0
POOLS = {"p": ("prefill", 1), "d": ("decode", 2)}
Made = Callable[[], tuple[PlannerSettings, Sequence[PlannerPlugin]]]
"""Settings and the plugins of this process, made anew at each call."""
Past = list[tuple[Nanos, Event, list[Effect]]]


class Wanderer:
    """Wants now this, now that; where it is going is its state."""

    def __init__(self, seed: int, **spec: Any) -> None:
        self.spec = PluginSpec(**{"id": f"wanderer-{seed}", "stage": "propose", **spec})
        self._place = seed

    def evaluate(self, context: Any) -> Result:
        # Twice the same state must lead to the same word, so the state alone is the dice.
        self._place = (self._place * 1103515245 + 12345 + context.tick) % 2**31
        dice = random.Random(self._place)
        if self.spec.stage == "predict":
            told = Prediction(seconds=60.0, requests=dice.random() * 100, horizons=(0.0,), quantiles={0.5: (1.5,)})
            return Predicted(models={"m": told}, final=dice.random() < 0.1)
        return any_result(dice)

    def snapshot(self) -> Any:
        return self._place

    def restore(self, state: Any) -> None:
        self._place = state


def any_result(dice: random.Random) -> Result:
    """Return any answer that a plugin may give."""
    because = (Reason(code="dice", text="so it fell", facts={"number": dice.random()}),)
    kind = dice.random()
    if kind < 0.15:
        return Accept(reasons=because)
    if kind < 0.2:
        return Reject(reasons=because)
    targets = tuple(
        PoolTarget(pool=pool, replicas=dice.randrange(30), kind=dice.choice(("set", "at_least", "at_most")))
        for pool in dice.sample(list(POOLS), dice.randrange(1, 3))
    )
    flips = (Flip(model="m", frm="prefill", to="decode"),) if dice.random() < 0.05 else ()
    return Override(targets=targets, flips=flips, reasons=because, final=dice.random() < 0.1, evidence={"dice": kind})


class World:
    """One planner and what befalls it.

    Args:
        made: the planner's settings and plugins.
        quiet: leave out what makes looks and plugins fail.
    """

    def __init__(self, seed: int, made: Made, *, quiet: bool = False) -> None:
        self.dice = random.Random(seed)
        settings, plugins = made()
        self.planner = Planner(settings, plugins, strict=True)
        self.quiet = quiet
        self.past: Past = []
        self.now = 0.0
        self.wake: float | None = 0.0
        self.looking: int | None = None
        self.asked: list[planning.AskPlugin] = []
        self.ticks = 0
        self.scaled = 0
        self.counts = {name: self.dice.randrange(1, 5) for name in POOLS}
        self.starting: dict[str, list[float]] = {name: [] for name in POOLS}
        """Pool -> when each that does not serve yet was started."""
        self.shown = dict(self.counts)
        """Pool -> what the last look told of it."""
        self.rate = 2.0

    def run(self, events: int) -> None:
        """Let so many things happen."""
        for _ in range(events):
            at, event = self._next()
            self.now = max(self.now, at)
            self.give(event)

    def give(self, event: Event) -> None:
        """Give one event, and check what must always hold."""
        now = nanos(self.now)
        effects = list(self.planner.handle(now, event))
        self.past.append((now, event, effects))
        self.planner.check()
        for effect in effects:
            match effect:
                case Wake():
                    self.wake = seconds(effect.at)
                    assert self.wake >= self.now - 1e-6, "it wants to be woken in the past"
                case planning.Observe():
                    assert self.looking is None and self.ticks == effect.id - 1, "two ticks at a time"
                    self.looking = effect.id
                case planning.Ticked():
                    self.ticks += 1
                    assert effect.record.tick == self.ticks, "a tick ended that never began, or ended twice"
                    self.looking, self.asked = None, []
                case planning.AskPlugin():
                    assert effect.id == self.ticks + 1, "it asks for a tick that is not under way"
                    self.asked.append(effect)
                case planning.Scale():
                    self._scale(effect)

    def _scale(self, scale: planning.Scale) -> None:
        self.scaled += 1
        assert all(count >= 0 for count in scale.targets.values()), scale.targets
        # What an operator set since the look can't be known yet.
        wanted = {**self.shown, **scale.targets}
        ceiling = self.planner.memory.budget.max_gpus
        gpus = sum(POOLS[name][1] * count for name, count in wanted.items())
        assert ceiling is None or gpus <= ceiling, f"{wanted} are {gpus} GPUs, and the ceiling is {ceiling}"
        told: dict[str, str] = {}
        for name, count in scale.targets.items():
            if not self.quiet and self.dice.random() < 0.1:
                told[name] = self.dice.choice(("no machine is free", "the quota is used up"))
                continue
            more = count - self.counts[name]
            self.starting[name] = (self.starting[name] + [self.now] * max(0, more))[: max(0, count)]
            self.counts[name] = count
        self.give(planning.Scaled(id=scale.id, problems=told))

    def _next(self) -> tuple[float, Event]:
        """Return what happens next, and when."""
        dice = self.dice
        if not self.quiet and dice.random() < 0.25:
            return self.now + dice.random(), self._odd()
        if self.looking is not None and (self.quiet or dice.random() < 0.9):
            number, self.looking = self.looking, None
            if not self.quiet and dice.random() < 0.05:
                return self.now, planning.ObserveFailed(id=number, why="connection refused")
            return self.now + dice.choice((0.0, 0.001, 0.4)), planning.Observed(id=number, observation=self.see())
        if self.asked and dice.random() < 0.85:
            ask = self.asked.pop(dice.randrange(len(self.asked)))
            at = self.now + dice.choice((0.0, 0.2, 3.0))
            if dice.random() < 0.2:
                return at, planning.PluginAnswered(id=ask.id, plugin=ask.plugin, error="it crashed")
            result: Result = any_result(dice)
            if ask.stage == "predict":
                result = Predicted(models={"m": Prediction(seconds=60.0, shape=RequestShape(dice.random(), None))})
            return at, planning.PluginAnswered(id=ask.id, plugin=ask.plugin, result=result, seconds=0.1)
        assert self.wake is not None
        late = 0.0 if self.quiet or dice.random() < 0.8 else dice.choice((0.002, 1.0, 12.0))
        return max(self.now, self.wake + late), Woken()

    def _odd(self) -> Event:
        """Return something that may happen at any time."""
        dice = self.dice
        plugin = f"outside-{dice.randrange(3)}"
        match dice.randrange(9):
            case 0 | 1:
                spec = PluginSpec(
                    id=plugin,
                    stage=dice.choice(("predict", "propose", "reconcile", "constrain")),
                    priority=dice.randrange(100),
                    interval=dice.choice((0.0, 5.0, 10.0)),
                    hold=dice.choice(("accept_when_idle", "hold_last")),
                    needs=dice.choice(((), ("traffic",), ("pools", "engines"))),
                    outside=True,
                )
                return planning.PluginRegistered(spec=spec)
            case 2:
                return planning.PluginLeft(plugin=plugin)
            case 3 | 4:
                return planning.PluginAlive(plugin=plugin)
            case 5:
                return planning.LimitsChanged(
                    budget={"max_gpus": dice.choice((None, 0, 4, 12, 40)), "min_replicas": dice.randrange(3)}
                )
            case 6:
                return planning.PluginAnswered(id=dice.randrange(50), plugin=plugin, result=any_result(dice))
            case 7:
                name = dice.choice(list(POOLS))
                self.counts[name], self.starting[name] = dice.randrange(8), []  # somebody else sets it
                return planning.PluginAlive(plugin=plugin)
            case _:
                return Woken()

    def see(self) -> Observation:
        """Return what there is to see now."""
        dice = self.dice
        self.shown = dict(self.counts)
        self.rate = min(20.0, max(0.2, self.rate * dice.uniform(0.9, 1.12)))
        pools = {}
        for name, (role, gpus) in POOLS.items():
            on_the_way = [since for since in self.starting[name] if self.now - since < 20.0]
            came = (20.0,) * (len(self.starting[name]) - len(on_the_way))
            self.starting[name] = on_the_way
            ready = max(0, self.counts[name] - len(on_the_way))
            pools[name] = pool_state(
                role=role,  # type: ignore[arg-type]
                gpus=gpus,
                desired=self.counts[name],
                ready=ready,
                starting=tuple(self.now - since for since in on_the_way)[: self.counts[name]],
                start_up_times=came,
                engines=tuple(_engine(name, role, number, self.rate / max(1, ready)) for number in range(ready)),
            )
        readable = self.quiet or dice.random() < 0.9
        model = ModelState(traffic=self._traffic() if readable else None, pools=pools, queued=dice.randrange(3))
        return Observation(at=self.now, window=BASE, models={"m": model})

    def _traffic(self) -> Traffic:
        arrived = round(self.rate * BASE)
        shapes: Bins = {}
        for _ in range(arrived):
            count_into(shapes, shape_bin(self.dice.randrange(500, 4000), self.dice.randrange(50, 300), 0.0))
        return Traffic(
            seconds=BASE,
            arrived=arrived,
            prompt_tokens=arrived * 2000,
            answered=arrived,
            answered_prompt_tokens=arrived * 2000,
            output_tokens=arrived * 150,
            judged=arrived,
            in_slo=round(arrived * 0.95),
            ttft={20: arrived},
            ttft_sum=arrived * 0.2,
            ttft_count=arrived,
            shapes=shapes,
        )


def _engine(pool: str, role: str, number: int, rate: float) -> EngineState:
    seqs, passes = max(1, round(4 * rate)), 40
    prefill = 0 if role == "decode" else round(2000 * rate * BASE)
    decode = 0 if role == "prefill" else seqs * passes
    steps = StepStats(
        passes=passes,
        wall=passes * 0.004 + prefill * 1e-4 + decode * 2e-4,
        prefill_tokens=prefill,
        decode_seqs=decode,
        decode_kv=decode * 2000,
    )
    return EngineState(
        worker=WorkerId(f"{pool}-{number}"),
        role=role,  # type: ignore[arg-type]
        steps=steps,
        running=seqs,
        waiting=0,
        decode_kv=seqs * 2000,
        limits=EngineLimits(kv_tokens=300_000, max_num_seqs=256, max_num_batched_tokens=8192),
    )
