"""Watchers of a planner's ticks, as set in the config: the report drawn on a schedule, and TensorBoard's log."""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from penstock.adapters.telemetry.tensorboard_log import TensorBoardLog
from penstock.config.settings.planning_settings import PlanningSettings
from penstock.kernel.errors import ConfigError
from penstock.planner.tick_record import TickRecord
from penstock.report.planner.planner_report_page import write_planner_report

REQUESTS_MAX = 1 << 30
"""Bytes of requests.jsonl that a planner reads while it plans: about ten seconds of CPU."""

log = logging.getLogger("penstock.planner.report")


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


Watcher = Callable[[TickRecord, object], None]


class PlannerDiagnostics:
    """Gives `watchers` to the code that runs the planner; `close` it after the planner has ended.

    Args:
        run: the run folder; None, where records are not kept, gives no report.
    Raises:
        ConfigError: TensorBoard's folder can't be written.
    """

    def __init__(self, settings: PlanningSettings, run: Path | None) -> None:
        self.watchers: list[Watcher] = []
        self._report: ScheduledReport | None = None
        self._tensorboard: TensorBoardLog | None = None
        if run is not None and settings.report.interval:
            self._report = ScheduledReport(run, settings.report.interval)
            self.watchers.append(self._report.ticked)
        if settings.tensorboard is not None:
            self._tensorboard = TensorBoardLog(settings.tensorboard)
            self.watchers.append(self._tensorboard.ticked)

    async def close(self) -> None:
        """Draw the last report, and end the log."""
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._report is not None:
            await self._report.close()
