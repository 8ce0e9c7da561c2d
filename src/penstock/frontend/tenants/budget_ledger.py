"""Budget ledger: the tokens of tenants in the present period, of all frontends, kept in a store that outlives the run.

Each process writes its own sum of each tenant, and reads those of the others, every `SYNC_EVERY` seconds: so a budget
may be overrun by what the processes admit in that time, and a crash forgets as much.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping

import msgspec

from penstock.adapters.seams import Store, StoreUnavailable
from penstock.config.settings.tenant_settings import BudgetPeriod, TenantSettings

log = logging.getLogger("penstock.frontend")

PREFIX = "budgets/"
"""``budgets/<tenant>/<process>``: `BudgetEntry`."""
SYNC_EVERY = 2.0
"""Seconds between two writes: a crash forgets no more than that."""


class BudgetEntry(msgspec.Struct, frozen=True, kw_only=True):
    """What one process has counted of a tenant. ``period``: such as 2026-11 or 2026-11-25."""

    version: int = 1
    period: str
    tokens: int


_decode = msgspec.json.Decoder(BudgetEntry).decode


def period_of(kind: BudgetPeriod, now: float) -> str:
    """Return the name of the period that a time, in seconds since 1970, is in."""
    return time.strftime("%Y-%m-%d" if kind == "day" else "%Y-%m", time.gmtime(now))


def period_left(kind: BudgetPeriod, now: float) -> float:
    """Return the seconds until the period ends."""
    name, at = period_of(kind, now), now
    step = 86_400.0 - now % 86_400.0
    while period_of(kind, at) == name:
        at += step
        step = 86_400.0
    return at - now


class BudgetLedger:
    """The tenants' tokens of their present periods.

    Args:
        store: keeps them; None keeps them in memory alone.
        process: name of this one, the same after a restart.
        wall: seconds since 1970.
    """

    def __init__(
        self,
        store: Store | None,
        process: str,
        tenants: Mapping[str, TenantSettings],
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._process = process
        self._kinds = {name: each.budget_period for name, each in tenants.items() if each.budget is not None}
        self._wall = wall
        self._own: dict[str, BudgetEntry] = {}
        self._others: dict[str, int] = {}
        self._dirty: set[str] = set()
        self.failing = False

    def used(self, tenant: str) -> int:
        """Return the tokens of a tenant in its present period, as far as they are known here."""
        entry, now = self._own.get(tenant), self._wall()
        own = entry.tokens if entry is not None and entry.period == period_of(self._kinds[tenant], now) else 0
        return own + self._others.get(tenant, 0)

    def add(self, tenant: str, tokens: int) -> None:
        """Count tokens, or give them back where the number is negative."""
        period = period_of(self._kinds[tenant], self._wall())
        entry = self._own.get(tenant)
        before = entry.tokens if entry is not None and entry.period == period else 0
        self._own[tenant] = BudgetEntry(period=period, tokens=max(0, before + tokens))
        self._dirty.add(tenant)

    def left(self, tenant: str) -> float:
        """Return the seconds until a tenant's period ends."""
        return period_left(self._kinds[tenant], self._wall())

    async def sync(self) -> None:
        """Write what changed and read what the others wrote; where the store fails, go on with what is known."""
        if self._store is None or not self._kinds:
            return
        try:
            found = await self._store.list(PREFIX)
            self._read_entries(found)
            for tenant in sorted(self._dirty):
                await self._store.put(f"{PREFIX}{tenant}/{self._process}", msgspec.json.encode(self._own[tenant]))
                self._dirty.discard(tenant)
        except StoreUnavailable as error:
            if not self.failing:
                log.warning("the tenants' budgets can't be kept at present: %s", error)
            self.failing = True
            return
        self.failing = False

    async def run(self) -> None:
        """Keep the budgets, until cancelled."""
        while True:
            await asyncio.sleep(SYNC_EVERY)
            await self.sync()

    def _read_entries(self, entries: Mapping[str, bytes]) -> None:
        now = self._wall()
        others: dict[str, int] = {}
        for key, value in entries.items():
            tenant, _, process = key.removeprefix(PREFIX).rpartition("/")
            if tenant not in self._kinds:
                continue
            try:
                entry = _decode(value)
            except msgspec.DecodeError as error:
                log.warning("what %s says of a budget can't be read: %s", key, error)
                continue
            if entry.period != period_of(self._kinds[tenant], now):
                continue
            if process != self._process:
                others[tenant] = others.get(tenant, 0) + entry.tokens
            elif tenant not in self._own:
                self._own[tenant] = entry  # of this process before it was started again
        self._others = others
