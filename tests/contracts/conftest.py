"""Which adapters stand behind each seam's contract suite? A new adapter adds one harness here and passes unchanged."""

import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Protocol

import pytest

from penstock.adapters.planes.inproc import InprocBus, InprocPlane
from penstock.adapters.planes.zmq import ZmqPlane
from penstock.adapters.seams import EventPlane, Store
from penstock.adapters.stores.file import FileStore
from penstock.adapters.stores.memory import MemorySpace, MemoryStore

POLL = 0.02

OWNER = """
import asyncio, sys
from pathlib import Path
from penstock.adapters.stores.file import FileStore

async def main(root, key, value, ttl):
    store = FileStore(Path(root))
    await store.put(key, value.encode(), ttl=float(ttl))
    print("put", flush=True)
    await asyncio.sleep(120)

asyncio.run(main(*sys.argv[1:]))
"""


class StoreHarness(Protocol):
    """What the suite needs of a store: handles as of several processes, real owners, an outage and its end."""

    has_processes: bool

    def open(self) -> Store: ...

    def spawn_owner(self, key: str, value: str, ttl: float) -> "subprocess.Popen[str]": ...

    def fail(self) -> None: ...

    def mend(self) -> None: ...

    async def close(self) -> None: ...


class FileHarness:
    has_processes = True

    def __init__(self, root: Path) -> None:
        self.root = root
        self._aside = root.with_name("aside")
        self._stores: list[FileStore] = []
        self._children: list[subprocess.Popen[str]] = []

    def open(self) -> FileStore:
        store = FileStore(self.root, poll=POLL)
        self._stores.append(store)
        return store

    def spawn_owner(self, key: str, value: str, ttl: float) -> "subprocess.Popen[str]":
        child = subprocess.Popen(
            [sys.executable, "-c", OWNER, str(self.root), key, value, str(ttl)], stdout=subprocess.PIPE, text=True
        )
        self._children.append(child)
        assert child.stdout is not None
        assert child.stdout.readline() == "put\n"
        return child

    def fail(self) -> None:
        """A file stands where the directory should be: this stops root as well, which permissions would not."""
        self.root.rename(self._aside)
        self.root.write_text("not a directory")

    def mend(self) -> None:
        self.root.unlink()
        self._aside.rename(self.root)

    async def close(self) -> None:
        for child in self._children:
            child.kill()
            child.wait()
            assert child.stdout is not None
            child.stdout.close()
        for store in self._stores:
            await store.close()


class MemoryHarness:
    has_processes = False

    def __init__(self) -> None:
        self._space = MemorySpace()
        self._stores: list[MemoryStore] = []

    def open(self) -> MemoryStore:
        store = MemoryStore(self._space)
        self._stores.append(store)
        return store

    def spawn_owner(self, key: str, value: str, ttl: float) -> "subprocess.Popen[str]":
        raise NotImplementedError("memory is not shared among processes")

    def fail(self) -> None:
        self._space.outage = "the test took it away"
        self._space.change()

    def mend(self) -> None:
        self._space.outage = None

    async def close(self) -> None:
        for store in self._stores:
            await store.close()


@pytest.fixture(params=["file", "memory"])
async def stores(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[StoreHarness]:
    harness: StoreHarness = FileHarness(tmp_path / "discovery") if request.param == "file" else MemoryHarness()
    yield harness
    await harness.close()


@pytest.fixture
async def files(tmp_path: Path) -> AsyncIterator[FileHarness]:
    harness = FileHarness(tmp_path / "discovery")
    yield harness
    await harness.close()


class PlaneHarness(Protocol):
    """What the suite needs of an event plane: ``count`` planes that all hear each other, named p0, p1..."""

    async def mesh(self, count: int, limit: int = 10_000) -> list[EventPlane]: ...

    async def close(self) -> None: ...


class _Planes:
    def __init__(self) -> None:
        self.planes: list[InprocPlane | ZmqPlane] = []

    async def close(self) -> None:
        for plane in self.planes:
            await plane.close()


class InprocHarness(_Planes):
    async def mesh(self, count: int, limit: int = 10_000) -> list[EventPlane]:
        bus = InprocBus()
        made = [InprocPlane(f"p{i}", bus, limit) for i in range(count)]
        self.planes += made
        return [*made]


class ZmqHarness(_Planes):
    async def mesh(self, count: int, limit: int = 10_000) -> list[EventPlane]:
        made = [ZmqPlane(f"p{i}", limit=limit) for i in range(count)]
        self.planes += made
        for plane in made:
            for other in made:
                await plane.connect(other.endpoint)
        return [*made]


@pytest.fixture(params=["inproc", "zmq"])
async def planes(request: pytest.FixtureRequest) -> AsyncIterator[PlaneHarness]:
    harness: PlaneHarness = InprocHarness() if request.param == "inproc" else ZmqHarness()
    yield harness
    await harness.close()
