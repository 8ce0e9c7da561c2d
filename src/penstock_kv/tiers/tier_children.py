"""Tier processes of a supervisor: one beside each engine whose pool has a cache, started again whenever it ends.

An engine without its tier process goes on: it misses, and computes.
"""

import asyncio
import json
from pathlib import Path

import msgspec

from penstock.adapters.background_tasks import BackgroundTasks
from penstock.adapters.engines.dialects.kv_transfer_protocol import TIER_SOCKET, TIERS
from penstock.adapters.engines.launch import EngineAddition
from penstock.adapters.task_cancel import end
from penstock.config.cluster_secret_file import SECRET_ENV
from penstock.config.settings.cluster_settings import PoolSettings
from penstock.runtime.supervision.child_process import ChildProcess, EngineSite, RestartedChild
from penstock_kv.cache_settings import CacheSettings
from penstock_kv.tiers.peer_exchange import PeerExchange
from penstock_kv.tiers.peer_tiers import SUFFIX
from penstock_kv.tiers.tier_admin_client import socket_of
from penstock_kv.vllm_kv_tiers import KV_TIER_ENV, KV_TIER_FLAGS, host_memories, kv_transfer_config


class TierChildren:
    """The tier processes of one supervisor, for pools of vLLM with a cache; a simulated engine has tiers of its own."""

    def __init__(self, site: EngineSite) -> None:
        self._site = site
        self._exchange = PeerExchange(site.store, socket_of(site.state, site.namespace, "").parent, site.ttl)
        self._exchanging: asyncio.Task[None] | None = None
        self._caches: dict[str, CacheSettings] = {}
        """Pool -> of each of its tier processes."""
        self._children: dict[str, RestartedChild] = {}
        self._ending = BackgroundTasks()

    def add(self, base: str, model: str, pool: PoolSettings) -> None:
        if has_tier_process(pool):
            self._caches[base] = msgspec.structs.replace(pool.cache, host=host_memories(pool.cache)[1])

    def addition(self, worker: str, pool: PoolSettings) -> EngineAddition | None:
        if not has_tier_process(pool):
            return None
        socket = self.socket(worker)
        return EngineAddition(
            flags={**KV_TIER_FLAGS},
            env=KV_TIER_ENV,
            labels={TIERS: pool.cache.order, TIER_SOCKET: socket},
            transfer=kv_transfer_config(socket, pool.cache, worker),
        )

    def socket(self, worker: str) -> str:
        """Return where an engine finds its tier process."""
        return str(socket_of(self._site.state, self._site.namespace, worker))

    def begin(self) -> None:
        """Each starts with its engine."""

    def spawned(self, worker: str, base: str, number: int) -> None:
        if base in self._caches and worker not in self._children:
            cache = self._caches[base]
            own = of_worker(cache, worker, number)
            if cache.peers and self._exchanging is None:
                self._exchanging = asyncio.create_task(self._exchange.run(), name="peer-exchange")
            child = self._children[worker] = RestartedChild(
                f"the tier process of {worker}",
                "its engine misses",
                self._site.settings,
                lambda: self._start(worker, own),
                crashed=lambda words: self._site.crashes.add(f"{worker}.tiers", "tiers", words),
            )
            child.begin()

    def forgotten(self, worker: str, base: str) -> None:
        child = self._children.pop(worker, None)
        if child is not None:
            self._ending.spawn(self._end(worker, child))

    async def stop(self) -> None:
        for worker in list(self._children):
            self.forgotten(worker, "")
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
        site = self._site
        peers = ["--peer-listen", f"{site.host}:0"] if cache.peers and SECRET_ENV in site.env else []
        settings = json.dumps(msgspec.to_builtins(cache))
        return await ChildProcess.start(
            f"tier process of {worker}",
            "penstock",
            ["cache", "serve", "--socket", str(path), "--settings", settings, *peers],
            log_path=site.logs / f"{worker}.tiers.log",
            env=site.env,
        )


def has_tier_process(pool: PoolSettings) -> bool:
    """Return whether each engine of a pool has a tier process beside it."""
    return pool.engine == "vllm" and not pool.attached and pool.cache.host > 0


def of_worker(cache: CacheSettings, worker: str, number: int) -> CacheSettings:
    """Return a pool's settings for one of its engines: a folder of its own on each disk, and a port of its own."""
    return msgspec.structs.replace(
        cache,
        disk_dirs=tuple(str(Path(folder) / worker) for folder in cache.disk_dirs),
        metrics_port=cache.metrics_port + number if cache.metrics_port else 0,
    )
