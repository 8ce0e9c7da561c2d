"""Traffic source of a planner: each model's traffic since the reading before, and the engines behind it."""

from collections.abc import Mapping
from typing import Protocol

import msgspec

from penstock.kernel.values import Role, Traffic
from penstock.planner.observation import BROKEN_AFTER, EngineState, Health


class WorkerReading(msgspec.Struct, frozen=True, kw_only=True):
    """One worker as the router knows it.

    Args:
        ready: whether it takes requests now.
        engines: one entry per rank.
        flips: whether it can take another role.
    """

    id: str
    model: str
    role: Role
    ready: bool
    flips: bool = False
    engines: tuple[EngineState, ...] = ()


class ModelReading(msgspec.Struct, frozen=True, kw_only=True):
    """One model. ``traffic``: None where it could not be read, which is not zero."""

    traffic: Traffic | None
    queued: int | None = None
    without_worker: int = 0
    health: Health = "fresh"
    why: str = ""


class Readability:
    """Since when a source can't be read."""

    def __init__(self) -> None:
        self._since: float | None = None

    def read(self, at: float) -> None:
        """Note that everything could be read at second ``at`` of the run."""
        self._since = at

    def unread(self, at: float, why: str) -> ModelReading:
        """Return a model that could not be read: stale, and broken once that has lasted `BROKEN_AFTER`."""
        if self._since is None:
            self._since = at
        health: Health = "broken" if at - self._since >= BROKEN_AFTER else "stale"
        return ModelReading(traffic=None, health=health, why=why)


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a source knows. ``workers`` is None where it knows no workers, such as a Prometheus."""

    models: Mapping[str, ModelReading]
    workers: Mapping[str, WorkerReading] | None = None


class TrafficSource(Protocol):
    """Reads traffic. What can't be read is marked as unreadable, never zero."""

    async def read(self, at: float) -> Reading:
        """Return what happened since the reading before; ``at``: second of the run. It raises no error of its own."""
        ...

    def snapshot(self) -> bytes:
        """Return the state for a planner that takes over, so that nothing counts twice and nothing is left out."""
        ...

    def restore(self, state: bytes) -> None:
        """Continue where the source that wrote ``state`` was."""
        ...

    def describe(self) -> str:
        """Return in a few words where it reads."""
        ...

    async def close(self) -> None:
        """Close connections."""
        ...
