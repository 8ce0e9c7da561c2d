"""Draws a planner's report on a schedule while it runs, in a thread, and once more at its end."""

import asyncio
import logging
from pathlib import Path

from penstock.config.settings.planning_settings import PlanningSettings
from penstock.kernel.errors import ConfigError
from penstock.planner.tick_record import TickRecord
from penstock_lab.report.planner.planner_report_page import write_planner_report

REQUESTS_MAX = 1 << 30
"""Bytes of requests.jsonl that a planner reads while it plans: about ten seconds of CPU."""

log = logging.getLogger("penstock.planner.report")


def scheduled_report(settings: PlanningSettings, run: Path | None) -> "ScheduledReport | None":
    """Return the report that the settings ask for: an entry of the seam ``tick listener``."""
    return ScheduledReport(run, settings.report.interval) if run is not None and settings.report.interval else None


class ScheduledReport:
    """Draws planner-report.html into a run folder; give `ticked` to `penstock.runtime.planning.tick_log.TickLog`.

    A report that fails is logged and tried again at its next time: it must not delay the planner.

    Args:
        interval: seconds of the run between two reports.
    """

    def __init__(self, folder: Path, interval: float) -> None:
        self.folder = folder
        self.drawn = 0
        self._interval = interval
        self._due: float | None = None
        self._task: asyncio.Task[None] | None = None

    def ticked(self, record: TickRecord, _: object = None) -> None:
        """Start a report where one is due, unless one is still being drawn."""
        if self._due is None:
            self._due = record.at + self._interval
        if record.at < self._due or (self._task is not None and not self._task.done()):
            return
        self._due = record.at + self._interval
        self._task = asyncio.get_running_loop().create_task(self._draw())

    async def idle(self) -> None:
        """Return when no report is being drawn."""
        if self._task is not None:
            await self._task

    async def close(self) -> None:
        """Draw the last one; none where no tick came, as of a planner that failed at its start."""
        await self.idle()
        if self._due is not None:
            await self._draw()

    async def _draw(self) -> None:
        try:
            path = await asyncio.to_thread(write_planner_report, self.folder, requests_max=REQUESTS_MAX)
        except ConfigError as error:
            log.warning("no report of the planner: %s", error)
            return
        except Exception:
            # Supervision boundary: a page that can't be drawn must not stop planning.
            log.exception("the planner's report could not be drawn by a bug of ours")
            return
        self.drawn += 1
        log.info("the planner's report is %s", path)
