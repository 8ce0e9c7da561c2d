"""Registry of planner plugins: what a plugin is, which ones take part in a tick, and the circuit of those that fail.

A built-in step and an operator's differ only in where they run. A plugin that fails contributes nothing and breaks no
tick; one that fails five times in a row is not called for a while.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import msgspec

from penstock.kernel.machine import Snapshot
from penstock.kernel.values import Role
from penstock.planner.plugins.plugin_context import PluginContext
from penstock.planner.plugins.proposals import Accept, Override, Reason, Result
from penstock.planner.settings_plugins import PluginEntry

Stage = Literal["predict", "propose", "reconcile", "constrain"]
STAGES: tuple[Stage, ...] = ("predict", "propose", "reconcile", "constrain")
Hold = Literal["accept_when_idle", "hold_last"]
Circuit = Literal["closed", "half_open", "open"]

FAILURES_MAX = 5
"""Failures in a row that open a plugin's circuit..."""
OPEN_SECONDS = 30.0
"""... for so long; then it gets one try."""


class PluginSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Identity of a plugin, and when it is called.

    Args:
        id: unique; ``priority``: smaller is stronger.
        interval: seconds between two calls; 0 is every tick.
        hold: between two calls, whether its last targets still count or it contributes nothing.
        needs: what it reads of the observation, such as ``traffic``; external plugins get only that.
        requires: results of a stage before, such as ``predictions``; a tick without them skips it.
        window: seconds of traffic that it wants; 0 is the time since the tick before.
        outside: whether it runs in another process and is called by `penstock.planner.events.AskPlugin`.
    """

    id: str
    stage: Stage
    priority: int = 100
    interval: float = 0.0
    hold: Hold = "accept_when_idle"
    needs: tuple[str, ...] = ()
    requires: tuple[str, ...] = ()
    window: float = 0.0
    version: str = "v1"
    outside: bool = False
    endpoint: str = ""

    @classmethod
    def of(cls, id: str, entry: PluginEntry) -> "PluginSpec":
        """Return the spec of a plugin that planner.plugins.use names."""
        fields = {name: getattr(entry, name) for name in entry.__struct_fields__ if name in cls.__struct_fields__}
        return cls(**{**fields, "id": id, "outside": bool(entry.endpoint), "endpoint": entry.endpoint or ""})


class PlannerPlugin(Protocol):
    """One step of a stage, in this process."""

    spec: PluginSpec

    def evaluate(self, context: PluginContext) -> Result:
        """Return the answer for one tick. It reads no clock and does no I/O; equal contexts give equal answers."""
        ...

    def snapshot(self) -> Any:
        """Return the state over time as plain data; None where there is none."""
        ...

    def restore(self, state: Any) -> None:
        """Restore the state that `snapshot` wrote."""
        ...


@runtime_checkable
class LearnsSpeeds(Protocol):
    """A plugin that uses workers' own benchmarks."""

    def benchmarked(self, model: str, role: Role, metrics: Mapping[str, Any]) -> None:
        """Add a worker's benchmark.

        Raises:
            ConfigError: it is not as it must be.
        """
        ...


class StatelessPlugin:
    """Base of plugins without state over time."""

    def snapshot(self) -> Any:
        return None

    def restore(self, state: Any) -> None:
        return None


@dataclass(slots=True)
class PluginSlot:
    """One registered plugin, with its health. Times in seconds of the run."""

    spec: PluginSpec
    plugin: PlannerPlugin | None
    """None where it is external."""
    registered: float
    called: float | None = None
    """When it was last called successfully."""
    last: Override | None = None
    failures: int = 0
    opened: float | None = None
    last_heartbeat: float = 0.0
    """Last heartbeat of an external one."""
    evaluations: dict[str, int] = field(default_factory=dict)
    """Counts of each kind of result, ``error`` and ``timeout`` among them."""
    seconds: float = 0.0
    """Duration of its last answer; external ones only."""

    def circuit(self, at: float) -> Circuit:
        if self.opened is None:
            return "closed"
        return "half_open" if at - self.opened >= OPEN_SECONDS else "open"

    def due(self, at: float, base: float) -> bool:
        """Return whether a tick calls it. The first call comes one interval after its registration."""
        if self.circuit(at) == "open":
            return False
        if not self.spec.interval:
            return True
        anchor = math.floor(self.registered / base + 1e-9) * base if self.called is None else self.called
        return at - anchor >= self.spec.interval - 1e-6

    def succeeded(self, at: float, result: Result) -> None:
        self.called, self.failures, self.opened = at, 0, None
        self._count(type(result).__name__.lower())
        self.last = result if isinstance(result, Override) else None

    def failed(self, at: float, kind: str = "error") -> None:
        """Count a failure; enough of them in a row, or one in the trial, open the circuit and end the held targets."""
        self.failures += 1
        self._count(kind)
        if self.failures >= FAILURES_MAX or self.opened is not None:
            self.opened, self.last = at, None

    def standing_override(self) -> Override | None:
        """Return the targets that still count between two calls; they are never final again."""
        if self.spec.hold != "hold_last" or self.last is None:
            return None
        return msgspec.structs.replace(self.last, final=False)

    def _count(self, kind: str) -> None:
        self.evaluations[kind] = self.evaluations.get(kind, 0) + 1

    def snapshot(self) -> Snapshot:
        """Return its health as plain data, with the plugin's own state."""
        return {
            "spec": msgspec.to_builtins(self.spec),
            "registered": self.registered,
            "called": self.called,
            "last": None if self.last is None else msgspec.to_builtins(self.last),
            "failures": self.failures,
            "opened": self.opened,
            "last_heartbeat": self.last_heartbeat,
            "evaluations": dict(self.evaluations),
            "seconds": self.seconds,
            "state": None if self.plugin is None else self.plugin.snapshot(),
        }

    def restore(self, state: Snapshot) -> None:
        """Restore the slot that `snapshot` wrote."""
        self.registered, self.called = state["registered"], state["called"]
        self.last = None if state["last"] is None else msgspec.convert(state["last"], Override)
        self.failures, self.opened, self.last_heartbeat = state["failures"], state["opened"], state["last_heartbeat"]
        self.evaluations, self.seconds = dict(state["evaluations"]), state["seconds"]
        if self.plugin is not None:
            self.plugin.restore(state["state"])


class PluginRegistry:
    """All registered plugins, in the order of registration."""

    def __init__(self) -> None:
        self.seats: dict[str, PluginSlot] = {}

    def add(self, spec: PluginSpec, plugin: PlannerPlugin | None, at: float) -> None:
        """Register; an id in use is replaced only by the same plugin (the caller checks)."""
        self.seats[spec.id] = PluginSlot(spec, plugin, at, last_heartbeat=at)

    def remove(self, id: str) -> bool:
        return self.seats.pop(id, None) is not None

    def of(self, stage: Stage) -> Iterator[PluginSlot]:
        """Yield the slots of a stage."""
        for seat in list(self.seats.values()):
            if seat.spec.stage == stage:
                yield seat


def silent_for(code: str, text: str) -> Accept:
    """Return an answer that changes nothing, with its reason."""
    return Accept(reasons=(Reason(code=code, text=text),))
