"""State of policy slo: its view of pools, and its memory of the mix, the model's error and the needed workers."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from penstock.kernel.latency_bins import Bins
from penstock.kernel.values import USUAL_LIMITS, EngineLimits, Pool, Role, Traffic
from penstock.planner.observation import ModelState, Observation, PoolState
from penstock.planner.performance.performance_model import PerformanceModel
from penstock.planner.performance.streamed_answers import quickest
from penstock.planner.plugins.plugin_context import PluginContext
from penstock.planner.policies.slo_flips import PAUSE
from penstock.planner.policies.slo_returns import ReturnTimes
from penstock.planner.policies.slo_speeds import ROLES
from penstock.planner.remembering import Remembering
from penstock.planner.sizing.fleet_sizing import Sizing
from penstock.planner.sizing.load_correction import Floats, LoadCorrection
from penstock.planner.sizing.workload_mix import DecayedWorkloadMix, WorkloadMix, shape_bin

MIX_FOR = 300.0
"""Half-life of the workload mix, in seconds."""
STEADY = 60.0
"""Seconds over which rate and fleet must not change much for a window to measure the engine model's error."""
CHANGE = 0.2
"""How much a rate may change for that, relative."""
WORSE = 0.05
"""Excess of misses, over those that an unsteady rate explains, from which a window counts."""
BURST = 180.0
"""Seconds after which a burst no longer affects the misses."""
WAITING_LEAST = 2.0
"""Waiting requests per worker that mean nothing: some always wait for a moment."""
JUDGED = 20
"""Fewest judged requests of such a window."""
ROOM_UP = 4
"""Largest factor on the present replicas to order at once, where no budget limits them."""


class SloPool(NamedTuple):
    """One pool as it is sized. ``lead``: seconds until an order of now serves; ``ready``: workers that have its
    role, those of other pools included."""

    name: str
    pool: Pool
    ready: int
    least: int
    most: int
    lead: float
    limits: EngineLimits[int]
    """Of one of its engines."""
    away: int = 0
    """Its replicas that have another role at present..."""
    guests: int = 0
    """... and those of other pools that have its role."""
    flips: bool = False
    serving: float = 0.0
    """Workers that serve until ``lead`` on average: the ready ones, and the starting ones for the time then left."""
    limit: float = np.inf
    """Workers that settings and connector allow; ``most`` is less where one tick should not go further."""

    @property
    def workers(self) -> int:
        """Workers that are desired for its role."""
        return max(0, self.pool.desired - self.away + self.guests)

    def replicas(self, workers: int) -> int:
        """Return the replicas of the pool that give so many workers of its role."""
        return max(0, workers + self.away - self.guests)


class SloPools(NamedTuple):
    """The pools of a model by role, and the GPUs that they may take together."""

    by_role: Mapping[Role, SloPool]
    gpus_most: float


class PendingChanges(NamedTuple):
    """A change of role that was ordered at second ``at``. Its workers finish their requests before it can be observed.
    ``doing``: workers that had role ``to`` before."""

    at: float
    frm: Role
    to: Role
    workers: int
    doing: int

    def left(self, at: float, observed: ModelState) -> int:
        """Return how many workers are still changing."""
        done = sum(1 for _ in observed.engines(self.to)) - self.doing
        return max(0, self.workers - done) if at - self.at < PAUSE else 0


def pools_of(
    model: str, observed: ModelState, context: PluginContext, changing: PendingChanges | None = None
) -> SloPools:
    """Return how a model's pools may be sized: aggregated ones, and prefill and decode where both exist."""
    budget = context.budget
    by_role: dict[Role, SloPool] = {}
    for role in ROLES:
        named = observed.pool(role)
        if named is not None:
            by_role[role] = _sized(model, *named, context)
    if not {"prefill", "decode"} <= set(by_role):  # one of them alone serves no request, or belongs to no plan
        by_role = {role: sized for role, sized in by_role.items() if role == "aggregated"}
    if changing is not None and changing.frm in by_role and changing.to in by_role:
        left, frm, to = changing.left(context.at, observed), by_role[changing.frm], by_role[changing.to]
        by_role[changing.frm] = frm._replace(away=frm.away + left)
        by_role[changing.to] = to._replace(guests=to.guests + left)
    ours = {sized.name for sized in by_role.values()}
    if budget.max_gpus is None:
        return SloPools(by_role, np.inf)
    others = [state.pool for _, name, state in context.observation.pools() if name not in ours]
    return SloPools(by_role, max(0, budget.max_gpus - sum(pool.gpus * pool.desired for pool in others)))


def _sized(model: str, name: str, state: PoolState, context: PluginContext) -> SloPool:
    pool = state.pool
    limits = context.budget.pools.get(name)
    least = context.budget.min_replicas if limits is None or limits.min_replicas is None else limits.min_replicas
    allowed = [pool.limit, None if limits is None else limits.max_replicas]
    if context.budget.max_gpus is not None:
        allowed.append(context.budget.max_gpus // max(1, pool.gpus))
    limit = min((each for each in allowed if each is not None), default=np.inf)
    # Where only the connector limits the GPUs, or nothing does, one tick must not order without bound.
    room = np.inf if context.budget.max_gpus is not None else max(8, ROOM_UP * max(1, pool.desired))
    most = int(min(limit, room))
    coming = context.coming.get(name)
    if coming is not None and coming.given_up:
        most = min(most, max(pool.desired, state.ready + coming.number))  # more replicas that do not start help nothing
    everywhere = context.model(model)
    doing = 0 if everywhere is None else sum(1 for _ in everywhere.engines(pool.role))
    own = sum(each.role == pool.role for each in state.engines)
    # A decision waits for the end of its tick; half a tick, on average.
    lead = context.start_ups.quantile(model, state, 0.8) + context.observation.window / 2.0
    ready = max(0, state.ready + doing - len(state.engines))
    due = () if coming is None else coming.due
    return SloPool(
        name=name,
        pool=pool,
        ready=ready,
        least=least,
        most=max(least, most),
        lead=lead,
        limits=state.engines[0].limits.filled(USUAL_LIMITS) if state.engines else USUAL_LIMITS,
        away=len(state.engines) - own,
        guests=doing - own,
        flips=state.flips,
        serving=ready + sum(max(0.0, 1.0 - each / lead) for each in due),
        limit=limit,
    )


class SloMemory(Remembering):
    """Memory from tick to tick."""

    shapes: DecayedWorkloadMix
    stress: LoadCorrection
    extra: float
    """Seconds of TTFT that are neither waiting nor prefill."""
    accept: float
    first_fleet: dict[Role, int]
    """The first workers: the operator's choice before anything was learnt."""
    quiet_since: float | None
    """When arrivals stopped; None while there are any."""
    _first: float | None
    """When traffic was first observed."""
    _learnt: float
    _returns: dict[Role, ReturnTimes]
    changing: PendingChanges | None
    """The last change of roles."""

    def __init__(self) -> None:
        self.shapes = DecayedWorkloadMix(MIX_FOR)
        self.stress = LoadCorrection()
        self.extra = 0.0
        self.accept = 1.0
        self.first_fleet = {}
        self.quiet_since = None
        self._isl: float | None = None
        self._osl: float | None = None
        self._first = None
        self._learnt = 0.0
        self._returns = {}
        self.changing = None

    def look(self, at: float, observed: ModelState) -> None:
        """Add a tick's traffic."""
        traffic = observed.traffic
        if traffic is None:
            return
        bins: Bins = traffic.shapes
        mean = traffic.shape
        if not bins and mean.osl:  # a source that has means only
            isl = traffic.answered_prompt_tokens / traffic.answered
            bins = {shape_bin(round(isl), round(mean.osl), mean.hit_rate or 0.0): traffic.answered}
        self.shapes.add(at, bins)
        if traffic.accept_length:
            self.accept = max(1.0, traffic.accept_length)
        if self._first is None and traffic.arrived:
            self._first = at
        if traffic.arrived or observed.queued:
            self.quiet_since = None
        elif self.quiet_since is None:
            self.quiet_since = at

    def traffic_seconds(self, at: float) -> float:
        """Return for how many seconds there has been traffic to learn from."""
        return 0.0 if self._first is None else at - self._first

    def mix(self) -> WorkloadMix | None:
        """Return the mix of the last minutes."""
        return self.shapes.shapes()

    def measure(
        self, recent: Traffic, speed: PerformanceModel, shapes: WorkloadMix, *, waited: bool, most: float
    ) -> None:
        """Learn how long the fastest answers took beyond prefill: neither waiting nor computing, such as a hand-off.

        Args:
            waited: whether even the fastest of these answers may have waited: then the value can fall, but not rise.
            most: seconds above which it is waiting all the same, where engines do not report waiting requests.
        """
        quick = quickest(recent, shapes)
        if quick is not None:
            tokens, seconds = quick
            extra = min(most, max(0.0, seconds - float(speed.prefill(tokens))))
            self.extra = min(self.extra, extra) if waited else extra

    def returns(self, role: Role) -> ReturnTimes:
        """Return the return times of a role's workers."""
        return self._returns.setdefault(role, ReturnTimes())

    def learn(self, context: PluginContext, model: str, pools: SloPools, sizing: Sizing) -> None:
        """Compare the attainment with the model's prediction, where the last minute was steady."""
        at = context.at
        looks = context.within(STEADY)
        if at - self._learnt < STEADY / 2 or len(looks) < 4 or at - looks[0].at < STEADY * 0.6:
            return
        fleets = {tuple(sum(1 for _ in look.models[model].engines(role)) for role in pools.by_role) for look in looks}
        if len(fleets) > 1:
            return
        halves = _halves(looks, model, at - STEADY / 2)
        if halves is None:
            return
        early, late = halves
        if not late.rate:
            return
        judged, in_slo = late.judged, late.in_slo
        if judged < JUDGED:
            return
        workers = {role: np.full(1, float(sized.ready)) for role, sized in pools.by_role.items()}
        rate = (early.rate + late.rate) / 2.0
        busy = busy_for(context, model)
        steady = not busy and abs(late.rate - early.rate) <= CHANGE * max(late.rate, early.rate)
        if not steady:
            # Present misses may come from an earlier burst, for as long as its work waits, or from a fleet that was
            # smaller then: so the highest rate since then and the smallest fleet count, and only misses that even
            # these do not explain are learnt from.
            rate = highest_rate(context, model, busy + BURST)
            workers = {role: np.full(1, smallest_fleet(context, model, role, busy + BURST)) for role in workers}

        def expected(factors: Floats) -> Floats:
            return sizing.attainment({role: np.repeat(n, len(factors)) for role, n in workers.items()}, rate * factors)

        if not steady and in_slo / judged > float(expected(np.ones(1))[0]) - WORSE:
            return
        self._learnt = at
        self.stress.learn(in_slo, judged, expected)


def waiting(observed: ModelState, roles: Sequence[Role] = ROLES) -> float:
    """Return the requests that wait, in the router and in engines."""
    return float(observed.queued or 0) + sum(engine.waiting or 0 for engine in observed.engines(*roles))


def work_waits(observed: ModelState) -> bool:
    """Return whether more requests wait than always do for a moment."""
    return waiting(observed) > WAITING_LEAST * max(1, sum(1 for _ in observed.engines(*ROLES)))


def busy_for(context: PluginContext, model: str) -> float:
    """Return for how many seconds work has been waiting, as far as observations go: 0 where none did for `STEADY`.

    A shorter calm counts as part of it: the requests that waited are still being answered.
    """
    since = None
    for look in reversed(context.observations):
        if (context.at if since is None else since) - look.at > STEADY:
            break
        if model in look.models and work_waits(look.models[model]):
            since = look.at
    return 0.0 if since is None else context.at - since


def highest_rate(context: PluginContext, model: str, over: float) -> float:
    """Return the highest rate of arrivals in any `STEADY` / 2 seconds of the last ``over`` seconds."""
    highest, arrived, seconds = 0.0, 0, 0.0
    for look in context.within(over):
        traffic = look.models[model].traffic if model in look.models else None
        if traffic is not None:
            arrived, seconds = arrived + traffic.arrived, seconds + traffic.seconds
            if seconds >= STEADY / 2.0:
                highest, arrived, seconds = max(highest, arrived / seconds), 0, 0.0
    return highest


def smallest_fleet(context: PluginContext, model: str, role: Role, over: float) -> float:
    """Return the fewest workers of a role in the last ``over`` seconds."""
    looks = (look.models[model] for look in context.within(over) if model in look.models)
    return float(min(sum(1 for _ in observed.engines(role)) for observed in looks))


def _halves(looks: Sequence[Observation], model: str, middle: float) -> tuple[Traffic, Traffic] | None:
    """Return the traffic before and after a second; None where a part of it could not be read."""
    halves: list[Traffic | None] = [None, None]
    for look in looks:
        traffic = look.models[model].traffic if model in look.models else None
        if traffic is None:
            return None
        before = halves[look.at > middle]
        halves[look.at > middle] = traffic if before is None else before + traffic
    early, late = halves
    return None if early is None or late is None else (early, late)
