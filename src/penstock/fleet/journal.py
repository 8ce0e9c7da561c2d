"""Journal of the fleet: its events and their effects, so that a rolling restart or a crash can be replayed."""

from collections.abc import Sequence
from functools import reduce
from operator import or_

import msgspec

from penstock.fleet import events
from penstock.fleet.fleet import Fleet
from penstock.kernel.journal_frames import Header, MachineBook, Record
from penstock.kernel.machine import Effect, Event, Woken

KIND = "fleet"

_EVENTS = [
    kind for kind in vars(events).values() if isinstance(kind, type) and issubclass(kind, Event) and kind is not Event
]
_decode_event = msgspec.msgpack.Decoder(reduce(or_, _EVENTS, Woken)).decode


def fleet_book(fleet: Fleet) -> MachineBook:
    """Return what writes a fleet's state and events for a journal."""
    return MachineBook(fleet, KIND, placed_by)


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
