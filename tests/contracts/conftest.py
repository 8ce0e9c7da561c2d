"""Which adapters stand behind each seam's contract suite? A new adapter adds one harness here and passes unchanged."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Collection, Mapping
from pathlib import Path
from typing import Any

import pytest

from penstock.adapters.planes.nats_plane import NatsPlane
from penstock.adapters.planes.zmq_forwarder import ForwardedPlane, Forwarder
from penstock.adapters.planes.zmq_plane import ZmqPlane
from penstock.adapters.seams import Connector, ConnectorError, EventPlane
from penstock.adapters.stores.etcd_client import EtcdClient
from penstock.adapters.stores.etcd_store import EtcdStore
from penstock.adapters.stores.memory_store import MemorySpace, MemoryStore
from penstock.adapters.stores.sqlite_store import SqliteStore
from penstock.config.settings.discovery_settings import NatsSettings
from penstock.kernel.secret import ClusterSecret
from penstock.kernel.values import Pool, Replica
from penstock.testing.connector_contract import ConnectorHarness
from penstock.testing.plane_contract import PlaneHarness
from penstock.testing.store_contract import StoreHarness
from tests import server_fixtures
from tests.adapters.connectors.holding import Ward
from tests.servers import Etcd, Nats

POLL = 0.02

etcd, nats, small_disk = server_fixtures.etcd, server_fixtures.nats, server_fixtures.small_disk

TEXT = "of the contract suites"
SECRET = ClusterSecret(TEXT)
OWNER = """
import asyncio, sys
from pathlib import Path
from penstock.adapters.stores.sqlite_store import SqliteStore
from penstock.kernel.secret import ClusterSecret

async def main(root, secret, key, value, ttl):
    store = SqliteStore(Path(root), secret=ClusterSecret(secret) if secret else None)
    await store.put(key, value.encode(), ttl=float(ttl))
    print("put", flush=True)
    await asyncio.sleep(120)

asyncio.run(main(*sys.argv[1:]))
"""


ETCD_OWNER = """
import asyncio, sys
from penstock.adapters.stores.etcd_store import EtcdStore
from penstock.adapters.stores.etcd_client import EtcdClient
from penstock.kernel.secret import ClusterSecret

async def main(url, prefix, secret, key, value, ttl):
    store = EtcdStore(EtcdClient([url]), prefix=prefix, secret=ClusterSecret(secret) if secret else None)
    await store.put(key, value.encode(), ttl=float(ttl))
    print("put", flush=True)
    await asyncio.sleep(120)

asyncio.run(main(*sys.argv[1:]))
"""


class SqliteHarness:
    has_processes = True

    def __init__(self, root: Path, secret: str = "") -> None:
        self.root = root
        self._secret = secret
        self._folder, self._file = root.with_name("a folder"), root.with_name("a file")
        self._folder.mkdir()
        self._file.write_text("not a directory")
        root.symlink_to(self._folder)
        self._stores: list[SqliteStore] = []
        self._children: list[subprocess.Popen[str]] = []

    def open(self) -> SqliteStore:
        store = SqliteStore(self.root, poll=POLL, secret=ClusterSecret(self._secret) if self._secret else None)
        self._stores.append(store)
        return store

    def spawn_owner(self, key: str, value: str, ttl: float) -> "subprocess.Popen[str]":
        child = self.begin_owner(key, value, ttl)
        assert child.stdout is not None
        assert child.stdout.readline() == "put\n"
        return child

    def begin_owner(self, key: str, value: str, ttl: float) -> "subprocess.Popen[str]":
        """Start an owner; it says when its key is there."""
        child = subprocess.Popen(
            [sys.executable, "-c", OWNER, str(self.root), self._secret, key, value, str(ttl)],
            stdout=subprocess.PIPE,
            text=True,
        )
        self._children.append(child)
        return child

    def fail(self) -> None:
        """A file stands where the directory should be: this stops root as well, which permissions would not."""
        self._put_in_place(self._file)

    def mend(self) -> None:
        self._put_in_place(self._folder)

    def _put_in_place(self, path: Path) -> None:
        """At one stroke: where nothing stood for a moment, a store that renews would make a directory anew."""
        link = self.root.with_name("next")
        link.symlink_to(path)
        link.replace(self.root)

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


class EtcdHarness:
    """A real etcd, which the tests of a session share: each has a prefix of its own."""

    has_processes = True

    def __init__(self, server: Etcd, prefix: str, secret: str = "") -> None:
        self.server = server
        self.prefix = prefix
        self._secret = secret
        self._stores: list[EtcdStore] = []
        self._children: list[subprocess.Popen[str]] = []

    def open(self, **more: Any) -> EtcdStore:
        secret = ClusterSecret(self._secret) if self._secret else None
        store = EtcdStore(EtcdClient([self.server.url]), prefix=self.prefix, settle=0.3, secret=secret, **more)
        self._stores.append(store)
        return store

    def spawn_owner(self, key: str, value: str, ttl: float) -> "subprocess.Popen[str]":
        child = subprocess.Popen(
            [sys.executable, "-c", ETCD_OWNER, self.server.url, self.prefix, self._secret, key, value, str(ttl)],
            stdout=subprocess.PIPE,
            text=True,
        )
        self._children.append(child)
        assert child.stdout is not None
        assert child.stdout.readline() == "put\n"
        return child

    def fail(self) -> None:
        self.server.kill()

    def mend(self) -> None:
        self.server.start(wait=False)

    async def close(self) -> None:
        for child in self._children:
            child.kill()
            child.wait()
            assert child.stdout is not None
            child.stdout.close()
        for store in self._stores:
            await store.close()


@pytest.fixture(params=["sqlite", "signed sqlite", "memory", "etcd", "signed etcd"])
async def stores(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[StoreHarness]:
    kind = request.param
    secret = TEXT if kind.startswith("signed") else ""
    harness: StoreHarness
    if kind == "memory":
        harness = MemoryHarness()
    elif kind.endswith("etcd"):
        harness = EtcdHarness(request.getfixturevalue("etcd"), f"{tmp_path.name}/", secret)
    else:
        harness = SqliteHarness(tmp_path / "discovery", secret)
    yield harness
    await harness.close()


@pytest.fixture
async def etcds(etcd: Etcd, tmp_path: Path) -> AsyncIterator[EtcdHarness]:
    """Handles on an etcd that runs."""
    harness = EtcdHarness(etcd, f"{tmp_path.name}/")
    yield harness
    await harness.close()


@pytest.fixture
async def sqlite(tmp_path: Path) -> AsyncIterator[SqliteHarness]:
    harness = SqliteHarness(tmp_path / "discovery")
    yield harness
    await harness.close()


class _Planes:
    def __init__(self) -> None:
        self.planes: list[NatsPlane | ZmqPlane] = []

    async def close(self) -> None:
        for plane in self.planes:
            await plane.close()


class ZmqHarness(_Planes):
    def __init__(self, secret: ClusterSecret | None = None) -> None:
        super().__init__()
        self._secret = secret

    async def mesh(self, count: int, limit: int = 10_000) -> list[EventPlane]:
        made = [ZmqPlane(f"p{i}", limit=limit, secret=self._secret) for i in range(count)]
        self.planes += made
        for plane in made:
            for other in made:
                await plane.connect(other.endpoint)
        return [*made]


class ForwardedHarness(_Planes):
    def __init__(self, secret: ClusterSecret | None = None) -> None:
        super().__init__()
        self._secret = secret
        self._forwarder = Forwarder("tcp://127.0.0.1:0", "tcp://127.0.0.1:0", secret=secret).start()

    async def mesh(self, count: int, limit: int = 10_000) -> list[EventPlane]:
        ends = self._forwarder.publish_endpoint, self._forwarder.subscribe_endpoint
        made = [ForwardedPlane(f"p{i}", *ends, limit=limit, secret=self._secret) for i in range(count)]
        self.planes += made
        return [*made]

    async def close(self) -> None:
        await super().close()
        self._forwarder.close()


class NatsHarness(_Planes):
    """A real nats-server, which the tests of a session share: each has a prefix of its own."""

    def __init__(self, server: Nats, prefix: str, secret: ClusterSecret | None = None) -> None:
        super().__init__()
        self._settings = NatsSettings(urls=(server.url,))
        self._prefix = prefix
        self._secret = secret

    async def mesh(self, count: int, limit: int = 10_000) -> list[EventPlane]:
        made = [
            NatsPlane(f"p{i}", self._settings, prefix=self._prefix, limit=limit, secret=self._secret)
            for i in range(count)
        ]
        self.planes += made
        return [*made]


PLANES = ["zmq", "zmq with curve", "forwarder", "forwarder with curve", "nats", "signed nats"]


@pytest.fixture(params=PLANES)
async def planes(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[PlaneHarness]:
    kind = request.param
    secret = SECRET if kind.endswith("with curve") or kind.startswith("signed") else None
    harness: PlaneHarness
    if kind.endswith("nats"):
        harness = NatsHarness(request.getfixturevalue("nats"), tmp_path.name, secret)
    else:
        harness = (ForwardedHarness if kind.startswith("forwarder") else ZmqHarness)(secret)
    yield harness
    await harness.close()


class ProcessHarness:
    def __init__(self, ward: Ward) -> None:
        self.ward = ward
        self.connector: Connector = ward.connector

    async def crash(self, replica: Replica) -> None:
        assert replica.pid is not None
        os.kill(replica.pid, signal.SIGKILL)

    async def close(self) -> None:
        await self.ward.close()


class ElsewhereConnector:
    """A connector that only writes down what it wants: somebody else, as an operator does, makes it so in its time."""

    def __init__(self) -> None:
        self.wanted = 2
        self.without: set[str] = set()
        self.there: dict[str, int] = {}
        self.made = 0
        self.changed = asyncio.Condition()
        self.closed = False
        self.operator = asyncio.create_task(self.operate())

    async def pools(self) -> Mapping[str, Pool]:
        found = tuple(Replica(id=name, state="ready", pid=number) for name, number in self.there.items())
        return {"main": Pool(model="m", desired=self.wanted, replicas=found)}

    async def scale(self, pool: str, replicas: int, *, without: Collection[str] = ()) -> None:
        if pool != "main" or not 0 <= replicas <= 100:
            raise ConnectorError(f"pool {pool} can't have {replicas} replicas")
        self.wanted, self.without = replicas, set(without)
        await self.tell()

    async def watch(self) -> AsyncIterator[Mapping[str, Pool]]:
        while not self.closed:
            yield await self.pools()
            async with self.changed:
                await self.changed.wait()

    async def close(self) -> None:
        self.closed = True
        self.operator.cancel()
        await asyncio.gather(self.operator, return_exceptions=True)
        await self.tell()

    async def tell(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    async def operate(self) -> None:
        """One step at a time towards what is wanted, and never in the step in which it was asked."""
        while True:
            await asyncio.sleep(0.005)
            named = self.without & set(self.there)
            if named:
                del self.there[named.pop()]
            elif len(self.there) < self.wanted:
                self.made += 1
                self.there[f"pod-{self.made}"] = self.made
            elif len(self.there) > self.wanted:
                del self.there[next(reversed(self.there))]
            else:
                continue
            await self.tell()


class ElsewhereHarness:
    def __init__(self) -> None:
        self.elsewhere = ElsewhereConnector()
        self.connector: Connector = self.elsewhere

    async def crash(self, replica: Replica) -> None:
        del self.elsewhere.there[replica.id]
        await self.elsewhere.tell()

    async def close(self) -> None:
        await self.elsewhere.close()


@pytest.fixture(params=["process", "elsewhere"])
async def connectors(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[ConnectorHarness]:
    harness: ConnectorHarness = (
        ProcessHarness(await Ward(tmp_path).up(2)) if request.param == "process" else ElsewhereHarness()
    )
    yield harness
    await harness.close()
