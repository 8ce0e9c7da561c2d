"""The `Machine` protocol, which the router, engines and planner implement, and the bases of events and effects.

A machine takes ``(now, event)`` and returns effects. It owns no clock, socket or thread, so one object runs
under `Simulation` (virtual time) and under the live driver (asyncio).
"""

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

import msgspec

Nanos = int
"""Nanoseconds since the start of the run: the only time a machine knows."""

SECOND: Nanos = 1_000_000_000
MILLISECOND: Nanos = 1_000_000

Snapshot = dict[str, Any]
"""Plain data (numbers, strings, bytes, lists, dicts) with a ``version`` key."""

T = TypeVar("T")
S = TypeVar("S", bound=msgspec.Struct)


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
        """Become the machine that wrote ``snapshot``: ``restore(snapshot())`` changes nothing.

        Raises:
            ValueError: it is of another version.
        """
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


def state_of(part: object, state: type[S]) -> S:
    """Return a machine's part as a state: a struct whose fields are those attributes of the part that it is made of.

    An attribute that is a part itself, which is what has a ``snapshot``, gives its own.
    """
    return state(**{name: _state_or_value(getattr(part, name)) for name in state.__struct_fields__})


def take_state(part: object, state: msgspec.Struct) -> None:
    """Become the part of which `state_of` returned this state; a part of it that was not there stays as it is."""
    for name in state.__struct_fields__:
        value = getattr(state, name)
        if (restore := getattr(getattr(part, name), "restore", None)) is None:
            setattr(part, name, value)
        elif value is not None:
            restore(value)


def write_snapshot(state: object, version: int) -> Snapshot:
    """Return a state (a struct or dataclass of such, lists, dicts, numbers and bytes) as plain data."""
    return {"version": version, **msgspec.to_builtins(state, builtin_types=(bytes,), enc_hook=list)}


def read_snapshot(snapshot: Snapshot, state: type[T], version: int, machine: str) -> T:
    """Return the state that `write_snapshot` wrote.

    Raises:
        ValueError: it is of another version, or no such state.
    """
    check_version(snapshot, version, machine)
    try:
        return msgspec.convert(snapshot, state)  # the version is no field of a state, and is left out
    except msgspec.ValidationError as error:
        raise ValueError(f"a snapshot of {machine} can't be read: {error}") from error


def check_version(snapshot: Snapshot, version: int, machine: str) -> None:
    """Refuse the snapshot of another version: its parts may mean something else.

    Raises:
        ValueError: it is one.
    """
    written = snapshot.get("version")
    if written != version:
        raise ValueError(
            f"a snapshot of {machine} has version {written}, and this release reads {version}: "
            "read it with the release that wrote it"
        )


def _state_or_value(value: object) -> object:
    snapshot = getattr(value, "snapshot", None)
    return value if snapshot is None else snapshot()
