"""Tier processes of a supervisor: one beside each engine whose pool has a cache, started again whenever it ends.

An engine without its tier process goes on: it misses, and computes.
"""

import asyncio
import json
import logging
import time
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any

import msgspec

from penstock.adapters.connectors.shim_client import ending
from penstock.adapters.task_cancel import end
from penstock.config.cluster_secret_file import SECRET_ENV
from penstock.config.settings.cache_settings import CacheSettings
from penstock.config.settings.cluster_settings import START_TIMEOUT, SuperviseSettings
from penstock.fleet.fleet_state import RESTART_BACKOFF_MAX
from penstock.kernel.errors import PenstockError
from penstock.runtime.cluster_state.crash_log import CrashBook
from penstock.runtime.kv_tiers.peer_tiers import SUFFIX
from penstock.runtime.kv_tiers.tier_admin_client import socket_of
from penstock.runtime.supervision.child_process import ChildProcess

log = logging.getLogger("penstock.supervisor")

STEADY = 60.0
"""Seconds after which a tier process counts as healthy: its next restart waits only for the shortest time."""


class TierChildren:
    """The tier processes of one supervisor: `begin` for each engine, then `stop`.

    Args:
        folder, namespace: of the state file; the sockets are beside it.
        logs: folder for their logs.
        env: theirs; an object store's credentials are in it, and for peers the cluster's secret.
        host: address of this machine on which peers reach them.
    """

    def __init__(
        self,
        settings: SuperviseSettings,
        folder: Path,
        namespace: str,
        *,
        logs: Path,
        env: Mapping[str, str],
        host: str,
        crashes: CrashBook,
    ) -> None:
        self.settings = settings
        self._folder = folder
        self._namespace = namespace
        self._logs = logs
        self._env = env
        self._host = host
        self._crashes = crashes
        self._watchers: dict[str, asyncio.Task[None]] = {}
        self._ending: set[asyncio.Task[None]] = set()

    def socket(self, worker: str) -> str:
        """Return where an engine finds its tier process."""
        return str(socket_of(self._folder, self._namespace, worker))

    def begin(self, worker: str, cache: CacheSettings, number: int) -> None:
        """Keep a tier process running beside an engine, the ``number``-th of its pool."""
        if worker not in self._watchers:
            own = of_worker(cache, worker, number)
            self._watchers[worker] = asyncio.create_task(self._watch(worker, own), name=f"tiers-{worker}")

    def end(self, worker: str) -> None:
        """End the tier process of an engine that is gone for good."""
        watcher = self._watchers.pop(worker, None)
        if watcher is not None:
            self._finish(self._end(worker, watcher))

    async def stop(self) -> None:
        """End all of them."""
        for worker in list(self._watchers):
            self.end(worker)
        while self._ending:
            await asyncio.wait(self._ending)

    async def _end(self, worker: str, watcher: "asyncio.Task[None]") -> None:
        await end((watcher,))  # one cancel is not enough: `asyncio.wait_for` may lose it
        if worker not in self._watchers:  # what a killed process left
            for suffix in (SUFFIX, ".sock"):
                Path(self.socket(worker)).with_suffix(suffix).unlink(missing_ok=True)

    def _finish(self, work: Coroutine[Any, Any, None]) -> None:
        """Do work that `stop` waits for, however often the watcher is cancelled."""
        task = asyncio.create_task(work)
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _watch(self, worker: str, cache: CacheSettings) -> None:
        wait = self.settings.restart_backoff
        while True:
            begun = time.monotonic()
            starting = asyncio.create_task(self._start(worker, cache))
            try:
                child = await asyncio.shield(starting)
                await child.ready(self.settings.start_timeout or START_TIMEOUT)
                status = await child.wait()
                self._crashes.add(f"{worker}.tiers", "tiers", ending(status))
                log.error("the tier process of %s %s; its engine misses meanwhile", worker, ending(status))
            except (PenstockError, OSError) as error:
                log.error("the tier process of %s can't be started, so its engine misses: %s", worker, error)
            finally:
                self._finish(self._stop(starting))
            if time.monotonic() - begun > STEADY:
                wait = self.settings.restart_backoff
            await asyncio.sleep(wait)
            wait = min(RESTART_BACKOFF_MAX, wait * 2)

    async def _stop(self, starting: "asyncio.Task[ChildProcess]") -> None:
        [child] = await asyncio.gather(starting, return_exceptions=True)
        if isinstance(child, ChildProcess):
            await child.stop(self.settings.stop_grace)

    async def _start(self, worker: str, cache: CacheSettings) -> ChildProcess:
        path = Path(self.socket(worker))
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        peers = ["--peer-listen", f"{self._host}:0"] if cache.peers and SECRET_ENV in self._env else []
        settings = json.dumps(msgspec.to_builtins(cache))
        return await ChildProcess.start(
            f"tier process of {worker}",
            "penstock",
            ["cache", "serve", "--socket", str(path), "--settings", settings, *peers],
            log_path=self._logs / f"{worker}.tiers.log",
            env=self._env,
        )


def of_worker(cache: CacheSettings, worker: str, number: int) -> CacheSettings:
    """Return a pool's settings for one of its engines: a folder of its own on each disk, and a port of its own."""
    return msgspec.structs.replace(
        cache,
        disk_dirs=tuple(str(Path(folder) / worker) for folder in cache.disk_dirs),
        metrics_port=cache.metrics_port + number if cache.metrics_port else 0,
    )
