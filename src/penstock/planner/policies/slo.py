"""How many workers keep the service level at the least cost, start-up time included? The default's PROPOSE step.

What is needed at a second h from now follows from the forecast's quantiles at h and the price of a miss
(`penstock.planner.sizing`). What is ordered now serves after the start-up time L: so the need at L is ordered, at once
and in full. What is given back can't be had again before L, and a start-up is paid like service: so a worker goes only
where nothing from now until L needs it (what is needed later can still be ordered), and nothing in the last ``hold``
seconds did.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from penstock.kernel.values import Role
from penstock.planner.context import Context
from penstock.planner.performance.sources import Known
from penstock.planner.plugins import Spec, silent_for
from penstock.planner.policies.slo_flips import PAUSE, SOON, Change, change
from penstock.planner.policies.slo_speeds import Speeds
from penstock.planner.policies.slo_state import Memory, Pool, Pools, pools_of
from penstock.planner.proposals import Because, Override, Prediction, Result, Target
from penstock.planner.seen import ModelSeen
from penstock.planner.serving import Limits, Service, Serving
from penstock.planner.settings import USUAL_ITL, USUAL_TTFT, SloTargets
from penstock.planner.sizing import Bounds, Candidate, Demand, Sizing, Table

OVERHEAD_OVER = 120.0
"""Seconds of answers from which is read what a TTFT has beyond waiting and prefill."""
CLASSES_OVER = 600.0
"""Seconds of answers from which the shares of classes are read."""
TABLES_FOR = 30.0
"""Seconds that tables are used before they are made anew from the mix as it is then."""
LEARN = 240.0
"""Seconds of traffic beyond the start-up time before anything is given back: until then no forecast was put to the
test."""
KEEP_MARGIN, KEEP_NOISE, KEEP_OVER = 0.04, 2.0, 150.0
"""How much more than is expected must fit before a worker goes: a share, and so many standard deviations of what is
counted in so many seconds. Without it, a rate at the edge would have a worker come and go all the time."""
DRAIN = 60.0
"""Seconds in which a backlog should be gone."""
BACKLOG_SHARE = 1.0
"""Most that a backlog adds to what is needed, as a share of the rate."""


class SloPropose:
    """Size one model's pools.

    Args:
        model: whose.
        slo: what is kept, and the price of a miss.
        known: what is known of engines of a role before they serve; the others are learnt from the passes seen.
    """

    def __init__(self, model: str, slo: SloTargets, known: Mapping[Role, Known] | None = None) -> None:
        self.spec = Spec(
            id=f"slo_propose:{model}",
            stage="propose",
            priority=50,
            needs=("traffic", "engines"),
            requires=("predictions",),
        )
        self.memory = Memory()
        self._model = model
        self._slo = slo
        self.speeds = Speeds({} if known is None else known)
        self._sizing: Sizing | None = None
        self._made: float | None = None

    @property
    def service(self) -> Service:
        """What is promised, in seconds."""
        return Service(self._slo.ttft or USUAL_TTFT, self._slo.itl or USUAL_ITL)

    def benchmarked(self, model: str, role: Role, metrics: Mapping[str, Any]) -> None:
        """Take in what a worker measured of itself."""
        if self.speeds.benchmarked(role, metrics):
            self._sizing = None

    def evaluate(self, context: Context) -> Result:
        """Return targets for every pool of the model that can be planned."""
        seen = context.model(self._model)
        prediction = context.predictions.get(self._model)
        if seen is None or prediction is None or not prediction.quantiles:
            return silent_for("no_forecast", f"nothing is forecast of {self._model} yet")
        pools = pools_of(self._model, seen, context)
        if not pools.by_role:
            return silent_for("no_pool", f"{self._model} has no pool that can be planned")
        memory = self.memory
        memory.look(context.at, seen)
        if not memory.first_fleet:
            memory.first_fleet = {role: pool.workers for role, pool in pools.by_role.items()}
        self.speeds.learn(seen)
        if memory.shapes.count < 1.0:
            return self._without_answers(seen, pools)
        if self._sizing is None or self._made is None or context.at - self._made >= TABLES_FOR:
            blind = [role for role in pools.by_role if not self.speeds.ready(role)]
            if blind:
                return silent_for("no_speed", f"how fast {', '.join(blind)} workers are is not known yet")
            self._sizing, self._made = self._tables(context, pools), context.at
        sizing = self._sizing
        memory.learn(context, self._model, pools, sizing)
        return self._propose(context, seen, pools, sizing, prediction)

    # --- steps --------------------------------------------------------------------------------------------------------

    def _without_answers(self, seen: ModelSeen, pools: Pools) -> Result:
        """Nothing was answered yet: wake who sleeps, and leave the others as they are."""
        arrived = 0 if seen.traffic is None else seen.traffic.arrived
        asleep = [pool for pool in pools.by_role.values() if pool.desired == 0]
        if asleep and (seen.held or arrived):
            targets = tuple(Target(pool=pool.name, replicas=1) for pool in asleep)
            text = f"requests of {self._model} wait and there is no worker: one is started"
            return Override(targets=targets, because=(Because(code="wake", text=text),))
        return silent_for("no_answers", f"no answer of {self._model} was seen yet, so its mix is not known")

    def _tables(self, context: Context, pools: Pools) -> Sizing:
        shapes = self.memory.mix()
        assert shapes is not None
        first: Role = "prefill" if "prefill" in pools.by_role else "aggregated"
        if first in pools.by_role:
            recent = context.traffic(self._model, OVERHEAD_OVER)
            self.memory.measure(recent, self.speeds.of(first), shapes)
        promises = self._promises(context)
        tables: dict[Role, Table] = {}
        price = 0.0
        for role, pool in pools.by_role.items():
            limits = Limits(pool.max_seqs, pool.max_batched_tokens, pool.kv_tokens)
            speed, extra, accept = self.speeds.of(role), self.memory.extra, self.memory.accept
            servings = [
                (weight, Serving(speed, limits, shapes, promise, extra=extra, accept=accept))
                for weight, promise in promises
            ]
            tables[role] = Table(servings, role)
            price = max(price, tables[role].least * pool.gpus) if role == "aggregated" else price
        if "prefill" in tables:
            halves = sum(tables[role].least * pools.by_role[role].gpus for role in tables if role != "aggregated")
            price = halves if not price else min(price, halves)
        weight = sum(weight for weight, _ in promises)
        return Sizing(tables, self._slo.miss_cost * price * weight)

    def _promises(self, context: Context) -> list[tuple[float, Service]]:
        """Return what is promised to each class, with its share of the requests times what its misses weigh."""
        recent = context.traffic(self._model, CLASSES_OVER)
        counts = {} if recent is None else {name: n for name, n in recent.classes.items() if name in self._slo.classes}
        answered = max(1, 0 if recent is None else recent.answered)
        promises = [(max(0.0, 1.0 - sum(counts.values()) / answered), self.service)]
        for name, count in counts.items():
            own = self._slo.classes[name]
            service = Service(own.ttft or self.service.ttft, own.itl or self.service.itl)
            promises.append((own.weight * count / answered, service))
        # All of them best effort: then any promise is as good as none, and the fleet is sized to keep up.
        return [each for each in promises if each[0] > 0.0] or [(1.0, self.service)]

    def _propose(
        self, context: Context, seen: ModelSeen, pools: Pools, sizing: Sizing, prediction: Prediction
    ) -> Result:
        lead = max(pool.lead for pool in pools.by_role.values())
        hold = self._slo.hold
        idle = self._idle(context, seen)
        bounds = {role: self._bounds(pool, idle) for role, pool in pools.by_role.items()}
        backlog = self._backlog(seen, pools, sizing, prediction, lead)
        needs: dict[float, Candidate] = {}
        order = sizing.best(self._demand(prediction, lead, backlog), bounds, pools.gpus_most)
        counted = max(1.0, _rate(prediction, 0.5, 0.0) * KEEP_OVER)
        margin = 1.0 + KEEP_MARGIN + KEEP_NOISE / math.sqrt(counted)
        for horizon in (0.0, lead / 2.0, lead):
            demand = self._demand(prediction, horizon, backlog if horizon >= lead else 0.0, margin)
            needs[horizon] = sizing.best(demand, bounds, pools.gpus_most)
        if idle:
            needs = {horizon: _none(each, bounds) for horizon, each in needs.items()}
            order = _none(order, bounds)
        keep = {role: max(each.workers[role] for each in needs.values()) for role in bounds}
        kept = self.memory.keep(context.at, keep, hold * self.memory.patience(context.at))
        learning = self.memory.seen_for(context.at) < lead + LEARN
        because: list[Because] = []
        flips = self._flips(context, seen, pools, sizing, prediction, lead)
        because += [each.because for each in flips]
        gained: dict[Role, int] = {
            role: sum(each.flip.count * ((each.flip.to == role) - (each.flip.frm == role)) for each in flips)
            for role in pools.by_role
        }
        wanted: dict[Role, int] = {}
        for role, pool in pools.by_role.items():
            now = pool.workers + gained[role]
            stay = max(kept[role], min(now, self.memory.first_fleet.get(role, 0))) if learning else kept[role]
            wanted[role] = max(order.workers[role], min(now, stay))
            if pool.desired == 0 and (seen.held or (seen.queued or 0) > 0):
                wanted[role] = max(1, wanted[role])
            if wanted[role] != now:
                because.append(self._reason(pool.name, now, wanted[role], lead, hold, prediction, order))
        self.memory.moved(context.at, {role: wanted[role] - pool.workers for role, pool in pools.by_role.items()})
        # A pool of prefill workers some of which decode must be that much larger to have as many that prefill.
        targets = {
            pool.name: max(0, pool.replicas(wanted[role]) - gained[role]) for role, pool in pools.by_role.items()
        }
        demand = self._demand(prediction, lead, backlog)
        chosen = sizing.candidate(wanted, demand, bounds)
        if not because:
            text = f"{_fleet(chosen.workers)} keep {chosen.kept:.1%} of what is expected in {lead:.0f} s"
            because.append(Because(code="fits", text=text))
        evidence = {
            "lead": lead,
            "demand": {"mean": round(demand.mean, 3), "q90": _rate(prediction, 0.9, lead)},
            "backlog": round(backlog, 3),
            "speed": {role: self.speeds.of(role).source for role in pools.by_role},
            "overhead": round(self.memory.extra, 4),
            "stress": round(self.memory.stress.factor, 3),
            "price": round(sizing.price, 3),
            "chosen": chosen.told(),
            "needs": {f"{h:g}": dict(one.workers) for h, one in needs.items()},
            "candidates": [one.told() for one in sizing.neighbours(chosen, demand, bounds)],
        }
        return Override(
            targets=tuple(Target(pool=name, replicas=count) for name, count in targets.items()),
            flips=tuple(each.flip for each in flips),
            because=tuple(because),
            evidence=evidence,
        )

    def _bounds(self, pool: Pool, idle: bool) -> Bounds:
        """Return what a pool may have. The last worker goes only after a silence, not because it has little to do."""
        least = pool.least
        if not least and pool.desired and not idle:
            least = 1
        return Bounds(least, max(least, pool.most), pool.gpus)

    def _flips(
        self, context: Context, seen: ModelSeen, pools: Pools, sizing: Sizing, prediction: Prediction, lead: float
    ) -> list[Change]:
        """Return the change of roles that should be made now, at most one."""
        halves = {role: pool for role, pool in pools.by_role.items() if role != "aggregated"}
        flipped = self.memory.flipped
        if not halves or not all(pool.flips for pool in halves.values()) or lead <= 2.0 * SOON:
            return []
        if flipped is not None and context.at - flipped < PAUSE:
            return []
        ready: dict[Role, int] = {role: sum(1 for _ in seen.engines(role)) for role in halves}
        soon, later = self._demand(prediction, SOON, 0.0), self._demand(prediction, lead, 0.0)
        found = change(self._model, ready, {role: pool.least for role, pool in halves.items()}, sizing, soon, later)
        if found is None:
            return []
        self.memory.flipped = context.at
        return [found]

    def _demand(self, prediction: Prediction, horizon: float, more: float, margin: float = 1.0) -> Demand:
        """Return the distribution of the rate at a second from now, made harder by what the model of engines errs.

        Args:
            more: requests per second beside what arrives; ``margin``: a factor on all of it.
        """
        ranks = sorted(prediction.quantiles)
        rates = np.array([np.interp(horizon, prediction.horizons, prediction.quantiles[rank]) for rank in ranks])
        return Demand.of_quantiles(ranks, (rates + more) * self.memory.stress.factor * margin)

    def _backlog(self, seen: ModelSeen, pools: Pools, sizing: Sizing, prediction: Prediction, lead: float) -> float:
        """Return the rate (requests/s) at which what waits now, and will still wait then, should be served."""
        waiting = float(seen.queued or 0) + sum(engine.waiting or 0 for engine in seen.engines(*pools.by_role))
        rate = float(np.interp(lead / 2, prediction.horizons, prediction.quantiles[0.5]))
        can = min(
            table.capacity(float(pools.by_role[role].ready), share=0.5) / self.memory.stress.factor
            for role, table in sizing.tables.items()
        )
        left = max(0.0, waiting + (rate - can) * lead) if waiting > 2.0 else 0.0
        return min(left / DRAIN, BACKLOG_SHARE * rate)

    def _idle(self, context: Context, seen: ModelSeen) -> bool:
        quiet = self.memory.quiet_since
        return quiet is not None and context.at - quiet >= self._slo.zero_after and not seen.held

    def _reason(
        self,
        pool: str,
        desired: int,
        wanted: int,
        lead: float,
        hold: float,
        prediction: Prediction,
        needed: Candidate,
    ) -> Because:
        facts = {
            "pool": pool,
            "was": desired,
            "wanted": wanted,
            "lead": lead,
            "rate_q50": _rate(prediction, 0.5, lead),
            "rate_q90": _rate(prediction, 0.9, lead),
        }
        if wanted > desired:
            text = (
                f"{pool} {desired} -> {wanted}: in {lead:.0f} s, when new workers serve, {facts['rate_q50']:.1f} "
                f"requests/s are expected ({facts['rate_q90']:.1f} at the 90th percentile), which "
                f"{_fleet(needed.workers)} serve with {needed.kept:.1%} in SLO"
            )
            return Because(code="up", text=text, facts=facts)
        text = (
            f"{pool} {desired} -> {wanted}: nothing in the next {lead:.0f} s needs more "
            f"({facts['rate_q90']:.1f} requests/s at the 90th percentile), nor did the last {hold:.0f} s"
        )
        return Because(code="down", text=text, facts=facts)

    # --- state --------------------------------------------------------------------------------------------------------

    def snapshot(self) -> Any:
        sizing = None if self._sizing is None else self._sizing.snapshot()
        return {
            "memory": self.memory.snapshot(),
            "speeds": self.speeds.snapshot(),
            "sizing": sizing,
            "made": self._made,
        }

    def restore(self, state: Any) -> None:
        self.memory.restore(state["memory"])
        self.speeds.restore(state["speeds"])
        self._sizing = None if state["sizing"] is None else Sizing.restored(state["sizing"])
        self._made = state["made"]


def _none(found: Candidate, bounds: Mapping[Role, Bounds]) -> Candidate:
    """Return the smallest fleet there may be."""
    return found._replace(workers={role: bound.least for role, bound in bounds.items()})


def _rate(prediction: Prediction, rank: float, horizon: float) -> float:
    return round(float(np.interp(horizon, prediction.horizons, prediction.quantiles[rank])), 2)


def _fleet(workers: Mapping[Role, int]) -> str:
    return " and ".join(f"{count} {role}" for role, count in workers.items()) + " workers"
