"""What does a planner's source answer? Each model's traffic since the reading before, and the engines behind it."""

from collections.abc import Mapping
from typing import Protocol

import msgspec

from penstock.kernel.values import Role
from penstock.planner.seen import EngineSeen, Health, Traffic


class WorkerRead(msgspec.Struct, frozen=True, kw_only=True):
    """One worker as it is known where requests are placed.

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
    engines: tuple[EngineSeen, ...] = ()


class ModelRead(msgspec.Struct, frozen=True, kw_only=True):
    """One model. ``traffic``: None where it could not be read, which is not the same as none."""

    traffic: Traffic | None
    queued: int | None = None
    held: int = 0
    health: Health = "fresh"
    why: str = ""


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a source knows. ``workers`` is None where it knows nobody, such as a Prometheus."""

    models: Mapping[str, ModelRead]
    workers: Mapping[str, WorkerRead] | None = None


class Source(Protocol):
    """Where traffic is read. What can't be read is said so, and never zero."""

    async def read(self, at: float) -> Reading:
        """Return what happened since the reading before; ``at``: second of the run. It raises nothing of its own."""
        ...

    def snapshot(self) -> bytes:
        """Return what a planner that takes over must know, so that nothing counts twice and nothing is left out."""
        ...

    def restore(self, state: bytes) -> None:
        """Go on from where the source that wrote ``state`` was."""
        ...

    def describe(self) -> str:
        """Say in a few words where it reads."""
        ...

    async def close(self) -> None:
        """Let go of connections."""
        ...
