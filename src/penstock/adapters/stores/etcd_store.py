"""etcd `Store` for discovery over several machines: leased keys, watches, and keys put again after a data loss.

docs/guides/discovery.md says what happens when etcd fails; docs/why/leases-in-etcd.md why each key has its own lease.
"""

import asyncio
import logging
import math
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass

from penstock.adapters.seams import StoreChange, StoreUnavailable
from penstock.adapters.stores.entry_codec import EntryCodec, check_entry, check_key
from penstock.adapters.stores.etcd_client import (
    Compacted,
    EtcdChanges,
    EtcdClient,
    EtcdCompare,
    EtcdEvent,
    EtcdPut,
    LeaseNotFound,
)
from penstock.adapters.stores.key_locks import KeyLocks
from penstock.adapters.task_cancel import end
from penstock.kernel.secret import ClusterSecret

log = logging.getLogger(__name__)

RETRY = 1.0
"""Seconds, at most, between tries to renew our leases while etcd does not answer."""
_REVOKED_AT_ONCE = 32
"""Leases given back at the same time."""


@dataclass(slots=True)
class _LeasedKey:
    """A key of ours: the lease that holds it, when that was last renewed (monotonic) and its life of the store."""

    value: bytes
    ttl: float
    lease: int
    renewed: float
    life: int


class EtcdStore:
    """A `Store` in an etcd.

    Args:
        client: owned by this store from here on.
        prefix: of all keys, so that several clusters can share an etcd.
        settle: seconds that owners get to put their keys again where etcd comes back without its data.
        probe: seconds of silence after which a watch is compared with what etcd holds.
        secret: of the cluster. With it entries are signed, and foreign ones are left out.
        revoked: called with each key of ours whose lease another client revoked; it is not put again.
    """

    def __init__(
        self,
        client: EtcdClient,
        *,
        prefix: str = "penstock/",
        settle: float = 5.0,
        probe: float = 5.0,
        secret: ClusterSecret | None = None,
        revoked: Callable[[str], None] = lambda key: None,
    ) -> None:
        self.root = f"etcd {client.urls[0]} {prefix}"
        self.codec = EntryCodec(self.root, secret)
        self.renewal_failures = 0
        self.regained = 0
        """Leases that were lost, and granted again with their keys."""
        self.revocations = 0
        """Leases that another client revoked."""
        self._client = client
        self._keys = f"{prefix}keys/".encode()
        self._mark = f"{prefix}identity".encode()
        self._settle = settle
        self._probe = probe
        self._revoked = revoked
        self._leased: dict[str, _LeasedKey] = {}
        self._locks = KeyLocks()
        self._renewing: asyncio.Task[None] | None = None
        self._due = math.inf
        """When our leases are renewed next (monotonic)."""
        self._sooner = asyncio.Event()
        """Set when a new lease has to be renewed before that."""
        self._identity: bytes | None = None
        self._life = 0
        """How often etcd came back with different data."""
        self._settled_at = 0.0
        self._closed = False

    async def put(self, key: str, value: bytes, *, ttl: float | None = None) -> None:
        """Write a value; with ``ttl`` (seconds, rounded up) it has a lease that lives as long as this process.

        Raises:
            StoreUnavailable: it could not be written.
            ValueError: the key can't be one, the value is larger than 1 MiB, or ttl is not above 0.
        """
        check_entry(key, value, ttl)
        self._check()
        async with self._locks.of(key):
            leased = self._leased.get(key)
            if ttl is None:
                await self._client.put(self._named(key), self._encode(key, value, 0))
                if leased is not None:
                    del self._leased[key]
                    await self._client.revoke(leased.lease)
                return
            if leased is not None and leased.ttl == ttl:
                try:
                    await self._client.put(self._named(key), self._encode(key, value, leased.lease), lease=leased.lease)
                    leased.value = value
                    return
                except LeaseNotFound:
                    leased = None  # a new put means that the key is wanted, also where another client revoked it
            fresh = await self._lease(value, ttl)
            await self._client.put(self._named(key), self._encode(key, value, fresh.lease), lease=fresh.lease)
            self._leased[key] = fresh
            if leased is not None:
                await self._client.revoke(leased.lease)
        if time.monotonic() + ttl / 3 < self._due:
            self._sooner.set()
        if self._renewing is None:
            self._renewing = asyncio.create_task(self._renew(), name="etcd leases")

    async def delete(self, key: str) -> None:
        """Delete a key of any writer; an absent one is no error."""
        check_key(key)
        self._check()
        async with self._locks.of(key):
            leased = self._leased.pop(key, None)
            await self._client.delete(self._named(key))
            if leased is not None:
                await self._client.revoke(leased.lease)

    async def list(self, prefix: str) -> dict[str, bytes]:
        """Return what is alive under a prefix."""
        self._check()
        answer = await self._client.range(self._named(prefix))
        decoded = ((item.key, self._decode(item.key, item.value, item.lease)) for item in answer.items)
        return {self._key(key): value for key, value in decoded if value is not None}

    async def watch(self, prefix: str) -> AsyncIterator[Sequence[StoreChange]]:
        """Yield first everything alive under ``prefix``, then changes as etcd reports them.

        A connection that breaks is made again and the watch continues from its revision; where etcd has
        forgotten that one, the difference is yielded.

        Raises:
            StoreUnavailable: etcd can't be reached. Also for a while after it came back without its data: the owners
                put their keys again, so a missing key then does not mean a gone owner.
        """
        under = self._named(prefix)
        await self._steady()
        known, revision = await self._all(under)
        yield [StoreChange(key, value) for key, (value, _) in known.items() if value is not None]
        while not self._closed:
            life = self._life
            try:
                async with aclosing(self._following(under, known, revision + 1)) as batches:
                    async for batch in batches:
                        revision = max(revision, batch.revision)
                        changes = self._apply(known, batch.events)
                        if changes:
                            yield changes
            except Compacted:
                now, revision = await self._all(under)
                before, known = known, now
                if changes := _changes_between(before, now):
                    yield changes
            except StoreUnavailable as error:
                if self._closed:
                    return
                log.info("a watch of etcd broke and is made again: %s", error)
                await self._steady()
                if self._life != life:
                    raise StoreUnavailable(f"etcd came back with other data: {error}") from error

    async def close(self) -> None:
        """Revoke our leases where etcd answers; they end anyway."""
        if self._closed:
            return
        self._closed = True
        if self._renewing is not None:
            await end([self._renewing])
        leases = [leased.lease for leased in self._leased.values()]
        self._leased.clear()
        try:
            for start in range(0, len(leases), _REVOKED_AT_ONCE):
                some = leases[start : start + _REVOKED_AT_ONCE]
                await asyncio.gather(*(self._client.revoke(lease) for lease in some))
        except StoreUnavailable as error:
            log.warning("left the store without a word; our keys go when their ttl is over: %s", error)
        await self._client.close()

    # --- leases -----------------------------------------------------------------------------------------------------

    async def _lease(self, value: bytes, ttl: float) -> _LeasedKey:
        if self._identity is None:
            await self._identify()
        requested_at = time.monotonic()
        return _LeasedKey(value, ttl, await self._client.grant(math.ceil(ttl)), requested_at, self._life)

    async def _renew(self) -> None:
        failing = False
        while True:
            self._sooner.clear()
            wait = min((leased.ttl for leased in self._leased.values()), default=RETRY) / 3
            self._due = min(self._due, time.monotonic() + (min(wait, RETRY) if failing else wait))
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, self._due - time.monotonic())):
                    await self._sooner.wait()
                continue
            self._due = math.inf
            try:
                await self._renew_all()
            except StoreUnavailable as error:
                self.renewal_failures += 1
                if not failing:
                    log.warning("our leases can't be renewed: %s", error)
                failing = True
                continue
            if failing:
                log.info("our leases in etcd are renewed again")
            failing = False

    async def _renew_all(self) -> None:
        requested_at = time.monotonic()
        leases = {leased.lease: key for key, leased in self._leased.items()}
        lost = []
        answers = await self._client.keep_alive(list(leases))
        # A lease whose whole ttl reaches beyond the time of the answer can't have ended by itself. The time of the
        # request proves nothing: on a busy machine it may reach etcd long after that.
        answered = time.monotonic()
        for lease, left in answers.items():
            leased = self._leased.get(leases[lease])
            if leased is None or leased.lease != lease:
                continue
            if left is None:
                lost.append(leases[lease])
            else:
                leased.renewed = requested_at
        if lost:
            await self._identify()
        for key in lost:
            async with self._locks.of(key):
                leased = self._leased.get(key)
                if leased is not None and leased.lease in leases:
                    await self._regain(key, leased, answered)

    async def _regain(self, key: str, leased: _LeasedKey, answered: float) -> None:
        """Put a key again whose lease has ended, unless another client revoked it."""
        if leased.life == self._life and answered - leased.renewed < leased.ttl:
            # It can't have ended by itself, and etcd has not lost it: another client revoked it.
            del self._leased[key]
            self.revocations += 1
            log.warning("the lease of %s was revoked by another client", key)
            self._revoked(key)
            return
        fresh = await self._lease(leased.value, leased.ttl)
        encoded = self._encode(key, leased.value, fresh.lease)
        named = self._named(key)
        if await self._client.txn([EtcdCompare(named, None)], [EtcdPut(named, encoded, fresh.lease)]):
            self._leased[key] = fresh
            self.regained += 1
            log.warning("the lease of %s had ended; it was granted again", key)
            return
        del self._leased[key]
        log.warning("the lease of %s had ended, and another process has taken it over", key)
        await self._client.revoke(fresh.lease)

    # --- watching ---------------------------------------------------------------------------------------------------

    async def _steady(self) -> None:
        """Raise `StoreUnavailable` while missing keys may only not have been put again yet."""
        self._check()
        await self._identify()
        left = self._settled_at - time.monotonic()
        if left > 0:
            raise StoreUnavailable(
                f"etcd came back without what it held; its owners get {left:.1f} s to put it again",
                hint="nothing to do",
            )

    async def _identify(self) -> None:
        """Check whether etcd has the same data as before: by a mark in it, and by a revision that never goes back."""
        newest = self._client.revision
        answer = await self._client.range(self._mark)
        if not answer.items:
            mark = EtcdPut(self._mark, secrets.token_hex(8).encode())
            await self._client.txn([EtcdCompare(self._mark, None)], [mark])
            answer = await self._client.range(self._mark)
        identity = answer.items[0].value if answer.items else None
        if self._identity is not None and (identity != self._identity or answer.revision < newest):
            log.warning("etcd came back with other data than it had")
            self._life += 1
            self._settled_at = time.monotonic() + self._settle
            self._client.revision = answer.revision
        self._identity = identity

    async def _all(self, under: bytes) -> tuple["_Known", int]:
        answer = await self._client.range(under)
        known: _Known = {}
        for item in answer.items:
            known[self._key(item.key)] = (self._decode(item.key, item.value, item.lease), item.revision)
        return known, answer.revision

    async def _following(self, under: bytes, known: "_Known", revision: int) -> AsyncGenerator[EtcdChanges, None]:
        """Yield what the watch yields; end it where etcd holds different keys after a silence.

        Nothing else distinguishes a dead connection from an idle one.
        """
        async with aclosing(self._client.watch(under, revision)) as changes:
            waiting = asyncio.ensure_future(anext(changes))
            try:
                while True:
                    if not (await asyncio.wait({waiting}, timeout=self._probe))[0]:
                        standing = (await self._client.range(under, values=False)).items
                        there = {self._key(item.key): item.revision for item in standing}
                        if not waiting.done() and there != {key: last for key, (_, last) in known.items()}:
                            raise StoreUnavailable("a watch of etcd missed a change")
                        continue
                    batch = waiting.result()
                    waiting = asyncio.ensure_future(anext(changes))
                    yield batch
            finally:
                waiting.cancel()
                with suppress(asyncio.CancelledError, StoreUnavailable, StopAsyncIteration):
                    await waiting

    def _apply(self, known: "_Known", events: Sequence[EtcdEvent]) -> Sequence[StoreChange]:
        """Apply changes to the known keys; of several changes of a key the last one counts."""
        before: dict[str, bytes | None] = {}
        for event in events:
            key = self._key(event.key)
            before.setdefault(key, known.get(key, (None, 0))[0])
            if event.value is None:
                known.pop(key, None)
            else:
                known[key] = (self._decode(event.key, event.value, event.lease), event.revision)
        now = {key: known.get(key, (None, 0))[0] for key in before}
        return [StoreChange(key, now[key]) for key, value in before.items() if now[key] != value]

    # --- names and values -------------------------------------------------------------------------------------------

    def _named(self, key: str) -> bytes:
        return self._keys + key.encode()

    def _key(self, name: bytes) -> str:
        return name[len(self._keys) :].decode("utf-8", "replace")

    def _encode(self, key: str, value: bytes, lease: int) -> bytes:
        return self.codec.encode(key, value, str(lease) if lease else None)

    def _decode(self, name: bytes, raw: bytes, lease: int) -> bytes | None:
        # A signed value under another key, or without the lease that it was signed with, was copied by an outsider.
        return self.codec.decode(self._key(name), raw, str(lease) if lease else None)

    def _check(self) -> None:
        if self._closed:
            raise StoreUnavailable(f"the store in {self.root} was closed by this process")


_Known = dict[str, tuple[bytes | None, int]]
"""Key -> its value, None where that is not this cluster's, and the revision of its last change."""


def _changes_between(before: _Known, now: _Known) -> Sequence[StoreChange]:
    changes = [StoreChange(key, None) for key, (value, _) in before.items() if value is not None and not _has(now, key)]
    changes += [
        StoreChange(key, value)
        for key, (value, _) in now.items()
        if value is not None and before.get(key, (None, 0))[0] != value
    ]
    return changes


def _has(known: _Known, key: str) -> bool:
    return known.get(key, (None, 0))[0] is not None
