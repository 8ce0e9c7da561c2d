"""What is a plugin, who takes part in a tick, and what of those that fail?

A built-in step and one of yours differ in nothing but where they run. Whoever fails contributes nothing and breaks no
tick; whoever fails five times in a row is left alone for a while.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import msgspec

from penstock.kernel.values import Role
from penstock.planner.context import Context
from penstock.planner.proposals import Accept, Because, Override, Result

Stage = Literal["predict", "propose", "reconcile", "constrain"]
STAGES: tuple[Stage, ...] = ("predict", "propose", "reconcile", "constrain")
Hold = Literal["accept_when_idle", "hold_last"]
Circuit = Literal["closed", "half_open", "open"]

FAILURES_MAX = 5
"""Failures in a row that open a plugin's circuit..."""
OPEN_SECONDS = 30.0
"""... for so long; then it gets one try."""


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """Who a plugin is and when it is asked.

    Args:
        id: unique; ``priority``: smaller is stronger.
        interval: seconds between two calls; 0 is every tick.
        hold: between two calls, whether its last targets go on counting or it has no say.
        needs: what it reads of the observation, such as ``traffic``; for those outside, only that is sent.
        requires: produced by a stage before, such as ``predictions``; without it this tick passes it over.
        window: seconds of traffic that it wants to see; 0 is the time since the tick before.
        outside: whether it runs in another process, so that it is asked by `penstock.planner.events.Ask`.
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


class Plugin(Protocol):
    """One step of a stage, in this process."""

    spec: Spec

    def evaluate(self, context: Context) -> Result:
        """Answer for one tick. It reads no clock and does no I/O; the same contexts lead to the same answers."""
        ...

    def snapshot(self) -> Any:
        """Return the state over time as plain data; None where there is none."""
        ...

    def restore(self, state: Any) -> None:
        """Become the plugin that wrote ``state``."""
        ...


@runtime_checkable
class LearnsSpeeds(Protocol):
    """A plugin that makes use of what workers measured of themselves."""

    def benchmarked(self, model: str, role: Role, metrics: Mapping[str, Any]) -> None:
        """Take in a worker's benchmark.

        Raises:
            ConfigError: it is not what it must be.
        """
        ...


class Stateless:
    """Base of plugins without state over time."""

    def snapshot(self) -> Any:
        return None

    def restore(self, state: Any) -> None:
        return None


@dataclass(slots=True)
class Seat:
    """One registered plugin, and how it has been doing. Times in seconds of the run."""

    spec: Spec
    plugin: Plugin | None
    """None where it runs outside."""
    registered: float
    called: float | None = None
    """When it was last called with success."""
    last: Override | None = None
    failures: int = 0
    opened: float | None = None
    heard: float = 0.0
    """Last sign of life of one outside."""
    evaluations: dict[str, int] = field(default_factory=dict)
    """How often each kind of result came, ``error`` and ``timeout`` among them."""
    seconds: float = 0.0
    """That its last answer took; of those outside."""

    def circuit(self, at: float) -> Circuit:
        if self.opened is None:
            return "closed"
        return "half_open" if at - self.opened >= OPEN_SECONDS else "open"

    def due(self, at: float, base: float) -> bool:
        """Say whether it is asked in a tick. The first call comes one interval after it was registered."""
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
        """Count a failure; enough of them in a row, or one in the trial, open the circuit and end what is held."""
        self.failures += 1
        self._count(kind)
        if self.failures >= FAILURES_MAX or self.opened is not None:
            self.opened, self.last = at, None

    def held(self) -> Override | None:
        """Return the targets that go on counting between two calls; they never silence others again."""
        if self.spec.hold != "hold_last" or self.last is None:
            return None
        return msgspec.structs.replace(self.last, final=False)

    def _count(self, kind: str) -> None:
        self.evaluations[kind] = self.evaluations.get(kind, 0) + 1

    def snapshot(self) -> dict[str, Any]:
        """Return how it has been doing as plain data, with the plugin's own state."""
        return {
            "spec": msgspec.to_builtins(self.spec),
            "registered": self.registered,
            "called": self.called,
            "last": None if self.last is None else msgspec.to_builtins(self.last),
            "failures": self.failures,
            "opened": self.opened,
            "heard": self.heard,
            "evaluations": dict(self.evaluations),
            "seconds": self.seconds,
            "state": None if self.plugin is None else self.plugin.snapshot(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Become the seat that wrote ``state``."""
        self.registered, self.called = state["registered"], state["called"]
        self.last = None if state["last"] is None else msgspec.convert(state["last"], Override)
        self.failures, self.opened, self.heard = state["failures"], state["opened"], state["heard"]
        self.evaluations, self.seconds = dict(state["evaluations"]), state["seconds"]
        if self.plugin is not None:
            self.plugin.restore(state["state"])


class Registry:
    """Who takes part, in the order of registration."""

    def __init__(self) -> None:
        self.seats: dict[str, Seat] = {}

    def add(self, spec: Spec, plugin: Plugin | None, at: float) -> None:
        """Register; an id that is there already is replaced only by itself (the caller checks)."""
        self.seats[spec.id] = Seat(spec, plugin, at, heard=at)

    def remove(self, id: str) -> bool:
        return self.seats.pop(id, None) is not None

    def of(self, stage: Stage) -> Iterator[Seat]:
        """Yield the seats of a stage."""
        for seat in list(self.seats.values()):
            if seat.spec.stage == stage:
                yield seat


def silent_for(code: str, text: str) -> Accept:
    """Return an answer that changes nothing and says why."""
    return Accept(because=(Because(code=code, text=text),))
