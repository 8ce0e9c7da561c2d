"""Contenders of the study: every policy with the one knob that makes it more or less eager, under the same ceiling."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from bench.planner_study import autoscaler_baselines
from bench.planner_study.scenario import GPUS_MAX, ITL, LAYOUTS, SLO, TTFT, known_speeds
from penstock.kernel.values import Role, Slo
from penstock.planner.planner import Planner
from penstock.planner.policies import PolicyInputs, plugins_of
from penstock.planner.settings import BudgetSettings, PlannerSettings, SloPolicySettings
from penstock_lab.simulate.scale_policy import ScalePolicy

Made = Mapping[str, Any]
"""Arguments of `bench.planner_study.scenario.run`: ``planner`` or ``policy``."""


@dataclass(frozen=True, slots=True)
class Contender:
    """A policy.

    Args:
        make: takes (value of the knob, layout). No contender receives the length of a start-up: a policy that uses it
            begins with the setting's default and learns.
        knob: its description for readers; ``default``: its value; ``sweep``: values from lean to eager.
    """

    name: str
    make: Callable[[float, str], Made]
    knob: str
    default: float
    sweep: tuple[float, ...]


def _settings(**more: Any) -> PlannerSettings:
    budget = more.pop("budget", BudgetSettings(max_gpus=GPUS_MAX))
    return PlannerSettings(enabled=True, budget=budget, **more)


def _planner(settings: PlannerSettings, layout: str, slo: Slo = SLO) -> Made:
    roles: tuple[Role, ...] = LAYOUTS[layout]
    mode = "aggregated" if layout == "aggregated" else "disaggregated"
    settings = msgspec.structs.replace(settings, mode=mode)
    inputs = PolicyInputs(slo=slo, speeds={"": {role: known_speeds() for role in roles}})
    return {"planner": Planner(settings, plugins_of(settings, inputs), strict=True)}


def _slo(miss_cost: float, layout: str) -> Made:
    return _planner(_settings(slo=SloPolicySettings(miss_cost=miss_cost)), layout)


def _tightened(policy: str, **more: Any) -> Callable[[float, str], Made]:
    """Return a function that makes a policy with a tighter service level than the one it is judged by."""

    def make(factor: float, layout: str) -> Made:
        slo = Slo(ttft=TTFT * factor, itl=ITL * factor)
        return _planner(_settings(policy=policy, **more), layout, slo)

    return make


def _floored(gpus_max: int | None = GPUS_MAX, **more: Any) -> Callable[[float, str], Made]:
    """Return a function that makes a policy with a lower bound on the replicas of each pool."""

    def make(least: float, layout: str) -> Made:
        each = int(least) if layout == "aggregated" else max(1, int(least) // 2)
        return _planner(_settings(budget=BudgetSettings(max_gpus=gpus_max, min_replicas=each), **more), layout)

    return make


def _ruled(rule: Callable[[float, int], ScalePolicy], interval: float) -> Callable[[float, str], Made]:
    """Return a function that makes one of the other autoscalers, which decides once per interval."""

    def make(knob: float, layout: str) -> Made:
        return {"policy": rule(knob, GPUS_MAX // len(LAYOUTS[layout])), "interval": interval}

    return make


_TIGHTER = (1.0, 0.7, 0.5, 0.35)
_FLOORS = (1.0, 3.0, 5.0, 7.0)
CONTENDERS: tuple[Contender, ...] = (
    Contender("slo", _slo, "planner.slo.miss_cost", SloPolicySettings().miss_cost, (5.0, 15.0, 40.0, 120.0, 360.0)),
    Contender(
        "thresholds throughput",
        _floored(optimization_target="throughput"),
        "min_replicas",
        1.0,
        _FLOORS,
    ),
    Contender("thresholds latency", _floored(optimization_target="latency"), "min_replicas", 1.0, _FLOORS),
    # A ceiling would replace the one that this policy has by itself, which is lower.
    Contender("load-classic", _floored(None, policy="load-classic"), "min_replicas", 1.0, _FLOORS),
    Contender("sla-classic", _tightened("sla-classic"), "service level x", 1.0, _TIGHTER),
    Contender("throughput-fpm", _tightened("throughput-fpm"), "service level x", 1.0, _TIGHTER),
    Contender("load-fpm", _tightened("load-fpm"), "service level x", 1.0, _TIGHTER),
    Contender("load-fpm-1.6", _tightened("load-fpm-1.6"), "service level x", 1.0, _TIGHTER),
    Contender("hybrid", _tightened("hybrid"), "service level x", 1.0, _TIGHTER),
    Contender("HPA-like", _ruled(autoscaler_baselines.hpa, 15.0), "KV use aimed at", 0.7, (0.8, 0.6, 0.4, 0.25)),
    Contender("KEDA-like", _ruled(autoscaler_baselines.keda, 15.0), "waiting per replica", 5.0, (10.0, 5.0, 2.0, 0.5)),
    Contender(
        "Ray-Serve-like",
        _ruled(autoscaler_baselines.RayServe, 10.0),
        "ongoing per replica",
        16.0,
        (32.0, 16.0, 10.0, 6.0),
    ),
)
BY_NAME = {contender.name: contender for contender in CONTENDERS}
