"""Virtual connector: writes a planner's replica counts into etcd keys; an outside orchestrator acknowledges them.

The keys are Dynamo's: docs/guides/planner-operating.md. `penstock_dynamo.virtual.virtual_client` is the other end.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence

from penstock.adapters.seams import StoreUnavailable
from penstock.config.settings.planning_settings import VirtualSettings
from penstock.kernel.values import Pool, Role
from penstock.planner.plugins.proposals import Flip, Reason
from penstock_dynamo.virtual.virtual_keys import (
    DECISION,
    DECODE,
    NEVER,
    PREFILL,
    VirtualCounts,
    VirtualKeys,
    standing,
)

log = logging.getLogger("penstock.planner")

WAIT_MAX = 1800.0
"""Longest, in seconds, that a scaling may take to be acknowledged before the next one is written all the same.

Dynamo's default; its planner never waits inside a scaling either.
"""


class VirtualConnector:
    """A `penstock.adapters.connectors.scale_connector.ScaleConnector` over a few keys.

    Args:
        keys: owned by this from here on.
        model: the model whose workers are scaled.
        pools: by role, how many there are before the first decision; prefill and decode, or aggregated.
        clock: seconds, any origin.
    """

    def __init__(
        self,
        keys: VirtualKeys,
        settings: VirtualSettings,
        *,
        model: str,
        pools: Mapping[Role, int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.faults = 0
        """Values that were no numbers, or out of order."""
        self._keys = keys
        self._settings = settings
        self._model = model
        self._pools = dict(pools)
        self._clock = clock
        self._newest = NEVER
        self._acknowledged = NEVER
        self._since: dict[int, float] = {}
        """Decision that is not acknowledged -> when that was first observed."""
        self._fault = ""
        self._busy = asyncio.Lock()

    async def look(self) -> Mapping[str, Pool]:
        counts = standing(await self._keys.read())
        self._check(counts)
        pools: dict[str, Pool] = {}
        for role, initial in self._pools.items():
            replicas = counts.prefill if role == "prefill" else counts.decode
            gpus = self._settings.gpus_prefill if role == "prefill" else self._settings.gpus_decode
            pools[name_of(role)] = Pool(
                model=self._model,
                role=role,
                desired=initial if replicas is None else replicas,
                gpus=gpus,
                problem=self._fault or None,
                acknowledged=counts.acknowledged,
            )
        return pools

    async def scale(
        self, targets: Mapping[str, int], flips: Sequence[Flip], reasons: Sequence[Reason]
    ) -> dict[str, str]:
        if self._busy.locked():
            return dict.fromkeys(targets, "the decision before it is still being written")
        async with self._busy:
            try:
                return await self._scale(targets, flips)
            except StoreUnavailable as error:
                return dict.fromkeys(targets, str(error))

    def describe(self) -> str:
        return f"{self._keys.name} (virtual)"

    async def close(self) -> None:
        await self._keys.close()

    async def _scale(self, targets: Mapping[str, int], flips: Sequence[Flip]) -> dict[str, str]:
        raw = await self._keys.read()
        counts = standing(raw)
        self._check(counts)
        if flips:
            log.warning("roles can't be changed through %s: the orchestrator there takes only numbers", self._keys.name)
        wanted = self._wanted(counts, targets)
        if wanted is None:
            return dict.fromkeys(targets, "there is no such pool: there are " + ", ".join(map(name_of, self._pools)))
        prefill, decode = wanted
        if (prefill, decode) == (counts.prefill, counts.decode):
            log.info("No scaling needed (prefill=%d, decode=%d), skipping ETCD update", prefill, decode)
            return {}
        if not counts.acknowledged and not self._waited_enough(counts.decision):
            text = f"decision {counts.decision} is not acknowledged; {DECISION} {counts.decision + 1} waits for it"
            return dict.fromkeys(targets, f"{text}, for at most {WAIT_MAX:g} s")
        decision = max(counts.decision, self._newest) + 1  # ids never go back, even where the keys did
        values = {PREFILL: str(prefill), DECODE: str(decode), DECISION: str(decision)}
        if not await self._keys.write({name: raw.get(name) for name in values}, values):
            return dict.fromkeys(targets, "another writer has written a decision at the same moment")
        log.info("decision %d: prefill=%d, decode=%d", decision, prefill, decode)
        self._newest = decision
        self._since = {decision: self._clock()}
        return {}

    def _wanted(self, counts: VirtualCounts, targets: Mapping[str, int]) -> tuple[int, int] | None:
        """Return both numbers; a role without a target keeps its number."""
        numbers = {"prefill": counts.prefill, "decode": counts.decode}
        for role, initial in self._pools.items():
            key = "prefill" if role == "prefill" else "decode"
            numbers[key] = initial if numbers[key] is None else numbers[key]
        for pool, replicas in targets.items():
            if pool not in map(name_of, self._pools):
                return None
            numbers[pool] = replicas
        return numbers["prefill"] or 0, numbers["decode"] or 0

    def _waited_enough(self, decision: int) -> bool:
        waited = self._clock() - self._since.setdefault(decision, self._clock())
        if waited < WAIT_MAX:
            return False
        log.warning(
            "decision %d was not acknowledged for %.0f s; the next decision is written all the same", decision, waited
        )
        return True

    def _check(self, counts: VirtualCounts) -> None:
        """Log what is out of order, once each time that it changes."""
        faults = list(counts.faults)
        if counts.decision < self._newest:
            faults.append(f"{DECISION} went back from {self._newest} to {counts.decision}")
        if counts.scaled < self._acknowledged:
            faults.append(f"scaled_decision_id went back from {self._acknowledged} to {counts.scaled}")
        self._newest = max(self._newest, counts.decision)
        self._acknowledged = max(self._acknowledged, min(counts.scaled, self._newest))
        fault = "; ".join(faults)
        if fault and fault != self._fault:
            self.faults += 1
            log.warning("%s: %s", self._keys.name, fault)
        self._fault = fault


def name_of(role: Role) -> str:
    """Return the name under which a role's workers are planned."""
    return "prefill" if role == "prefill" else "decode"
