"""Who watches a planner's ticks, as the settings ask for it? The report on its schedule, and TensorBoard's log."""

from collections.abc import Callable
from pathlib import Path

from penstock.adapters.telemetry.tensorboard import TensorBoardLog
from penstock.config.planner import PlanningSettings
from penstock.planner.record import TickRecord
from penstock.report.planner_schedule import ScheduledReport

Watcher = Callable[[TickRecord, object], None]


class PlannerDiagnostics:
    """Give `watchers` to whoever runs the planner, and `close` it after that has ended.

    Args:
        run: the run folder; None, where records are not kept, has no report.
    Raises:
        ConfigError: TensorBoard's folder can't be written.
    """

    def __init__(self, settings: PlanningSettings, run: Path | None) -> None:
        self.watchers: list[Watcher] = []
        self._report: ScheduledReport | None = None
        self._tensorboard: TensorBoardLog | None = None
        if run is not None and settings.report.interval:
            self._report = ScheduledReport(run, settings.report.interval, target=settings.report.target)
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
