"""Kubernetes `Store` for discovery: keys as PenstockEntry resources, held by Leases; no etcd of our own is needed.

docs/guides/discovery.md says what it writes; docs/why/leases-in-kubernetes.md why so.
"""

import logging
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING

from penstock.adapters.seams import StoreChange, StoreUnavailable, changes_between
from penstock.adapters.stores.entry_codec import EntryCodec, check_entry, check_key
from penstock.adapters.stores.key_locks import KeyLocks
from penstock.config.settings.cluster_settings import ClusterSettings
from penstock.kernel.secret import ClusterSecret
from penstock_kubernetes.api.api_client import ask, code_of, open_client, unavailable
from penstock_kubernetes.api.discovery_resources import (
    DISCOVERY_LABEL,
    entry_body,
    entry_class,
    entry_name,
    read_entry,
)
from penstock_kubernetes.api.resource_watch import list_all
from penstock_kubernetes.store.kubernetes_leases import KubernetesLeases, LeaseSightings, OwnLease
from penstock_kubernetes.store.kubernetes_view import KubernetesView, list_leases

if TYPE_CHECKING:
    from lightkube import AsyncClient

log = logging.getLogger(__name__)


class KubernetesStore:
    """A `Store` in the API server of a Kubernetes cluster, in the client's namespace.

    Args:
        client: owned by this store from here on.
        cluster: name of the cluster; clusters that share a namespace differ in it.
        secret: of the cluster. With it entries are signed, and foreign ones are left out.
        revoked: called with each key of ours whose lease somebody deleted; it is not put again.
    """

    def __init__(
        self,
        client: "AsyncClient",
        cluster: str,
        *,
        secret: ClusterSecret | None = None,
        revoked: Callable[[str], None] = lambda key: None,
        sightings: LeaseSightings | None = None,
    ) -> None:
        self.root = f"Kubernetes namespace {client.namespace}, cluster {cluster}"
        self.codec = EntryCodec(self.root, secret)
        self.regained = 0
        """Leases that were lost, and made again with their keys."""
        self.revocations = 0
        """Leases of ours that somebody deleted."""
        self._client = client
        self._cluster = cluster
        self._revoked = revoked
        self._sightings = LeaseSightings() if sightings is None else sightings
        self._own = KubernetesLeases(client, cluster, lost=self._regain, revoked=self._lease_revoked)
        self._view: KubernetesView | None = None
        self._newest: str | None = None
        """Version of our last list or write, which the next list must not be older than."""
        self._locks = KeyLocks()
        self._closed = False

    @property
    def renewal_failures(self) -> int:
        """Renewals of our leases that failed."""
        return self._own.renewal_failures

    async def put(self, key: str, value: bytes, *, ttl: float | None = None) -> None:
        """Write a value; with ``ttl`` (seconds, rounded up) it is held by a lease of this process.

        Raises:
            StoreUnavailable: it could not be written.
            ValueError: the key can't be one, the value is larger than 1 MiB, or ttl is not above 0.
        """
        check_entry(key, value, ttl)
        self._check()
        async with self._locks.of(key):
            before = self._own.holding(key)
            lease = None if ttl is None else await self._own.of(ttl)
            await self._write(key, value, lease, known=before is not None)
            if before is not None and before is not lease:
                before.keys.pop(key, None)
            if lease is not None:
                lease.keys[key] = value

    async def delete(self, key: str) -> None:
        """Delete a key of any writer; an absent one is no error."""
        from lightkube import ApiError

        check_key(key)
        self._check()
        async with self._locks.of(key):
            lease = self._own.holding(key)
            if lease is not None:
                del lease.keys[key]
            try:
                await ask(lambda: self._client.delete(entry_class(), entry_name(self._cluster, key)))
            except ApiError as error:
                if code_of(error) != 404:
                    raise unavailable(error) from error

    async def list(self, prefix: str) -> dict[str, bytes]:
        """Return what is alive under a prefix.

        A process that watches nothing has observed no lease for long, and takes each lease that there is for alive.
        """
        self._check()
        # Forgotten where this fails: an API server whose data was restored counts from an earlier version on.
        labels, since, self._newest = {DISCOVERY_LABEL: self._cluster}, self._newest, None
        entries, self._newest = await list_all(self._client, entry_class(), labels=labels, since=since)
        # After the entries: the lease of each was made before it.
        leases, _ = await list_leases(self._client, self._cluster, since=self._newest)
        alive = {}
        for entry in map(read_entry, entries):
            if not entry.key.startswith(prefix):
                continue
            if entry.lease is not None and (entry.lease not in leases or self._sightings.is_dead(entry.lease, leases)):
                continue
            value = self.codec.decode(entry.key, entry.raw, entry.lease)
            if value is not None:
                alive[entry.key] = value
        return dict(sorted(alive.items()))

    async def watch(self, prefix: str) -> AsyncIterator[Sequence[StoreChange]]:
        """Yield first everything alive under ``prefix``, then changes as the API server tells them.

        All watches of a store share one watch of the entries and one of the leases.

        Raises:
            StoreUnavailable: the API server can't be read; also where our own lease can't be renewed, as the others'
                silence then says nothing about them.
        """
        self._check()
        if self._view is None or self._view.failure is not None:
            self._view = KubernetesView(self._client, self._cluster, self._sightings, self.codec, self._own)
        view = self._view
        known: dict[str, bytes] | None = None
        async for everything in view.states():
            alive = {key: value for key, value in everything.items() if key.startswith(prefix)}
            changes = changes_between(known or {}, alive)
            if changes or known is None:
                yield changes
            known = alive

    async def close(self) -> None:
        """Delete our leases where the API server answers; they end anyway."""
        if self._closed:
            return
        self._closed = True
        if self._view is not None:
            await self._view.close()
        try:
            await self._own.close()
        except StoreUnavailable as error:
            log.warning("left the store without a word; our keys go when their ttl is over: %s", error)
        await self._client.close()

    # --- internals ----------------------------------------------------------------------------------------------------

    async def _write(self, key: str, value: bytes, lease: OwnLease | None, *, known: bool) -> None:
        """Write an entry over whatever there is; ``known``: there should be one."""
        if known and await self._patch(key, value, lease):
            return
        while not await self._create(key, value, lease):
            if await self._patch(key, value, lease):
                return

    async def _create(self, key: str, value: bytes, lease: OwnLease | None) -> bool:
        """Create an entry; return whether there was none."""
        from lightkube import ApiError

        body = self._body(key, value, lease)
        metadata = {**body["metadata"], "name": entry_name(self._cluster, key)}  # type: ignore[dict-item]
        resource = entry_class()
        fresh = resource({**body, "metadata": metadata})
        try:
            made = await ask(lambda: self._client.create(fresh))
        except ApiError as error:
            if code_of(error) == 409:
                return False
            raise unavailable(error) from error
        self._newest = made.metadata.resourceVersion
        return True

    async def _patch(self, key: str, value: bytes, lease: OwnLease | None, version: str | None = None) -> bool:
        """Change an entry; return whether there was one, at that version where one is named."""
        from lightkube import ApiError
        from lightkube.types import PatchType

        body = self._body(key, value, lease)
        if version is not None:
            body["metadata"] = {**body["metadata"], "resourceVersion": version}  # type: ignore[dict-item]
        name = entry_name(self._cluster, key)
        try:
            made = await ask(lambda: self._client.patch(entry_class(), name, body, patch_type=PatchType.MERGE))
        except ApiError as error:
            if code_of(error) in (404, 409):
                return False
            raise unavailable(error) from error
        self._newest = made.metadata.resourceVersion
        return True

    def _body(self, key: str, value: bytes, lease: OwnLease | None) -> dict[str, object]:
        name, uid = (None, None) if lease is None else (lease.name, lease.uid)
        return entry_body(self._cluster, key, self.codec.encode(key, value, name), name, uid)

    async def _regain(self, lost: OwnLease) -> None:
        """Put the keys of a lease that has ended again, except those that another process has taken over."""
        fresh = await self._own.of(lost.ttl)
        for key, value in list(lost.keys.items()):
            async with self._locks.of(key):
                if key not in lost.keys:
                    continue  # it was put anew or deleted meanwhile
                if await self._put_again(key, value, lost, fresh):
                    fresh.keys[key] = value
                else:
                    log.warning("another process has taken %s over", key)
                del lost.keys[key]
        self.regained += 1

    async def _put_again(self, key: str, value: bytes, lost: OwnLease, fresh: OwnLease) -> bool:
        from lightkube import ApiError

        if await self._create(key, value, fresh):
            return True
        try:
            there = await ask(lambda: self._client.get(entry_class(), entry_name(self._cluster, key)))
        except ApiError as error:
            if code_of(error) != 404:
                raise unavailable(error) from error
            return await self._create(key, value, fresh)  # the garbage collector has just removed it
        if read_entry(there).lease not in (lost.name, fresh.name):
            return False
        return await self._patch(key, value, fresh, there.metadata.resourceVersion)

    def _lease_revoked(self, lease: OwnLease) -> None:
        self.revocations += 1
        log.warning("somebody deleted the lease %s of this process", lease.name)
        for key in lease.keys:
            self._revoked(key)

    def _check(self) -> None:
        if self._closed:
            raise StoreUnavailable(f"the store in {self.root} was closed by this process")


def open_kubernetes_store(
    settings: ClusterSettings, secret: ClusterSecret | None, revoked: Callable[[str], None]
) -> KubernetesStore:
    """Return the store of ``discovery.store: kubernetes``; the arguments are those of `KubernetesStore`.

    Raises:
        ConfigError: there is no login at an API server.
    """
    client = open_client(settings.discovery.kubernetes)
    return KubernetesStore(client, settings.name, secret=secret, revoked=revoked)
