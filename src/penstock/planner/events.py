"""What does the planner hear, and what does it want done?"""

from collections.abc import Mapping
from typing import Any

from penstock.kernel.machine import Effect, Event
from penstock.kernel.values import Role
from penstock.planner.plugins import Spec, Stage
from penstock.planner.proposals import Because, Flip, Prediction, Result
from penstock.planner.record import TickRecord
from penstock.planner.seen import Observation

# --- events -----------------------------------------------------------------------------------------------------------


class Looked(Event, frozen=True, kw_only=True):
    """What there was to see. ``id``: of the `Look`."""

    id: int
    observation: Observation


class LookFailed(Event, frozen=True, kw_only=True):
    """Nothing could be seen at all, such as when the connector does not answer."""

    id: int
    why: str


class Answered(Event, frozen=True, kw_only=True):
    """A plugin outside has answered, or ``error`` says why it has not. ``seconds``: that it took."""

    id: int
    plugin: str
    result: Result | None = None
    error: str | None = None
    seconds: float = 0.0


class Scaled(Event, frozen=True, kw_only=True):
    """The connector took a `Scale` up; ``problems``: pool -> why it can't be."""

    id: int
    problems: dict[str, str] = {}


class PluginCame(Event, frozen=True, kw_only=True):
    """A plugin outside wants to take part."""

    spec: Spec


class PluginAlive(Event, frozen=True, kw_only=True):
    """A sign of life of a plugin outside."""

    plugin: str


class PluginWent(Event, frozen=True, kw_only=True):
    """A plugin outside takes part no more; ``why``: for the record."""

    plugin: str
    why: str = "it unregistered"


class Benchmarked(Event, frozen=True, kw_only=True):
    """A worker has told what it measured of itself; ``metrics`` as `penstock.engine.benchmark.perf_metrics` has it."""

    model: str
    role: Role
    metrics: dict[str, Any]


class LimitsChanged(Event, frozen=True, kw_only=True):
    """An operator changed budgets or minima: plain data of `penstock.planner.settings.BudgetSettings`."""

    budget: dict[str, Any]


# --- effects ----------------------------------------------------------------------------------------------------------


class Look(Effect, frozen=True, kw_only=True):
    """Look at everything; answered by `Looked` or `LookFailed`."""

    id: int


class Ask(Effect, frozen=True, kw_only=True):
    """Ask a plugin outside; answered by `Answered`. What it is given is only what it needs.

    Args:
        deadline: seconds that it has.
        proposal: pool -> replicas, as the stage before said.
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
    """Want so many replicas of these pools, and these changes of role; answered by `Scaled`.

    It is a level: said again for as long as the connector wants something else.
    """

    id: int
    targets: dict[str, int]
    flips: tuple[Flip, ...] = ()
    because: tuple[Because, ...] = ()


class Ticked(Effect, frozen=True, kw_only=True):
    """A tick is over: all that is to be known of it."""

    record: TickRecord


class Alarm(Effect, frozen=True, kw_only=True):
    """Somebody should look: a source is broken, a replica never starts, a plugin is silent."""

    because: Because
