"""A fleet driver over tiny engines, and what a test needs around it."""

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from penstock.adapters.connectors.engine_process import EngineProcess, EngineTemplate
from penstock.adapters.connectors.engine_runner import EngineRunner
from penstock.adapters.connectors.state_file import StateFile
from penstock.adapters.engines.describe import ServerHealth
from penstock.adapters.engines.start_log import StartLog, start_log_of
from penstock.config.settings.cluster_settings import SuperviseSettings
from penstock.fleet import events
from penstock.fleet.gpu_allocator import GpuAllocator
from penstock.kernel.errors import EngineError
from penstock.kernel.values import Pool, Role
from penstock.runtime.supervision.fleet_driver import FleetDriver, RequestCount

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

    def differences(self, command: Sequence[str]) -> list[str]:
        return [] if tuple(command) == self.argv else ["something"]

    def start_log(self) -> StartLog:
        return start_log_of("")


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
        self.there: set[str] = set()
        self.busy: set[str] = set()
        """Servers that take connections and do not answer."""
        self.known: set[str] = set()
        """Workers with an entry."""
        self.drains: list[events.DrainReported | events.DrainForgotten] = []
        self.statuses: asyncio.Queue[Any] = asyncio.Queue()
        self.replace: Callable[[int], Any] | None = None

    async def missing(self, pool: str, url: str) -> str | None:
        self.deaf -= 1
        return None if self.deaf < 0 else "nobody listens yet"

    async def health(self, engine: EngineProcess, timeout: float, model: str) -> ServerHealth:
        if engine.url in self.busy:
            return ServerHealth("it is busy", silent=True)
        return ServerHealth(None if engine.url in self.there else "no answer")

    async def mark_silent(self, worker: str, *, silent: bool, draining: bool) -> None:
        word = f"{'silent' if silent else 'heard'} {worker}"
        if self.told[-1] != word:
            self.told.append(word)

    async def sleep(self, engine: EngineProcess) -> None:
        self.told.append(f"asleep {engine.worker}")

    async def wake(self, engine: EngineProcess) -> None:
        self.told.append(f"woken {engine.worker}")

    async def publish(self, engine: EngineProcess, role: Role, *, draining: bool) -> None:
        if self.refuse.get(engine.worker, 0) > 0 and not draining:
            self.refuse[engine.worker] -= 1
            raise EngineError(f"{engine.worker} is unfit")
        if engine.pid is None and engine.url not in self.there:
            raise EngineError(f"{engine.url} is away")
        self.known.add(engine.worker)
        self.told.append(f"{'leave' if draining else 'came'} {engine.worker}")

    async def acknowledged(self, worker: str) -> None:
        pass

    async def requests_left(self, worker: str) -> AsyncIterator[RequestCount]:
        if self.hold is not None:
            await self.hold.wait()
        yield RequestCount(0, 0, True)

    async def withdraw(self, worker: str) -> None:
        if worker in self.known:
            self.known.discard(worker)
            self.told.append(f"gone {worker}")

    async def replace_frontend(self, index: int) -> None:
        assert self.replace is not None
        await self.replace(index)

    def crashed(self, crash: events.Crashed) -> None:
        self.told.append(f"crashed {crash.worker}: {crash.reason}")

    def report(self, report: Any) -> None:
        self.statuses.put_nowait(report)


class Ward:
    """A connector with a state file in a folder of its own."""

    def __init__(self, folder: Path, *, gpus: Sequence[int] = (), grace: float = 0.0, end: float = 5.0) -> None:
        self.folder = folder
        self.nurse = Nurse()
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        self.state = StateFile.open(folder / "state", "test")
        self.state.own(folder)
        self.gpus = GpuAllocator.over(gpus, "the test")
        self.connector = FleetDriver(
            SETTINGS,
            EngineRunner(
                SETTINGS, self.state, logs=folder / "logs", env={"PATH": "/usr/bin:/bin"}, grace=grace, end=end
            ),
            self.nurse,
            gpus=self.gpus,
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
