"""Contradictions between a planner's settings that a single knob's range can't show, each with the knob's path."""

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from penstock.kernel.errors import ConfigError
from penstock.kernel.values import Pool
from penstock.planner.settings import BudgetSettings, PlannerSettings, PoolLimits


class Contradiction(NamedTuple):
    """One contradiction to correct. ``path``: of the knob, below planner."""

    path: tuple[str, ...]
    message: str
    hint: str


def contradictions(settings: PlannerSettings) -> Iterator[Contradiction]:
    """Return every contradiction in these settings."""
    yield from of_budget(settings)
    yield from of_plugins(settings)


def of_budget(settings: PlannerSettings) -> Iterator[Contradiction]:
    """Check that no floor lies above its ceiling: of the GPUs, of a pool's replicas, of replicas with a GPU each."""
    budget = settings.budget
    least, most = budget.min_gpus, budget.max_gpus
    if least is not None and most is not None and least > most:
        message = f"is {least}, above planner.budget.max_gpus {most}"
        yield Contradiction(("budget", "min_gpus"), message, "lower it, or raise the ceiling")
    floors = sum(limits.min_replicas or 0 for limits in budget.pools.values())
    if most is not None and floors > most:
        yield floor_over_ceiling(most, floors)
    for name, limits in budget.pools.items():
        floor = _minimum_replicas(budget, name)
        if limits.max_replicas is not None and limits.max_replicas < floor:
            message = f"is {limits.max_replicas}, below its min_replicas {floor}"
            hint = "lower min_replicas of the pool, or raise max_replicas"
            yield Contradiction(("budget", "pools", name, "max_replicas"), message, hint)


def of_replicas(settings: PlannerSettings, pools: Mapping[str, Pool]) -> Iterator[Contradiction]:
    """Check the bounds of GPUs against those of the pools that there are.

    Args:
        pools: all that this planner plans, by the names that the budget uses.
    """
    budget = settings.budget
    floor = sum(_minimum_replicas(budget, name) * pool.gpus for name, pool in pools.items())
    if budget.max_gpus is not None and floor > budget.max_gpus:
        yield floor_over_ceiling(budget.max_gpus, floor)
    most = [(budget.pools.get(name, PoolLimits()).max_replicas, pool.gpus) for name, pool in pools.items()]
    reach = sum(count * gpus for count, gpus in most if count is not None)
    if budget.min_gpus is not None and reach < budget.min_gpus and all(count is not None for count, _ in most):
        message = f"is {budget.min_gpus}, and the most of all pools together takes {reach} GPUs"
        yield Contradiction(("budget", "min_gpus"), message, "lower it, or raise max_replicas")


def of_pools(settings: PlannerSettings, pools: Mapping[str, Pool]) -> Iterator[Contradiction]:
    """Check that the pools which budget and policy speak of exist, and that the power of each is known."""
    budget = settings.budget
    for name in budget.pools:
        if name not in pools:
            yield Contradiction(("budget", "pools", name), "there is no such pool", f"there is {', '.join(pools)}")
    if budget.watts is not None:
        yield from _of_power(budget, budget.watts, pools)
    if settings.optimization_target == "sla" and settings.policy == "sla-classic" and settings.mode != "prefill":
        decoding = {pool.model for pool in pools.values() if pool.role == "decode"}
        for model in dict.fromkeys(pool.model for pool in pools.values() if pool.model not in decoding):
            message = f"is sla-classic, which sizes prefill and decode pools, and {model} has none of role decode"
            yield Contradiction(("policy",), message, "add one, or take policy slo")


def _of_power(budget: BudgetSettings, ceiling: float, pools: Iterable[str]) -> Iterator[Contradiction]:
    """Check a ceiling of power: watts that are not known would count as none."""
    watts = {name: budget.pools.get(name, PoolLimits()).watts for name in pools}
    unknown = [name for name, each in watts.items() if each is None]
    floor = sum(_minimum_replicas(budget, name) * each for name, each in watts.items() if each is not None)
    if unknown:
        message = f"is {ceiling:g}, and what a replica of {', '.join(unknown)} draws is not known"
        yield Contradiction(("budget", "watts"), message, f"set planner.budget.pools.{unknown[0]}.watts")
    elif floor > ceiling:
        message = f"is {ceiling:g}, and the least of all pools together draws {floor:g} W"
        yield Contradiction(("budget", "watts"), message, "raise it, or lower min_replicas")


def _minimum_replicas(budget: BudgetSettings, name: str) -> int:
    least = budget.pools.get(name, PoolLimits()).min_replicas
    return budget.min_replicas if least is None else least


def floor_over_ceiling(most: int, floor: int) -> Contradiction:
    """Return the contradiction of minima that take more GPUs than there may be."""
    message = f"is {most}, and the least of all pools together takes {floor} GPUs"
    return Contradiction(("budget", "max_gpus"), message, "raise it, or lower min_replicas")


def of_plugins(settings: PlannerSettings) -> Iterator[Contradiction]:
    """A plugin is in this process or elsewhere."""
    for id, entry in settings.plugins.use.items():
        if bool(entry.module) == bool(entry.endpoint):
            message = "has a module and an endpoint" if entry.module else "has neither a module nor an endpoint"
            hint = "give module for a Python module in the planner's process, or endpoint for a plugin that serves"
            yield Contradiction(("plugins", "use", id), message, hint)


def refuse(contradictions: Iterable[Contradiction]) -> None:
    """Raise the first contradiction.

    Raises:
        ConfigError: there is one.
    """
    for path, message, hint in contradictions:
        raise ConfigError(f"planner.{'.'.join(path)} {message}", hint=hint)
