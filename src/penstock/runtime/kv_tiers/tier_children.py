"""Tier processes of a supervisor: one beside each engine whose pool has a cache, started again whenever it ends.

An engine without its tier process goes on: it misses, and computes.
"""

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path

import msgspec

from penstock.adapters.background_tasks import BackgroundTasks
from penstock.adapters.task_cancel import end
from penstock.config.cluster_secret_file import SECRET_ENV
from penstock.config.settings.cache_settings import CacheSettings
from penstock.config.settings.cluster_settings import SuperviseSettings
from penstock.runtime.cluster_state.crash_log import CrashBook
from penstock.runtime.kv_tiers.peer_exchange import PeerExchange
from penstock.runtime.kv_tiers.peer_tiers import SUFFIX
from penstock.runtime.kv_tiers.tier_admin_client import socket_of
from penstock.runtime.supervision.child_process import ChildProcess
from penstock.runtime.supervision.restarted_child import RestartedChild


class TierChildren:
    """The tier processes of one supervisor: `begin` for each engine, then `stop`.

    Args:
        folder, namespace: of the state file; the sockets are beside it.
        logs: folder for their logs.
        env: theirs; an object store's credentials are in it, and for peers the cluster's secret.
        host: address of this machine on which peers reach them.
        exchange: tells other machines of those that have peers.
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
        exchange: PeerExchange,
    ) -> None:
        self.settings = settings
        self._folder = folder
        self._namespace = namespace
        self._logs = logs
        self._env = env
        self._host = host
        self._crashes = crashes
        self._exchange = exchange
        self._exchanging: asyncio.Task[None] | None = None
        self._children: dict[str, RestartedChild] = {}
        self._ending = BackgroundTasks()

    def socket(self, worker: str) -> str:
        """Return where an engine finds its tier process."""
        return str(socket_of(self._folder, self._namespace, worker))

    def begin(self, worker: str, cache: CacheSettings, number: int) -> None:
        """Keep a tier process running beside an engine, the ``number``-th of its pool."""
        if worker not in self._children:
            own = of_worker(cache, worker, number)
            if cache.peers and self._exchanging is None:
                self._exchanging = asyncio.create_task(self._exchange.run(), name="peer-exchange")
            child = self._children[worker] = RestartedChild(
                f"the tier process of {worker}",
                "its engine misses",
                lambda: self.settings,
                lambda: self._start(worker, own),
                crashed=lambda words: self._crashes.add(f"{worker}.tiers", "tiers", words),
            )
            child.begin()

    def end(self, worker: str) -> None:
        """End the tier process of an engine that is gone for good."""
        child = self._children.pop(worker, None)
        if child is not None:
            self._ending.spawn(self._end(worker, child))

    async def stop(self) -> None:
        """End all of them."""
        for worker in list(self._children):
            self.end(worker)
        await self._ending.settled()
        if self._exchanging is not None:
            await end((self._exchanging,))

    async def _end(self, worker: str, child: RestartedChild) -> None:
        await child.stop()
        if worker not in self._children:  # what a killed process left
            for suffix in (SUFFIX, ".sock"):
                Path(self.socket(worker)).with_suffix(suffix).unlink(missing_ok=True)

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
