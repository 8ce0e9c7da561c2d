"""`SimulatedCluster`: the production router, engines, traffic and a script of faults, run on virtual time."""

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

import msgspec

from penstock.fleet import events as fleet
from penstock.fleet.fleet import Fleet
from penstock.fleet.fleet_state import FleetTimes
from penstock.fleet.victims import to_flip
from penstock.kernel.errors import InvariantError
from penstock.kernel.machine import Effect, Event, Machine, Nanos, Woken, nanos, seconds
from penstock.kernel.request_record import RequestRecord
from penstock.kernel.simulation import Answer, Simulation
from penstock.kernel.values import Pool
from penstock.planner import events as planning
from penstock.planner.observation import Observation
from penstock.planner.tick_record import TickRecord
from penstock.router import events as routing
from penstock.router.kv_index.pool_index import BLOCKS
from penstock.router.router import Router
from penstock.router.status import StatusRow, router_row
from penstock_lab.engine.itl_histogram import joined
from penstock_lab.engine.network_links import NetworkLinks
from penstock_lab.runs.run_form import RUNS
from penstock_lab.simulate.effect_handlers import FLEET, ROUTER, EffectHandlers
from penstock_lab.simulate.fleet_effects import FleetEffects
from penstock_lab.simulate.kv_transfers import LINKS
from penstock_lab.simulate.observer import Observer
from penstock_lab.simulate.scale_policy import ScalePolicy
from penstock_lab.simulate.simulated_fleet import SimulatedFleet
from penstock_lab.simulate.simulation_plan import Fault, SimulationPlan, checked
from penstock_lab.traffic.sessions import Sessions
from penstock_lab.traffic.traffic_request import TrafficRequest

PLANNER = "planner"
WATCHED = (ROUTER, FLEET, PLANNER)
SETTLED = nanos(3600.0)
"""Nanoseconds after the last request within which everything must be over: longer than any prefill."""
SLICE = 1 << 13
"""Events between two calls of ``progress``: some thousand requests."""


class SimulatedCluster:
    """One simulated run; `run` it once.

    Args:
        plan: pools and faults.
        traffic: requests in order of arrival, or sessions in a closed loop.
        policy: decides how many workers there are; None leaves them as they are.
        planner: a `penstock.planner.planner.Planner`, which does the same as it does live; one of the two.
        ticked: takes the record of every tick of the planner.
        record: takes every request that has ended, in that order.
        decided: takes every decision of the router.
        observe: takes the seconds and the router's figures (`penstock.router.status`), every ``plan.observe_every``.
        watch: takes every event of router, fleet and planner: the time, the machine's name, the event, its effects.
    Raises:
        ConfigError: the plan contradicts itself.
    """

    def __init__(
        self,
        plan: SimulationPlan,
        traffic: Iterable[TrafficRequest],
        *,
        policy: ScalePolicy | None = None,
        planner: Machine | None = None,
        ticked: Callable[[TickRecord], object] = lambda record: None,
        record: Callable[[RequestRecord], object] = lambda record: None,
        decided: Callable[[routing.Decision], object] = lambda decision: None,
        observe: Callable[[float, StatusRow], object] | None = None,
        watch: Callable[[Nanos, str, Event, Sequence[Effect]], object] | None = None,
    ) -> None:
        self.plan = checked(plan)
        self.router = Router(
            plan.router, slo=plan.slo, name=ROUTER, seed=plan.seed, form=BLOCKS if plan.single_blocks else RUNS
        )
        self.fleet = SimulatedFleet(plan, random.Random(plan.seed + 1))
        self.supervisor = Fleet(FleetTimes(restart_backoff=plan.restart_backoff, drain_timeout=plan.drain_timeout))
        """Decides which workers there are, as a live supervisor's does."""
        self.world = EffectHandlers(
            plan,
            self.router,
            self.fleet,
            record=record,
            decided=decided,
            idle=self._idle,
            loop=traffic if isinstance(traffic, Sessions) else None,
            later=lambda at, act: self.simulation.call(at, act),
            post=lambda at, machine, event: self.simulation.post(at, machine, event),
        )
        transfer = next(iter(plan.pools.values())).sim.transfer
        self.links = NetworkLinks(transfer.bandwidth, transfer.latency)
        self.simulation = Simulation(
            {ROUTER: self.router, LINKS: self.links, FLEET: self.supervisor},
            self.world,
            checked=plan.checked,
            watch=None
            if watch is None
            else lambda now, name, event, effects: name in WATCHED and watch(now, name, event, effects),
        )
        self.refused: list[str] = []
        """What the script or the policy requested and could not be done, with the reason."""
        self._effects = FleetEffects(self.fleet, self.world, self.simulation, self.links, self.refused.append)
        self._traffic: Iterator[TrafficRequest] = iter(traffic)
        self._exhausted = False
        self._policy = policy
        self._ticked = ticked
        self.pools = {
            name: Pool(model=plan.model, role=kind.role, gpus=kind.gpus, desired=kind.replicas)
            for name, kind in plan.pools.items()
        }
        """Pools as policy or planner last decided."""
        self.alarms: dict[str, int] = {}
        """Count of the planner's alarms, by code."""
        self.observer: Observer | None = None
        if policy is not None or planner is not None:
            self.observer = Observer(plan, self.fleet)
            self.world.lookers.append(self.observer)
        if planner is not None:
            self.simulation.machines[PLANNER] = planner
            self.world.carry(planning.Observe, self._look_for)
            self.world.carry(planning.Scale, self._scale_for)
            self.world.carry(planning.Ticked, self._ticked_of)
            self.world.carry(planning.Alarm, self._alarmed)
        self._observe = observe
        self._over = False
        """Whether the last request has ended: what the script has for later has no effect on one."""

    @property
    def end(self) -> Nanos:
        """When the last request ended, or when arrivals end by plan, whichever is later."""
        until = 0 if self.plan.until is None else nanos(self.plan.until)
        return max(self.world.end, until)

    def run(self, progress: Callable[[], object] = lambda: None) -> None:
        """Let everything happen.

        Args:
            progress: called now and then.
        Raises:
            InvariantError: tokens, blocks or requests went missing: a bug of ours.
        """
        for name, pool in self.pools.items():
            sleeping = self.plan.pools[name].sleeping
            self.simulation.post(0, FLEET, fleet.PoolAdded(pool=name, configured=pool, sleeping=sleeping))
        self.simulation.post(0, FLEET, fleet.Begun())
        for fault in self.plan.faults:
            self._at(nanos(fault.at), partial(self._befall, fault))
        if self._policy is not None:
            self._at(nanos(self.plan.policy_interval), self._decide)
        if PLANNER in self.simulation.machines:
            self.simulation.post(0, PLANNER, Woken())
        if self._observe is not None:
            self._at(nanos(self.plan.observe_every), self._look)
        self._next_arrival()
        handled = -1
        while not self._quiet and self.simulation.events_handled != handled:
            handled = self.simulation.events_handled
            self.simulation.run(limit=SLICE)
            progress()
        self.simulation.run(until=self.end)
        self._over = True
        # What requests left behind that ended early comes to its end: passes, and prefills that are not needed.
        for name in (PLANNER, FLEET):
            self.simulation.remove(name)
        self.simulation.run(until=self.simulation.now + SETTLED)
        self.world.check()
        if self.simulation.clamped:
            raise InvariantError(f"{self.simulation.clamped} events were meant for the past")

    def gpu_hours(self) -> float:
        """Return GPU-hours up to the end, with the workers' starting and draining."""
        return self.fleet.gpu_hours(self.end)

    def asleep_hours(self) -> float:
        """Return the hours up to the end for which workers slept, in host memory and without GPUs."""
        return self.fleet.asleep_hours(self.end)

    def handoffs(self) -> dict[str, int]:
        """Return what became of prefills on workers of their own, as `penstock.router.model_pool` counts it."""
        pool = self.router.pools.get(self.plan.model)
        return {} if pool is None or not pool.roles.splits else dict(pool.counts.handoffs)

    def media(self) -> dict[str, int]:
        """Return what became of images: encoded, found in an engine's own cache, and read from the store."""
        counts = [worker.engine.media_counts for worker in self.fleet.workers.values()]
        return {name: sum(column) for name, column in zip(("encoded", "reused", "fetched"), zip(*counts), strict=False)}

    def adapters(self) -> dict[str, int]:
        """Return what became of requests for LoRA adapters, as the router counts it; empty without."""
        pool = self.router.pools.get(self.plan.model)
        return {} if pool is None or not any(pool.adapters.counts.values()) else dict(pool.adapters.counts)

    def gaps(self) -> list[tuple[float, int]]:
        """Return (seconds, how many of it) of the waits between tokens, of all engines."""
        return joined(self.fleet.gaps)

    # --- the script: arrivals, faults, decisions about scale ----------------------------------------------------------

    @property
    def _quiet(self) -> bool:
        """Whether nothing arrives any more and all that did has ended."""
        return self._exhausted and not self.world.open

    def _idle(self) -> None:
        if self._exhausted:
            self.simulation.stop()

    def _at(self, at: Nanos, act: Callable[[], object]) -> None:
        self.simulation.call(at, lambda: None if self._over else act())

    def _post(self, machine: str, event: Event) -> None:
        self.simulation.post(self.simulation.now, machine, event)

    def _next_arrival(self) -> None:
        request = next(self._traffic, None)
        until = self.plan.until
        if request is None or (until is not None and request.at >= until):
            self._exhausted = True
            if not self.world.open:
                self.simulation.stop()
            return
        self.simulation.call(nanos(request.at), partial(self._arrive, request))

    def _arrive(self, request: TrafficRequest) -> None:
        for event in (*self.world.tier_reports(self.simulation.now), self.world.arrived(request)):
            self._post(ROUTER, event)
        self._next_arrival()

    def _befall(self, fault: Fault) -> None:
        """Carry out one line of the script of faults; what can't be is kept in ``refused``."""
        at = seconds(self.simulation.now)
        if fault.kind == "add":
            name = fault.pool or next(iter(self.plan.pools))
            there = sum(life.wanted and life.phase != "given up" for life in self.supervisor.state.of(name))
            return self._post(FLEET, fleet.Desired(pool=name, replicas=there + 1, at=at))
        if fault.kind == "restart":
            return self._post(FLEET, fleet.RestartDesired(revision=f"{at:g}"))
        if fault.kind == "undrain":
            return self._post(FLEET, fleet.DrainDropped(worker=fault.worker or ""))
        worker = None if fault.worker is None else self.fleet.workers.get(fault.worker)
        if worker is None:
            known = ", ".join(self.fleet.workers) or "none"
            self.refused.append(f"{fault.kind} of {fault.worker} at {fault.at:g} s: workers then are {known}")
        elif fault.kind == "fail":
            died = fleet.Died(worker=worker.id, serial=worker.serial, reason="it failed", restart=fault.starts_again)
            self._effects.fail(self.simulation.now, worker, died)
        elif fault.kind == "drain":
            self._post(FLEET, fleet.DrainDesired(worker=worker.id, at=at))
        elif fault.kind == "flip":
            self._post(FLEET, fleet.RoleDesired(worker=worker.id, role=fault.role))
        else:
            on = fault.kind == "cordon"
            self._post(ROUTER, routing.WorkerCordoned(worker=worker.id, on=on, reason="by the script"))

    # --- scaling -----------------------------------------------------------------------------------------------------

    def _decide(self) -> None:
        """Ask the policy, and do what it says."""
        assert self._policy is not None
        now = self.simulation.now
        self._at(now + nanos(self.plan.policy_interval), self._decide)
        _, desired = self._scale(self._policy.decide(self._see(now)) or {})
        for event in desired:
            self._post(FLEET, event)

    def _scale(self, targets: Mapping[str, int]) -> tuple[dict[str, str], list[Event]]:
        """Return what can't be, by pool, and what the fleet is told."""
        problems: dict[str, str] = {}
        desired: list[Event] = []
        for pool, count in targets.items():
            if pool not in self.plan.pools or count < 0:
                problems[pool] = f"{count} workers of {pool}: there is no such pool or number"
                self.refused.append(f"at {seconds(self.simulation.now):g} s, {problems[pool]}")
                continue
            self.pools[pool] = msgspec.structs.replace(self.pools[pool], desired=count)
            desired.append(fleet.Desired(pool=pool, replicas=count, by_planner=True))
        return problems, desired

    def _see(self, now: Nanos) -> Observation:
        assert self.observer is not None
        return self.observer.look(now, self.pools, self.router.waiting(self.plan.model))

    # --- what a planner wants ----------------------------------------------------------------------------------------

    def _look_for(self, now: Nanos, sender: str, effect: planning.Observe) -> Iterable[Answer]:
        return ((now, sender, planning.Observed(id=effect.id, observation=self._see(now))),)

    def _scale_for(self, now: Nanos, sender: str, effect: planning.Scale) -> Iterable[Answer]:
        problems, told = self._scale(effect.targets)
        for flip in effect.flips:
            for worker in to_flip(self.supervisor.pools().values(), flip.model, flip.frm, flip.count):
                told.append(fleet.RoleDesired(worker=worker, role=flip.to))
        scaled = planning.Scaled(id=effect.id, problems=problems)
        return [*((now, FLEET, event) for event in told), (now, sender, scaled)]

    def _ticked_of(self, now: Nanos, sender: str, effect: planning.Ticked) -> Iterable[Answer]:
        self._ticked(effect.record)
        return ()

    def _alarmed(self, now: Nanos, sender: str, effect: planning.Alarm) -> Iterable[Answer]:
        self.alarms[effect.reason.code] = self.alarms.get(effect.reason.code, 0) + 1
        return ()

    def _look(self) -> None:
        """Pass the router's figures to ``observe``."""
        assert self._observe is not None
        now = self.simulation.now
        self._at(now + nanos(self.plan.observe_every), self._look)
        self._observe(seconds(now), router_row(self.router))
