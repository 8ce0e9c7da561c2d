"""Change book of a supervisor: says on its terminal what happens to the cluster, and writes down what it did itself."""

from pathlib import Path
from typing import Any

from penstock.fleet import events
from penstock.kernel.plurals import counted
from penstock.runtime.cluster_state.crash_log import Crash
from penstock.runtime.cluster_state.desired_state import PLANNER
from penstock.runtime.records.change_log import FILE, SUPERVISOR, change_of
from penstock.runtime.records.run_folder import RunFolder
from penstock.runtime.supervision.terminal import Say


class ChangeBook:
    """``run``: the run folder; ``say``: prints a line on the operator's terminal."""

    def __init__(self, run: Path, say: Say) -> None:
        self._lines = RunFolder(run).writer(FILE)
        self._say = say

    def add(self, key: str, old: Any, new: Any, by: str = SUPERVISOR) -> None:
        """Say a change; write it down, unless it is an operator's: who took it from the operator has written it."""
        change = change_of(key, old, new, by)
        self._say(f"{change.time[11:19]}Z {change.text}")
        if by in (SUPERVISOR, PLANNER):
            self._lines.write(change)
            self._lines.flush()  # one line, and a supervisor holds nobody up

    def crashed(self, crash: Crash) -> None:
        """Add a crash."""
        self.add(f"crash {crash.name}", None, crash.reason)

    def reported(self, report: events.DrainReported | events.DrainForgotten | events.RestartReported) -> None:
        """Add the end of a drain or of a restart."""
        if isinstance(report, events.DrainReported) and report.state == "done":
            cut = f", {report.cut} cut off there" if report.cut else ""
            requests = f"{counted(report.finished, 'request')} finished{cut}"
            self.add(f"drained {report.worker}", None, f"after {report.seconds:.1f} s, {requests}")
        elif isinstance(report, events.RestartReported) and report.state != "running":
            self.add("restarted", None, report.problem or f"{', '.join(report.done) or 'nothing'} replaced")
