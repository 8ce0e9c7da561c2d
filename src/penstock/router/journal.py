"""The router's journal: every event that a router took, with its effects, so that a replay can repeat them."""

from collections.abc import Sequence
from functools import reduce
from operator import or_
from typing import Any

import msgspec

from penstock.kernel.journal_frames import Header, MachineBook, Record
from penstock.kernel.machine import Effect, Event, Snapshot
from penstock.kernel.values import Slo
from penstock.router.events import Arrived, Dispatch, Failed
from penstock.router.kv_index.pool_index import PromptForm, form_of
from penstock.router.router import HANDLERS, Router
from penstock.router.settings import RouterSettings

KIND = "router"
PER_EXACT, PER_GUESSED = 3e-8, 2e-6
"""Seconds to write down a block of the exact index, and one of routing history."""

_decode_event = msgspec.msgpack.Decoder(reduce(or_, HANDLERS)).decode


def router_book(router: Router) -> MachineBook:
    """Return what writes a router down for a journal. Hashes and lengths, never text."""

    def made() -> Snapshot:
        return {
            "settings": msgspec.to_builtins(router.started),
            "shared": router.shared,
            "form": router.form.name,
        }

    def seconds() -> float:
        found = 0.0  # what it knows of caches is nearly all of it
        for pool in router.pools.values():
            for index in (pool.index.exact, pool.index.history, pool.index.predicted):
                each = PER_EXACT if index is pool.index.exact else PER_GUESSED
                found += 0.0 if index is None else len(index) * each
        return found

    return MachineBook(router, KIND, placed_by, name=router.name, made=made, seconds=seconds)


def placed_by(effects: Sequence[Effect]) -> list[tuple[str, int, str, int]]:
    """Return what was sent where: (request, attempt, worker, rank)."""
    return [
        (effect.id, effect.attempt, effect.target.worker, effect.target.rank)
        for effect in effects
        if type(effect) is Dispatch
    ]


def event_of(record: Record, form: PromptForm) -> Event:
    """Return a record's event as the router took it.

    Raises:
        ValueError: it is no event of a router.
    """
    event: Event = _decode_event(record.event)
    if isinstance(event, Arrived):
        return msgspec.structs.replace(event, prompt=form.prompt(event.prompt))
    if isinstance(event, Failed) and event.resume is not None:
        resume = msgspec.structs.replace(event.resume, prompt=form.prompt(event.resume.prompt))
        return msgspec.structs.replace(event, resume=resume)
    return event


def router_of(header: Header, settings: RouterSettings | None = None, slo: Slo | None = None) -> Router:
    """Return the router whose state a header holds.

    Args:
        settings, slo: others, as if it had been started with them; what it knew stays.
    Raises:
        ValueError: the header's state is not that of a router of this version.
    """
    made: dict[str, Any] = header.made
    snapshot = header.snapshot
    if settings is not None:
        snapshot = {**snapshot, "settings": msgspec.to_builtins(settings)}
    if slo is not None:
        snapshot = {**snapshot, "slo": msgspec.to_builtins(slo)}
    started = msgspec.convert(made["settings"], RouterSettings) if settings is None else settings
    router = Router(started, name=header.machine, shared=made["shared"], form=form_of(made["form"]))
    try:
        router.restore(snapshot)
    except msgspec.ValidationError as error:  # of an index: the rest is read before anything is restored
        raise ValueError(f"the header's state does not belong to this version: {error}") from error
    return router
