"""Diagnostics of a planner: what extensions do with its ticks, such as the scheduled report and TensorBoard's log.

An entry of the seam ``tick listener`` is called with the planner's settings and the run folder, which is None where
records are not kept, and returns a `TickListener`, or None where the settings do not ask for it.
"""

from pathlib import Path
from typing import Protocol

from penstock import extension
from penstock.config.settings.planning_settings import PlanningSettings
from penstock.planner.tick_record import TickRecord


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
