"""A supervisor's tier processes: one beside each engine, started again when it dies, gone when the engine is."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from penstock.adapters.connectors.state_file import StateFile
from penstock.adapters.stores.memory_store import MemorySpace, MemoryStore
from penstock.config.settings.cluster_settings import PoolSettings, SuperviseSettings
from penstock.fleet.events import Forget, Spawn
from penstock.kernel.errors import PenstockError
from penstock.runtime.supervision.engine_fleet import EngineFleet
from penstock_kv.cache_settings import CacheSettings
from penstock_kv.tiers.tier_admin_client import TierAdminClient, sockets
from penstock_kv.tiers.tier_admin_protocol import AskStat, CacheStat
from penstock_kv.tiers.tier_children import of_worker
from tests.adapters.connectors.holding import eventually
from tests.kv.tiers.plain_engine import ROW_BYTES, PlainEngine, block_hashes

pytestmark = pytest.mark.live


def answers(path: Path) -> bool:
    try:
        client = TierAdminClient(path)
        client.ask(AskStat(), CacheStat)
    except PenstockError:
        return False
    client.close()
    return True


async def test_each_engine_has_a_tier_process_that_is_started_again_until_the_engine_is_gone(tmp_path: Path) -> None:
    state = StateFile.open(tmp_path, "test")
    env = {**os.environ, "PENSTOCK_STATE_DIR": str(tmp_path)}
    supervise = SuperviseSettings(restart_backoff=0.05)
    fleet = EngineFleet(MemoryStore(MemorySpace()), supervise, state, logs=tmp_path, ttl=10.0, env=env)
    pool = PoolSettings(engine="vllm", command="/bin/false", cache=CacheSettings(host=64 * ROW_BYTES))
    fleet.add_pool("m", "main", pool)
    [path] = [tmp_path / "test.tiers" / "main-0.sock"]
    spawn = Spawn(worker="main-0", serial=1, pool="main", number=0)
    fleet._watched(0, "fleet", spawn, [spawn])  # type: ignore[arg-type]

    async def up() -> None:
        await eventually(lambda: path.exists() and answers(path))

    await up()
    assert sockets(env) == [path]

    def use() -> int:
        with PlainEngine(path, worker="main-0") as engine:
            engine.store(block_hashes(4))
            peer = engine.socket.getsockopt(1, 17, 12)  # SOL_SOCKET, SO_PEERCRED: pid, uid, gid
            os.kill(int.from_bytes(peer[:4], "little"), signal.SIGKILL)
            while engine.read() is not None:
                pass
        return int.from_bytes(peer[:4], "little")

    first = await asyncio.to_thread(use)
    await eventually(lambda: "main-0.tiers" in fleet.crashes.crashes)
    await up()
    assert await asyncio.to_thread(use) != first
    await eventually(lambda: fleet.crashes.crashes["main-0.tiers"].count == 2)
    await up()
    forget = Forget(worker="main-0", pool="main", number=0)
    fleet._watched(1, "fleet", forget, [forget])  # type: ignore[arg-type]
    await eventually(lambda: not path.exists())
    await fleet.stop()
    state.close()


def test_each_engine_has_its_own_folder_on_each_disk_and_its_own_port() -> None:
    cache = CacheSettings(host=1, disk=1, disk_dirs=("/a", "/b"), metrics_port=9000)
    own = of_worker(cache, "main-2", 2)
    assert own.disk_dirs == ("/a/main-2", "/b/main-2")
    assert own.metrics_port == 9002
    assert of_worker(CacheSettings(host=1), "main-2", 2).metrics_port == 0
