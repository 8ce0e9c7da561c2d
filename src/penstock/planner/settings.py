"""Knobs of the planner, each once, with unit, range, default and what it trades."""

import math
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import msgspec

from penstock import extension
from penstock.kernel.settings import Knob, Settings
from penstock.planner.settings_plugins import PluginSettings

if TYPE_CHECKING:
    ClassicSettings: TypeAlias = Any
    PolicyName: TypeAlias = str
else:  # of the older policies, where their package is installed
    ClassicSettings = extension.settings_group("classic")
    PolicyName = extension.choices("policy", "slo", "static")

OptimizationTarget = Literal["throughput", "latency", "load", "sla"]
PlannerMode = Literal["auto", "aggregated", "disaggregated", "prefill", "decode"]


class PoolLimits(Settings, frozen=True, kw_only=True):
    """Bounds of one pool."""

    min_replicas: Annotated[
        int | None, Knob("Fewest replicas; unset is planner.budget.min_replicas.", unit="count", ge=0)
    ] = None
    max_replicas: Annotated[
        int | None, Knob("Most replicas; unset is what budget and machine allow.", unit="count", ge=0)
    ] = None
    priority: Annotated[
        int,
        Knob("Order in which pools get GPUs where the budget is short: a higher number goes first.", unit="count"),
    ] = 0
    watts: Annotated[float | None, Knob("Power that one replica may draw, in watts; unset is not counted.", gt=0)] = (
        None
    )


class BudgetSettings(Settings, frozen=True, kw_only=True):
    """What all pools together may take. The ceiling always wins."""

    max_gpus: Annotated[
        int | None,
        Knob(
            "Most GPUs of all pools together, those that start included; unset means no ceiling but the machine's.",
            unit="count",
            ge=0,
            live=True,
        ),
    ] = None
    min_gpus: Annotated[
        int | None, Knob("Fewest GPUs of all pools together; unset means no floor.", unit="count", ge=0, live=True)
    ] = None
    min_replicas: Annotated[
        int,
        Knob("Fewest replicas of a pool; 0 lets it go to none while nothing comes.", unit="count", ge=0, live=True),
    ] = 1
    watts: Annotated[
        float | None, Knob("Most power of all pools together, in watts; unset means no ceiling.", gt=0, live=True)
    ] = None
    pools: Annotated[dict[str, PoolLimits], Knob("Bounds of single pools, by name.")] = {}


class SloPolicySettings(Settings, frozen=True, kw_only=True):
    """How policy slo keeps the SLO."""

    miss_cost: Annotated[
        float,
        Knob(
            "What a missed request costs, in units of the GPU time that serving it takes: the one knob of how eagerly "
            "policy slo adds GPUs; higher misses fewer and idles more.",
            gt=0,
            live=True,
        ),
    ] = 20.0
    hold: Annotated[
        float,
        Knob(
            "Policy slo gives a worker back when nothing within the next start-up time needs it, and nothing of the "
            "last so many seconds did; it keeps workers for longer by itself where their return is worth it.",
            unit="s",
            ge=0,
            live=True,
        ),
    ] = 60.0
    zero_after: Annotated[
        float,
        Knob(
            "Seconds without an arrival after which the last worker may go, where a pool may have none.",
            unit="s",
            gt=0,
            live=True,
        ),
    ] = 300.0


class StartSettings(Settings, frozen=True, kw_only=True):
    """Replicas that are on the way."""

    assumed: Annotated[
        float,
        Knob("Time from the decision until a replica serves, for as long as none was measured.", unit="s", ge=0),
    ] = 60.0
    deadline: Annotated[
        float,
        Knob(
            "A replica that takes longer counts no more, and a reason is shown; it goes on trying.",
            unit="s",
            gt=0,
            live=True,
        ),
    ] = 600.0


class PlannerSettings(Settings, frozen=True, kw_only=True):
    """How many workers there should be, and who says so."""

    enabled: Annotated[bool, Knob("Run the planner in this cluster.")] = False
    advisory: Annotated[bool, Knob("Say what should be and why, and touch nothing.", live=True)] = False
    policy: Annotated[
        PolicyName,
        Knob(
            "Who decides: slo forecasts demand and keeps the service level at the least cost; the others are the "
            "field's older ways under their names."
        ),
    ] = "slo"
    optimization_target: Annotated[
        OptimizationTarget,
        Knob("sla keeps slo by the policy; throughput, latency and load are thresholds instead of a policy."),
    ] = "sla"
    mode: Annotated[
        PlannerMode,
        Knob("Which pools are planned; auto takes what there is; prefill and decode leave the other role alone."),
    ] = "auto"
    slo: SloPolicySettings = SloPolicySettings()
    budget: BudgetSettings = BudgetSettings()
    start: StartSettings = StartSettings()
    plugins: PluginSettings = PluginSettings()
    classic: ClassicSettings = msgspec.field(default_factory=lambda: ClassicSettings())
    load_interval: Annotated[
        float, Knob("Seconds between two looks of what reacts to load; shorter sees a burst sooner.", unit="s", gt=0)
    ] = 5.0
    throughput_interval: Annotated[
        float, Knob("The same of what plans for throughput; longer is steadier.", unit="s", gt=0)
    ] = 180.0
    tick: Annotated[
        float | None,
        Knob("Seconds between two ticks; unset is the greatest common divisor of those two.", unit="s", gt=0),
    ] = None
    manual_hold: Annotated[
        float,
        Knob(
            "How long a number of replicas that an operator has set is left alone; 0 takes it only as a start.",
            unit="s",
            ge=0,
            live=True,
        ),
    ] = 600.0

    @property
    def may_be_none(self) -> bool:
        """Whether some pool may have no replica at all."""
        least = self.budget.min_replicas
        return least == 0 or any(pool.min_replicas == 0 for pool in self.budget.pools.values())

    @property
    def base(self) -> float:
        """Seconds between two ticks."""
        if self.tick is not None:
            return self.tick
        intervals = (self.load_interval, self.throughput_interval)
        if self.optimization_target == "sla" and self.policy == "load-classic":
            intervals = (self.classic.load.metric_pulling_interval, self.classic.load.adjustment_interval)
        elif self.optimization_target == "sla" and self.policy == "sla-classic":
            intervals = (self.load_interval, self.classic.sla.adjustment_interval)
        return math.gcd(*(round(interval * 1000) for interval in intervals)) / 1000
