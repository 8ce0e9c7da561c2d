"""What becomes of a tick's record? A line of the run folder, a report for status, gauges: all of them say the same."""

import asyncio
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Mapping

import msgspec

from penstock.adapters.seams import Store, StoreUnavailable
from penstock.adapters.telemetry.planner_metrics import PlannerMetrics
from penstock.planner.proposals import Because
from penstock.planner.record import TickRecord
from penstock.planner.seen import Observation
from penstock.runtime.planning.report import ALARMS_KEPT, REPORT, AlarmTold, PlannerReport
from penstock.runtime.run_folder import LineWriter

log = logging.getLogger("penstock.planner")

Listener = Callable[[TickRecord, PlannerReport], None]


class Keeping:
    """Writes down what a planner decides.

    Args:
        said: what every report says alike: ``policy``, ``advisory``, ``source``, ``connector``, ``every``.
        records: None keeps none on disk.
        store: where the report stands for `ttl` seconds beyond the planner's end; None says it nowhere.
    """

    def __init__(
        self,
        said: Mapping[str, object],
        *,
        metrics: PlannerMetrics,
        records: LineWriter | None = None,
        store: Store | None = None,
        ttl: float = 10.0,
    ) -> None:
        self.metrics = metrics
        self.last: PlannerReport | None = None
        self.ticked_once = asyncio.Event()
        """Set once a tick is over."""
        self._said = dict(said)
        self._records = records
        self._store = store
        self._ttl = ttl
        self._alarms: deque[AlarmTold] = deque(maxlen=ALARMS_KEPT)
        self._reason: tuple[Because, ...] = ()
        self._changed: float | None = None
        self._unsaid = 0
        self._roles: dict[str, tuple[str, str]] = {}
        """Pool -> its model and role."""
        self.listeners: list[Listener] = []
        """Told each record and the report that was made of it."""

    def alarm(self, at: float, because: Because) -> None:
        """Keep something that somebody should look at."""
        self._alarms.append(AlarmTold(at=at, because=because))
        self.metrics.alarmed(because.code)

    async def ticked(self, record: TickRecord, restarts: int) -> None:
        """Write a tick down wherever it is to be seen."""
        if record.outcome in ("apply", "advise"):
            self._reason, self._changed = record.chosen or record.bound, record.at
        report = PlannerReport(
            **{**self._said, "policy": record.policy},  # type: ignore[arg-type]
            pid=os.getpid(),
            at=record.at,
            wall=time.time(),
            tick=record.tick,
            outcome=record.outcome,
            pools=record.pools,
            health={model: each.health for model, each in record.models.items()},
            plugins={said.id: said.result for said in record.said},
            reason=self._reason,
            changed=self._changed,
            bound=record.bound,
            alarms=tuple(self._alarms),
            gpus=record.gpus,
            restarts=restarts,
        )
        self.last = report
        self.metrics.ticked(record)
        self.metrics.wants((*self._roles[pool], n) for pool, n in record.targets.items() if pool in self._roles)
        for listener in self.listeners:
            listener(record, report)
        if self._records is not None:
            self._records.write(record)
            await asyncio.to_thread(self._records.flush)
        if self._store is not None:
            await self._say(self._store, report)
        self.ticked_once.set()

    def saw(self, seen: Observation) -> None:
        """Show the engines of a look in the gauges: a record has none of them."""
        self.metrics.saw(seen)
        self._roles = {name: (model, pool.role) for model, name, pool in seen.pools()}

    async def close(self) -> None:
        """Take the report away: nobody plans any more."""
        if self._store is not None:
            try:
                await self._store.delete(REPORT)
            except StoreUnavailable as error:
                log.warning("the planner's last report stays until its lease ends: %s", error)

    async def _say(self, store: Store, report: PlannerReport) -> None:
        try:
            await store.put(REPORT, msgspec.json.encode(report), ttl=self._ttl)
            self._unsaid = 0
        except StoreUnavailable as error:
            self._unsaid += 1
            if self._unsaid & (self._unsaid - 1) == 0:  # the 1st, 2nd, 4th...
                log.warning("how the planner is can't be said, %d times now: %s", self._unsaid, error)
