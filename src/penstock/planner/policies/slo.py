"""Policy slo: the PROPOSE step that keeps the service level at the least cost, start-up time included.

The need at h seconds from now follows from the forecast's quantiles at h and the price of a miss
(`penstock.planner.sizing.fleet_sizing`). An order now serves after the start-up time L: so the need at L is ordered,
at once and in full. A removed worker can't be had again before L, and a start-up is paid like service: so a worker is
removed only where no need from now until L includes it (later needs can still be ordered), where no work waits, and
where keeping it for the return of the need is not worth its GPU (`penstock.planner.policies.slo_returns`).
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from penstock.kernel.machine import Snapshot
from penstock.kernel.plurals import counted
from penstock.kernel.values import LatencyTargets, Role
from penstock.planner.observation import ModelState
from penstock.planner.plugins.plugin_context import PluginContext
from penstock.planner.plugins.plugin_registry import PluginSpec, silent_for
from penstock.planner.plugins.proposals import Override, PoolTarget, Prediction, Reason, Result
from penstock.planner.policies.policy_inputs import PolicyInputs
from penstock.planner.policies.slo_flips import PAUSE, SOON, RoleChange, change
from penstock.planner.policies.slo_reasons import ExpectedLoad, FloorReason, ceiling, reason
from penstock.planner.policies.slo_speeds import RoleSpeeds
from penstock.planner.policies.slo_state import (
    WAITING_LEAST,
    PendingChanges,
    SloMemory,
    SloPool,
    SloPools,
    pools_of,
    waiting,
    work_waits,
)
from penstock.planner.remembering import Remembering
from penstock.planner.settings import SloPolicySettings
from penstock.planner.sizing.attainment import AttainmentModel
from penstock.planner.sizing.fleet_sizing import Bounds, FleetCandidate, ShareTable, Sizing, UncertainDemand
from penstock.planner.sizing.workload_mix import WorkloadMix

OVERHEAD_OVER = 120.0
"""Seconds of answers used to measure the part of TTFT beyond waiting and prefill."""
OVERHEAD_MOST = 0.5
"""Share of the TTFT target above which that part is waiting all the same."""
CLASSES_OVER = 600.0
"""Seconds of answers used for the shares of classes."""
TABLES_FOR = 30.0
"""Seconds for which tables are used before they are made anew from the then current mix."""
LEARN = 240.0
"""Seconds of traffic beyond the start-up time before any worker is removed: until then no forecast was put to the
test."""
USED_OVER = 30.0
"""Seconds of arrivals that show how many workers are used."""
KEEP_MARGIN, KEEP_NOISE, KEEP_OVER = 0.04, 2.0, 150.0
"""Margin over the expected load before a worker is removed: a share, and so many standard deviations of the
requests counted in so many seconds. Without it, a rate at the edge would add and remove a worker all the time."""
DRAIN = 60.0
"""Seconds in which a backlog should be gone."""
BACKLOG_SHARE = 1.0
"""Most that a backlog adds to the needed rate, as a share of it."""
WAITS = 0.5
"""Share of the TTFT target from which the time to start the waiting requests counts as waiting work."""
FREE_MAX = 100_000
"""Workers of a role where no limit holds; the sizing itself leaves out numbers that no rate needs."""
SHORT = 0.005
"""Gain in attainment without limits from which they are reported as binding."""


class SloPropose(Remembering):
    """Sizes one model's pools.

    Args:
        model: its name.
        settings: the price of a miss, and what else the policy may be told.
        inputs: the SLO, and known speeds of engines before they serve; the others are learnt from the observed passes.
    """

    memory: SloMemory
    speeds: RoleSpeeds
    _made: float | None

    def __init__(self, model: str, settings: SloPolicySettings, inputs: PolicyInputs) -> None:
        self.spec = PluginSpec(
            id=f"slo_propose:{model}",
            stage="propose",
            priority=50,
            needs=("traffic", "engines"),
            requires=("predictions",),
        )
        self.memory = SloMemory()
        self._model = model
        self._settings = settings
        self._inputs = inputs
        self.speeds = RoleSpeeds(inputs.of(model))
        self._sizing: Sizing | None = None
        self._made = None

    def benchmarked(self, model: str, role: Role, metrics: Mapping[str, Any]) -> None:
        """Add a worker's own measurement."""
        if self.speeds.benchmarked(role, metrics):
            self._sizing = None

    def evaluate(self, context: PluginContext) -> Result:
        """Return targets for every pool of the model that can be planned."""
        observed = context.model(self._model)
        prediction = context.predictions.get(self._model)
        if observed is None or prediction is None or not prediction.quantiles:
            return silent_for("no_forecast", f"nothing is forecast of {self._model} yet")
        pools = pools_of(self._model, observed, context, self.memory.changing)
        if not pools.by_role:
            return silent_for("no_pool", f"{self._model} has no pool that can be planned")
        memory = self.memory
        memory.look(context.at, observed)
        if not memory.first_fleet:
            memory.first_fleet = {role: sized.workers for role, sized in pools.by_role.items()}
        self.speeds.learn(observed)
        self.speeds.learn_from_answers(context, self._model)
        if memory.shapes.count < 1.0:
            return self._without_answers(observed, pools)
        if self._sizing is None or self._made is None or context.at - self._made >= TABLES_FOR:
            blind = [role for role in pools.by_role if not self.speeds.ready(role)]
            if blind:
                return silent_for("no_speed", f"how fast {', '.join(blind)} workers are is not known yet")
            self._sizing, self._made = self._tables(context, pools), context.at
        sizing = self._sizing
        memory.learn(context, self._model, pools, sizing)
        return self._propose(context, observed, pools, sizing, prediction)

    # --- steps --------------------------------------------------------------------------------------------------------

    def _without_answers(self, observed: ModelState, pools: SloPools) -> Result:
        """Before the first answer: wake pools without workers, and leave the others unchanged."""
        arrived = 0 if observed.traffic is None else observed.traffic.arrived
        asleep = [each.name for each in pools.by_role.values() if each.pool.desired == 0]
        if asleep and (observed.without_worker or arrived):
            targets = tuple(PoolTarget(pool=name, replicas=1) for name in asleep)
            text = f"requests of {self._model} wait and there is no worker: one is started"
            return Override(targets=targets, reasons=(Reason(code="wake", text=text),))
        return silent_for("no_answers", f"no answer of {self._model} was seen yet, so its mix is not known")

    def _tables(self, context: PluginContext, pools: SloPools) -> Sizing:
        shapes = self.memory.mix()
        assert shapes is not None
        first: Role = "prefill" if "prefill" in pools.by_role else "aggregated"
        if first in pools.by_role:
            self._overhead(context, first, shapes)
        promises = self._promises(context)
        tables: dict[Role, ShareTable] = {}
        price = 0.0
        for role, sized in pools.by_role.items():
            limits = sized.limits
            speed, extra, accept = self.speeds.of(role), self.memory.extra, self.memory.accept
            servings = [
                (weight, AttainmentModel(speed, limits, shapes, promise, extra=extra, accept=accept))
                for weight, promise in promises
            ]
            tables[role] = ShareTable(servings, role)
            price = max(price, tables[role].least * sized.pool.gpus) if role == "aggregated" else price
        if "prefill" in tables:
            halves = sum(tables[role].least * pools.by_role[role].pool.gpus for role in tables if role != "aggregated")
            price = halves if not price else min(price, halves)
        weight = sum(weight for weight, _ in promises)
        return Sizing(tables, self._settings.miss_cost * price * weight, price)

    def _overhead(self, context: PluginContext, first: Role, shapes: WorkloadMix) -> None:
        """Measure the part of TTFT beyond waiting and prefill."""
        recent = context.traffic(self._model, OVERHEAD_OVER)
        if recent is None:
            return
        looks = (look.models.get(self._model) for look in context.within(OVERHEAD_OVER))
        waited = any(work_waits(observed) for observed in looks if observed)
        most = OVERHEAD_MOST * self._inputs.ttft
        self.memory.measure(recent, self.speeds.of(first), shapes, waited=waited, most=most)

    def _promises(self, context: PluginContext) -> list[tuple[float, LatencyTargets]]:
        """Return the targets of each class, with its share of the requests times the weight of its misses."""
        recent = context.traffic(self._model, CLASSES_OVER)
        classes, service = self._inputs.slo.classes, LatencyTargets(*self._inputs.slo.planned)
        counts = {} if recent is None else {name: n for name, n in recent.classes.items() if name in classes}
        answered = max(1, 0 if recent is None else recent.answered)
        promises = [(max(0.0, 1.0 - sum(counts.values()) / answered), service)]
        for name, count in counts.items():
            own = classes[name]
            promises.append(
                (own.weight * count / answered, LatencyTargets(own.ttft or service.ttft, own.itl or service.itl))
            )
        # All of them best effort: then any target is as good as none, and the fleet is sized to keep up.
        return [each for each in promises if each[0] > 0.0] or [(1.0, service)]

    def _propose(
        self, context: PluginContext, observed: ModelState, pools: SloPools, sizing: Sizing, prediction: Prediction
    ) -> Result:
        lead = max(sized.lead for sized in pools.by_role.values())
        idle = self._idle(context, observed)
        bounds = {role: self._bounds(sized, idle) for role, sized in pools.by_role.items()}
        backlog = self._backlog(observed, pools, sizing, prediction, lead)
        demand = self._demand(prediction, lead, backlog)
        order = sizing.best(demand, bounds, pools.gpus_most)
        counted = max(1.0, _predicted_rate(prediction, 0.5, 0.0) * KEEP_OVER)
        margin = 1.0 + KEEP_MARGIN + KEEP_NOISE / math.sqrt(counted)
        needs: dict[float, FleetCandidate] = {}
        for horizon in (0.0, lead / 2.0, lead):
            harder = self._demand(prediction, horizon, backlog if horizon >= lead else 0.0, margin)
            needs[horizon] = sizing.best(harder, bounds, pools.gpus_most)
        if idle:
            needs = {horizon: _none(each, bounds) for horizon, each in needs.items()}
            order = _none(order, bounds)
        expected = ExpectedLoad(lead, _predicted_rate(prediction, 0.5, lead), _predicted_rate(prediction, 0.9, lead))
        flips = self._flips(context, observed, pools, sizing, prediction, lead)
        reasons = [each.reason for each in flips]
        gained: dict[Role, int] = {
            role: sum(each.flip.count * ((each.flip.to == role) - (each.flip.frm == role)) for each in flips)
            for role in pools.by_role
        }
        now = {role: sized.workers + gained[role] for role, sized in pools.by_role.items()}
        soon = self._demand(prediction, 0.0, 0.0)
        floors: dict[Role, FloorReason] = {}
        used = self._used(context, sizing, bounds, pools)
        for role, sized in pools.by_role.items():
            self._remember(context.at, role, used, needs, order, sizing, soon, lead)
            floors[role] = self._floor(context, observed, sized, now[role], needs, sizing, idle)
        wanted = {role: max(order.workers[role], min(now[role], floors[role].workers)) for role in pools.by_role}
        changing = self.memory.changing
        if changing is not None and context.at - changing.at < PAUSE and order.gpus <= _gpus_of_workers(pools, now):
            wanted = now  # a worker that changes its role next is not removed, and its coming work is not ordered
        for role, sized in pools.by_role.items():
            if sized.pool.desired == 0 and (observed.without_worker or (observed.queued or 0) > 0):
                wanted[role] = max(1, wanted[role])
        wanted = _within_gpu_ceiling(wanted, order, pools)
        reasons += [
            reason(sized, now[role], wanted[role], order, floors[role], expected)
            for role, sized in pools.by_role.items()
        ]
        # Changes come first: the first reason is shown where there is room for one.
        reasons.sort(key=lambda each: each.code in ("fits", "flip") or each.facts["was"] == each.facts["wanted"])
        bound = self._ceiling(pools, sizing, demand, bounds, order)
        # A prefill pool with some workers that decode must be that much larger to have as many that prefill.
        targets = {
            sized.name: max(0, sized.replicas(wanted[role]) - gained[role]) for role, sized in pools.by_role.items()
        }
        chosen = sizing.candidate(wanted, demand, bounds)
        evidence = {
            "lead": lead,
            "demand": {"mean": round(demand.mean, 3), "q90": _predicted_rate(prediction, 0.9, lead)},
            "backlog": round(backlog, 3),
            "speed": {role: self.speeds.of(role).source for role in pools.by_role},
            "overhead": round(self.memory.extra, 4),
            "stress": round(self.memory.stress.factor, 3),
            "price": round(sizing.price, 3),
            "chosen": chosen.as_data(),
            "cheapest": order.as_data(),
            "floors": {pools.by_role[role].name: floor._asdict() for role, floor in floors.items()},
            "needs": {f"{h:g}": dict(one.workers) for h, one in needs.items()},
            "candidates": [one.as_data() for one in sizing.neighbours(chosen, demand, bounds)],
        }
        return Override(
            targets=tuple(PoolTarget(pool=name, replicas=count) for name, count in targets.items()),
            flips=tuple(each.flip for each in flips),
            reasons=tuple(reasons),
            bound=tuple(bound),
            evidence=evidence,
        )

    def _remember(
        self,
        at: float,
        role: Role,
        used: Mapping[Role, int],
        needs: Mapping[float, FleetCandidate],
        order: FleetCandidate,
        sizing: Sizing,
        soon: UncertainDemand,
        lead: float,
    ) -> None:
        """Learn when workers that were not needed are needed again, and what their absence costs then."""
        others = needs[0.0].workers

        def harm(size: int) -> float:
            less, full = ({**others, role: count} for count in (size - 1, size))
            return sizing.expected_harm(less, soon) - sizing.expected_harm(full, soon)

        self.memory.returns(role).look(
            at,
            used=used[role],
            now=needs[0.0].workers[role],
            order=order.workers[role],
            needed=max(each.workers[role] for each in needs.values()),
            lead=lead,
            harm=harm,
        )

    def _used(
        self, context: PluginContext, sizing: Sizing, bounds: Mapping[Role, Bounds], pools: SloPools
    ) -> Mapping[Role, int]:
        """Return the workers that recent arrivals need, independent of any forecast."""
        recent = context.traffic(self._model, USED_OVER)
        if recent is None or not recent.arrived:
            return {role: bound.least for role, bound in bounds.items()}
        rate = recent.arrived / recent.seconds * self.memory.stress.factor
        return sizing.best(UncertainDemand(np.array([rate]), np.ones(1)), bounds, pools.gpus_most).workers

    def _floor(
        self,
        context: PluginContext,
        observed: ModelState,
        sized: SloPool,
        now: int,
        needs: Mapping[float, FleetCandidate],
        sizing: Sizing,
        idle: bool,
    ) -> FloorReason:
        """Return the number below which a pool must not be brought at present, and why."""
        role, lead = sized.pool.role, sized.lead
        most = max(each.workers[role] for each in needs.values())
        floors = [FloorReason(most, "soon", f"{most} are needed within {lead:.0f} s, with a margin")]
        if not idle:
            size, age, patience = self.memory.returns(role).worth_keeping(
                context.at, now, self._settings.hold, lead, sized.pool.gpus
            )
            text = (
                f"the last of {size} was needed {age:.0f} s ago, and is kept for {patience:.0f} s in case it is wanted "
                "again before a new one could serve"
            )
            floors.append(FloorReason(size, "returns", text))
        if self.memory.traffic_seconds(context.at) < lead + LEARN:
            first = self.memory.first_fleet.get(role, 0)
            text = f"none of the first fleet goes before forecasts were put to the test for {lead + LEARN:.0f} s"
            floors.append(FloorReason(first, "learning", text))
        waits = waiting(observed)
        seconds = waits * sizing.tables[role].least / max(1, sized.ready)
        if waits > WAITING_LEAST and seconds > WAITS * self._inputs.ttft:
            text = f"no worker goes while work waits: {counted(round(waits), 'request')}"
            floors.append(FloorReason(now, "waiting", text))
        return max(floors, key=lambda floor: floor.workers)

    def _ceiling(
        self,
        pools: SloPools,
        sizing: Sizing,
        demand: UncertainDemand,
        bounds: Mapping[Role, Bounds],
        order: FleetCandidate,
    ) -> list[Reason]:
        """Return the cost of the limits, where they hold the fleet back."""
        width = min(sized.pool.gpus for sized in pools.by_role.values())
        full = order.gpus + width > pools.gpus_most
        if not full and all(order.workers[role] < sized.limit for role, sized in pools.by_role.items()):
            return []
        free = sizing.best(demand, {role: each._replace(most=FREE_MAX) for role, each in bounds.items()})
        if free.gpus <= order.gpus or free.attainment - order.attainment < SHORT:
            return []
        return [ceiling(self._model, pools.gpus_most, order, free)]

    def _bounds(self, sized: SloPool, idle: bool) -> Bounds:
        """Return a pool's bounds. The last worker is removed only after a silence, not because it has little to do."""
        least = sized.least
        if not least and sized.pool.desired and not idle:
            least = 1
        return Bounds(least, max(least, sized.most), sized.pool.gpus)

    def _flips(
        self,
        context: PluginContext,
        observed: ModelState,
        pools: SloPools,
        sizing: Sizing,
        prediction: Prediction,
        lead: float,
    ) -> list[RoleChange]:
        """Return the change of roles for this moment, at most one."""
        halves = {role: sized for role, sized in pools.by_role.items() if role != "aggregated"}
        last = self.memory.changing
        if not halves or not all(sized.flips for sized in halves.values()) or lead <= 2.0 * SOON:
            return []
        if last is not None and context.at - last.at < PAUSE:
            return []
        ready: dict[Role, int] = {role: sum(1 for _ in observed.engines(role)) for role in halves}
        soon, later = self._demand(prediction, SOON, 0.0), self._demand(prediction, lead, 0.0)
        best = change(self._model, ready, {role: sized.least for role, sized in halves.items()}, sizing, soon, later)
        if best is None:
            return []
        flip = best.flip
        self.memory.changing = PendingChanges(context.at, flip.frm, flip.to, flip.count, ready[flip.to])
        return [best]

    def _demand(self, prediction: Prediction, horizon: float, more: float, margin: float = 1.0) -> UncertainDemand:
        """Return the distribution of the rate at a second from now, raised by the learnt error of the engine model.

        Args:
            more: requests per second beside the arrivals; ``margin``: a factor on all of it.
        """
        ranks = sorted(prediction.quantiles)
        rates = np.array([np.interp(horizon, prediction.horizons, prediction.quantiles[rank]) for rank in ranks])
        return UncertainDemand.of_quantiles(ranks, (rates + more) * self.memory.stress.factor * margin)

    def _backlog(
        self, observed: ModelState, pools: SloPools, sizing: Sizing, prediction: Prediction, lead: float
    ) -> float:
        """Return the rate (requests/s) for the waiting work that will still wait after the start-up."""
        waits = waiting(observed, tuple(pools.by_role))
        rate = float(np.interp(lead / 2, prediction.horizons, prediction.quantiles[0.5]))
        can = min(
            table.capacity(pools.by_role[role].serving, share=0.5) / self.memory.stress.factor
            for role, table in sizing.tables.items()
        )
        left = max(0.0, waits + (rate - can) * lead) if waits > WAITING_LEAST else 0.0
        return min(left / DRAIN, BACKLOG_SHARE * rate)

    def _idle(self, context: PluginContext, observed: ModelState) -> bool:
        quiet = self.memory.quiet_since
        return quiet is not None and context.at - quiet >= self._settings.zero_after and not observed.without_worker

    # --- state --------------------------------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        return {**super().snapshot(), "sizing": None if self._sizing is None else self._sizing.snapshot()}

    def restore(self, state: Snapshot) -> None:
        super().restore(state)
        self._sizing = None if state["sizing"] is None else Sizing.restored(state["sizing"])


def _none(fleet: FleetCandidate, bounds: Mapping[Role, Bounds]) -> FleetCandidate:
    """Return the smallest fleet within bounds."""
    return fleet._replace(workers={role: bound.least for role, bound in bounds.items()})


def _predicted_rate(prediction: Prediction, rank: float, horizon: float) -> float:
    return round(float(np.interp(horizon, prediction.horizons, prediction.quantiles[rank])), 2)


def _gpus_of_workers(pools: SloPools, workers: Mapping[Role, int]) -> int:
    return sum(pools.by_role[role].pool.gpus * count for role, count in workers.items())


def _within_gpu_ceiling(wanted: Mapping[Role, int], order: FleetCandidate, pools: SloPools) -> dict[Role, int]:
    """Return numbers that fit under the ceiling: workers kept beyond the cheapest fleet give way to ordered ones."""
    workers = dict(wanted)
    while _gpus_of_workers(pools, workers) > pools.gpus_most:
        role = max(workers, key=lambda each: workers[each] - order.workers[each])
        if workers[role] <= order.workers[role]:
            break
        workers[role] -= 1
    return workers
