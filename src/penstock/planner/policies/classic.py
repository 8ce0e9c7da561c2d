"""What do the field's older policies share? Pools by role, why nothing is done, one step up or down, and a budget.

They know one prefill and one decode pool, or one aggregated pool, per model: the first of its role by name.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from penstock.kernel.values import Role, StepStats
from penstock.planner.budget import Pair, Widths, load_guard
from penstock.planner.context import Context
from penstock.planner.proposals import Accept, Because, Override, Result, Target
from penstock.planner.seen import EngineSeen, ModelSeen, Observation, PoolSeen
from penstock.planner.settings import BudgetSettings, PlannerMode, PoolLimits

Loop = Literal["load", "throughput"]
ROLES_OF: dict[PlannerMode, tuple[Role, ...]] = {
    "auto": ("prefill", "decode", "aggregated"),
    "aggregated": ("aggregated",),
    "disaggregated": ("prefill", "decode"),
    "prefill": ("prefill",),
    "decode": ("decode",),
}


class Team(NamedTuple):
    """One pool and those of its engines that do its work at present. ``wanted``: replicas, as the stage before said."""

    name: str
    role: Role
    pool: PoolSeen
    engines: tuple[EngineSeen, ...]
    wanted: int

    @property
    def starting(self) -> bool:
        """Whether replicas are on their way in or out, or can't be had."""
        return not self.pool.settled


def teams_of(seen: ModelSeen, mode: PlannerMode, context: Context) -> dict[Role, Team]:
    """Return a model's pools by role, as far as the mode plans them."""
    found: dict[Role, Team] = {}
    for role in ROLES_OF[mode]:
        pool = seen.pool(role)
        if pool is not None:
            name, told = pool
            engines = tuple(engine for engine in told.engines if engine.role == role)
            found[role] = Team(name, role, told, engines, context.baseline.get(name, told.desired))
    return found


def minimum_of(name: str, budget: BudgetSettings) -> int:
    """Return the fewest replicas of a pool."""
    least = budget.pools.get(name, PoolLimits()).min_replicas
    return budget.min_replicas if least is None else least


# --- what is said -----------------------------------------------------------------------------------------------------


def held(code: str, text: str, **facts: object) -> Because:
    """Return why nothing is done about a pool."""
    return Because(code=code, text=text, facts=facts)


def answer(targets: Sequence[Target], because: Iterable[Because], evidence: Mapping[str, object]) -> Result:
    """Return targets with their reasons; without any target, only the reasons."""
    reasons = tuple(because)
    return (
        Override(targets=tuple(targets), because=reasons, evidence=dict(evidence))
        if targets
        else Accept(because=reasons)
    )


class Step(NamedTuple):
    """What one loop wants of one pool: -1, 0 or +1 replicas, and why."""

    delta: int
    because: Because


def mismatch(team: Team) -> Because | None:
    """Say whether the engines that tell of themselves are not those that serve: then no sum over them is right."""
    told: dict[str, int] = {}
    for engine in team.engines:
        told[engine.worker] = told.get(engine.worker, 0) + 1
    if not told:
        return held("no_fpm_data", f"no engine of {team.name} tells of its passes", pool=team.name)
    if len(told) != team.pool.ready:
        text = f"{len(told)} workers of {team.name} tell of themselves, {team.pool.ready} serve"
        return held("worker_count_mismatch", text, pool=team.name, told=len(told), ready=team.pool.ready)
    if len(set(told.values())) > 1:
        text = f"the workers of {team.name} tell of different numbers of ranks: {sorted(told.values())}"
        return held("worker_count_mismatch", text, pool=team.name, ranks=sorted(told.values()))
    return None


def in_progress(team: Team) -> Because:
    """Say what a pool is busy with."""
    pool = team.pool
    text = (
        f"{team.name} is being scaled: {pool.ready} of {pool.desired} serve, {len(pool.starting)} start, "
        f"{pool.draining} leave, {pool.failed} can't start"
    )
    return held("scaling_in_progress", text, pool=team.name, ready=pool.ready, desired=pool.desired)


# --- a budget of the loop's own ---------------------------------------------------------------------------------------


def guarded(
    teams: Mapping[Role, Team], wanted: Mapping[Role, int], budget: BudgetSettings
) -> tuple[dict[Role, int], Because | None]:
    """Bring a step of a prefill and a decode pool into the GPU budget as the field's load loop does.

    The limits at the end of every tick hold in any case; this decides who gives way before they have to.
    """
    found = dict(wanted)
    if budget.max_gpus is None or "prefill" not in teams or "decode" not in teams:
        return found, None
    prefill, decode = teams["prefill"], teams["decode"]
    widths = Widths(max(1, prefill.pool.gpus), max(1, decode.pool.gpus))
    result = load_guard(
        Pair(prefill.wanted, decode.wanted),
        Pair(wanted["prefill"], wanted["decode"]),
        widths,
        -1 if budget.min_gpus is None else budget.min_gpus,
        budget.max_gpus,
        Pair(minimum_of(prefill.name, budget), minimum_of(decode.name, budget)),
    )
    if not result.reason:
        return found, None
    found |= {"prefill": result.pair.prefill, "decode": result.pair.decode}
    text = (
        f"{wanted['prefill']} prefill and {wanted['decode']} decode do not fit into {budget.max_gpus} GPUs: "
        f"{result.pair.prefill} and {result.pair.decode}"
    )
    return found, held(result.reason, text, wanted=list(wanted.values()), got=list(result.pair))


# --- passes -----------------------------------------------------------------------------------------------------------


class Passes:
    """Windows of passes, each taken once, from the looks that a plugin has not seen yet."""

    def __init__(self) -> None:
        self._until: float | None = None

    def fresh(self, context: Context) -> Iterator[Observation]:
        """Yield the looks since the last call, this tick's last."""
        until, self._until = self._until, context.at
        for look in context.looks:
            if until is None or look.at > until + 1e-6:
                yield look

    def snapshot(self) -> float | None:
        return self._until

    def restore(self, state: float | None) -> None:
        self._until = state


def decode_kv_of(engine: EngineSeen) -> float | None:
    """Return the KV tokens that an engine decodes, those that wait to be decoded included; None where it is not told.

    A decode engine with requests that wait and no word of their KV is taken to have more like those that run: their KV
    may be on its way, or still with a prefill engine.
    """
    if engine.decode_kv is None:
        return None
    waiting = float(engine.queued_decode_kv or 0)
    if engine.role == "decode" and not waiting and engine.waiting and engine.running:
        waiting = engine.waiting * engine.decode_kv / engine.running
    return engine.decode_kv + waiting


def mean(steps: StepStats, name: str) -> float | None:
    """Return a sum's mean per pass; None where it is not told."""
    value = getattr(steps, name)
    return None if value is None or steps.passes <= 0 else float(value) / steps.passes
