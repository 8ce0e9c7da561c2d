"""Events and effects of the planner machine."""

from collections.abc import Mapping
from typing import Any

from penstock.kernel.machine import Effect, Event
from penstock.kernel.values import Role
from penstock.planner.observation import Observation
from penstock.planner.plugins.plugin_registry import PluginSpec, Stage
from penstock.planner.plugins.proposals import Flip, Prediction, Reason, Result
from penstock.planner.tick_record import TickRecord

# --- events -----------------------------------------------------------------------------------------------------------


class Observed(Event, frozen=True, kw_only=True):
    """The observation that was requested. ``id``: of the `Observe`."""

    id: int
    observation: Observation


class ObserveFailed(Event, frozen=True, kw_only=True):
    """No observation could be made at all, such as when the connector does not answer."""

    id: int
    why: str


class PluginAnswered(Event, frozen=True, kw_only=True):
    """An external plugin has answered, or ``error`` is why it has not. ``seconds``: until its answer."""

    id: int
    plugin: str
    result: Result | None = None
    error: str | None = None
    seconds: float = 0.0


class Scaled(Event, frozen=True, kw_only=True):
    """The connector received a `Scale`; ``problems``: pool -> why it can't be done."""

    id: int
    problems: dict[str, str] = {}


class PluginRegistered(Event, frozen=True, kw_only=True):
    """An external plugin asks to be registered."""

    spec: PluginSpec


class PluginAlive(Event, frozen=True, kw_only=True):
    """A heartbeat of an external plugin."""

    plugin: str


class PluginLeft(Event, frozen=True, kw_only=True):
    """An external plugin is no longer registered; ``why``: for the record."""

    plugin: str
    why: str = "it unregistered"


class Benchmarked(Event, frozen=True, kw_only=True):
    """A worker's measurement of itself; ``metrics`` as `penstock_lab.engine.self_benchmark.perf_metrics` has them."""

    model: str
    role: Role
    metrics: dict[str, Any]


class LimitsChanged(Event, frozen=True, kw_only=True):
    """An operator changed budgets or minima: plain data of `penstock.planner.settings.BudgetSettings`."""

    budget: dict[str, Any]


# --- effects ----------------------------------------------------------------------------------------------------------


class Observe(Effect, frozen=True, kw_only=True):
    """Observe everything; answered by `Observed` or `ObserveFailed`."""

    id: int


class AskPlugin(Effect, frozen=True, kw_only=True):
    """Call an external plugin; answered by `PluginAnswered`. It gets only what it needs.

    Args:
        deadline: seconds for its answer.
        proposal: pool -> replicas, from the stage before.
    """

    id: int
    plugin: str
    stage: Stage
    deadline: float
    tick: int
    observation: Observation | None
    predictions: Mapping[str, Prediction]
    proposal: Mapping[str, int]


class Scale(Effect, frozen=True, kw_only=True):
    """Set the desired replicas of these pools, and these changes of role; answered by `Scaled`.

    It is a level: repeated for as long as the connector's desired replicas differ.
    """

    id: int
    targets: dict[str, int]
    flips: tuple[Flip, ...] = ()
    reasons: tuple[Reason, ...] = ()


class Ticked(Effect, frozen=True, kw_only=True):
    """A tick is over, with its whole record."""

    record: TickRecord


class Alarm(Effect, frozen=True, kw_only=True):
    """An operator should look: a source is broken, a replica never starts, a plugin is silent."""

    reason: Reason
