"""Virtual connector's client for an outside orchestrator: waits for a planner's decision and acknowledges it.

client = connect(["http://127.0.0.1:2379"], "dynamo")        # penstock_dynamo.virtual.virtual_keys_access
while True:
    decision = await client.wait(after=client.completed)
    ...                                                     # make it so many workers
    await client.complete(decision)
"""

import asyncio
import logging
from typing import NamedTuple

from penstock.adapters.seams import StoreUnavailable
from penstock.kernel.errors import PenstockError
from penstock_dynamo.virtual.virtual_keys import DECISION, NEVER, SCALED, VirtualCounts, VirtualKeys, standing

log = logging.getLogger("penstock.virtual")


class VirtualDecision(NamedTuple):
    """How many workers there should be; None leaves it as it is. ``decision_id`` counts up from 0."""

    num_prefill_workers: int | None
    num_decode_workers: int | None
    decision_id: int


class UnknownDecision(PenstockError):
    """The acknowledged decision is one that the planner has not issued, or does not know any more."""


class VirtualClient:
    """The other end of `penstock_dynamo.virtual.virtual_connector.VirtualConnector`.

    Args:
        every: seconds between two reads while nothing is new.
    """

    def __init__(self, keys: VirtualKeys, *, every: float = 1.0) -> None:
        self.completed = NEVER
        """The newest decision that this client has acknowledged, or read as acknowledged."""
        self._keys = keys
        self._every = every
        self._faults: tuple[str, ...] = ()

    async def get(self) -> VirtualDecision | None:
        """Return the newest decision; None before there was any.

        Raises:
            StoreUnavailable: etcd does not answer.
        """
        counts = await self._standing()
        return None if counts.decision == NEVER else VirtualDecision(counts.prefill, counts.decode, counts.decision)

    async def wait(self, after: int | None = None, timeout: float | None = None) -> VirtualDecision:
        """Return the newest decision, once there is one that has not been acknowledged.

        Decisions between are skipped: only the newest one matters. It waits for an etcd that does not answer.

        Args:
            after: wait for one newer than this id, instead of one that is not acknowledged.
            timeout: seconds; None waits for ever.
        Raises:
            TimeoutError: there was none in that time.
        """
        async with asyncio.timeout(timeout):
            while True:
                try:
                    counts = await self._standing()
                except StoreUnavailable as error:
                    log.warning("decisions can't be read at present: %s", error)
                else:
                    least = counts.scaled if after is None else after
                    if counts.decision > least and (counts.prefill is not None or counts.decode is not None):
                        return VirtualDecision(counts.prefill, counts.decode, counts.decision)
                await asyncio.sleep(self._every)

    async def complete(self, decision: VirtualDecision) -> None:
        """Acknowledge that a decision, and with it every earlier one, has been carried out.

        A decision older than the newest acknowledged one changes nothing.

        Raises:
            UnknownDecision: the planner never issued it, or its ids began anew.
            StoreUnavailable: etcd does not answer; call again.
        """
        while True:
            raw = await self._keys.read()
            counts = standing(raw)
            if not 0 <= decision.decision_id <= counts.decision:
                raise UnknownDecision(
                    f"decision {decision.decision_id} can't be complete: the newest that was issued is "
                    f"{counts.decision}",
                    hint="wait() returns those that are open",
                )
            if decision.decision_id <= counts.scaled <= counts.decision:
                self.completed = counts.scaled
                return
            expected = {SCALED: raw.get(SCALED), DECISION: raw.get(DECISION)}
            if await self._keys.write(expected, {SCALED: str(decision.decision_id)}):
                self.completed = decision.decision_id
                return

    async def close(self) -> None:
        """Close the connection."""
        await self._keys.close()

    async def _standing(self) -> VirtualCounts:
        counts = standing(await self._keys.read())
        if counts.faults != self._faults:
            self._faults = counts.faults
            for fault in counts.faults:
                log.warning("%s: %s", self._keys.name, fault)
        self.completed = max(self.completed, min(counts.scaled, counts.decision))
        return counts
