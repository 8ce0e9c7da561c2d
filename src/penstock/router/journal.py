"""What goes into a router's journal, and how does one come out of it again?"""

from collections.abc import Sequence
from functools import reduce
from operator import or_
from typing import Any

import msgspec

from penstock.kernel.errors import InvariantError
from penstock.kernel.journal import VERSION, Header, Record, digest_of, packed
from penstock.kernel.machine import Effect, Event, Nanos
from penstock.kernel.runs import chain_of
from penstock.router.events import Arrived, Dispatch, Failed
from penstock.router.router import HANDLERS, Router
from penstock.router.settings import RouterSettings

KIND = "router"

_decode_event = msgspec.msgpack.Decoder(reduce(or_, HANDLERS)).decode
_decode_header = msgspec.msgpack.Decoder(Header).decode
_decode_record = msgspec.msgpack.Decoder(Record).decode


def header_of(router: Router, *, sequence: int, now: Nanos, wall_ns: int) -> bytes:
    """Write down all that a router is. Cost: walks everything that it keeps, its index above all."""
    made = {
        "settings": msgspec.to_builtins(router.started),
        "shared": router.shared,
        "runs": router.runs,
    }
    return packed(
        Header(
            machine=router.name,
            kind=KIND,
            sequence=sequence,
            now=now,
            wall_ns=wall_ns,
            made=made,
            snapshot=router.snapshot(),
        )
    )


def record_of(router: Router, sequence: int, now: Nanos, event: Event, effects: Sequence[Effect]) -> bytes:
    """Write down what a router took and what came of it. Hashes and lengths, never text."""
    return packed(
        Record(sequence, now, router.name, msgspec.Raw(packed(event)), digest_of(effects), placed_by(effects))
    )


def placed_by(effects: Sequence[Effect]) -> list[tuple[str, int, str, int]]:
    """Return what was sent where: (request, attempt, worker, rank)."""
    return [
        (effect.id, effect.attempt, effect.target.worker, effect.target.rank)
        for effect in effects
        if type(effect) is Dispatch
    ]


def read_header(payload: bytes) -> Header:
    """Read the first frame of a segment.

    Raises:
        ValueError: it is no header, or one of another version or machine.
    """
    header = _decode_header(payload)
    if header.version != VERSION or header.kind != KIND:
        raise ValueError(f"a journal of version {header.version} of a {header.kind}, not {VERSION} of a {KIND}")
    return header


def read_record(payload: bytes) -> Record:
    """Read any other frame of a segment.

    Raises:
        ValueError: it is no record.
    """
    return _decode_record(payload)


def event_of(record: Record, *, runs: bool) -> Event:
    """Return a record's event as the router took it.

    Raises:
        ValueError: it is none that a router takes.
    """
    event: Event = _decode_event(record.event)
    if runs:
        if isinstance(event, Arrived):
            return msgspec.structs.replace(event, blocks=chain_of(event.blocks))
        if isinstance(event, Failed) and event.resume is not None:
            resume = msgspec.structs.replace(event.resume, blocks=chain_of(event.resume.blocks))
            return msgspec.structs.replace(event, resume=resume)
    return event


def router_of(header: Header, settings: RouterSettings | None = None) -> Router:
    """Return the router that a header was written of.

    Args:
        settings: other settings, as if it had been started with them; what it knew stays.
    Raises:
        ValueError: the header's state is none of a router of this version.
    """
    made: dict[str, Any] = header.made
    snapshot = header.snapshot
    if settings is not None:
        snapshot = {**snapshot, "settings": msgspec.to_builtins(settings)}
    started = msgspec.convert(made["settings"], RouterSettings) if settings is None else settings
    router = Router(started, name=header.machine, shared=made["shared"], runs=made["runs"])
    try:
        router.restore(snapshot)
    except (KeyError, TypeError, InvariantError) as error:
        raise ValueError(f"the header's state is none of this version's: {error!r}") from error
    return router
