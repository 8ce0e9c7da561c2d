"""Contradictions between settings of the older policies, each with the knob's path."""

from collections.abc import Iterator
from typing import Any

from penstock.kernel.settings import Settings
from penstock.planner.limits.contradictions import Contradiction
from penstock.planner.settings import PlannerSettings

THRESHOLDS = {
    "prefill": ("prefill_scale_down_queue_tokens", "prefill_scale_up_queue_tokens"),
    "decode": ("decode_scale_down_kv_rate", "decode_scale_up_kv_rate"),
}
"""Role -> knobs of planner.classic.thresholds, to go down and to go up."""
LOAD_THRESHOLDS = (
    ("prefill_queue_scale_down_threshold", "prefill_queue_scale_up_threshold"),
    ("decode_kv_scale_down_threshold", "decode_kv_scale_up_threshold"),
)
"""The same of planner.classic.load."""


def classic_contradictions(settings: PlannerSettings) -> Iterator[Contradiction]:
    """Return every contradiction in the settings of these policies."""
    yield from of_thresholds(settings, needed=settings.optimization_target == "load")
    yield from of_load_thresholds(settings)
    if settings.optimization_target == "load":
        return
    if settings.optimization_target == "sla" and settings.policy == "hybrid":
        yield from of_hybrid(settings)
    if settings.optimization_target == "sla" and settings.policy == "sla-classic" and settings.mode == "aggregated":
        message = "is aggregated, and planner.policy sla-classic sizes prefill and decode pools only"
        yield Contradiction(("mode",), message, "set mode to auto, or policy to slo")


def classic_complaints(settings: Any) -> Iterator[tuple[tuple[str, ...], str, str]]:
    """Return the same of a whole cluster's settings."""
    for path, message, hint in classic_contradictions(settings.planner):
        yield ("planner", *path), message, hint


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
        if not lacking:
            yield from _reversed(where, thresholds, down, up)


def of_load_thresholds(settings: PlannerSettings) -> Iterator[Contradiction]:
    """Check the same of policy load-classic: a load between reversed ones would be one to go down and one to go up."""
    for down, up in LOAD_THRESHOLDS:
        yield from _reversed(("classic", "load"), settings.classic.load, down, up)


def _reversed(where: tuple[str, ...], settings: Settings, down: str, up: str) -> Iterator[Contradiction]:
    if getattr(settings, down) >= getattr(settings, up):
        message = f"is {getattr(settings, down):g}, and {up} is {getattr(settings, up):g}"
        yield Contradiction((*where, down), message, "the one to go down must be lower")
