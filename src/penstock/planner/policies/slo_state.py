"""What does the default policy remember, and how does it see pools? The mix, what its model errs, who was needed."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from penstock.kernel.bins import Bins, quantiles
from penstock.kernel.values import Role
from penstock.planner.context import Context
from penstock.planner.performance.model import PerformanceModel
from penstock.planner.policies.slo_speeds import ROLES
from penstock.planner.seen import ModelSeen, Observation, PoolSeen, Traffic
from penstock.planner.shapes import DecayedShapes, Shapes, shape_bin
from penstock.planner.sizing import Sizing
from penstock.planner.stress import Floats, Stress

MIX_FOR = 300.0
"""Seconds in which half of what is known of the mix is forgotten."""
STEADY = 60.0
"""Seconds over which rate and fleet must not change much for a window to say how good the model of engines is."""
CHANGE = 0.2
"""How much a rate may change for that, relative."""
QUICK = 0.05
"""Rank of the answers that count as those which did not wait."""
WORSE = 0.05
"""By how much more must be missed than a rate that is not steady explains, for it to say something."""
BURST = 180.0
"""Seconds after which a burst has no part in what is missed any more."""
REGRET = 240.0
"""Seconds within which a worker that is given back should not be wanted again."""
PATIENCE_MAX, PATIENCE_FOR = 8.0, 1800.0
"""Most that the hold grows by such regrets, and seconds after which half of that is left."""
JUDGED = 20
"""Fewest judged requests of such a window."""
ROOM_UP = 4
"""How many times what is there may be wanted at once, where no budget says."""


class Pool(NamedTuple):
    """One pool as it is sized. ``lead``: seconds until what is ordered now serves."""

    name: str
    gpus: int
    desired: int
    ready: int
    least: int
    most: int
    lead: float
    max_seqs: float
    max_batched_tokens: float
    kv_tokens: float
    away: int = 0
    """Replicas of it that do another role at present..."""
    guests: int = 0
    """... and those of other pools that do its role."""
    flips: bool = False

    @property
    def workers(self) -> int:
        """How many are wanted to do its role."""
        return max(0, self.desired - self.away + self.guests)

    def replicas(self, workers: int) -> int:
        """Return how many replicas the pool should have, so that so many do its role."""
        return max(0, workers + self.away - self.guests)


class Pools(NamedTuple):
    """The pools of a model by role, and the GPUs that they may take together."""

    by_role: Mapping[Role, Pool]
    gpus_most: float


def pools_of(model: str, seen: ModelSeen, context: Context) -> Pools:
    """Return how a model's pools may be sized: those that do everything, and prefill and decode where both are."""
    budget = context.budget
    found: dict[Role, Pool] = {}
    for role in ROLES:
        named = seen.pool(role)
        if named is not None:
            found[role] = _pool(model, *named, context)
    if not {"prefill", "decode"} <= set(found):  # one of them alone serves nobody, or is planned by nobody
        found = {role: pool for role, pool in found.items() if role == "aggregated"}
    ours = {pool.name for pool in found.values()}
    if budget.max_gpus is None:
        return Pools(found, np.inf)
    others = sum(pool.gpus * pool.desired for _, name, pool in context.observation.pools() if name not in ours)
    return Pools(found, max(0, budget.max_gpus - others))


def _pool(model: str, name: str, seen: PoolSeen, context: Context) -> Pool:
    limits = context.budget.pools.get(name)
    least = context.budget.min_replicas if limits is None or limits.min_replicas is None else limits.min_replicas
    most = max(8, ROOM_UP * max(1, seen.desired))
    if context.budget.max_gpus is not None:
        most = context.budget.max_gpus // max(1, seen.gpus)
    if limits is not None and limits.max_replicas is not None:
        most = min(most, limits.max_replicas)
    if seen.limit is not None:
        most = min(most, seen.limit)
    coming = context.coming.get(name)
    if coming is not None and coming.given_up:
        most = min(most, max(seen.desired, seen.ready + coming.number))  # more of what does not start helps nobody
    engine = seen.engines[0] if seen.engines else None
    everywhere = context.model(model)
    doing = 0 if everywhere is None else sum(1 for _ in everywhere.engines(seen.role))
    own = sum(each.role == seen.role for each in seen.engines)
    return Pool(
        name=name,
        gpus=seen.gpus,
        desired=seen.desired,
        ready=seen.ready,
        least=least,
        most=max(least, most),
        # What is decided within a tick waits for its end; half of one, on average.
        lead=context.start_ups.quantile(model, seen, 0.8) + context.observation.window / 2.0,
        max_seqs=256.0 if engine is None or engine.max_seqs is None else float(engine.max_seqs),
        max_batched_tokens=8192.0
        if engine is None or engine.max_batched_tokens is None
        else float(engine.max_batched_tokens),
        kv_tokens=2e6 if engine is None or not engine.kv_tokens else float(engine.kv_tokens),
        away=len(seen.engines) - own,
        guests=doing - own,
        flips=seen.flips,
    )


class Memory:
    """What is remembered from tick to tick."""

    def __init__(self) -> None:
        self.shapes = DecayedShapes(MIX_FOR)
        self.stress = Stress()
        self.extra = 0.0
        """Seconds of TTFT that are neither waiting nor prefill."""
        self.accept = 1.0
        self.first_fleet: dict[Role, int] = {}
        """Workers that there were at first: what somebody thought right before anything was learnt."""
        self.quiet_since: float | None = None
        """When arrivals stopped; None while there are any."""
        self._isl: float | None = None
        self._osl: float | None = None
        self._first: float | None = None
        """When traffic was first seen."""
        self._needed: list[tuple[float, dict[Role, int]]] = []
        self._learnt: float = 0.0
        self._gone: dict[Role, float] = {}
        """When workers of a role were last given back."""
        self._patience, self._patient = 1.0, 0.0
        """By how much longer workers were last held, and when that was decided."""
        self.flipped: float | None = None
        """When roles were last changed."""

    def look(self, at: float, seen: ModelSeen) -> None:
        """Take in a tick's traffic."""
        traffic = seen.traffic
        if traffic is None:
            return
        bins: Bins = traffic.shapes
        if not bins and traffic.answered and traffic.osl:  # a source that knows means only
            isl = traffic.answered_prompt_tokens / traffic.answered
            bins = {shape_bin(round(isl), round(traffic.osl), traffic.hit_rate or 0.0): traffic.answered}
        self.shapes.add(at, bins)
        if traffic.accept_length:
            self.accept = max(1.0, traffic.accept_length)
        if self._first is None and traffic.arrived:
            self._first = at
        if traffic.arrived or seen.queued:
            self.quiet_since = None
        elif self.quiet_since is None:
            self.quiet_since = at

    def seen_for(self, at: float) -> float:
        """Return for how many seconds there has been traffic to learn from."""
        return 0.0 if self._first is None else at - self._first

    def mix(self) -> Shapes | None:
        """Return the mix of the last minutes."""
        return self.shapes.shapes()

    def measure(self, recent: Traffic | None, speed: PerformanceModel, shapes: Shapes) -> None:
        """Learn what the quickest answers took beyond prefill: neither waiting nor computing, such as a hand-off."""
        if recent is None:
            return
        (quick,) = quantiles(recent.ttft, (QUICK,))
        if quick is not None:
            order = np.argsort(shapes.fresh)
            place = int(np.searchsorted(np.cumsum(shapes.weight[order]), QUICK))
            own = float(speed.prefill(shapes.fresh[order][min(place, len(order) - 1)]))
            self.extra = max(0.0, quick - own)

    def keep(self, at: float, needed: Mapping[Role, int], hold: float) -> dict[Role, int]:
        """Return the most that was needed in the last ``hold`` seconds, this tick included."""
        self._needed = [(when, each) for when, each in self._needed if when >= at - hold]
        self._needed.append((at, dict(needed)))
        return {role: max(each.get(role, 0) for _, each in self._needed) for role in needed}

    def moved(self, at: float, steps: Mapping[Role, int]) -> None:
        """Take in what is changed: who is given back and wanted again soon should have stayed."""
        for role, step in steps.items():
            if step < 0:
                self._gone[role] = at
            elif step > 0 and at - self._gone.pop(role, -REGRET) < REGRET:
                self._patience = min(PATIENCE_MAX, 2.0 * self.patience(at))
                self._patient = at

    def patience(self, at: float) -> float:
        """Return by what factor workers are held for longer, after they were given back too early; it fades to 1."""
        faded: float = self._patience * 0.5 ** ((at - self._patient) / PATIENCE_FOR)
        return max(1.0, faded)

    def learn(self, context: Context, model: str, pools: Pools, sizing: Sizing) -> None:
        """Hold what was kept against what the model says, where the last minute was steady."""
        at = context.at
        looks = context.within(STEADY)
        if at - self._learnt < STEADY / 2 or len(looks) < 4 or at - looks[0].at < STEADY * 0.6:
            return
        fleets = {tuple(pool.ready for pool in look.models[model].pools.values()) for look in looks}
        if len(fleets) > 1:
            return
        halves = _halves(looks, model, at - STEADY / 2)
        if halves is None:
            return
        early, late = halves
        if not late.rate:
            return
        judged, kept = late.judged, late.in_slo
        if judged < JUDGED:
            return
        workers = {role: np.full(1, float(pool.ready)) for role, pool in pools.by_role.items()}
        rate = (early.rate + late.rate) / 2.0
        steady = abs(late.rate - early.rate) <= CHANGE * max(late.rate, early.rate)
        if not steady:
            # What misses now may be the fault of a burst before: so the highest rate of the last minutes is held
            # against it, and only what is worse than even that rate explains is learnt from.
            rate = highest_rate(context, model)

        def expected(factors: Floats) -> Floats:
            return sizing.kept({role: np.repeat(n, len(factors)) for role, n in workers.items()}, rate * factors)

        if not steady and kept / judged > float(expected(np.ones(1))[0]) - WORSE:
            return
        self._learnt = at
        self.stress.learn(kept, judged, expected)

    def snapshot(self) -> dict[str, Any]:
        return {
            "shapes": self.shapes.snapshot(),
            "stress": self.stress.snapshot(),
            "extra": self.extra,
            "accept": self.accept,
            "quiet_since": self.quiet_since,
            "needed": [[at, dict(each)] for at, each in self._needed],
            "learnt": self._learnt,
            "first": self._first,
            "flipped": self.flipped,
            "gone": dict(self._gone),
            "patience": [self._patience, self._patient],
            "first_fleet": dict(self.first_fleet),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self.shapes.restore(state["shapes"])
        self.stress.restore(state["stress"])
        self.extra, self.accept = state["extra"], state["accept"]
        self.quiet_since, self._learnt = state["quiet_since"], state["learnt"]
        self.flipped, self._gone = state["flipped"], dict(state["gone"])
        self._patience, self._patient = state["patience"]
        self._first, self.first_fleet = state["first"], dict(state["first_fleet"])
        self._needed = [(at, dict(each)) for at, each in state["needed"]]


def highest_rate(context: Context, model: str) -> float:
    """Return the highest rate of arrivals in any `STEADY` / 2 seconds of the last `BURST` seconds."""
    found, arrived, seconds = 0.0, 0, 0.0
    for look in context.within(BURST):
        traffic = look.models[model].traffic if model in look.models else None
        if traffic is not None:
            arrived, seconds = arrived + traffic.arrived, seconds + traffic.seconds
            if seconds >= STEADY / 2.0:
                found, arrived, seconds = max(found, arrived / seconds), 0, 0.0
    return found


def _halves(looks: Sequence[Observation], model: str, middle: float) -> tuple[Traffic, Traffic] | None:
    """Return the traffic before and after a second; None where a part of it could not be read."""
    found: list[Traffic | None] = [None, None]
    for look in looks:
        traffic = look.models[model].traffic if model in look.models else None
        if traffic is None:
            return None
        before = found[look.at > middle]
        found[look.at > middle] = traffic if before is None else before + traffic
    early, late = found
    return None if early is None or late is None else (early, late)
