"""Weight processes of a supervisor: one for each pool that shares its weights, started again whenever it ends.

An engine whose weight process is gone reads the files.
"""

import asyncio
import shutil
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from penstock.adapters.task_cancel import end
from penstock.config.cluster_secret_file import SECRET_ENV
from penstock.config.settings.cluster_settings import SuperviseSettings
from penstock.runtime.kv_tiers.peer_exchange import PeerExchange
from penstock.runtime.supervision.child_process import ChildProcess
from penstock.runtime.supervision.restarted_child import RestartedChild

PREFIX = "weights/"
"""Of the store's keys that say where weight processes listen."""
READY_SECONDS = 600.0
"""Until it has read a checkpoint once: 300 GB at 500 MB/s."""


class WeightChildren:
    """The weight processes of one supervisor: `add` pools, `begin`, then `stop`.

    Args:
        logs: folder for their logs.
        env: theirs, with the cluster's secret where there is one.
        host: address of this machine on which siblings reach them.
        exchange: from the folder of their sockets to what tells other machines of them.
    """

    def __init__(
        self,
        settings: SuperviseSettings,
        *,
        logs: Path,
        env: Mapping[str, str],
        host: str,
        exchange: Callable[[Path], PeerExchange],
    ) -> None:
        self._settings = settings
        self._folder: Path | None = None
        self._logs = logs
        self._env = env
        self._host = host
        self._exchange = exchange
        self._checkpoints: dict[str, Path] = {}
        self._exchanging: asyncio.Task[None] | None = None
        self._children: list[RestartedChild] = []

    def add(self, pool: str, checkpoint: Path) -> str:
        """Share a pool's checkpoint from `begin` on; return where its engines ask."""
        if self._folder is None:
            # A folder of a run may be too long for the name of a socket, which has 107 bytes.
            self._folder = Path(tempfile.mkdtemp(prefix="penstock-w-"))
        self._checkpoints[pool] = checkpoint
        return str(self._socket(pool))

    def begin(self) -> None:
        """Start them."""
        if self._folder is not None:
            self._exchanging = asyncio.create_task(self._exchange(self._folder).run(), name="weights-exchange")
        for pool, checkpoint in self._checkpoints.items():
            child = RestartedChild(
                f"the weight process of {pool}",
                "its engines read the files",
                lambda: self._settings,
                partial(self._start, pool, checkpoint),
                patience=READY_SECONDS,
            )
            child.begin()
            self._children.append(child)

    async def stop(self) -> None:
        """End them."""
        if self._exchanging is not None:
            await end((self._exchanging,))
        await asyncio.gather(*(child.stop() for child in self._children))
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _socket(self, pool: str) -> Path:
        assert self._folder is not None
        return self._folder / f"{pool}.sock"

    async def _start(self, pool: str, checkpoint: Path) -> ChildProcess:
        listen = ["--listen", f"{self._host}:0"] if SECRET_ENV in self._env else []
        return await ChildProcess.start(
            f"weight process of {pool}",
            "penstock",
            ["weights", "serve", str(checkpoint), "--socket", str(self._socket(pool)), "--name", pool, *listen],
            log_path=self._logs / f"{pool}.weights.log",
            env=self._env,
        )
