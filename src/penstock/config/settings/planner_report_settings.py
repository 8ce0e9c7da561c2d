"""Knobs of the planner's HTML report."""

from typing import Annotated

from penstock.kernel.settings import Knob, Settings


class PlannerReportSettings(Settings, frozen=True, kw_only=True):
    """planner-report.html in the run folder."""

    interval: Annotated[
        float,
        Knob(
            "Seconds between two drawings; 0 draws none. Long runs take a second or two of CPU each time.",
            unit="s",
            ge=0,
        ),
    ] = 3600.0
