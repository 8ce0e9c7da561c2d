"""Leader election by a Lease: of several operators one acts, and it stops before another begins."""

import asyncio
import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock_kubernetes.api.api_client import code_of, unavailable

if TYPE_CHECKING:
    from lightkube import AsyncClient
    from lightkube.resources.coordination_v1 import Lease

log = logging.getLogger("penstock.operator")

LEASE_SECONDS = 15
"""Seconds without news of a leader after which another takes its place: as in Kubernetes' own components."""
RENEW_WITHIN = 10.0
"""Seconds without a renewal after which a leader stops to act: others wait longer."""
RENEW_EVERY = 2.0


class LeaseState(NamedTuple):
    """What stood in the Lease, and when our own clock first saw it: clocks of hosts may differ by any amount."""

    state: tuple[object, ...]
    at: float


class LeaderElection:
    """One candidate. ``leading`` is set while it may act.

    Args:
        clock: seconds, any origin; never another host's.
    """

    def __init__(
        self,
        client: "AsyncClient",
        namespace: str,
        name: str,
        identity: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.leading = asyncio.Event()
        self.following = asyncio.Event()
        """The opposite, to be waited for."""
        self.following.set()
        self._client = client
        self._place = (namespace, name)
        self._identity = identity
        self._clock = clock
        self._renewed: float | None = None
        self._observed: LeaseState | None = None

    async def run(self) -> None:
        """Stand for election until cancelled; then give the Lease back."""
        try:
            while True:
                begun = self._clock()
                try:
                    async with asyncio.timeout(RENEW_WITHIN / 2):
                        await self.step()
                except TimeoutError:
                    log.warning("the API server does not answer, so the Lease is not renewed")
                self._expire()
                await asyncio.sleep(max(0.0, RENEW_EVERY - (self._clock() - begun)))
        finally:
            self._follow()
            await self._release()

    async def step(self) -> None:
        """Take or renew the Lease, where it is ours, free, or its holder is silent."""
        from httpx2 import HTTPError
        from lightkube.resources.coordination_v1 import Lease

        begun = self._clock()
        namespace, name = self._place
        try:
            try:
                lease = await self._client.get(Lease, name, namespace=namespace)
            except HTTPError as error:
                if code_of(error) != 404:
                    raise
                await self._client.create(self._manifest(None))
                self._lead(begun)
                return
            spec = lease.spec
            holder = "" if spec is None else spec.holderIdentity or ""
            if holder not in ("", self._identity) and not self._silent(spec):
                self._follow()
                return
            await self._client.replace(self._manifest(lease))
            self._lead(begun)
        except HTTPError as error:
            if code_of(error) != 409:  # another candidate was faster
                log.warning("the Lease %s/%s can't be renewed: %s", namespace, name, unavailable(error))
        self._expire()

    def _silent(self, spec: Any) -> bool:
        """Return whether a holder has not renewed for as long as it said, by our own clock."""
        state = (spec.holderIdentity, spec.renewTime, spec.leaseTransitions)
        if self._observed is None or self._observed.state != state:
            self._observed = LeaseState(state, self._clock())
        return self._clock() - self._observed.at > (spec.leaseDurationSeconds or LEASE_SECONDS)

    def _lead(self, at: float) -> None:
        if not self.leading.is_set():
            log.info("%s leads", self._identity)
        self._renewed = at
        self.leading.set()
        self.following.clear()

    def _follow(self) -> None:
        if self.leading.is_set():
            log.warning("%s does not lead any more, and changes nothing", self._identity)
        self.leading.clear()
        self.following.set()

    def _expire(self) -> None:
        if self.leading.is_set() and self._renewed is not None and self._clock() - self._renewed > RENEW_WITHIN:
            self._follow()

    def _manifest(self, lease: "Lease | None") -> "Lease":
        from lightkube.models.coordination_v1 import LeaseSpec
        from lightkube.models.meta_v1 import ObjectMeta
        from lightkube.resources.coordination_v1 import Lease

        namespace, name = self._place
        now = datetime.fromtimestamp(time.time(), UTC)
        spec = LeaseSpec() if lease is None or lease.spec is None else lease.spec
        if spec.holderIdentity != self._identity:
            spec.holderIdentity, spec.acquireTime = self._identity, now
            spec.leaseTransitions = 0 if lease is None else (spec.leaseTransitions or 0) + 1
        spec.leaseDurationSeconds, spec.renewTime = LEASE_SECONDS, now
        # The version makes that only one of two candidates writes.
        known = None if lease is None or lease.metadata is None else lease.metadata.resourceVersion
        return Lease(metadata=ObjectMeta(name=name, namespace=namespace, resourceVersion=known), spec=spec)

    async def _release(self) -> None:
        from httpx2 import HTTPError
        from lightkube.resources.coordination_v1 import Lease

        if self._renewed is None:
            return
        namespace, name = self._place
        try:
            lease = await self._client.get(Lease, name, namespace=namespace)
            if lease.spec is not None and lease.spec.holderIdentity == self._identity:
                lease.spec.holderIdentity = ""
                await self._client.replace(lease)
        except HTTPError as error:
            log.warning("the Lease is not given back, so the next operator waits for it: %s", unavailable(error))
