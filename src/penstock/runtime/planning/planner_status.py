"""Planner status of a frontend: follows the planner's report in the store, and derives findings for the operator."""

import asyncio
import logging
import time
from collections.abc import Callable

import msgspec

from penstock.adapters.seams import Store
from penstock.kernel.message_version import NewerVersion
from penstock.kernel.plurals import counted
from penstock.planner.plugins.proposals import CEILING
from penstock.router.status_rows import Level, StatusFinding
from penstock.runtime.cluster_state.store_watch import follow
from penstock.runtime.planning.planner_report import REPORT, PlannerReport, reports

log = logging.getLogger("penstock.planner")

PATIENCE = 3
"""Ticks without a report before that is a finding."""
STARTS_WITHIN = 60.0
"""Seconds that a planner gets for its first report."""
_LEVELS: dict[str, Level] = {"stale": "warning", "broken": "error"}


class PlannerStatus:
    """Follows the planner's report.

    Args:
        enabled: whether a planner should run.
    """

    def __init__(self, store: Store, enabled: Callable[[], bool]) -> None:
        self.report: PlannerReport | None = None
        self._store = store
        self._enabled = enabled
        self._since = time.monotonic()

    async def run(self) -> None:
        """Follow until cancelled."""
        await follow(
            self._store,
            REPORT,
            known=lambda: [] if self.report is None else [REPORT],
            put=self._put,
            deleted=self._deleted,
            frozen=lambda error: None,
        )

    def findings(self) -> list[StatusFinding]:
        """Return findings for the operator, with the next step."""
        report = self.report
        if report is None:
            if not self._enabled() or time.monotonic() - self._since < STARTS_WITHIN:
                return []
            return [
                StatusFinding("warning", "no planner runs, so replica counts stay as they are", "see logs/planner.log")
            ]
        findings = []
        silent = time.monotonic() - self._since
        if silent > PATIENCE * report.every + 10.0:
            text = f"the planner has not reported for {silent:.0f} s; replica counts stay as they are"
            findings.append(StatusFinding("warning", text, "see logs/planner.log in the run folder"))
        for model, health in report.health.items():
            if health in _LEVELS:
                why = f": {report.unread[model]}" if model in report.unread else ""
                text = f"the planner can't read the traffic of {model} ({health}{why}): nothing is taken away meanwhile"
                findings.append(StatusFinding(_LEVELS[health], text, "'penstock explain scale' says why"))
        for reason in report.bound:
            if reason.code == CEILING:
                findings.append(StatusFinding("warning", reason.text, "raise planner.budget.max_gpus, or shed load"))
        for name, pool in report.pools.items():
            if pool.given_up:
                given_up = counted(pool.given_up, "replica")
                text = f"{given_up} of {name} did not come to serve, and counts no more"
                findings.append(
                    StatusFinding("warning", text, f"'penstock scale' says what holds them; {name} is planned on")
                )
        return findings

    async def _put(self, key: str, raw: bytes) -> None:
        try:
            self.report = reports.decode(raw)
            self._since = time.monotonic()
        except (msgspec.DecodeError, NewerVersion) as error:
            log.warning("what the planner says can't be read: %s", error)
        await asyncio.sleep(0)

    async def _deleted(self, key: str) -> None:
        self.report, self._since = None, time.monotonic()
