"""A process connector over tiny engines, and what a test needs around it."""

import asyncio
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from penstock.adapters.connectors.engine_process import EngineProcess, EngineTemplate
from penstock.adapters.connectors.gpu_inventory import GpuAllocator, GpuInventory
from penstock.adapters.connectors.process_connector import ProcessConnector
from penstock.adapters.connectors.state_file import StateFile
from penstock.config.settings.cluster_settings import SuperviseSettings
from penstock.kernel.errors import EngineError
from penstock.kernel.values import Pool

PATIENCE = 30.0
"""Seconds after which a wait is given up; only a broken connector meets it."""

TINY = """
import json, os, signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
print(json.dumps({"url": "http://tiny/" + sys.argv[1], "gpus": os.environ.get("CUDA_VISIBLE_DEVICES")}), flush=True)
while True:
    signal.pause()
"""
"""An engine that says where it is and then does nothing."""

SETTINGS = SuperviseSettings(restart_backoff=0.01, stop_grace=5.0)


class Launched(NamedTuple):
    argv: tuple[str, ...]
    env: dict[str, str] = {}
    url: str | None = None
    start_timeout: float = PATIENCE
    card: dict[str, Any] = {}


def tiny(worker: str, port: int, gpus: Sequence[int], code: str = TINY) -> Launched:
    env = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))} if gpus else {}
    return Launched((sys.executable, "-I", "-S", "-c", code, worker), env)


class Nurse:
    """Does what a supervisor does about engines, and writes it down."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.refuse: dict[str, int] = {}
        """Worker -> how often it is still found unfit."""
        self.hold: asyncio.Event | None = None
        """Drains wait for it."""
        self.deaf = 0
        """How many looks at a server that is starting find nobody."""

    async def missing(self, url: str) -> str | None:
        self.deaf -= 1
        return None if self.deaf < 0 else "nobody listens yet"

    async def replica_ready(self, engine: EngineProcess) -> None:
        if self.refuse.get(engine.worker, 0) > 0:
            self.refuse[engine.worker] -= 1
            raise EngineError(f"{engine.worker} is unfit")
        self.told.append(f"came {engine.worker}")

    async def leave(self, engine: EngineProcess) -> None:
        self.told.append(f"leave {engine.worker}")
        if self.hold is not None:
            await self.hold.wait()

    async def replica_ended(self, engine: EngineProcess) -> None:
        self.told.append(f"gone {engine.worker}")

    def crashed(self, worker: str, reason: str) -> None:
        self.told.append(f"crashed {worker}: {reason}")


class Ward:
    """A connector with a state file in a folder of its own."""

    def __init__(self, folder: Path, *, gpus: Sequence[int] = (), grace: float = 0.0, end: float = 5.0) -> None:
        self.folder = folder
        self.nurse = Nurse()
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        self.state = StateFile.open(folder / "state", "test")
        self.state.own(folder)
        self.gpus = GpuAllocator(GpuInventory(tuple(gpus), "the test"))
        self.connector = ProcessConnector(
            SETTINGS,
            self.state,
            self.nurse,
            logs=folder / "logs",
            gpus=self.gpus,
            env={"PATH": "/usr/bin:/bin"},
            orphan_grace=grace,
            end=end,
        )
        self.closed = False

    async def up(self, replicas: int = 2, template: EngineTemplate | None = None, pool: str = "main") -> "Ward":
        await self.connector.open()
        self.connector.add(pool, template or EngineTemplate(pool, tiny), Pool(model="m", desired=replicas))
        await self.connector.start()
        await self.connector.ready()
        return self

    def file(self) -> dict[str, Any]:
        found: dict[str, Any] = msgspec.json.decode((self.folder / "state" / "test.json").read_bytes())
        return found

    async def pids(self, pool: str = "main") -> dict[str, int | None]:
        return {replica.id: replica.pid for replica in (await self.connector.pools())[pool].replicas}

    async def settled(self, pool: str = "main", ready: int | None = None) -> None:
        async with asyncio.timeout(PATIENCE):
            while True:
                found = (await self.connector.pools())[pool]
                if found.settled and (ready is None or found.ready == ready):
                    return
                await asyncio.sleep(0.01)

    async def close(self) -> None:
        if not self.closed:
            self.closed = True
            await self.connector.close()
            self.state.close()


async def eventually(met: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not met():
            await asyncio.sleep(0.01)


def until(met: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not met():
        assert time.monotonic() < end
        time.sleep(0.01)


def alive(pid: int) -> bool:
    """Tell whether a process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
