"""The planner machine: observes, calls plugins stage by stage, applies the limits, and scales.

One tick: `Observe` -> `Observed` -> predict, propose, reconcile, constrain -> limits -> `Scale`, `Ticked`. The same
object runs live, on virtual time, and in a simulator that is not ours.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import msgspec

from penstock.kernel.errors import ConfigError, InvariantError
from penstock.kernel.machine import (
    Effect,
    Event,
    Nanos,
    Snapshot,
    Wake,
    Woken,
    nanos,
    read_snapshot,
    seconds,
    write_snapshot,
)
from penstock.planner import events as planning
from penstock.planner.limits.limits import project
from penstock.planner.observation import ModelState, Observation
from penstock.planner.overrides import OverrideTracker
from penstock.planner.plugins.plugin_context import PluginContext
from penstock.planner.plugins.plugin_registry import (
    LearnsSpeeds,
    PlannerPlugin,
    PluginRegistry,
    PluginSlot,
    PluginSpec,
    Stage,
)
from penstock.planner.plugins.proposals import Reason
from penstock.planner.settings import BudgetSettings, PlannerSettings
from penstock.planner.sizing.start_up_times import StartUpTimes
from penstock.planner.tick import PlannerTick, open_stage, pools_within
from penstock.planner.tick_record import ModelTick, Outcome, PoolTick, TickRecord, reason_about

SNAPSHOT_VERSION = 7
HISTORY = 1200.0
"""Seconds of observations that are kept for plugins; a plugin that looks further back keeps its own."""
TICK_TIMEOUT = 30.0
"""Longest seconds of a tick; a longer one is dropped and changes nothing. Dynamo's default."""


class PlannerMemory(msgspec.Struct, kw_only=True):
    """What a planner knows over time: all that its snapshot has."""

    budget: BudgetSettings
    standing: OverrideTracker = msgspec.field(default_factory=OverrideTracker)
    start_ups: StartUpTimes
    looks: list[Observation] = []
    tick: PlannerTick | None = None
    begun: float | None = None
    next_due: float = 0.0
    number: int = 0
    dropped: int = 0
    """Answers that no tick waited for."""
    seats: dict[str, Snapshot] = {}
    """The slots of plugins; filled only in a snapshot, since the plugins themselves are no part of it."""


class Planner:
    """One planner; its first `Woken` is its first tick.

    Args:
        settings: intervals, limits and targets.
        plugins: those of this process, in the order of their calls within a stage.
        strict: let errors of plugins through, as tests and simulations want it.
    """

    def __init__(self, settings: PlannerSettings, plugins: Iterable[PlannerPlugin], *, strict: bool = False) -> None:
        self.settings = settings
        self.memory = PlannerMemory(budget=settings.budget, start_ups=StartUpTimes(settings.start.assumed))
        self.registry = PluginRegistry()
        self._strict = strict
        self._out: list[Effect] = []
        for plugin in plugins:
            if plugin.spec.id in self.registry.seats:
                raise ValueError(f"two plugins have the id {plugin.spec.id}")
            self.registry.add(plugin.spec, plugin, 0.0)

    def handle(self, now: Nanos, event: Event) -> Sequence[Effect]:
        """Handle one event of `penstock.planner.events`, or `Woken`; return the effects, in order."""
        at = seconds(now)
        self._out = []
        match event:
            case Woken():
                self._woken(at)
            case planning.Observed():
                self._looked(at, event)
            case planning.ObserveFailed():
                self._look_failed(at, event)
            case planning.PluginAnswered():
                self._answered(at, event)
            case planning.Scaled():
                self._scaled(event)
            case planning.PluginRegistered():
                self._registered(at, event.spec)
            case planning.PluginAlive() if event.plugin in self.registry.seats:
                self.registry.seats[event.plugin].last_heartbeat = at
            case planning.PluginLeft():
                if self.registry.remove(event.plugin):
                    self._alarm("plugin_gone", f"planner plugin {event.plugin} is out: {event.why}")
                    self._unawaited(at, event.plugin)
            case planning.Benchmarked():
                self._benchmarked(event)
            case planning.LimitsChanged():
                self.memory.budget = msgspec.convert(event.budget, BudgetSettings)
            case _:
                self.memory.dropped += 1
        out, self._out = self._out, []
        return out

    def refuses(self, spec: PluginSpec) -> str | None:
        """Return why a plugin can't be registered, or None where it can."""
        if spec.id in self.registry.seats:
            return f"duplicate_id: there is a plugin {spec.id} already"
        if spec.window and spec.window < self.settings.base:
            return f"bad_window: {spec.window:g} s is less than a tick, which takes {self.settings.base:g} s"
        return None

    # --- a tick's course --------------------------------------------------------------------------------------------

    def _woken(self, at: float) -> None:
        if self.memory.begun is None:
            self.memory.begun = self.memory.next_due = at
            for seat in self.registry.seats.values():
                seat.registered = seat.last_heartbeat = at
        tick = self.memory.tick
        if tick is None:
            if at + 1e-9 < self.memory.next_due:
                return self._sleep(self.memory.next_due)
            return self._begin(at)
        if at - tick.at >= TICK_TIMEOUT - 1e-6:
            missing = "a look" if tick.observing else ", ".join(tick.waiting)
            self._alarm("tick_timeout", f"a tick waited {at - tick.at:.0f} s for {missing}; nothing of it counts")
            return self._end(at, "timeout")
        for plugin, deadline in list(tick.waiting.items()):
            if at >= deadline - 1e-9:
                self._failed(at, plugin, "timeout", f"no answer within {self.settings.plugins.deadline:g} s")
        self._go_on(at)

    def _begin(self, at: float) -> None:
        self.memory.number += 1
        self.memory.tick = PlannerTick(self.memory.number, at, self.memory.next_due)
        for seat in list(self.registry.seats.values()):
            silent = at - seat.last_heartbeat
            if seat.spec.outside and silent > self.settings.plugins.heartbeat:
                self.registry.remove(seat.spec.id)
                self._alarm("plugin_silent", f"planner plugin {seat.spec.id} was silent for {silent:.0f} s, and is out")
        self._out.append(planning.Observe(id=self.memory.number))
        self._sleep(at + TICK_TIMEOUT)

    def _looked(self, at: float, event: planning.Observed) -> None:
        tick = self.memory.tick
        if tick is None or not tick.observing or event.id != tick.number:
            self.memory.dropped += 1
            return
        observation = event.observation
        self.memory.looks.append(observation)
        while self.memory.looks[0].at < observation.at - HISTORY:
            del self.memory.looks[0]
        for reason in self.memory.standing.observe(observation, self.settings.manual_hold):
            self._out.append(planning.Alarm(reason=reason))
        tick.reasons += self.memory.standing.unread(observation)
        deadline = self.settings.start.deadline
        for model, name, state in observation.pools():
            self.memory.start_ups.note(model, state)
            given_up = self.memory.start_ups.coming(model, state, deadline).given_up
            lacking = self.memory.standing.not_started(name, state.pool, given_up, deadline)
            if lacking is not None:
                self._out.append(planning.Alarm(reason=lacking))
        tick.observing = False
        tick.baseline = {name: state.pool.desired for _, name, state in observation.pools()}
        self._go_on(at)

    def _look_failed(self, at: float, event: planning.ObserveFailed) -> None:
        tick = self.memory.tick
        if tick is None or not tick.observing or event.id != tick.number:
            self.memory.dropped += 1
            return
        self._alarm("blind", f"nothing could be seen in this tick, so all stays as it is: {event.why}")
        tick.reasons.append(Reason(code="blind", text=event.why))
        self._end(at, "blind")

    def _go_on(self, at: float) -> None:
        """Run the stages until one has to wait for a plugin."""
        tick = self.memory.tick
        assert tick is not None
        if tick.observing:
            return self._sleep(tick.at + TICK_TIMEOUT)
        while not tick.over:
            if not tick.plugin_asked:
                context = self.context(tick)
                alarms = open_stage(
                    tick, self.registry, context, self.settings.base, ask=partial(self._ask, at), strict=self._strict
                )
                self._out += [planning.Alarm(reason=reason) for reason in alarms]
            if tick.waiting:
                return self._sleep(max(at, min(tick.at + TICK_TIMEOUT, *tick.waiting.values())))
            tick.close_stage()
        self._decide(at)

    def context(self, tick: PlannerTick) -> PluginContext:
        """Return the context for plugins at this point."""
        observation = self.memory.looks[-1]
        deadline = self.settings.start.deadline
        return PluginContext(
            tick=tick.number,
            at=observation.at,
            observations=self.memory.looks,
            baseline=tick.baseline,
            predictions=tick.predictions,
            start_ups=self.memory.start_ups,
            coming={
                name: self.memory.start_ups.coming(model, state, deadline) for model, name, state in observation.pools()
            },
            budget=self.memory.budget,
            manual=self.memory.standing.manual,
        )

    def _ask(self, at: float, seat: PluginSlot, stage: Stage) -> None:
        tick = self.memory.tick
        assert tick is not None
        deadline = self.settings.plugins.deadline
        # From now, not from the tick's start: a slow observation or earlier stage must not use up the time of this one.
        tick.waiting[seat.spec.id] = at + deadline
        self._out.append(
            planning.AskPlugin(
                id=tick.number,
                plugin=seat.spec.id,
                stage=stage,
                deadline=deadline,
                tick=tick.number,
                observation=_needed(seat.spec, self.context(tick)),
                predictions=tick.predictions,
                proposal=dict(tick.baseline),
            )
        )

    def _answered(self, at: float, event: planning.PluginAnswered) -> None:
        tick, seat = self.memory.tick, self.registry.seats.get(event.plugin)
        if tick is None or event.id != tick.number or event.plugin not in tick.waiting or seat is None:
            self.memory.dropped += 1
            return
        if event.error is not None or event.result is None:
            self._failed(at, event.plugin, "error", event.error or "an empty answer")
        else:
            del tick.waiting[event.plugin]
            seat.seconds, seat.last_heartbeat = event.seconds, at
            seat.succeeded(tick.due, event.result)
            tick.answered(seat, event.result)
        self._go_on(at)

    def _failed(self, at: float, plugin: str, kind: str, why: str) -> None:
        tick, seat = self.memory.tick, self.registry.seats.get(plugin)
        assert tick is not None
        tick.waiting.pop(plugin, None)
        if seat is not None:
            seat.failed(at, kind)
            tick.silent(seat, kind, why)
            self._alarm(f"plugin_{kind}", f"planner plugin {plugin} is left out of this tick: {why}")

    def _unawaited(self, at: float, plugin: str) -> None:
        tick = self.memory.tick
        if tick is not None and tick.waiting.pop(plugin, None) is not None:
            self._go_on(at)

    def _registered(self, at: float, spec: PluginSpec) -> None:
        before = self.registry.seats.get(spec.id)
        if before is not None and before.plugin is not None:
            # The registration service calls `refuses` first; this is for a plugin that registered in between.
            self._alarm("duplicate_id", f"planner plugin {spec.id} at {spec.endpoint} is not let in: we have our own")
            return
        self.registry.add(spec, None, at)

    # --- outcome ---------------------------------------------------------------------------------------------------

    def _decide(self, at: float) -> None:
        """Apply the limits, and order the desired replicas."""
        tick, observation = self.memory.tick, self.memory.looks[-1]
        assert tick is not None
        pools = list(observation.pools())
        desired = {name: state.pool.desired for _, name, state in pools}
        if tick.vetoed:
            return self._end(at, "veto", desired)
        planned = pools_within(pools, self.settings.mode)
        wanted: dict[str, int] = {}
        for model, name, _ in pools:
            now = desired[name]
            proposed = tick.baseline.get(name, now) if name in planned else now
            hold = None if proposed == now else self.memory.standing.hold_reason(name, model, proposed, now)
            wanted[name] = proposed if hold is None else now
            if hold is not None:
                tick.bound.append(hold)
        committed = {name: min(desired[name], state.ready + len(state.starting)) for _, name, state in pools}
        projected = project(wanted, observation, self.memory.budget, committed=committed)
        tick.bound += projected.bound
        targets = projected.targets
        changed = {name: count for name, count in targets.items() if count != desired[name]}
        if not changed and not tick.flips:
            return self._end(at, "hold" if wanted == desired and tick.bound else "keep", targets)
        if self.settings.advisory:
            return self._end(at, "advise", targets)
        self.memory.standing.record_order(targets)
        reasons = (*tick.bound, *tick.reasons)
        self._out.append(planning.Scale(id=tick.number, targets=changed, flips=tick.flips, reasons=reasons))
        self._end(at, "apply", targets)

    def _benchmarked(self, event: planning.Benchmarked) -> None:
        for seat in self.registry.seats.values():
            if isinstance(seat.plugin, LearnsSpeeds):
                try:
                    seat.plugin.benchmarked(event.model, event.role, event.metrics)
                except ConfigError as error:
                    self._alarm("bad_benchmark", f"a {event.role} worker of {event.model} sent invalid data: {error}")

    def _scaled(self, event: planning.Scaled) -> None:
        for pool, why in event.problems.items():
            if self.memory.standing.problems.get(pool) != why:
                self._alarm("not_scaled", f"{pool} can't be scaled as planned: {why}", pool=pool)
        self.memory.standing.problems = dict(event.problems)

    def _end(self, at: float, outcome: Outcome, targets: dict[str, int] | None = None) -> None:
        tick = self.memory.tick
        assert tick is not None
        self._out += [planning.Alarm(reason=reason) for reason in self.memory.standing.ceiling_reached(at, tick.bound)]
        self._out.append(planning.Ticked(record=self._record(tick, outcome, targets)))
        self.memory.tick = None
        base = self.settings.base
        assert self.memory.begun is not None
        turns = int((at - self.memory.begun) / base + 1e-6) + 1
        self.memory.next_due = self.memory.begun + turns * base
        self._sleep(self.memory.next_due)

    def _record(self, tick: PlannerTick, outcome: Outcome, targets: dict[str, int] | None) -> TickRecord:
        observation = self.memory.looks[-1] if self.memory.looks and not tick.observing else None
        pools: dict[str, PoolTick] = {}
        gpus = 0
        for model, name, state in () if observation is None else observation.pools():
            pool, coming = state.pool, self.memory.start_ups.coming(model, state, self.settings.start.deadline)
            gpus += pool.gpus * (state.ready + len(state.starting) + state.draining)
            pools[name] = PoolTick(
                ready=state.ready,
                starting=len(state.starting),
                asleep=state.asleep,
                host_memory=state.host_memory,
                draining=state.draining,
                failed=state.failed,
                desired=pool.desired,
                proposed=tick.baseline.get(name, pool.desired),
                target=pool.desired if targets is None else targets[name],
                gpus=pool.gpus,
                given_up=coming.given_up,
                model=model,
                role=pool.role,
                why=self._why(tick, name, pool.desired, targets),
            )
        return TickRecord(
            tick=tick.number,
            at=tick.at,
            policy=self.policy,
            outcome=outcome,
            models={}
            if observation is None
            else {name: self._model(tick, name, each) for name, each in observation.models.items()},
            pools=pools,
            plugin_results=tuple(tick.plugin_results),
            chosen=tuple(tick.vetoed or tick.reasons),
            bound=tuple(tick.bound),
            alternatives=tuple(tick.lost),
            evidence=tick.evidence,
            flips=tick.flips,
            gpus=gpus,
            late=max(0.0, tick.at - tick.due),
        )

    def _why(self, tick: PlannerTick, pool: str, desired: int, targets: dict[str, int] | None) -> str:
        """Return why a pool should change: the reason of the stages, or of the limit that changed their proposal."""
        if targets is None or targets[pool] == desired:
            return ""
        proposed = tick.baseline.get(pool, desired)
        limit = None if targets[pool] == proposed else reason_about(pool, tick.bound)
        return limit or tick.why.get(pool) or reason_about(pool, [*tick.bound, *tick.reasons]) or ""

    @property
    def policy(self) -> str:
        """Name of the policy that decides."""
        target = self.settings.optimization_target
        return self.settings.policy if target == "sla" else f"thresholds-{target}"

    def _model(self, tick: PlannerTick, name: str, observed: ModelState) -> ModelTick:
        traffic, predicted = observed.traffic, tick.predictions.get(name)
        health = self.memory.standing.health.get(name, observed.health)
        forecast = {} if predicted is None else msgspec.to_builtins(predicted, str_keys=True)
        if traffic is None:
            return ModelTick(health=health, why=observed.why, queued=observed.queued, predicted=forecast)
        return ModelTick(
            health=health,
            why=observed.why,
            rate=traffic.rate,
            shape=traffic.shape,
            ttft=traffic.ttft_mean,
            itl=traffic.itl_mean,
            judged=traffic.judged,
            in_slo=traffic.in_slo,
            queued=observed.queued,
            predicted=forecast,
        )

    def _alarm(self, code: str, text: str, **facts: Any) -> None:
        self._out.append(planning.Alarm(reason=Reason(code=code, text=text, facts=facts)))

    def _sleep(self, until: float) -> None:
        self._out.append(Wake(at=nanos(until)))

    # --- a machine's other duties ------------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        seats = {id: seat.snapshot() for id, seat in self.registry.seats.items()}
        return write_snapshot(msgspec.structs.replace(self.memory, seats=seats), SNAPSHOT_VERSION)

    def restore(self, snapshot: Snapshot) -> None:
        self.memory = read_snapshot(snapshot, PlannerMemory, SNAPSHOT_VERSION, "a planner")
        seats, self.memory.seats = self.memory.seats, {}
        own = {id: seat for id, seat in self.registry.seats.items() if seat.plugin is not None}
        self.registry.seats = {}
        for id, slot in seats.items():
            spec = msgspec.convert(slot["spec"], PluginSpec)
            if not spec.outside and id not in own:
                continue  # another policy is configured now: its plugins start anew
            seat = own.pop(id, None) or PluginSlot(spec, None, slot["registered"])
            seat.restore(slot)
            self.registry.seats[id] = seat
        self.registry.seats |= own

    def check(self) -> None:
        tick = self.memory.tick
        if tick is not None and tick.waiting and (tick.observing or tick.over):
            raise InvariantError(f"a tick that is not in a stage waits for {', '.join(tick.waiting)}")
        if any(count < 0 for count in self.memory.standing.ordered.values()):
            raise InvariantError(f"fewer than no replicas were wanted: {self.memory.standing.ordered}")
        coming = [look.at for look in self.memory.looks]
        if coming != sorted(coming):
            raise InvariantError("looks are not in the order of time")


def _needed(spec: PluginSpec, context: PluginContext) -> Observation | None:
    """Return the part of the observation that an external plugin needs."""
    if not spec.needs:
        return None
    models: dict[str, ModelState] = {}
    for name, model in context.observation.models.items():
        traffic = context.traffic(name, spec.window or context.observation.window) if "traffic" in spec.needs else None
        pools = model.pools
        if "engines" not in spec.needs:
            pools = {each: msgspec.structs.replace(pool, engines=()) for each, pool in pools.items()}
        models[name] = msgspec.structs.replace(model, traffic=traffic, pools=pools)
    return msgspec.structs.replace(context.observation, models=models)
