"""Restarted child: a child process that is started again whenever it ends, at once or after waits that grow."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from penstock.adapters.background_tasks import BackgroundTasks
from penstock.adapters.connectors.shim_client import ending
from penstock.adapters.task_cancel import end
from penstock.config.settings.cluster_settings import START_TIMEOUT, SuperviseSettings
from penstock.fleet.crash_backoff import crash_wait
from penstock.kernel.errors import PenstockError
from penstock.runtime.supervision.child_process import ChildProcess

log = logging.getLogger("penstock.supervisor")


class RestartedChild:
    """One child process: `begin`, then `stop`.

    Args:
        name: such as "the planner", for the log.
        without: what is so while there is none, for the log.
        settings: returns those that count now.
        start: starts it.
        patience: seconds until it is ready; None takes supervise.start_timeout.
        crashed: takes the words for how it ended.
    """

    def __init__(
        self,
        name: str,
        without: str,
        settings: Callable[[], SuperviseSettings],
        start: Callable[[], Awaitable[ChildProcess]],
        *,
        patience: float | None = None,
        crashed: Callable[[str], object] = lambda ending: None,
    ) -> None:
        self._name, self._without = name, without
        self._settings = settings
        self._start = start
        self._patience = patience
        self._crashed = crashed
        self._watcher: asyncio.Task[None] | None = None
        self._ending = BackgroundTasks()
        """What `stop` waits for, however often the watcher is cancelled."""

    def begin(self) -> None:
        """Keep it running from now on."""
        if self._watcher is None:
            self._watcher = asyncio.create_task(self._watch(), name=self._name)

    async def stop(self) -> None:
        """End it; one that is being started is not left behind."""
        if self._watcher is not None:
            await end((self._watcher,))  # one cancel is not enough: `asyncio.wait_for` may lose it
        await self._ending.settled()

    async def _watch(self) -> None:
        wait, said = 0.0, ""
        while True:
            began: float | None = None
            starting = asyncio.ensure_future(self._start())
            try:
                child = await asyncio.shield(starting)
                await child.ready(self._patience or self._settings().start_timeout or START_TIMEOUT)
                began, said = time.monotonic(), ""
                status = await child.wait()
                self._crashed(ending(status))
                log.error("%s %s; %s meanwhile", self._name, ending(status), self._without)
            except (PenstockError, OSError) as error:
                # The same reason at each try is said once, and again where it changes.
                level, said = (logging.DEBUG if said == str(error) else logging.ERROR), str(error)
                log.log(level, "%s can't be started, so %s: %s", self._name, self._without, error)
            finally:
                self._ending.spawn(self._end(starting))
            await self._ending.settled()
            ran = 0.0 if began is None else time.monotonic() - began
            wait = crash_wait(wait, ran, self._settings().restart_backoff)
            await asyncio.sleep(wait)

    async def _end(self, starting: "asyncio.Future[ChildProcess]") -> None:
        [child] = await asyncio.gather(starting, return_exceptions=True)
        if isinstance(child, ChildProcess):
            await child.stop(self._settings().stop_grace)
