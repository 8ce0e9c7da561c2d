"""A tier process with a slow disk, or an engine that asks too much: misses, within bounds, and no wrong byte."""

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from penstock_kv.cache_settings import CacheSettings
from penstock_kv.inside.tier_protocol import JobDone, RequestHints, TierHello
from penstock_kv.tiers import tier_frames, tier_node, tier_process
from penstock_kv.tiers.tier_node import OpenTiers, TierNode
from penstock_kv.tiers.tier_process import opener
from penstock_kv.tiers.tier_server import TierServer
from penstock_kv.transfer.storage.slab_file import FileCalls
from tests.kv.tiers.plain_engine import ROW_BYTES, PlainEngine, block_hashes


class SlowReads(FileCalls):
    """A disk whose reads hang until `let`."""

    def __init__(self) -> None:
        self.free = threading.Event()
        self.free.set()

    def preadv(self, fd: int, buffers, offset: int) -> int:  # type: ignore[no-untyped-def]
        self.free.wait(20)
        return super().preadv(fd, buffers, offset)


@contextmanager
def server(path: Path, host: int, disk: int, calls: FileCalls, monkeypatch: pytest.MonkeyPatch) -> Iterator[TierNode]:
    """Run a tier server in a thread of this process, over a disk with these system calls."""
    store = tier_process.DiskStore
    monkeypatch.setattr(tier_process, "DiskStore", lambda *given: store(*given, calls=calls))
    settings = CacheSettings(host=host * ROW_BYTES, disk=disk * (ROW_BYTES + 4096), disk_dirs=(str(path / "disk"),))
    ready, nodes = threading.Event(), []

    async def run() -> None:
        node = TierNode(opener(settings))
        serving = TierServer(node, path / "kv.sock")
        await serving.start()
        stopping = asyncio.Event()
        nodes.append((node, asyncio.get_running_loop(), stopping))
        ready.set()
        await stopping.wait()
        await serving.close()

    thread = threading.Thread(target=asyncio.run, args=(run(),))
    thread.start()
    ready.wait(20)
    node, loop, stopping = nodes[0]
    try:
        yield node
    finally:
        loop.call_soon_threadsafe(stopping.set)
        thread.join(30)
        assert not thread.is_alive()
        assert not node.failed.done(), "the machine failed"


def test_a_slow_disk_is_a_miss_in_time_and_the_rows_are_never_touched_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SlowReads()
    with server(tmp_path, 16, 64, disk, monkeypatch) as node, PlainEngine(tmp_path / "kv.sock") as engine:
        hashes = block_hashes(32)
        for first in range(0, 32, 4):
            engine.store(hashes[first : first + 4])
            engine.until(lambda first=first: set(hashes[first : first + 4]) <= engine.stored.get("disk", set()))
        below = [value for value in hashes if value not in engine.stored["host"]][:4]
        disk.free.clear()
        begun = time.monotonic()
        done = engine.load(below, first_row=40, hints=RequestHints(deadline=0.3))
        assert done == [False] * 4
        assert time.monotonic() - begun < 5
        disk.free.set()
        deadline = time.monotonic() + 10
        while node.open_moves and time.monotonic() < deadline:
            time.sleep(0.02)
        assert node.open_moves == 0, "a move ends once the system call has returned"
        assert all(engine.untouched(row) for row in range(40, 44))


def test_an_engine_with_too_many_open_jobs_gets_misses_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_node, "JOBS_MAX", 4)
    disk = SlowReads()
    with server(tmp_path, 16, 64, disk, monkeypatch) as node, PlainEngine(tmp_path / "kv.sock") as engine:
        hashes = block_hashes(32)
        for first in range(0, 32, 4):
            engine.store(hashes[first : first + 4])
            engine.until(lambda first=first: set(hashes[first : first + 4]) <= engine.stored.get("disk", set()))
        below = [value for value in hashes if value not in engine.stored["host"]][:8]
        disk.free.clear()
        jobs = [engine.begin_load([value], first_row=40 + row) for row, value in enumerate(below)]
        for job in jobs[4:]:
            assert engine.wait(JobDone, job=job).done == [False]
        assert len(node.jobs) == 4
        disk.free.set()
        for row, (job, value) in enumerate(zip(jobs[:4], below)):
            assert engine.right([value], engine.wait(JobDone, job=job).done, first_row=40 + row)


@pytest.mark.slow
def test_an_engine_that_reads_nothing_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_frames, "UNREAD_MAX", 100_000)
    with server(tmp_path, 64, 0, FileCalls(), monkeypatch) as node:
        with PlainEngine(tmp_path / "kv.sock") as engine, pytest.raises(OSError, match=r"[Bb]roken|reset|timed out"):
            for _ in range(100_000):
                engine.begin_load(block_hashes(32))
        deadline = time.monotonic() + 10
        while node.links and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not node.links
        with PlainEngine(tmp_path / "kv.sock") as engine:
            assert engine.store(block_hashes(4)) == [True] * 4


async def test_a_machine_that_fails_ends_the_process(tmp_path: Path) -> None:
    class Broken:
        def handle(self, now: int, event: object) -> list[object]:
            raise RuntimeError("a bug")

        def check(self) -> None:
            raise RuntimeError("a bug")

    async def open_broken(hello: TierHello) -> OpenTiers:
        opened = await opener(CacheSettings(host=64 * ROW_BYTES))(hello)
        return opened._replace(machine=Broken())  # type: ignore[arg-type]

    node = TierNode(open_broken)
    serving = TierServer(node, tmp_path / "kv.sock")
    await serving.start()

    def ask() -> None:
        with PlainEngine(tmp_path / "kv.sock") as engine:
            engine.send(msgspec.convert({"t": "speed", "seconds_per_token": 0.1}, tier_node.PrefillSpeed))
            assert engine.read() is None

    asking = asyncio.create_task(asyncio.to_thread(ask))
    with pytest.raises(RuntimeError, match="a bug"):
        await asyncio.wait_for(node.failed, 10)
    await serving.close()
    await asking
