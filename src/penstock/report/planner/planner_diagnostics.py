"""Watchers of a planner's ticks, as set in the config: the scheduled report, and TensorBoard's log."""

from collections.abc import Callable
from pathlib import Path

from penstock.adapters.telemetry.tensorboard_log import TensorBoardLog
from penstock.config.settings.planning_settings import PlanningSettings
from penstock.planner.tick_record import TickRecord
from penstock.report.planner.scheduled_report import ScheduledReport

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
