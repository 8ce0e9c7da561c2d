"""A disk that fails, fills up, hangs, lies or loses power ends as a miss, and never as wrong bytes."""

import asyncio
import errno
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from penstock.kernel.errors import ConfigError
from penstock_kv.transfer.storage import io_threads
from penstock_kv.transfer.storage.block_store import BlockIo
from penstock_kv.transfer.storage.disk_store import THREADS_PER_FILE, DiskStore
from penstock_kv.transfer.storage.record_header import SECTOR, SIZE
from penstock_kv.transfer.storage.slab_file import FileCalls
from tests.conftest import skip_or_fail
from tests.depth import deep
from tests.kv.transfer.block_store_contract import PATIENCE, block, empty, outcomes, payload_of, written
from tests.kv.transfer.faulty_files import FaultyFiles, FileFault

SIZE_OF_BLOCK = 16384
SLOTS = 16


@pytest.fixture
def files() -> FaultyFiles:
    return FaultyFiles(patience=10.0)


@pytest.fixture
async def disk(tmp_path: Path, files: FaultyFiles) -> AsyncIterator[DiskStore]:
    store = DiskStore([tmp_path / "a", tmp_path / "b"], SIZE_OF_BLOCK, SLOTS, calls=files)
    yield store
    files.release()
    await store.close()


def raw_record(store: DiskStore, slot: int) -> bytes:
    file, index = store.place(slot)
    with file.path.open("rb") as raw:
        raw.seek(file.offset(index))
        return raw.read(file.stride)


def overwrite(store: DiskStore, slot: int, record: bytes) -> None:
    file, index = store.place(slot)
    with file.path.open("r+b") as raw:
        raw.seek(file.offset(index))
        raw.write(record)


async def settled(store: DiskStore) -> None:
    async with asyncio.timeout(PATIENCE):
        while store.busy():
            await asyncio.sleep(0.001)


@pytest.mark.parametrize(
    "fault",
    [FileFault("error", "write"), FileFault("error", "write", errno=errno.ENOSPC), FileFault("short", "write")],
    ids=["EIO", "ENOSPC", "short"],
)
async def test_a_write_that_fails_leaves_no_record(disk: DiskStore, files: FaultyFiles, fault: FileFault) -> None:
    old, other = await written(disk, [3, 4])
    files.inject(fault)
    new = old._replace(generation=old.generation + 1)
    (result,) = await disk.write([new], PATIENCE)
    assert result.outcome == "failed"
    assert result.cause
    files.inject(None)
    assert await outcomes(disk, [empty(old), empty(new), empty(other)]) == ["absent", "absent", "ok"]
    assert await outcomes(disk, [empty(old)]) == ["absent"]
    (again,) = await written(disk, [3])
    assert await outcomes(disk, [empty(again)]) == ["ok"]


@pytest.mark.parametrize("fault", [FileFault("error", "read"), FileFault("short", "read")], ids=["EIO", "short"])
async def test_a_read_that_fails_is_a_miss_with_its_cause(
    disk: DiskStore, files: FaultyFiles, fault: FileFault
) -> None:
    blocks = await written(disk, [0, 1])
    files.inject(fault)
    results = await disk.read([empty(each) for each in blocks], PATIENCE)
    assert [result.outcome for result in results] == ["failed", "failed"]
    assert all(result.cause for result in results)
    files.inject(None)
    assert await outcomes(disk, [empty(each) for each in blocks]) == ["ok", "ok"]


@pytest.mark.parametrize("target", ["read", "write"])
async def test_a_bit_that_flips_on_its_way_is_never_served(disk: DiskStore, files: FaultyFiles, target: str) -> None:
    rng = random.Random(1)
    places = [*range(0, SIZE, 3), *(rng.randrange(SECTOR, SECTOR + SIZE_OF_BLOCK) for _ in range(40))]
    one = block(2, b"key-2", 9, payload_of(2, SIZE_OF_BLOCK), b"key-1")
    for at in places:
        if target == "write":
            files.inject(FileFault("flip", "write", at=at))
        assert [each.outcome for each in await disk.write([one], PATIENCE)] == ["ok"]
        files.inject(FileFault("flip", "read", at=at) if target == "read" else None)
        assert (await outcomes(disk, [empty(one)]))[0] == "corrupt", at
        files.inject(None)


async def test_a_flipped_byte_anywhere_in_the_file_is_never_wrong_data(tmp_path: Path) -> None:
    rng = random.Random(2)
    for _ in range(deep(60)):
        store = DiskStore([tmp_path], SIZE_OF_BLOCK, 4)
        blocks = await written(store, range(4), first=rng.randrange(1000))
        await store.close()
        path = store.place(0)[0].path
        with path.open("r+b") as raw:
            at = rng.choice([rng.randrange(SIZE), rng.randrange(SECTOR + rng.randrange(5) * store.place(0)[0].stride)])
            raw.seek(at)
            byte = raw.read(1)[0]
            raw.seek(at)
            raw.write(bytes([byte ^ 1 << rng.randrange(8)]))
        store = DiskStore([tmp_path], SIZE_OF_BLOCK, 4)
        reads = {each.slot: empty(each) for each in blocks}
        for record in store.records():
            read = reads[record.slot]
            assert (record.key, record.generation) == (read.key, read.generation)
            if (await outcomes(store, [read]))[0] == "ok":
                assert bytes(read.buffer) == bytes(blocks[record.slot].buffer)
        await store.close()


async def test_the_disk_lost_a_write(disk: DiskStore) -> None:
    """The record before is whole, has the same key and even the same generation: its stamp gives it away."""
    (old,) = await written(disk, [5])
    record = raw_record(disk, 5)
    (new,) = await written(disk, [5])
    assert (new.key, new.generation) == (old.key, old.generation)
    overwrite(disk, 5, record)
    (result,) = await disk.read([empty(new)], PATIENCE)
    assert (result.outcome, "lost" in result.cause) == ("stale", True)


async def test_a_record_that_landed_in_another_slot_is_not_one(disk: DiskStore, tmp_path: Path) -> None:
    one, two = await written(disk, [2, 4])
    overwrite(disk, 4, raw_record(disk, 2))
    assert await outcomes(disk, [empty(two), empty(one)._replace(slot=4), empty(one)]) == ["stale", "stale", "ok"]
    await disk.close()
    again = DiskStore([tmp_path / "a", tmp_path / "b"], SIZE_OF_BLOCK, SLOTS)
    assert [record.slot for record in again.records()] == [2]
    await again.close()


async def test_a_read_that_hangs_is_late_and_keeps_its_slot_busy(disk: DiskStore, files: FaultyFiles) -> None:
    blocks = await written(disk, [0, 1, 2])
    files.inject(FileFault("hang", "read", times=1))
    begin = time.monotonic()
    (result,) = await disk.read([empty(blocks[0])], 0.1)
    assert result.outcome == "late"
    assert time.monotonic() - begin < 5, "the caller waited for the disk"
    assert disk.busy() == {0}
    assert await outcomes(disk, [empty(each) for each in blocks[1:]]) == ["ok", "ok"]
    files.release()
    await settled(disk)
    assert await outcomes(disk, [empty(each) for each in blocks]) == ["ok"] * 3


async def test_a_write_that_ends_too_late_leaves_no_record(disk: DiskStore, files: FaultyFiles, tmp_path: Path) -> None:
    files.inject(FileFault("hang", "write", times=1))
    late = block(0, b"late", 1, payload_of(1, SIZE_OF_BLOCK))
    (result,) = await disk.write([late], 0.05)
    assert (result.outcome, disk.busy()) == ("late", {0})
    files.release()
    await settled(disk)
    assert await outcomes(disk, [empty(late)]) == ["absent"]
    await disk.close()
    again = DiskStore([tmp_path / "a", tmp_path / "b"], SIZE_OF_BLOCK, SLOTS)
    assert again.records() == []
    await again.close()


async def test_a_write_under_way_at_a_clear_does_not_come_back_after_a_crash(
    disk: DiskStore, files: FaultyFiles, tmp_path: Path
) -> None:
    before, late, after = (block(slot, b"%d" % slot, 1, payload_of(slot, SIZE_OF_BLOCK)) for slot in range(3))
    await disk.write([before], PATIENCE)
    files.inject(FileFault("hang", "write", times=1))
    writing = asyncio.create_task(disk.write([late], PATIENCE))
    async with asyncio.timeout(PATIENCE):
        while not files.hanging:
            await asyncio.sleep(0.001)
    await disk.void()
    files.release()
    assert (await writing)[0].outcome == "ok", "it is whole on the disk now, and nobody has forgotten it"
    await disk.write([after], PATIENCE)
    for folder in ("a", "b"):
        shutil.copytree(tmp_path / folder, tmp_path / "crashed" / folder)
    again = DiskStore([tmp_path / "crashed" / "a", tmp_path / "crashed" / "b"], SIZE_OF_BLOCK, SLOTS)
    assert [record.key for record in again.records()] == [b"2"]
    await again.close()


async def test_one_directory_that_hangs_does_not_stop_the_other(disk: DiskStore, files: FaultyFiles) -> None:
    blocks = await written(disk, range(SLOTS))
    files.inject(FileFault("hang", "read", times=THREADS_PER_FILE))
    first = [empty(each) for each in blocks if each.slot % 2 == 0]
    assert set(await _outcomes_within(disk, first, 0.1)) == {"late"}
    assert len(disk.busy()) == THREADS_PER_FILE
    assert await outcomes(disk, [empty(each) for each in blocks if each.slot % 2]) == ["ok"] * (SLOTS // 2)


async def _outcomes_within(store: DiskStore, blocks: list[BlockIo], deadline: float) -> list[str]:
    return [result.outcome for result in await store.read(blocks, deadline)]


async def test_what_waits_for_a_hanging_disk_is_limited(
    disk: DiskStore, files: FaultyFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(io_threads, "QUEUE_LIMIT", 3)
    (one,) = await written(disk, [0])
    files.inject(FileFault("hang", "read", times=1))
    assert await _outcomes_within(disk, [empty(one)], 0.05) == ["late"]
    waiting = [asyncio.ensure_future(disk.read([empty(one)], PATIENCE)) for _ in range(3)]
    await asyncio.sleep(0)
    (result,) = await disk.read([empty(one)], PATIENCE)
    assert (result.outcome, "wait already" in result.cause) == ("failed", True)
    files.release()
    assert [(await each)[0].outcome for each in waiting] == ["ok"] * 3


async def test_a_cancelled_caller_leaves_its_slot_busy_and_no_more(disk: DiskStore, files: FaultyFiles) -> None:
    (one,) = await written(disk, [0])
    files.inject(FileFault("hang", "read", times=1))
    task = asyncio.ensure_future(disk.read([empty(one)], PATIENCE))
    async with asyncio.timeout(PATIENCE):
        while not files.hanging:
            await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert disk.busy() == {0}
    files.release()
    await settled(disk)
    assert await outcomes(disk, [empty(one)]) == ["ok"]


# --- opening ----------------------------------------------------------------------------------------------------------


async def test_two_processes_never_share_a_slab_file(tmp_path: Path) -> None:
    store = DiskStore([tmp_path], SIZE_OF_BLOCK, 4)
    with pytest.raises(ConfigError, match="another process"):
        DiskStore([tmp_path], SIZE_OF_BLOCK, 4)
    await store.close()
    await DiskStore([tmp_path], SIZE_OF_BLOCK, 4).close()


async def test_a_file_of_another_shape_is_emptied_and_one_that_grew_is_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = DiskStore([tmp_path], SIZE_OF_BLOCK, 4)
    await written(store, range(4))
    await store.close()
    for slots, records in ((8, 4), (2, 2)):
        store = DiskStore([tmp_path], SIZE_OF_BLOCK, slots)
        assert len(store.records()) == records
        await store.close()
    store = DiskStore([tmp_path], 2 * SIZE_OF_BLOCK, 4)
    assert store.records() == []
    assert "it is emptied" in caplog.text
    await store.close()


async def test_a_broken_first_sector_empties_the_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = DiskStore([tmp_path], SIZE_OF_BLOCK, 4)
    await written(store, range(4))
    await store.close()
    with store.place(0)[0].path.open("r+b") as raw:
        raw.seek(20)
        raw.write(b"\xff")
    store = DiskStore([tmp_path], SIZE_OF_BLOCK, 4)
    assert (store.records(), "broken sector" in caplog.text) == ([], True)
    await store.close()


async def test_headers_that_can_not_be_read_are_empty_slots_and_one_line(
    tmp_path: Path, files: FaultyFiles, caplog: pytest.LogCaptureFixture
) -> None:
    store = DiskStore([tmp_path], SIZE_OF_BLOCK, 8)
    blocks = await written(store, range(8))
    await store.close()
    files.inject(FileFault("error", "read", times=4, skip=1))
    store = DiskStore([tmp_path], SIZE_OF_BLOCK, 8, calls=files)
    assert len(store.records()) == 4
    assert caplog.text.count("can't be read") == 1
    assert sorted(await outcomes(store, [empty(each) for each in blocks])) == ["absent"] * 4 + ["ok"] * 4
    await store.close()


async def test_a_folder_that_is_replaced_is_empty_and_the_others_stay(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for _ in range(3):
        store = DiskStore(folders, SIZE_OF_BLOCK, 4)
        blocks = await written(store, range(4))
        await store.close()
    store.place(0)[0].path.unlink()
    for _ in range(2):
        store = DiskStore(folders, SIZE_OF_BLOCK, 4)
        assert sorted(record.slot for record in store.records()) == [1, 3]
        assert await outcomes(store, [empty(each) for each in blocks]) == ["absent", "ok", "absent", "ok"]
        await store.close()


async def test_without_direct_io_blocks_are_right_and_a_warning_says_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = os.open

    def without(path: object, flags: int, *rest: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct I/O here")
        return plain(path, flags, *rest)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(os, "open", without)
    with caplog.at_level(logging.WARNING):
        store = DiskStore([tmp_path], SIZE_OF_BLOCK, 4)
    assert "has no direct I/O" in caplog.text
    blocks = await written(store, range(4))
    assert await outcomes(store, [empty(each) for each in blocks]) == ["ok"] * 4
    await store.close()


def test_settings_that_can_not_work_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no folder"):
        DiskStore([], SIZE_OF_BLOCK, 4)
    with pytest.raises(ConfigError, match="2 folders"):
        DiskStore([tmp_path / "a", tmp_path / "b"], SIZE_OF_BLOCK, 1)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="can't be used"):
        DiskStore([tmp_path / "file"], SIZE_OF_BLOCK, 4)


# --- a real small disk ------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 1 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True, text=True, check=False
    )
    if mount.returncode:
        skip_or_fail("tmpfs", f"a small one can't be mounted: {mount.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


async def test_a_tier_that_does_not_fit_says_what_does(small_disk: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no place for .* bytes: 51 blocks fit") as error:
        DiskStore([small_disk], SIZE_OF_BLOCK, 100)
    assert str(small_disk) in str(error.value)
    store = DiskStore([small_disk], SIZE_OF_BLOCK, 51)
    blocks = await written(store, range(50))
    assert await outcomes(store, [empty(each) for each in blocks]) == ["ok"] * 50
    await store.close()
    with pytest.raises(ConfigError, match="51 blocks fit"):
        DiskStore([small_disk], SIZE_OF_BLOCK, 100)
    store = DiskStore([small_disk], SIZE_OF_BLOCK, 51)
    assert len(store.records()) == 50, "a size that did not fit must not cost what is there"
    await store.close()


class Overcommitted(FileCalls):
    """A file system that gives no guarantee, as one that copies on write."""

    def fallocate(self, fd: int, offset: int, length: int) -> None:
        pass


async def test_a_disk_that_is_full_at_a_write_fails_that_block(small_disk: Path) -> None:
    store = DiskStore([small_disk], SIZE_OF_BLOCK, 100, calls=Overcommitted())
    blocks = [block(slot, b"%d" % slot, 1, payload_of(slot, SIZE_OF_BLOCK)) for slot in range(100)]
    results = await store.write(blocks, PATIENCE)
    counts = {outcome: sum(result.outcome == outcome for result in results) for outcome in ("ok", "failed")}
    assert sum(counts.values()) == 100
    assert counts["ok"] >= 40
    assert all("No space left" in result.cause for result in results if result.outcome == "failed")
    reads = [empty(each) for each in blocks]
    expected = ["ok" if result.outcome == "ok" else "absent" for result in results]
    assert await outcomes(store, reads) == expected
    await store.close()


# --- kill -9 ----------------------------------------------------------------------------------------------------------

WRITER = """
import asyncio, random, sys
from pathlib import Path
from penstock_kv.transfer.storage.block_store import BlockIo
from penstock_kv.transfer.storage.block_store import BlockIo
from penstock_kv.transfer.storage.disk_store import DiskStore
from penstock_kv.transfer.storage.slab_file import aligned

async def main(folders, size, slots, seed):
    store = DiskStore([Path(each) for each in folders], size, slots)
    rng = random.Random(seed)
    buffers = [aligned(size) for _ in range(slots)]
    print("ready", flush=True)
    for generation in range(1, 1_000_000):
        blocks = []
        for slot in rng.sample(range(slots), 8):
            key = rng.randbytes(20)
            buffers[slot][:] = random.Random(key).randbytes(size)
            blocks.append(BlockIo(slot, key, generation, buffers[slot], key[::-1]))
        await store.write(blocks, 30)
        store.forget(rng.sample(range(slots), 1))

asyncio.run(main(sys.argv[4:], int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
"""


@pytest.mark.parametrize("seed", range(deep(5)))
async def test_kill_9_at_any_moment_leaves_whole_records_or_none(tmp_path: Path, seed: int) -> None:
    size, slots = 256 * 1024, 32
    folders = [tmp_path / "a", tmp_path / "b"]
    rng = random.Random(seed)
    records = 0
    for life in range(2):
        process = subprocess.Popen(  # noqa: ASYNC220 - nothing else runs meanwhile
            [sys.executable, "-c", WRITER, str(size), str(slots), str(seed * 100 + life), *map(str, folders)],
            stdout=subprocess.PIPE,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        await asyncio.sleep(rng.uniform(0.01, 0.3))
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        store = DiskStore(folders, size, slots)
        for record in store.records():
            read = block(record.slot, record.key, record.generation, bytes(size))
            (outcome,) = await outcomes(store, [read])
            assert record.parent == record.key[::-1]
            if outcome == "ok":
                records += 1
                assert bytes(read.buffer) == random.Random(record.key).randbytes(size)
            else:
                assert outcome == "corrupt", "a write that the kill cut off"
        await store.close()
    assert records, "no record outlived a kill"
