"""How is the planner process kept running? Started once the cluster is up, and again whenever it ends.

Losing it freezes replica counts, never traffic; the next one goes on from what it left in the run folder.
"""

import asyncio
import logging
import os
import time
from pathlib import Path

from penstock.config.cluster import ClusterSettings
from penstock.kernel.errors import PenstockError
from penstock.kernel.threads import ONE_THREAD
from penstock.planner.settings import PlannerSettings
from penstock.runtime.children import Child
from penstock.runtime.frontends import secrets_of

log = logging.getLogger("penstock.supervisor")

STEADY = 60.0
"""Seconds after which a planner counts as having run well: the next end waits only for the shortest time."""


class PlannerChild:
    """The planner process of a cluster: `begin`, then `stop`.

    Args:
        run: the run folder.
    """

    def __init__(self, settings: ClusterSettings, run: Path) -> None:
        self.settings = settings
        self._run = run
        self._child: Child | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()

    def begin(self) -> None:
        """Keep one running from now on."""
        if self._watcher is None:
            self._watcher = asyncio.create_task(self._watch(), name="planner")

    async def stop(self) -> None:
        """End it, so that what is drained now is not started again."""
        async with self._starting:  # one that is being started must not be left behind
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
                await child.ready(supervise.start_timeout)
                status = await child.wait()
                log.error("the planner ended with status %s; replica counts stay as they are meanwhile", status)
            except (PenstockError, OSError) as error:
                log.error("the planner can't be started, so replica counts stay as they are: %s", error)
                if self._child is not None:
                    await self._child.stop(supervise.stop_grace)
            if time.monotonic() - begun > STEADY:
                wait = supervise.restart_backoff
            await asyncio.sleep(wait)
            wait = min(supervise.restart_backoff_max, wait * 2)

    async def _start(self) -> Child:
        return await Child.start(
            "planner",
            "penstock.cli.planner_process",
            ["--run", str(self._run)],
            log_path=self._run / "logs" / "planner.log",
            env={**ONE_THREAD, **os.environ, **secrets_of(self.settings)},
        )


def policy_of(settings: PlannerSettings) -> str:
    """Return what decides, in a word."""
    target = settings.optimization_target
    return f"policy {settings.policy}" if target == "sla" else f"thresholds for {target}"
