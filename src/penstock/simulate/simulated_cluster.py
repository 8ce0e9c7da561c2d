"""`SimulatedCluster`: the production router, engines, traffic and a script of faults, run on virtual time."""

import heapq
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

import msgspec

from penstock.engine.itl_histogram import joined
from penstock.engine.network_links import NetworkLinks
from penstock.engine.self_benchmark import perf_metrics
from penstock.kernel.errors import InvariantError
from penstock.kernel.machine import Effect, Event, Machine, Nanos, Woken, nanos, seconds
from penstock.kernel.request_record import RequestRecord
from penstock.kernel.simulation import Answer, Simulation
from penstock.kernel.values import Pool, Role, WorkerId
from penstock.planner import events as planning
from penstock.planner.observation import Observation
from penstock.planner.tick_record import TickRecord
from penstock.router import events as routing
from penstock.router.prompt_forms import BLOCKS, RUNS
from penstock.router.router import Router
from penstock.router.status_rows import RouterStatus
from penstock.simulate.effect_handlers import ROUTER, EffectHandlers
from penstock.simulate.kv_transfers import LINKS
from penstock.simulate.observer import Observer
from penstock.simulate.scale_policy import ScalePolicy
from penstock.simulate.simulated_fleet import SimulatedFleet, SimulatedWorker
from penstock.simulate.simulation_plan import Fault, SimulationPlan, checked
from penstock.traffic.sessions import Sessions
from penstock.traffic.traffic_request import TrafficRequest

PLANNER = "planner"
SETTLED = nanos(3600.0)
"""Nanoseconds after the last request within which everything must be over: longer than any prefill."""
SLICE = 512
"""Events between two checks whether everything has ended."""


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
        observe: takes the router's status (`penstock.router.status`) and the seconds, every ``plan.observe_every``.
        watch: takes every event of the router with the time, and its effects.
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
        observe: Callable[[float, RouterStatus], object] | None = None,
        watch: Callable[[Nanos, str, Event, Sequence[Effect]], object] | None = None,
    ) -> None:
        self.plan = checked(plan)
        self.router = Router(
            plan.router, slo=plan.slo, name=ROUTER, seed=plan.seed, form=BLOCKS if plan.by_block else RUNS
        )
        self.fleet = SimulatedFleet(plan, random.Random(plan.seed + 1))
        self.world = EffectHandlers(
            plan,
            self.router,
            self.fleet,
            removed=lambda worker: self.simulation.remove(worker.id),
            record=record,
            decided=decided,
            loop=traffic if isinstance(traffic, Sessions) else None,
        )
        transfer = next(iter(plan.pools.values())).sim.transfer
        self.links = NetworkLinks(transfer.bandwidth, transfer.latency)
        self.simulation = Simulation(
            {ROUTER: self.router, LINKS: self.links},
            self.world,
            checked=plan.checked,
            watch=None
            if watch is None
            else lambda now, name, event, effects: name == ROUTER and watch(now, name, event, effects),
        )
        self.refused: list[str] = []
        """What the script or the policy requested and could not be done, with the reason."""
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
        self._script: list[tuple[Nanos, int, Callable[[], None]]] = []
        self._script_serial = 0
        self._speeds: dict[str, dict[str, float]] = {}

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
        for name, pool in self.plan.pools.items():
            for _ in range(pool.replicas):
                self._start(name, at_once=True)  # what the run begins with serves already
        for fault in self.plan.faults:
            self._at(nanos(fault.at), partial(self._befall, fault))
        if self._policy is not None:
            self._at(nanos(self.plan.policy_interval), self._decide)
        if PLANNER in self.simulation.machines:
            self.simulation.post(0, PLANNER, Woken())
        if self._observe is not None:
            self._at(nanos(self.plan.observe_every), self._look)
        self._next_arrival()
        turn = 0
        while self._script or self.world.open:
            if not self._script:
                # A planner goes on for ever: near the end it must not run far ahead of the last request.
                self.simulation.run(limit=SLICE if PLANNER not in self.simulation.machines else 1)
            else:
                at = self._script[0][0]
                self.simulation.run(until=at)
                if self._quiet and at > self.end:
                    break  # what is still in the script would have no effect on a request
                _, _, act = heapq.heappop(self._script)
                act()
            turn += 1
            if turn % SLICE == 0:
                progress()
        progress()
        # What requests left behind that ended early comes to its end: passes, and prefills that are not needed.
        if PLANNER in self.simulation.machines:
            self.simulation.remove(PLANNER)
        self.simulation.run(until=self.simulation.now + SETTLED)
        self.world.check()
        if self.simulation.clamped:
            raise InvariantError(f"{self.simulation.clamped} events were meant for the past")

    def gpu_hours(self) -> float:
        """Return GPU-hours up to the end, with the workers' starting and draining."""
        return self.fleet.gpu_hours(self.end)

    def handoffs(self) -> dict[str, int]:
        """Return what became of prefills on workers of their own, as `penstock.router.model_pool` counts it."""
        pool = self.router.pools.get(self.plan.model)
        return {} if pool is None or not pool.splits else dict(pool.handoffs)

    def gaps(self) -> list[tuple[float, int]]:
        """Return (seconds, how many of it) of the waits between tokens, of all engines."""
        return joined(self.fleet.gaps)

    # --- the script: arrivals, faults, starts, decisions about scale -------------------------------------------------

    @property
    def _quiet(self) -> bool:
        """Whether nothing arrives any more and all that did has ended."""
        return self._exhausted and not self.world.open

    def _at(self, at: Nanos, act: Callable[[], None]) -> None:
        """Do something at a time; what comes first at one time is done first."""
        self._script_serial += 1
        heapq.heappush(self._script, (at, self._script_serial, act))

    def _post(self, event: Event) -> None:
        """Send the router an event now."""
        self.simulation.post(self.simulation.now, ROUTER, event)

    def _next_arrival(self) -> None:
        request = next(self._traffic, None)
        until = self.plan.until
        if request is None or (until is not None and request.at >= until):
            self._exhausted = True
            return
        self._at(nanos(request.at), partial(self._arrive, request))

    def _arrive(self, request: TrafficRequest) -> None:
        self._post(self.world.arrived(request))
        self._next_arrival()

    def _start(self, pool: str, worker: WorkerId | None = None, *, at_once: bool = False) -> None:
        """Start a worker, or start one again."""
        now = self.simulation.now
        made, ready = self.fleet.start(pool, now, worker)
        if at_once:
            ready = now
        self.simulation.machines[made.id] = made.engine
        bandwidth = self.plan.pools[pool].sim.transfer.bandwidth
        if bandwidth != self.links.bandwidth(made.id):
            self.links.set(made.id, bandwidth)
        self._post(routing.WorkerJoined(card=made.card, ready=ready <= now))
        if ready <= now:
            self._ready(made)
        else:
            self._at(ready, partial(self._ready, made))

    def _ready(self, worker: SimulatedWorker) -> None:
        if self.fleet.workers.get(worker.id) is not worker or worker.state != "starting":
            return  # it was ended before it served
        worker.state = "ready"
        worker.life.ready = self.simulation.now
        self._post(routing.WorkerReady(worker=worker.id, epoch=worker.card.epoch))
        if self.plan.router.cost.kind == "latency":
            if worker.pool not in self._speeds:
                kind = self.plan.pools[worker.pool]
                self._speeds[worker.pool] = perf_metrics(kind.sim, kind.table)["fit"]
            self._post(routing.WorkerMeasured(worker=worker.id, **self._speeds[worker.pool]))

    def _befall(self, fault: Fault) -> None:
        """Carry out one line of the script of faults; what can't be is kept in ``refused``."""
        if fault.kind == "add":
            return self._start(fault.pool or next(iter(self.plan.pools)))
        worker = None if fault.worker is None else self.fleet.workers.get(fault.worker)
        if worker is None:
            known = ", ".join(self.fleet.workers) or "none"
            self.refused.append(f"{fault.kind} of {fault.worker} at {fault.at:g} s: workers then are {known}")
        elif fault.kind == "fail":
            self._fail(worker, fault.restart)
        elif fault.kind in ("drain", "flip"):
            self._drain(worker, fault.role)
        else:
            self._post(routing.WorkerCordoned(worker=worker.id, on=fault.kind == "cordon", reason="by the script"))

    def _fail(self, worker: SimulatedWorker, restart: float | None) -> None:
        """End a worker at once: its streams break, then it leaves."""
        self._break(worker, "the connection broke: it was killed")
        self._remove(worker, "it failed")
        if restart is not None:
            self._at(self.simulation.now + nanos(restart), partial(self._start, worker.pool, worker.id))

    def _drain(self, worker: SimulatedWorker, becomes: Role | None = None) -> None:
        """Let a worker finish what it has, then end it, or give it another role."""
        if worker.state == "draining":
            worker.becomes = becomes
            return
        if worker.state == "starting":
            return self._remove(worker, "it was drained")
        worker.becomes = becomes
        if worker.idle:
            return self._carry_out(self.world.done(worker, self.simulation.now))
        worker.state = "draining"
        self._post(routing.WorkerDraining(worker=worker.id, epoch=worker.card.epoch))
        self._at(self.simulation.now + nanos(self.plan.drain_timeout), partial(self._give_up, worker))

    def _give_up(self, worker: SimulatedWorker) -> None:
        """A drain has taken too long: what still runs goes on elsewhere, where it can."""
        if self.fleet.workers.get(worker.id) is worker and worker.state == "draining":
            if worker.becomes is not None:  # its engine goes on with what it has
                return self._carry_out(self.world.done(worker, self.simulation.now))
            self._break(worker, "it was drained, and its time is over")
            self._remove(worker, "it was drained, with requests that had not ended in time")

    def _break(self, worker: SimulatedWorker, why: str) -> None:
        self._carry_out(self.world.cut_off(worker, self.simulation.now))
        for event in self.world.broken(worker, self.simulation.now, why):
            self._post(event)

    def _carry_out(self, answers: Iterable[Answer]) -> None:
        for at, machine, event in answers:
            self.simulation.post(at, machine, event)

    def _remove(self, worker: SimulatedWorker, why: str) -> None:
        self._post(self.world.left(worker, self.simulation.now, why))

    # --- scaling -----------------------------------------------------------------------------------------------------

    def _decide(self) -> None:
        """Ask the policy, and do what it says."""
        assert self._policy is not None
        now = self.simulation.now
        self._at(now + nanos(self.plan.policy_interval), self._decide)
        self._scale(self._policy.decide(self._see(now)) or {})

    def _scale(self, wanted: Mapping[str, int]) -> dict[str, str]:
        """Let pools have so many workers; return what can't be, by pool."""
        problems: dict[str, str] = {}
        for pool, count in wanted.items():
            if pool not in self.plan.pools or count < 0:
                problems[pool] = f"{count} workers of {pool}: there is no such pool or number"
                self.refused.append(f"at {seconds(self.simulation.now):g} s, {problems[pool]}")
                continue
            self.pools[pool] = msgspec.structs.replace(self.pools[pool], desired=count)
            staying = self.fleet.staying(pool)
            for _ in range(count - len(staying)):
                self._start(pool)
            # Workers that do not serve go first, then the youngest, whose cache is the emptiest.
            order = staying[::-1]
            order.sort(key=lambda worker: worker.state != "starting")
            for worker in order[: max(0, len(staying) - count)]:
                self._drain(worker)
        return problems

    def _see(self, now: Nanos) -> Observation:
        assert self.observer is not None
        return self.observer.look(now, self.pools, self.router.waiting(self.plan.model))

    # --- what a planner wants ----------------------------------------------------------------------------------------

    def _look_for(self, now: Nanos, sender: str, effect: planning.Observe) -> Iterable[Answer]:
        return ((now, sender, planning.Observed(id=effect.id, observation=self._see(now))),)

    def _scale_for(self, now: Nanos, sender: str, effect: planning.Scale) -> Iterable[Answer]:
        problems = self._scale(effect.targets)
        for flip in effect.flips:
            able = [w for w in self.fleet.workers.values() if w.state == "ready" and w.card.role == flip.frm]
            able.sort(key=lambda worker: len(worker.running))  # those with least to finish
            for worker in able[: flip.count]:
                self._drain(worker, flip.to)
        return ((now, sender, planning.Scaled(id=effect.id, problems=problems)),)

    def _ticked_of(self, now: Nanos, sender: str, effect: planning.Ticked) -> Iterable[Answer]:
        self._ticked(effect.record)
        return ()

    def _alarmed(self, now: Nanos, sender: str, effect: planning.Alarm) -> Iterable[Answer]:
        self.alarms[effect.reason.code] = self.alarms.get(effect.reason.code, 0) + 1
        return ()

    def _look(self) -> None:
        """Pass the router's status to ``observe``."""
        assert self._observe is not None
        now = self.simulation.now
        self._at(now + nanos(self.plan.observe_every), self._look)
        self._observe(seconds(now), self.router.status(now))
