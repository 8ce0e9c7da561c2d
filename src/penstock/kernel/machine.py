"""The `Machine` protocol, which the router, engines and planner implement, and the bases of events and effects.

A machine takes ``(now, event)`` and returns effects. It owns no clock, socket or thread, so one object runs
under `Simulation` (virtual time) and under the live driver (asyncio).
"""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import msgspec

Nanos = int
"""Nanoseconds since the start of the run: the only time a machine knows."""

SECOND: Nanos = 1_000_000_000
MILLISECOND: Nanos = 1_000_000

Snapshot = dict[str, Any]
"""Plain data (numbers, strings, bytes, lists, dicts) with a ``version`` key."""


class Event(msgspec.Struct, frozen=True, kw_only=True, tag=True, tag_field="event"):
    """Something that happened; subclasses are the vocabulary of one room."""


class Effect(msgspec.Struct, frozen=True, kw_only=True, tag=True, tag_field="effect"):
    """Something that a machine wants done; a driver's adapter carries it out, in order."""


class Woken(Event, frozen=True):
    """The time of the machine's newest `Wake` has come."""


class Wake(Effect, frozen=True, kw_only=True):
    """Ask for a `Woken` at ``at``. One is pending per machine; the newest replaces the older."""

    at: Nanos


class Send(Effect, frozen=True, kw_only=True):
    """Give ``message`` to another machine, after this ``handle`` returns and at the same ``now``."""

    machine: str
    message: Event


@runtime_checkable
class Machine(Protocol):
    """State over time: changes only in `handle`."""

    def handle(self, now: Nanos, event: Event) -> Sequence[Effect]:
        """Take one event and return what should be done about it, in order."""
        ...

    def snapshot(self) -> Snapshot:
        """Return the whole state as plain data, the random generator's included."""
        ...

    def restore(self, snapshot: Snapshot) -> None:
        """Become the machine that wrote ``snapshot``: ``restore(snapshot())`` changes nothing."""
        ...

    def check(self) -> None:
        """Raise `InvariantError` where the state contradicts itself. Cost: may walk everything."""
        ...


def seconds(now: Nanos) -> float:
    """Turn kernel time into seconds, the unit that people and metrics see."""
    return now / SECOND


def nanos(duration: float) -> Nanos:
    """Turn seconds into kernel time, rounded to the nanosecond."""
    return round(duration * SECOND)
