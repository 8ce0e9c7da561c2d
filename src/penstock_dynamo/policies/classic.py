"""Common part of Dynamo's older policies: pools by role, reasons for no change, single steps, and a GPU budget.

They know one prefill and one decode pool, or one aggregated pool, per model: the first of its role by name.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from penstock.kernel.values import Role, StepStats
from penstock.planner.observation import EngineState, ModelState, Observation, PoolState
from penstock.planner.plugins.plugin_context import PluginContext
from penstock.planner.plugins.proposals import Accept, Override, PoolTarget, Reason, Result
from penstock.planner.remembering import Remembering
from penstock.planner.settings import BudgetSettings, PlannerMode, PoolLimits
from penstock_dynamo.policies.gpu_budget import PoolPair, Widths, load_guard

ROLES_OF: dict[PlannerMode, tuple[Role, ...]] = {
    "auto": ("prefill", "decode", "aggregated"),
    "aggregated": ("aggregated",),
    "disaggregated": ("prefill", "decode"),
    "prefill": ("prefill",),
    "decode": ("decode",),
}


class RolePool(NamedTuple):
    """One pool and those of its engines that have its role at present. ``replicas``: from the stage before."""

    name: str
    role: Role
    state: PoolState
    engines: tuple[EngineState, ...]
    replicas: int

    @property
    def starting(self) -> bool:
        """Whether replicas are on their way in or out, or can't be had."""
        return not self.state.settled


def teams_of(observed: ModelState, mode: PlannerMode, context: PluginContext) -> dict[Role, RolePool]:
    """Return a model's pools by role, as far as the mode plans them."""
    teams: dict[Role, RolePool] = {}
    for role in ROLES_OF[mode]:
        named = observed.pool(role)
        if named is not None:
            name, state = named
            engines = tuple(engine for engine in state.engines if engine.role == role)
            teams[role] = RolePool(name, role, state, engines, context.baseline.get(name, state.pool.desired))
    return teams


def minimum_of(name: str, budget: BudgetSettings) -> int:
    """Return the fewest replicas of a pool."""
    least = budget.pools.get(name, PoolLimits()).min_replicas
    return budget.min_replicas if least is None else least


# --- reasons ----------------------------------------------------------------------------------------------------------


def hold_reason(code: str, text: str, **facts: object) -> Reason:
    """Return the reason why a pool does not change. ``pool``: which one, where it is one."""
    return Reason(code=code, text=text, facts=facts, pools=(str(facts["pool"]),) if "pool" in facts else ())


def about(teams: Iterable[RolePool], reason: Reason) -> Reason:
    """Return a reason with the pools that it is about."""
    return msgspec.structs.replace(reason, pools=tuple(team.name for team in teams))


def answer(targets: Sequence[PoolTarget], reasons: Iterable[Reason], evidence: Mapping[str, object]) -> Result:
    """Return targets with their reasons; without any target, only the reasons."""
    if not targets:
        return Accept(reasons=tuple(reasons))
    return Override(targets=tuple(targets), reasons=tuple(reasons), evidence=dict(evidence))


class ScaleStep(NamedTuple):
    """One loop's step for one pool: -1, 0 or +1 replicas, and why."""

    delta: int
    reason: Reason


def mismatch(team: RolePool) -> Reason | None:
    """Return the reason where the reporting engines are not the serving ones: then no sum over them is right."""
    ranks: dict[str, int] = {}
    for engine in team.engines:
        ranks[engine.worker] = ranks.get(engine.worker, 0) + 1
    if not ranks:
        return hold_reason("no_fpm_data", f"no engine of {team.name} tells of its passes", pool=team.name)
    if len(ranks) != team.state.ready:
        text = f"{len(ranks)} workers of {team.name} tell of themselves, {team.state.ready} serve"
        return hold_reason("worker_count_mismatch", text, pool=team.name, told=len(ranks), ready=team.state.ready)
    if len(set(ranks.values())) > 1:
        text = f"the workers of {team.name} tell of different numbers of ranks: {sorted(ranks.values())}"
        return hold_reason("worker_count_mismatch", text, pool=team.name, ranks=sorted(ranks.values()))
    return None


def in_progress(team: RolePool) -> Reason:
    """Return the reason of a pool whose replicas start or leave."""
    state, desired = team.state, team.state.pool.desired
    text = (
        f"{team.name} is being scaled: {state.ready} of {desired} serve, {len(state.starting)} start, "
        f"{state.draining} leave, {state.failed} can't start"
    )
    return hold_reason("scaling_in_progress", text, pool=team.name, ready=state.ready, desired=desired)


# --- a budget of the loop's own ---------------------------------------------------------------------------------------


def guarded(
    teams: Mapping[Role, RolePool], wanted: Mapping[Role, int], budget: BudgetSettings
) -> tuple[dict[Role, int], Reason | None]:
    """Bring the targets of a prefill and a decode pool into the GPU budget as Dynamo's loops do.

    The limits at the end of every tick hold in any case, and are the same; this gives the reason in Dynamo's words, and
    holds an exchange in which one pool would give and the other could not take. The reason precedes those of the steps.
    """
    targets = dict(wanted)
    if budget.max_gpus is None or not {"prefill", "decode"} <= set(wanted):
        return targets, None
    prefill, decode = teams["prefill"], teams["decode"]
    widths = Widths(max(1, prefill.state.pool.gpus), max(1, decode.state.pool.gpus))
    result = load_guard(
        PoolPair(prefill.replicas, decode.replicas),
        PoolPair(wanted["prefill"], wanted["decode"]),
        widths,
        -1 if budget.min_gpus is None else budget.min_gpus,
        budget.max_gpus,
        PoolPair(minimum_of(prefill.name, budget), minimum_of(decode.name, budget)),
    )
    if not result.reason:
        return targets, None
    targets |= {"prefill": result.pair.prefill, "decode": result.pair.decode}
    text = (
        f"{wanted['prefill']} prefill and {wanted['decode']} decode do not fit into {budget.max_gpus} GPUs: "
        f"{result.pair.prefill} and {result.pair.decode}"
    )
    reason = hold_reason(result.reason, text, wanted=list(wanted.values()), got=list(result.pair))
    return targets, about((teams[role] for role in wanted if targets[role] != wanted[role]), reason)


# --- passes -----------------------------------------------------------------------------------------------------------


class PassTotals(Remembering):
    """Windows of passes, each read once, from the observations that a plugin has not read yet."""

    _until: float | None

    def __init__(self) -> None:
        self._until = None

    def fresh(self, context: PluginContext) -> Iterator[Observation]:
        """Yield the observations since the last call, this tick's last."""
        until, self._until = self._until, context.at
        for look in context.observations:
            if until is None or look.at > until + 1e-6:
                yield look


def decode_kv_of(engine: EngineState) -> float | None:
    """Return the KV tokens that an engine decodes, including those that wait to be decoded; None where not reported.

    A decode engine with waiting requests whose KV it does not report is assumed to have more like the running: their
    KV may be on its way, or still with a prefill engine.
    """
    if engine.decode_kv is None:
        return None
    waiting = float(engine.queued_decode_kv or 0)
    if engine.role == "decode" and not waiting and engine.waiting and engine.running:
        waiting = engine.waiting * engine.decode_kv / engine.running
    return engine.decode_kv + waiting


def mean(steps: StepStats, name: str) -> float | None:
    """Return a sum's mean per pass; None where it is not reported."""
    value = getattr(steps, name)
    return None if value is None or steps.passes <= 0 else float(value) / steps.passes
