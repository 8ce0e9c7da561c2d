"""Tick log: writes each tick's record as a line of the run folder, the planner's report in the store, and gauges.

An entry of the seam ``tick listener`` is called with the planner's settings and the run folder, which is None where
records are not kept, and returns a `TickListener`, or None where the settings do not ask for it.
"""

import asyncio
import logging
import os
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Protocol

import msgspec

from penstock import extension
from penstock.adapters.seams import Store, StoreUnavailable
from penstock.adapters.telemetry.planner_metrics import PlannerMetrics
from penstock.config.settings.planning_settings import PlanningSettings
from penstock.planner.observation import Observation
from penstock.planner.plugins.proposals import Reason
from penstock.planner.tick_record import TickRecord
from penstock.runtime.planning.planner_report import ALARMS_MAX, REPORT, AlarmReport, PlannerReport
from penstock.runtime.records.journal_writer import JournalWriter
from penstock.runtime.records.run_folder import LineWriter

log = logging.getLogger("penstock.planner")

Listener = Callable[[TickRecord, PlannerReport], None]


class TickLog:
    """Records what a planner decides.

    Args:
        description: fields alike in every report: ``policy``, ``advisory``, ``source``, ``connector``, ``every``.
        records: None keeps none on disk; ``journal``: likewise.
        store: where the report stays for `ttl` seconds beyond the planner's end; None: no report.
    """

    def __init__(
        self,
        description: Mapping[str, object],
        *,
        metrics: PlannerMetrics,
        records: LineWriter | None = None,
        journal: JournalWriter | None = None,
        store: Store | None = None,
        ttl: float = 10.0,
    ) -> None:
        self.metrics = metrics
        self.journal = journal
        self.last: PlannerReport | None = None
        self.ticked_once = asyncio.Event()
        """Set once a tick is over."""
        self._description = dict(description)
        self._records = records
        self._store = store
        self._ttl = ttl
        self._alarms: deque[AlarmReport] = deque(maxlen=ALARMS_MAX)
        self._reason: tuple[Reason, ...] = ()
        self._why = ""
        self._changed: float | None = None
        self._unsaid = 0
        self._roles: dict[str, tuple[str, str]] = {}
        """Pool -> its model and role."""
        self.listeners: list[Listener] = []
        """Called with each record and the report made of it."""
        self.recommended: Callable[[Mapping[str, int]], Awaitable[None]] | None = None
        """Takes the targets of each tick that had an observation."""

    def alarm(self, at: float, reason: Reason) -> None:
        """Keep an alarm for the report."""
        self._alarms.append(AlarmReport(at=at, reason=reason))
        self.metrics.alarmed(reason.code)

    async def ticked(self, record: TickRecord, restarts: int) -> None:
        """Write a tick to all outputs."""
        if record.outcome in ("apply", "advise"):
            self._reason, self._why, self._changed = record.chosen or record.bound, record.why, record.at
        judged = sum(model.judged for model in record.models.values())
        report = PlannerReport(
            **{**self._description, "policy": record.policy},  # type: ignore[arg-type]
            pid=os.getpid(),
            at=record.at,
            wall=time.time(),
            tick=record.tick,
            outcome=record.outcome,
            pools=record.pools,
            health={model: each.health for model, each in record.models.items()},
            unread={model: each.why for model, each in record.models.items() if each.why},
            plugins={each.id: each.result for each in record.plugin_results},
            reason=self._reason,
            why=self._why,
            changed=self._changed,
            bound=record.bound,
            alarms=tuple(self._alarms),
            gpus=record.gpus,
            restarts=restarts,
            attainment=sum(model.in_slo for model in record.models.values()) / judged if judged else None,
        )
        self.last = report
        self.metrics.ticked(record)
        self.metrics.wants((*self._roles[pool], n) for pool, n in record.targets.items() if pool in self._roles)
        if self.recommended is not None:
            await self.recommended(record.targets)
        for listener in self.listeners:
            listener(record, report)
        if self._records is not None:
            self._records.write(record)
            await asyncio.to_thread(self._records.flush)
        if self.journal is not None:
            await asyncio.to_thread(self.journal.flush)
        if self._store is not None:
            await self._write_report(self._store, report)
        self.ticked_once.set()

    def saw(self, observation: Observation) -> None:
        """Show the engines of an observation in the gauges: a record does not hold them."""
        self.metrics.saw(observation)
        self._roles = {name: (model, state.pool.role) for model, name, state in observation.pools()}

    async def close(self) -> None:
        """Delete the report: no planner runs any more."""
        if self._store is not None:
            try:
                await self._store.delete(REPORT)
            except StoreUnavailable as error:
                log.warning("the planner's last report stays until its lease ends: %s", error)

    async def _write_report(self, store: Store, report: PlannerReport) -> None:
        try:
            await store.put(REPORT, msgspec.json.encode(report), ttl=self._ttl)
            self._unsaid = 0
        except StoreUnavailable as error:
            self._unsaid += 1
            if self._unsaid & (self._unsaid - 1) == 0:  # the 1st, 2nd, 4th...
                log.warning("the planner's status can't be written, %d times now: %s", self._unsaid, error)


class TickListener(Protocol):
    """Hears of every tick until it is closed."""

    def ticked(self, record: TickRecord, _: object = None) -> None: ...

    async def close(self) -> None: ...


class PlannerDiagnostics:
    """Gives `watchers` to the code that runs the planner; `close` it after the planner has ended.

    Raises:
        ConfigError: what a listener writes can't be written.
    """

    def __init__(self, settings: PlanningSettings, run: Path | None) -> None:
        made = [make(settings, run) for make in extension.entries("tick listener").values()]
        self._listeners: list[TickListener] = [each for each in made if each is not None]
        self.watchers = [each.ticked for each in self._listeners]

    async def close(self) -> None:
        """Let each write what is left."""
        for each in self._listeners:
            await each.close()
