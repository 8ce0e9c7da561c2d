"""Two machines whose supervisors share a store: their tier processes find each other, and forget who is gone."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from penstock.adapters.stores.memory_store import MemorySpace, MemoryStore
from penstock.adapters.task_cancel import end
from penstock.config.cluster_secret_file import SECRET_ENV
from penstock_kv.tiers import peer_exchange
from penstock_kv.tiers.peer_exchange import PREFIX, PeerExchange
from penstock_kv.tiers.peer_tiers import PeerPlace
from tests.adapters.connectors.holding import eventually
from tests.kv.tiers.conftest import Start, TierProcess
from tests.kv.tiers.plain_engine import ROW_BYTES, PlainEngine, block_hashes
from tests.kv.tiers.test_peers import LISTEN, wait_for


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_exchange, "LOOK", 0.02)


def place(folder: Path, name: str, port: int) -> bytes:
    value = msgspec.json.encode(PeerPlace(name, "10.0.0.1", port))
    (folder / f"{name}.peer").write_bytes(value)
    return value


async def test_each_has_the_others_places_and_loses_those_that_are_gone(tmp_path: Path) -> None:
    space = MemorySpace()
    here, there = tmp_path / "here", tmp_path / "there"
    there.mkdir()
    stale = there / "old.elsewhere.peer"
    stale.write_bytes(b"of an earlier run")
    one, two = MemoryStore(space), MemoryStore(space)
    first = asyncio.create_task(PeerExchange(one, here, 10.0).run())
    second = asyncio.create_task(PeerExchange(two, there, 10.0).run())
    await eventually(lambda: here.is_dir() and not stale.exists())
    value, copy = place(here, "a-0", 7000), there / "a-0.elsewhere.peer"
    await eventually(lambda: copy.exists() and copy.read_bytes() == value)
    value = place(here, "a-0", 7001)  # it was started again
    await eventually(lambda: copy.read_bytes() == value)
    place(there, "b-0", 7002)
    await eventually(lambda: (here / "b-0.elsewhere.peer").exists())
    assert set(await one.list(PREFIX)) == {PREFIX + "a-0", PREFIX + "b-0"}, "none is told of twice"
    (here / "a-0.peer").unlink()
    await eventually(lambda: not copy.exists())
    await end((second,))
    await eventually(lambda: not (here / "b-0.elsewhere.peer").exists())
    await end((first,))


async def test_an_entry_that_is_none_is_left_out(tmp_path: Path) -> None:
    store = MemoryStore(MemorySpace())
    other = msgspec.json.encode(PeerPlace("other", "10.0.0.1", 1))
    for name, value in (("a", b"nonsense"), ("b", other), ("../c", msgspec.json.encode(PeerPlace("../c", "h", 1)))):
        await store.put(PREFIX + name, value)
    await store.put(PREFIX + "other", other)
    task = asyncio.create_task(PeerExchange(store, tmp_path / "x" / "y", 10.0).run())
    await eventually(lambda: (tmp_path / "x" / "y" / "other.elsewhere.peer").exists())
    names = await asyncio.to_thread(lambda: [path.name for path in tmp_path.rglob("*.peer")])
    assert names == ["other.elsewhere.peer"]
    await end((task,))


@pytest.mark.live
async def test_a_block_comes_from_another_machine(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SECRET_ENV, "a secret of this test's cluster")
    space = MemorySpace()
    folders = [tmp_path / name for name in "ab"]
    exchanging = [asyncio.create_task(PeerExchange(MemoryStore(space), folder, 10.0).run()) for folder in folders]
    await eventually(lambda: all(folder.is_dir() for folder in folders))

    def load() -> list[bool]:
        hosts = [TierProcess(folder, "--host", str(64 * ROW_BYTES), *LISTEN, name=folder.name) for folder in folders]
        start.running += hosts
        hashes = block_hashes(8)
        with PlainEngine(hosts[0].socket) as one, PlainEngine(hosts[1].socket) as two:
            one.store(hashes)
            wait_for(hosts[1], "a")
            assert two.ask(hashes).blocks == 8
            done = two.load(hashes, first_row=32)
            assert two.right(hashes, done, first_row=32)
            return done

    assert await asyncio.to_thread(load) == [True] * 8
    await end(exchanging)
