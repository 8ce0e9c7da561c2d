"""Change book of a supervisor: says on its terminal what happens to the cluster, and writes down what it did itself.

At SIGHUP the config is read again: changed live knobs are applied, and those that can't change are named.
"""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.adapters.seams import Store, StoreUnavailable
from penstock.config.live_knobs import differences, live_knobs, refusal_of, unheard
from penstock.config.reading.load import Loaded
from penstock.config.settings.cluster_settings import ClusterSettings
from penstock.fleet import events
from penstock.kernel.errors import ConfigError
from penstock.kernel.plurals import counted
from penstock.runtime.cluster_state.crash_log import Crash
from penstock.runtime.cluster_state.current_settings import CurrentSettings, desire_settings
from penstock.runtime.cluster_state.desired_state import PLANNER
from penstock.runtime.records.change_log import FILE, SUPERVISOR, change_of
from penstock.runtime.records.run_folder import RunFolder
from penstock.runtime.supervision.terminal import Say

log = logging.getLogger("penstock.supervisor")
SIGHUP = "SIGHUP"
"""``by`` of what the config's file changed."""


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


class ConfigReload:
    """Waits for `ask`, and reads the config again.

    Args:
        loaded: the settings as they were read at the start.
        reload: reads them again, as at the start; None where there is no file to read.
        say: prints a line on the operator's terminal.
    """

    def __init__(
        self,
        store: Store,
        tuning: CurrentSettings,
        loaded: ClusterSettings,
        reload: Callable[[], Loaded] | None,
        run: Path,
        say: Callable[[str], None],
    ) -> None:
        self._store = store
        self._tuning = tuning
        self._loaded = loaded
        self._reload = reload
        self._lines = RunFolder(run).writer(FILE)
        self._say = say
        self._requested = asyncio.Event()

    def ask(self) -> None:
        """Request a reload."""
        self._requested.set()

    async def run(self) -> None:
        """Work until cancelled."""
        while True:
            await self._requested.wait()
            self._requested.clear()
            try:
                for line in await self._reread():
                    self._say(f"SIGHUP: {line}")
            except (ConfigError, StoreUnavailable) as error:
                self._say(f"SIGHUP: nothing was changed: {error}")
            except Exception:  # supervision boundary: the next SIGHUP must still work
                log.exception("the config could not be read again by a bug of ours")

    async def _reread(self) -> list[str]:
        if self._reload is None:
            return ["there is no config file to read again; 'penstock set KEY=VALUE' changes settings."]
        new = (await asyncio.to_thread(self._reload)).settings
        live = live_knobs(self._tuning.settings)
        changes = [change for change in differences(self._tuning.settings, new) if change.key in live]
        lines = [refusal_of(change.key) for change in differences(self._loaded, new) if change.key not in live]
        silent = unheard(new.router, self._tuning.started.router)
        if silent:
            lines += [str(problem) for problem in silent]
            changes = [change for change in changes if not change.key.startswith("router.cost.")]
        await desire_settings(self._store, changes, SIGHUP)
        for change in changes:
            self._lines.write(change_of(change.key, change.old, change.new, SIGHUP))
            lines.append(f"{change.key}: {change.old} -> {change.new}")
        await asyncio.to_thread(self._lines.flush)
        return lines or ["the config says what is in use already."]
