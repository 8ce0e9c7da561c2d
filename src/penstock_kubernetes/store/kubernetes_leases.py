"""Leases of one process in a Kubernetes store: one for each ttl, renewed every third of it, with the keys it holds.

docs/why/leases-in-kubernetes.md says why a lease is the process's and not the key's.
"""

import asyncio
import logging
import math
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.adapters.seams import StoreUnavailable
from penstock.adapters.task_cancel import end
from penstock_kubernetes.api.api_client import ask, code_of, unavailable
from penstock_kubernetes.api.discovery_resources import DISCOVERY_LABEL, lease_body, lease_class, wall_time
from penstock_kubernetes.api.resource_watch import list_all, older

if TYPE_CHECKING:
    from lightkube import AsyncClient


LONG_DEAD = 3.0
"""Times the ttl, at least, after which a lease that is not renewed is deleted: a slow owner has come back by then."""


class LeaseRenewal(NamedTuple):
    """A lease as the API server has it: ``version`` changes with each renewal, ``ttl`` is in seconds."""

    version: str
    ttl: float


@dataclass(slots=True)
class _LeaseState:
    renewal: LeaseRenewal
    at: float
    alive: bool = True


class LeaseSightings:
    """What this process knows of all leases of a cluster; ``monotonic`` is a clock in seconds."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._leases: dict[str, _LeaseState] = {}
        self._long_dead = LONG_DEAD + secrets.randbelow(100) / 50
        """Up to two ttls later than others, so that not all processes delete a lease at once."""

    def see(self, lease: str, renewal: LeaseRenewal) -> bool:
        """Note a lease; return whether that makes it alive."""
        state = self._leases.get(lease)
        if state is not None and (state.renewal == renewal or older(renewal.version, state.renewal.version)):
            return False  # also what a watch tells late, after a list was newer
        self._leases[lease] = _LeaseState(renewal, self._monotonic())
        return state is None or not state.alive

    def vanish(self, lease: str) -> bool:
        """Note that a lease was deleted; return whether it was alive."""
        state = self._leases.pop(lease, None)
        return state is not None and state.alive

    def look(self, leases: Mapping[str, LeaseRenewal]) -> None:
        """Note all leases that there are now."""
        for lease in [lease for lease in self._leases if lease not in leases]:
            del self._leases[lease]
        for lease, renewal in leases.items():
            state = self._leases.get(lease)
            if state is None or state.renewal != renewal:
                self._leases[lease] = _LeaseState(renewal, self._monotonic())

    @property
    def newest(self) -> str | None:
        """The newest version of all leases: a list of before it is no news."""
        versions = (state.renewal.version for state in self._leases.values())
        return max(versions, key=lambda version: int(version) if version.isdigit() else 0, default=None)

    def is_known(self, lease: str) -> bool:
        """Return whether a lease was noted at all."""
        return lease in self._leases

    def is_alive(self, lease: str) -> bool:
        """Return whether a lease counts as alive."""
        state = self._leases.get(lease)
        return state is not None and state.alive

    def is_dead(self, lease: str, renewals: Mapping[str, LeaseRenewal]) -> bool:
        """Return whether a lease was ended by `judge`, and was not renewed since."""
        state = self._leases.get(lease)
        return state is not None and not state.alive and renewals.get(lease) == state.renewal

    def late(self) -> list[str]:
        """Return the leases that count as alive and were not renewed for their ttl."""
        now = self._monotonic()
        return [lease for lease, state in self._leases.items() if state.alive and now - state.at > state.renewal.ttl]

    def judge(self) -> list[str]:
        """End the leases that are late, once it is certain that no renewal was missed; return them."""
        late = self.late()
        for lease in late:
            self._leases[lease].alive = False
        return late

    def forgive(self) -> None:
        """Give live leases their whole ttl again: neither owners nor we could reach the API server."""
        now = self._monotonic()
        for state in self._leases.values():
            if state.alive:
                state.at = now

    def long_dead(self) -> dict[str, str]:
        """Return the leases to delete, each with its version."""
        now = self._monotonic()
        return {
            lease: state.renewal.version
            for lease, state in self._leases.items()
            if not state.alive and now - state.at > self._long_dead * state.renewal.ttl
        }

    def wait(self, longest: float) -> float:
        """Return the seconds until the next lease can be late."""
        now = self._monotonic()
        due = (state.at + state.renewal.ttl - now for state in self._leases.values() if state.alive)
        return max(0.05, min(longest, min(due, default=longest)))


log = logging.getLogger(__name__)

RETRY = 1.0
"""Seconds, at most, between tries to renew a lease while the API server does not answer."""
_RENEWAL_LONGEST = 3.0
"""Seconds, at least, that one renewal may take with its repetitions."""
ENDED = ""
"""Holder of a lease that a reader ended before it deletes it: its owner makes a new one."""


@dataclass(slots=True)
class OwnLease:
    """A lease of this process: ``renewed`` is when its last renewal was sent (monotonic), ``keys`` what it holds."""

    name: str
    uid: str
    version: str
    ttl: float
    renewed: float
    keys: dict[str, bytes] = field(default_factory=dict)


class KubernetesLeases:
    """The leases of this process.

    Args:
        lost: called with a lease that ended although we live; it puts the keys again under another.
        revoked: called with a lease that somebody deleted while we renewed it.
    """

    def __init__(
        self,
        client: "AsyncClient",
        cluster: str,
        *,
        lost: Callable[[OwnLease], Awaitable[None]],
        revoked: Callable[[OwnLease], None],
    ) -> None:
        self.renewal_failures = 0
        self.failing = False
        """Whether the last renewal failed: then the silence of other owners says nothing about them."""
        self._client = client
        self._cluster = cluster
        self._lost = lost
        self._revoked = revoked
        self._by_ttl: dict[float, OwnLease] = {}
        self._ended: list[OwnLease] = []
        """Leases that were lost, with the keys that are not put again yet."""
        self._creating = asyncio.Lock()
        self._renewing: dict[float, asyncio.Task[None]] = {}

    async def of(self, ttl: float) -> OwnLease:
        """Return the lease of a ttl, which is created where there is none."""
        async with self._creating:
            lease = self._by_ttl.get(ttl)
            if lease is None:
                lease = self._by_ttl[ttl] = await self._create(ttl)
                if ttl not in self._renewing:
                    self._renewing[ttl] = asyncio.create_task(self._renew(ttl), name=f"lease of {ttl} s")
            return lease

    def holding(self, key: str) -> OwnLease | None:
        """Return the lease of ours that holds a key, or held it."""
        return next((lease for lease in (*self._by_ttl.values(), *self._ended) if key in lease.keys), None)

    async def close(self) -> None:
        """Delete the leases; what they hold goes with them."""
        await end(list(self._renewing.values()))
        for lease in self._by_ttl.values():
            await delete_lease(self._client, lease.name)
        self._by_ttl.clear()

    # --- internals ----------------------------------------------------------------------------------------------------

    async def _create(self, ttl: float) -> OwnLease:
        from lightkube import ApiError

        name = f"penstock-{secrets.token_hex(8)}"
        body = lease_body(self._cluster, name, math.ceil(ttl))
        resource = lease_class()
        requested = time.monotonic()
        fresh = resource.from_dict({**body, "metadata": {**_checked_mapping(body["metadata"]), "name": name}})
        try:
            made = await ask(lambda: self._client.create(fresh))
        except ApiError as error:
            raise unavailable(error) from error
        return OwnLease(name, made.metadata.uid, made.metadata.resourceVersion, ttl, requested)

    async def _renew(self, ttl: float) -> None:
        pause = math.ceil(ttl) / 3
        while True:
            await asyncio.sleep(min(pause, RETRY) if self.failing else pause)
            try:
                async with asyncio.timeout(max(_RENEWAL_LONGEST, pause)):
                    if (lease := self._by_ttl.get(ttl)) is not None:
                        await self._renew_once(lease)
                while self._ended:
                    await self._lost(self._ended[0])
                    del self._ended[0]
            except (StoreUnavailable, TimeoutError) as error:
                self.renewal_failures += 1
                if not self.failing:
                    log.warning("our lease can't be renewed: %s", str(error) or "the API server does not answer")
                self.failing = True
                continue
            if self.failing:
                log.info("our lease is renewed again")
            self.failing = False

    async def _renew_once(self, lease: OwnLease) -> None:
        from lightkube import ApiError
        from lightkube.types import PatchType

        resource = lease_class()
        requested = time.monotonic()
        # With the version: a reader that took us for dead has marked the lease, which must not be undone by us.
        patch = {"metadata": {"resourceVersion": lease.version}, "spec": {"renewTime": wall_time()}}
        try:
            renewed = await ask(lambda: self._client.patch(resource, lease.name, patch, patch_type=PatchType.MERGE))
        except ApiError as error:
            if code_of(error) == 409:
                await self._reread(lease)
            elif code_of(error) == 404:
                await self._vanished(lease, time.monotonic())
            else:
                raise unavailable(error) from error
            return
        lease.version, lease.renewed = renewed.metadata.resourceVersion, requested

    async def _reread(self, lease: OwnLease) -> None:
        """Take the newer version of a lease that somebody changed, also we by a request whose answer was lost."""
        from lightkube import ApiError

        try:
            now = await ask(lambda: self._client.get(lease_class(), lease.name))
        except ApiError as error:
            if code_of(error) != 404:
                raise unavailable(error) from error
            await self._vanished(lease, time.monotonic())
            return
        if is_ended(now):
            self._replace(lease)
            return
        lease.version = now.metadata.resourceVersion
        await self._renew_once(lease)

    async def _vanished(self, lease: OwnLease, answered: float) -> None:
        """A lease is no more: somebody deleted it, or we were so late that a reader did, or the server lost data."""
        late = answered - lease.renewed >= lease.ttl
        _, version = await list_all(self._client, lease_class(), labels={DISCOVERY_LABEL: self._cluster})
        if late or older(version, lease.version):
            self._replace(lease)
            return
        del self._by_ttl[lease.ttl]
        self._revoked(lease)

    def _replace(self, lease: OwnLease) -> None:
        log.warning("the lease %s of ours has ended; its %d keys are put again", lease.name, len(lease.keys))
        del self._by_ttl[lease.ttl]
        self._ended.append(lease)


def is_ended(lease: Any) -> bool:
    """Return whether a reader has ended a lease, whose owner it took for dead."""
    return lease.spec is None or (lease.spec.holderIdentity or ENDED) == ENDED


async def delete_lease(client: "AsyncClient", name: str) -> None:
    """Delete a lease; an absent one is no error.

    Raises:
        StoreUnavailable: it could not be deleted.
    """
    from lightkube import ApiError

    try:
        await ask(lambda: client.delete(lease_class(), name))
    except ApiError as error:
        if code_of(error) != 404:
            raise unavailable(error) from error


async def end_leases(client: "AsyncClient", leases: Sequence[tuple[str, str]]) -> None:
    """Delete leases of dead owners: each is marked first, which fails where its owner has renewed it meanwhile.

    Args:
        leases: name and version of each.
    """
    from lightkube import ApiError
    from lightkube.types import PatchType

    for name, version in leases:
        patch = {"metadata": {"resourceVersion": version}, "spec": {"holderIdentity": ENDED}}
        with suppress(ApiError):  # renewed, or another reader was faster
            await ask(
                lambda name=name, patch=patch: client.patch(  # type: ignore[misc]
                    lease_class(), name, patch, patch_type=PatchType.MERGE
                )
            )
            await delete_lease(client, name)
            log.info("lease %s was not renewed for long, and was deleted", name)


def _checked_mapping(value: object) -> dict[str, object]:
    assert isinstance(value, dict)
    return value
