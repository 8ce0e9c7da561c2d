"""Contradictions between a planner's settings that a single knob's range can't show, each with the knob's path."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from penstock.kernel.errors import ConfigError
from penstock.planner.settings import PlannerSettings

THRESHOLDS = {
    "prefill": ("prefill_scale_down_queue_tokens", "prefill_scale_up_queue_tokens"),
    "decode": ("decode_scale_down_kv_rate", "decode_scale_up_kv_rate"),
}
"""Role -> knobs of planner.classic.thresholds, to go down and to go up."""


class Contradiction(NamedTuple):
    """One contradiction to correct. ``path``: of the knob, below planner."""

    path: tuple[str, ...]
    message: str
    hint: str


def contradictions(settings: PlannerSettings) -> Iterator[Contradiction]:
    """Return every contradiction in these settings."""
    yield from of_budget(settings)
    yield from of_plugins(settings)
    yield from of_thresholds(settings, needed=settings.optimization_target == "load")
    if settings.optimization_target == "load":
        return
    if settings.optimization_target == "sla" and settings.policy == "hybrid":
        yield from of_hybrid(settings)


def of_budget(settings: PlannerSettings) -> Iterator[Contradiction]:
    """Check that no floor lies above its ceiling: of the GPUs, of a pool's replicas."""
    budget = settings.budget
    least, most = budget.min_gpus, budget.max_gpus
    if least is not None and most is not None and least > most:
        message = f"is {least}, above planner.budget.max_gpus {most}"
        yield Contradiction(("budget", "min_gpus"), message, "lower it, or raise the ceiling")
    for name, limits in budget.pools.items():
        floor = budget.min_replicas if limits.min_replicas is None else limits.min_replicas
        if limits.max_replicas is not None and limits.max_replicas < floor:
            message = f"is {limits.max_replicas}, below its min_replicas {floor}"
            hint = "lower min_replicas of the pool, or raise max_replicas"
            yield Contradiction(("budget", "pools", name, "max_replicas"), message, hint)


def of_plugins(settings: PlannerSettings) -> Iterator[Contradiction]:
    """A plugin is in this process or elsewhere."""
    for id, entry in settings.plugins.use.items():
        if bool(entry.module) == bool(entry.endpoint):
            message = "has a module and an endpoint" if entry.module else "has neither a module nor an endpoint"
            hint = "give module for a Python module in the planner's process, or endpoint for a plugin that serves"
            yield Contradiction(("plugins", "use", id), message, hint)


def of_hybrid(settings: PlannerSettings) -> Iterator[Contradiction]:
    """Check that the load loop of policy hybrid is the faster one."""
    if settings.load_interval >= settings.throughput_interval:
        message = (
            f"is {settings.load_interval:g} s, not shorter than planner.throughput_interval "
            f"{settings.throughput_interval:g} s"
        )
        hint = "in policy hybrid the load loop works between two decisions for throughput"
        yield Contradiction(("load_interval",), message, hint)


def of_thresholds(settings: PlannerSettings, *, needed: bool) -> Iterator[Contradiction]:
    """Check that each threshold to go down lies below the one to go up; ``needed``: all four must be set."""
    thresholds = settings.classic.thresholds
    where = ("classic", "thresholds")
    for down, up in THRESHOLDS.values():
        lacking = [knob for knob in (up, down) if getattr(thresholds, knob) is None]
        for knob in lacking if needed else ():
            hint = "set all four of planner.classic.thresholds"
            yield Contradiction((*where, knob), "is not set, and planner.optimization_target is load", hint)
        if not lacking and getattr(thresholds, down) >= getattr(thresholds, up):
            message = f"is {getattr(thresholds, down):g}, and {up} is {getattr(thresholds, up):g}"
            yield Contradiction((*where, down), message, "the one to go down must be lower")


def refuse(contradictions: Iterable[Contradiction]) -> None:
    """Raise the first contradiction.

    Raises:
        ConfigError: there is one.
    """
    for path, message, hint in contradictions:
        raise ConfigError(f"planner.{'.'.join(path)} {message}", hint=hint)
