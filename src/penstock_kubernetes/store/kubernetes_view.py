"""View of a Kubernetes store that all watches of one process share: what is alive, by two watches of the API server."""

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from penstock.adapters.seams import StoreUnavailable
from penstock.adapters.stores.entry_codec import EntryCodec
from penstock.adapters.task_cancel import end
from penstock_kubernetes.api.discovery_resources import DISCOVERY_LABEL, entry_class, lease_class, read_entry
from penstock_kubernetes.api.resource_watch import ResourceChange, follow, list_all
from penstock_kubernetes.store.kubernetes_leases import (
    KubernetesLeases,
    LeaseRenewal,
    LeaseSightings,
    end_leases,
    is_ended,
)

if TYPE_CHECKING:
    from lightkube import AsyncClient

log = logging.getLogger(__name__)

LOOK_EVERY = 5.0
"""Seconds, at most, between two looks for leases that are late or long dead."""
_PAUSE, _BEHIND = 0.05, 10
"""Seconds, and how often, that a new entry waits for its lease to be told of."""
SHOW_EVERY = 0.05
"""Seconds, at least, between two states that readers get: each costs what all entries do, and 500 that join come in as
many changes."""
_SUSPENDED = 2.0
"""Seconds by which a look may come late; beyond, this process was suspended, and owners on its machine perhaps too."""


class KubernetesView:
    """What is alive in a store, from the first `states` on until the API server can't be read."""

    def __init__(
        self,
        client: "AsyncClient",
        cluster: str,
        sightings: LeaseSightings,
        codec: EntryCodec,
        own: KubernetesLeases,
    ) -> None:
        self.failure: StoreUnavailable | None = None
        """Why it ended; the next watch begins another."""
        self._client = client
        self._cluster = cluster
        self._sightings = sightings
        self._codec = codec
        self._own = own
        self._entries: dict[str, tuple[str, bytes, str | None]] = {}
        """Name of an entry -> key, value and lease."""
        self._alive: dict[str, bytes] | None = None
        self._changed: set[asyncio.Event] = set()
        self._closed = False
        self._showing: asyncio.TimerHandle | None = None
        self._show_again = 0.0
        self._task = asyncio.create_task(self._run(), name="Kubernetes store")

    async def states(self) -> AsyncIterator[Mapping[str, bytes]]:
        """Yield what is alive, then again after changes; a slow reader receives only the newest state."""
        event = asyncio.Event()
        self._changed.add(event)
        try:
            while True:
                event.clear()
                if self.failure is not None:
                    raise self.failure
                if self._closed:
                    return
                if self._alive is not None:
                    yield self._alive
                if not event.is_set():
                    await event.wait()
        finally:
            self._changed.discard(event)

    async def close(self) -> None:
        """End all `states`."""
        self._closed = True
        await end([self._task])
        if self._showing is not None:
            self._showing.cancel()
        self._wake()

    # --- internals ----------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        self._sightings.forgive()
        listed = asyncio.Event()
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._follow_entries(listed))
                group.create_task(self._follow_leases(listed))
                group.create_task(self._judge())
        except* StoreUnavailable as errors:
            self.failure = _first_error(errors)
        except* Exception as errors:  # supervision boundary: watchers must learn that nothing comes any more
            log.exception("the store could not be followed by a bug of ours; it is read again")
            self.failure = StoreUnavailable(f"the view of the store failed: {errors.exceptions[0]}")
        self._wake()

    async def _follow_entries(self, listed: asyncio.Event) -> None:
        labels = {DISCOVERY_LABEL: self._cluster}
        async with aclosing(follow(self._client, entry_class(), labels=labels)) as batches:
            async for batch in batches:
                await self._entries_changed(batch, listed)

    async def _entries_changed(self, batch: list[ResourceChange], listed: asyncio.Event) -> None:
        changed = {change.name: self._read(change) for change in batch}
        if listed.is_set():
            await self._know({entry[2] for entry in changed.values() if entry is not None and entry[2] is not None})
        for name, entry in changed.items():
            if entry is None:
                self._entries.pop(name, None)
            else:
                self._entries[name] = entry
        if listed.is_set():
            self._show()
        listed.set()

    async def _know(self, leases: set[str]) -> None:
        """Wait until the watch of the leases, which may be behind, told of these; an entry waits so long.

        One that it does not tell of may be deleted already: a list shows that.
        """
        for _ in range(_BEHIND):
            if all(map(self._sightings.is_known, leases)):
                return
            await asyncio.sleep(_PAUSE)
        await self._look()

    async def _follow_leases(self, listed: asyncio.Event) -> None:
        await listed.wait()  # the lease of each entry was made before it
        self._sightings.look((await list_leases(self._client, self._cluster))[0])
        labels = {DISCOVERY_LABEL: self._cluster}
        async with aclosing(follow(self._client, lease_class(), labels=labels)) as batches:
            async for batch in batches:
                for change in batch:
                    if change.object is None or is_ended(change.object):
                        self._sightings.vanish(change.name)
                    else:
                        self._sightings.see(change.name, _renewal(change.object))
                self._show()

    def _read(self, change: ResourceChange) -> tuple[str, bytes, str | None] | None:
        if change.object is None:
            return None
        entry = read_entry(change.object)
        value = self._codec.decode(entry.key, entry.raw, entry.lease)
        return None if value is None else (entry.key, value, entry.lease)

    async def _judge(self) -> None:
        """End leases that were not renewed, and delete those that are long dead."""
        while True:
            pause = self._sightings.wait(LOOK_EVERY)
            began = time.monotonic()
            await asyncio.sleep(pause)
            if time.monotonic() - began > pause + _SUSPENDED:
                self._sightings.forgive()
            if self._sightings.late():
                if self._own.failing:
                    raise StoreUnavailable(
                        "our own lease can't be renewed, so the silence of others says nothing about them",
                        hint="look at the API server; `penstock doctor` lists rights that are missing",
                    )
                await self._look()  # a watch may be behind, or its connection dead
                ended = self._sightings.judge()
                if ended:
                    log.info("%d leases were not renewed for their ttl, the first is %s", len(ended), ended[0])
                self._show()
            if dead := self._sightings.long_dead():
                await end_leases(self._client, list(dead.items()))

    async def _look(self) -> None:
        leases, _ = await list_leases(self._client, self._cluster, since=self._sightings.newest)
        self._sightings.look(leases)

    def _show(self) -> None:
        """Let readers know what is alive, at once or `SHOW_EVERY` after the last time."""
        if self._showing is None:
            loop = asyncio.get_running_loop()
            self._showing = loop.call_at(max(loop.time(), self._show_again), self._show_now)

    def _show_now(self) -> None:
        """Compute what is alive; readers learn of it where it changed."""
        self._showing = None
        self._show_again = asyncio.get_running_loop().time() + SHOW_EVERY
        alive = {
            key: value
            for key, value, lease in sorted(self._entries.values(), key=lambda entry: entry[0])
            if lease is None or self._sightings.is_alive(lease)
        }
        if alive != self._alive:
            self._alive = alive
            self._wake()

    def _wake(self) -> None:
        for event in self._changed:
            event.set()


async def list_leases(
    client: "AsyncClient", cluster: str, *, since: str | None = None
) -> tuple[dict[str, LeaseRenewal], str]:
    """Return every lease of a store, and the resourceVersion of the list; see `list_all` for ``since``."""
    leases, version = await list_all(client, lease_class(), labels={DISCOVERY_LABEL: cluster}, since=since)
    return {lease.metadata.name: _renewal(lease) for lease in leases if not is_ended(lease)}, version


def _renewal(lease: Any) -> LeaseRenewal:
    seconds = None if lease.spec is None else lease.spec.leaseDurationSeconds
    return LeaseRenewal(lease.metadata.resourceVersion or "", float(seconds or math.inf))


def _first_error(errors: BaseExceptionGroup[StoreUnavailable]) -> StoreUnavailable:
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, StoreUnavailable)
    return error
