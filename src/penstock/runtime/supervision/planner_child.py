"""Planner child process: started once the cluster is up, and again whenever it ends.

Losing it freezes replica counts, never traffic; the next one continues from its state in the run folder.
"""

import asyncio
import logging
import os
import time
from pathlib import Path

from penstock.adapters.connectors.shim_client import ending
from penstock.config.settings.cluster_settings import START_TIMEOUT, ClusterSettings
from penstock.fleet.fleet_state import RESTART_BACKOFF_MAX
from penstock.kernel.errors import PenstockError
from penstock.kernel.numeric_threads import ONE_THREAD
from penstock.planner.settings import PlannerSettings
from penstock.runtime.cluster_state.crash_log import CrashBook
from penstock.runtime.supervision.child_process import ChildProcess
from penstock.runtime.supervision.frontend_processes import secrets_of

log = logging.getLogger("penstock.supervisor")

STEADY = 60.0
"""Seconds after which a planner counts as healthy: its next restart waits only for the shortest time."""


class PlannerChild:
    """The planner process of a cluster: `begin`, then `stop`.

    Args:
        run: the run folder.
        crashes: record of its crashes.
    """

    def __init__(self, settings: ClusterSettings, run: Path, crashes: CrashBook) -> None:
        self.settings = settings
        self._crashes = crashes
        self._run = run
        self._child: ChildProcess | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()

    def begin(self) -> None:
        """Keep a planner running from now on."""
        if self._watcher is None:
            self._watcher = asyncio.create_task(self._watch(), name="planner")

    async def stop(self) -> None:
        """End the planner, so that drained workers are not started again."""
        async with self._starting:  # a planner that is being started must not be left behind
            if self._watcher is not None:
                self._watcher.cancel()
                await asyncio.gather(self._watcher, return_exceptions=True)
        if self._child is not None:
            await self._child.stop(self.settings.supervise.stop_grace)

    async def _watch(self) -> None:
        supervise = self.settings.supervise
        wait = supervise.restart_backoff
        while True:
            begun = time.monotonic()
            try:
                async with self._starting:
                    child = self._child = await self._start()
                await child.ready(supervise.start_timeout or START_TIMEOUT)
                status = await child.wait()
                self._crashes.add("planner", "planner", ending(status))
                log.error("the planner %s; replica counts stay as they are meanwhile", ending(status))
            except (PenstockError, OSError) as error:
                log.error("the planner can't be started, so replica counts stay as they are: %s", error)
                if self._child is not None:
                    await self._child.stop(supervise.stop_grace)
            if time.monotonic() - begun > STEADY:
                wait = supervise.restart_backoff
            await asyncio.sleep(wait)
            wait = min(RESTART_BACKOFF_MAX, wait * 2)

    async def _start(self) -> ChildProcess:
        return await ChildProcess.start(
            "planner",
            "penstock.cli.planner_process",
            ["--run", str(self._run)],
            log_path=self._run / "logs" / "planner.log",
            env={**ONE_THREAD, **os.environ, **secrets_of(self.settings)},
        )


def policy_of(settings: PlannerSettings) -> str:
    """Return the name of the policy that decides."""
    target = settings.optimization_target
    return f"policy {settings.policy}" if target == "sla" else f"thresholds for {target}"
