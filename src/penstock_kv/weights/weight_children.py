"""Weight processes of a supervisor: one for each pool that shares its weights, started again whenever it ends.

An engine whose weight process is gone reads the files.
"""

import asyncio
import os
import shutil
import tempfile
from functools import partial
from pathlib import Path

from penstock.adapters.engines.launch import EngineAddition, plugin_installed
from penstock.adapters.task_cancel import end
from penstock.config.cluster_secret_file import SECRET_ENV
from penstock.config.settings.cluster_settings import PoolSettings
from penstock.kernel.errors import ConfigError
from penstock.runtime.supervision.child_process import ChildProcess, EngineSite, RestartedChild
from penstock_kv.inside.weights.weight_protocol import LOAD_FORMAT, WEIGHTS_ENV
from penstock_kv.tiers.peer_exchange import PeerExchange

PREFIX = "weights/"
"""Of the store's keys that say where weight processes listen."""
LOADER_ENTRY_POINTS = "vllm.general_plugins"
"""Where vLLM finds the loader that asks a weight process."""
READY_SECONDS = 600.0
"""Until it has read a checkpoint once: 300 GB at 500 MB/s."""


class WeightChildren:
    """The weight processes of one supervisor."""

    def __init__(self, site: EngineSite) -> None:
        self._site = site
        self._folder: Path | None = None
        self._checkpoints: dict[str, Path] = {}
        self._exchanging: asyncio.Task[None] | None = None
        self._children: list[RestartedChild] = []

    def add(self, base: str, model: str, pool: PoolSettings) -> None:
        if not pool.share_weights or pool.engine == "sim":
            return
        checkpoint = Path(pool.model_path or model).expanduser()
        if not checkpoint.is_dir():
            raise ConfigError(
                f"pool {base}: share_weights is on, and {checkpoint} is not a folder of this machine",
                hint="set model_path to the folder of the checkpoint, or share_weights to false",
            )
        if self._folder is None:
            # A folder of a run may be too long for the name of a socket, which has 107 bytes.
            self._folder = Path(tempfile.mkdtemp(prefix="penstock-w-"))
        self._checkpoints[base] = checkpoint

    def addition(self, worker: str, pool: PoolSettings) -> EngineAddition | None:
        base = worker.rpartition("-")[0]
        if base not in self._checkpoints:
            return None
        if not plugin_installed(pool.program, {**os.environ, **pool.env}, LOADER_ENTRY_POINTS):
            raise ConfigError(
                f"share_weights of {worker}: the environment of {pool.program} has no weight loader",
                hint="install penstock into it: pip install --no-deps penstock",
            )
        return EngineAddition(flags={"--load-format": LOAD_FORMAT}, env={WEIGHTS_ENV: str(self._socket(base))})

    def begin(self) -> None:
        if self._folder is not None:
            exchange = PeerExchange(self._site.store, self._folder, self._site.ttl, prefix=PREFIX)
            self._exchanging = asyncio.create_task(exchange.run(), name="weights-exchange")
        for pool, checkpoint in self._checkpoints.items():
            child = RestartedChild(
                f"the weight process of {pool}",
                "its engines read the files",
                self._site.settings,
                partial(self._start, pool, checkpoint),
                patience=READY_SECONDS,
            )
            child.begin()
            self._children.append(child)

    def spawned(self, worker: str, base: str, number: int) -> None:
        """One is beside all engines of a pool."""

    def forgotten(self, worker: str, base: str) -> None:
        """It is there for those that are left."""

    async def stop(self) -> None:
        if self._exchanging is not None:
            await end((self._exchanging,))
        await asyncio.gather(*(child.stop() for child in self._children))
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _socket(self, pool: str) -> Path:
        assert self._folder is not None
        return self._folder / f"{pool}.sock"

    async def _start(self, pool: str, checkpoint: Path) -> ChildProcess:
        listen = ["--listen", f"{self._site.host}:0"] if SECRET_ENV in self._site.env else []
        return await ChildProcess.start(
            f"weight process of {pool}",
            "penstock",
            ["weights", "serve", str(checkpoint), "--socket", str(self._socket(pool)), "--name", pool, *listen],
            log_path=self._site.logs / f"{pool}.weights.log",
            env=self._site.env,
        )
