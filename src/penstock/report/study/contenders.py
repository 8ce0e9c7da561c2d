"""Who takes part? Every policy with the one knob by which it gets more or less eager, under the same ceiling."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from penstock.kernel.values import Role
from penstock.planner.planner import Planner
from penstock.planner.policies import Inputs, plugins_of
from penstock.planner.settings import BudgetSettings, PlannerSettings, SloTargets, StartSettings
from penstock.report.study import baselines
from penstock.report.study.world import GPUS_MAX, ITL, LAYOUTS, TTFT, known
from penstock.simulate.scaling import ScalePolicy

Made = Mapping[str, Any]
"""Arguments of `penstock.report.study.world.run`: ``planner`` or ``policy``."""


@dataclass(frozen=True, slots=True)
class Contender:
    """A policy.

    Args:
        make: takes (value of the knob, layout, start-up seconds).
        knob: what it is, for people; ``default``: its value; ``sweep``: values from lean to eager.
    """

    name: str
    make: Callable[[float, str, float], Made]
    knob: str
    default: float
    sweep: tuple[float, ...]


def _settings(start_up: float, **more: Any) -> PlannerSettings:
    slo = more.pop("slo", SloTargets(ttft=TTFT, itl=ITL))
    budget = more.pop("budget", BudgetSettings(max_gpus=GPUS_MAX))
    return PlannerSettings(
        enabled=True, slo=slo, budget=budget, start=StartSettings(assumed=max(1.0, start_up)), **more
    )


def _planner(settings: PlannerSettings, layout: str) -> Made:
    roles: tuple[Role, ...] = LAYOUTS[layout]
    mode = "aggregated" if layout == "aggregated" else "disaggregated"
    settings = msgspec.structs.replace(settings, mode=mode)
    inputs = Inputs(known={"": {role: known() for role in roles}})
    return {"planner": Planner(settings, plugins_of(settings, inputs), strict=True)}


def _slo(miss_cost: float, layout: str, start_up: float) -> Made:
    return _planner(_settings(start_up, slo=SloTargets(ttft=TTFT, itl=ITL, miss_cost=miss_cost)), layout)


def _tightened(policy: str, **more: Any) -> Callable[[float, str, float], Made]:
    """Return what makes a policy that is told a tighter service level than it is judged by."""

    def make(factor: float, layout: str, start_up: float) -> Made:
        slo = SloTargets(ttft=TTFT * factor, itl=ITL * factor)
        return _planner(_settings(start_up, slo=slo, policy=policy, **more), layout)

    return make


def _floored(**more: Any) -> Callable[[float, str, float], Made]:
    """Return what makes a policy that never has fewer than so many replicas of a pool."""

    def make(least: float, layout: str, start_up: float) -> Made:
        each = int(least) if layout == "aggregated" else max(1, int(least) // 2)
        return _planner(
            _settings(start_up, budget=BudgetSettings(max_gpus=GPUS_MAX, min_replicas=each), **more), layout
        )

    return make


def _ruled(rule: Callable[[float, int], ScalePolicy], interval: float) -> Callable[[float, str, float], Made]:
    """Return what makes one of the other autoscalers, which looks every so many seconds."""

    def make(knob: float, layout: str, start_up: float) -> Made:
        return {"policy": rule(knob, GPUS_MAX // len(LAYOUTS[layout])), "interval": interval}

    return make


_TIGHTER = (1.0, 0.7, 0.5, 0.35)
_FLOORS = (1.0, 3.0, 5.0, 7.0)
CONTENDERS: tuple[Contender, ...] = (
    Contender("slo", _slo, "planner.slo.miss_cost", SloTargets().miss_cost, (5.0, 15.0, 40.0, 120.0, 360.0)),
    Contender(
        "thresholds throughput",
        _floored(optimization_target="throughput"),
        "min_replicas",
        1.0,
        _FLOORS,
    ),
    Contender("thresholds latency", _floored(optimization_target="latency"), "min_replicas", 1.0, _FLOORS),
    Contender("load-classic", _floored(policy="load-classic"), "min_replicas", 1.0, _FLOORS),
    Contender("sla-classic", _tightened("sla-classic"), "service level x", 1.0, _TIGHTER),
    Contender("throughput-fpm", _tightened("throughput-fpm"), "service level x", 1.0, _TIGHTER),
    Contender("load-fpm", _tightened("load-fpm"), "service level x", 1.0, _TIGHTER),
    Contender("load-fpm-1.6", _tightened("load-fpm-1.6"), "service level x", 1.0, _TIGHTER),
    Contender("hybrid", _tightened("hybrid"), "service level x", 1.0, _TIGHTER),
    Contender("HPA-like", _ruled(baselines.hpa, 15.0), "KV use aimed at", 0.7, (0.8, 0.6, 0.4, 0.25)),
    Contender("KEDA-like", _ruled(baselines.keda, 15.0), "waiting per replica", 5.0, (10.0, 5.0, 2.0, 0.5)),
    Contender("Ray-Serve-like", _ruled(baselines.RayServe, 10.0), "ongoing per replica", 16.0, (32.0, 16.0, 10.0, 6.0)),
)
BY_NAME = {contender.name: contender for contender in CONTENDERS}
