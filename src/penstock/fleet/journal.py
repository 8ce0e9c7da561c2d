"""Journal of the fleet: its events and their effects, so that a rolling restart or a crash can be replayed."""

from collections.abc import Sequence
from functools import reduce
from operator import or_

import msgspec

from penstock.fleet import events
from penstock.fleet.fleet import Fleet
from penstock.kernel.journal_frames import Header, Record, packed, packed_record
from penstock.kernel.machine import Effect, Event, Nanos, Woken

KIND = "fleet"

_EVENTS = [
    kind for kind in vars(events).values() if isinstance(kind, type) and issubclass(kind, Event) and kind is not Event
]
_decode_event = msgspec.msgpack.Decoder(reduce(or_, _EVENTS, Woken)).decode


class FleetBook:
    """Writes a fleet's state and events for a journal."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def header(self, *, sequence: int, now: Nanos, wall_ns: int) -> bytes:
        """Return the fleet's whole state as a header."""
        return packed(
            Header(
                machine=KIND,
                kind=KIND,
                sequence=sequence,
                now=now,
                wall_ns=wall_ns,
                made={},
                snapshot=self._fleet.snapshot(),
            )
        )

    def record(self, sequence: int, now: Nanos, event: Event, effects: Sequence[Effect]) -> bytes:
        """Return one event with its effects as a record."""
        return packed_record(sequence, now, KIND, event, effects, placed_by(effects))

    def seconds(self) -> float:
        """Return about how long `header` takes: hardly any time."""
        return 0.0


def placed_by(effects: Sequence[Effect]) -> list[tuple[str, int, str, int]]:
    """Return what is done with replicas: (replica, serial, effect, 0)."""
    return [
        (effect.worker, effect.serial, type(effect).__name__, 0)
        for effect in effects
        if isinstance(effect, events.Spawn | events.PublishReplica | events.Stop)
    ]


def event_of(record: Record) -> Event:
    """Return a record's event in the fleet's type.

    Raises:
        ValueError: it is no event of a fleet.
    """
    event: Event = _decode_event(record.event)
    return event


def fleet_of(header: Header) -> Fleet:
    """Return the fleet that a header describes.

    Raises:
        ValueError: its state is not of a fleet of this version.
    """
    fleet = Fleet()
    fleet.restore(header.snapshot)
    return fleet
