"""What does the SQLite store promise beyond the contract, about its file, its disk and its clocks?"""

import asyncio
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import aclosing, closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.adapters.seams import StoreUnavailable
from penstock.adapters.stores.entry_codec import EntryCodec
from penstock.adapters.stores.lease_book import LeaseBook, LeaseRow
from penstock.adapters.stores.sqlite_database import BUSY, NAME, unavailable
from penstock.adapters.stores.sqlite_store import SqliteStore
from penstock.testing.store_contract import alive_again
from tests.depth import deep

PATIENCE = 30.0
POLL = 0.02


def opened(root: Path) -> closing[sqlite3.Connection]:
    """Open the database as an operator does."""
    return closing(sqlite3.connect(root / NAME, isolation_level=None))


def intact(root: Path) -> bool:
    with opened(root) as database:
        return database.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


async def until_there(store: SqliteStore, wanted: dict[str, bytes]) -> None:
    async with asyncio.timeout(PATIENCE):
        while await alive_again(store, "") != wanted:
            await asyncio.sleep(POLL)


@given(st.binary(max_size=200), st.integers(0, 400))
def test_an_entry_cut_short_anywhere_is_not_ours(value, cut):
    codec = EntryCodec("here")
    raw = codec.encode("workers/ä", value, "l")
    assert codec.decode("workers/ä", raw, "l") == value
    if cut < len(raw):
        assert codec.decode("workers/ä", raw[:cut], "l") is None
    assert codec.decode("workers/ä", value + b"\n" + raw, "l") is None


async def test_a_watcher_reads_only_what_changed(sqlite, monkeypatch):
    store, other = sqlite.open(), sqlite.open()
    for number in range(50):
        await store.put(f"workers/{number}", b"1", ttl=30.0)
    read = []
    decode = other.codec.decode
    monkeypatch.setattr(other.codec, "decode", lambda key, *rest: (read.append(key), decode(key, *rest))[1])
    async with asyncio.timeout(PATIENCE), aclosing(other.watch("workers/")) as changes:
        assert len(await anext(changes)) == 50
        read.clear()
        await store.put("workers/7", b"2", ttl=30.0)
        assert list(await anext(changes)) == [("workers/7", b"2")]
        await store.delete("workers/8")
        assert list(await anext(changes)) == [("workers/8", None)]
    assert read == ["workers/7"]


async def test_processes_that_start_together_make_one_database(sqlite):
    processes = [sqlite.begin_owner(f"workers/{number}", str(number), 30.0) for number in range(6)]
    for process in processes:
        assert process.stdout.readline() == "put\n"
    assert await sqlite.open().list("") == {f"workers/{number}": str(number).encode() for number in range(6)}


WRITER = """
import asyncio, sys
from pathlib import Path
from penstock.adapters.stores.sqlite_store import SqliteStore

async def main(root, name):
    store = SqliteStore(Path(root))
    number = 0
    while True:
        number += 1
        await store.put(f"workers/{name}", str(number).encode() * 3000, ttl=0.5)
        await store.put(f"desired/{name}/{number % 7}", b"x" * number)
        await store.delete(f"desired/{name}/{(number + 3) % 7}")
        if number == 1:
            print("put", flush=True)

asyncio.run(main(*sys.argv[1:]))
"""


def begin_writer(root: Path, name: str) -> "subprocess.Popen[str]":
    return subprocess.Popen([sys.executable, "-c", WRITER, str(root), name], stdout=subprocess.PIPE, text=True)


async def test_a_kill_at_any_moment_leaves_the_database_whole(sqlite):
    store = sqlite.open()
    await store.put("mine", b"1", ttl=30.0)
    for round_ in range(deep(12)):
        writers = [begin_writer(sqlite.root, name) for name in "ab"]
        for writer in writers:
            assert writer.stdout.readline() == "put\n"
        await asyncio.sleep(random.Random(round_).uniform(0.0, 0.05))
        for writer in writers:
            writer.kill()
        for writer in writers:
            writer.wait()
            writer.stdout.close()
        assert intact(sqlite.root)
        assert (await store.list("mine")) == {"mine": b"1"}
        for key, value in (await store.list("workers/")).items():
            assert value == value[: len(value) // 3000] * 3000, key
        await store.put("mine", b"1", ttl=30.0)
    assert store.codec.ignored == 0


async def test_a_full_disk_is_told_with_a_next_step_drops_nobody_and_ends(small_disk):
    root = small_disk / "discovery"
    store, other = SqliteStore(root, poll=POLL), SqliteStore(root, poll=POLL)
    try:
        await store.put("k", b"old", ttl=0.6)
        ballast = small_disk / "ballast"
        async with aclosing(other.watch("")) as changes:
            assert list(await anext(changes)) == [("k", b"old")]
            with ballast.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
                while True:
                    file.write(bytes(4096))
            with pytest.raises(StoreUnavailable, match="free some space"):
                while True:  # each put needs its own pages of the log, so the last free bytes go soon
                    await store.put("large", b"x" * 100_000)
            try:
                end = time.monotonic() + 2.0  # time has to pass here: nobody may be dropped, for longer than the ttl
                while time.monotonic() < end:
                    seen = await asyncio.wait_for(anext(changes), end - time.monotonic())
                    assert ("k", None) not in list(seen)
            except (StoreUnavailable, TimeoutError):
                pass
        assert (await other.list("k")).get("k") in (b"old", None)
        ballast.unlink()
        assert (await alive_again(other, "k")) == {"k": b"old"}
        await store.put("k", b"new", ttl=5.0)
        assert (await other.list("k")) == {"k": b"new"}
    finally:
        await store.close()
        await other.close()


async def test_a_lock_of_another_process_holds_no_event_loop_and_drops_nobody(sqlite):
    store, other = sqlite.open(), sqlite.open()
    await store.put("k", b"1", ttl=0.3)
    lags = []

    async def tick():
        while True:
            before = time.monotonic()
            await asyncio.sleep(0.01)
            lags.append(time.monotonic() - before)

    with opened(sqlite.root) as holder:
        async with aclosing(other.watch("")) as changes:
            assert list(await anext(changes)) == [("k", b"1")]
            holder.execute("BEGIN IMMEDIATE")
            ticking = asyncio.create_task(tick())
            began = time.monotonic()
            with pytest.raises(StoreUnavailable, match="another process holds it"):
                await store.put("k", b"2", ttl=0.3)
            assert time.monotonic() - began < BUSY + 2.0
            with pytest.raises(StoreUnavailable, match="another process holds it"):
                await asyncio.wait_for(anext(changes), PATIENCE)
        ticking.cancel()
        assert sorted(lags)[len(lags) // 2] < BUSY / 10 and len(lags) > 20
        assert store.renewal_failures > 0
        holder.execute("ROLLBACK")
    await until_there(other, {"k": b"1"})


async def test_a_suspended_owner_is_dropped_and_comes_back(sqlite):
    other = sqlite.open()
    child = sqlite.spawn_owner("theirs", "2", 0.6)
    async with asyncio.timeout(PATIENCE), aclosing(other.watch("")) as changes:
        assert list(await anext(changes)) == [("theirs", b"2")]
        child.send_signal(signal.SIGSTOP)
        assert list(await anext(changes)) == [("theirs", None)]
        child.send_signal(signal.SIGCONT)
        assert list(await anext(changes)) == [("theirs", b"2")]


async def test_a_folder_taken_away_is_filled_again_by_its_owners(sqlite):
    store, other = sqlite.open(), sqlite.open()
    await store.put("k", b"1", ttl=0.3)
    sqlite.root.rename(sqlite.root.with_name("taken away"))
    async with asyncio.timeout(PATIENCE), aclosing(other.watch("")) as changes:
        while list(await anext(changes)) != [("k", b"1")]:
            pass


async def test_a_deleted_file_is_an_outage_that_drops_nobody_and_ends(sqlite):
    store, other = sqlite.open(), sqlite.open()
    sqlite.spawn_owner("theirs", "2", 0.6)  # first: nothing is renewed while this waits for it
    await store.put("mine", b"1", ttl=0.6)
    wanted = {"mine": b"1", "theirs": b"2"}
    for _ in range(3):
        async with asyncio.timeout(PATIENCE), aclosing(other.watch("")) as changes:
            assert dict(await anext(changes)) == wanted
            (sqlite.root / NAME).unlink()  # its log and index stay, and are no part of the next one
            with pytest.raises(StoreUnavailable, match="get time to renew"):
                await anext(changes)
        assert await alive_again(other, "") == wanted
        assert await sqlite.open().list("") == wanted, "who comes later reads the same file"
        assert intact(sqlite.root)


async def test_the_log_of_a_deleted_file_is_no_part_of_the_next_one(sqlite):
    child = sqlite.spawn_owner("theirs", "2", 30.0)
    child.send_signal(signal.SIGSTOP)  # it still has the deleted file, its log and their locks
    (sqlite.root / NAME).unlink()
    store, other = sqlite.open(), sqlite.open()
    for number in range(20):
        await store.put(f"workers/{number}", b"1")
    assert set(await other.list("")) == {f"workers/{number}" for number in range(20)}
    child.send_signal(signal.SIGCONT)
    assert intact(sqlite.root)


@pytest.mark.parametrize("junk", [b"", b"no database at all " * 1000, b"SQLite format 3\x00" + bytes(8000)])
async def test_a_damaged_file_is_named_with_the_way_out(sqlite, junk):
    store, other = sqlite.open(), sqlite.open()
    await store.put("k", b"1", ttl=0.6)
    path = sqlite.root / NAME
    path.with_suffix(".junk").write_bytes(junk)
    path.with_suffix(".junk").replace(path)
    with pytest.raises(StoreUnavailable) as caught:
        await other.list("")
    assert str(path) in str(caught.value) and "move its folder away" in str(caught.value)
    with pytest.raises(StoreUnavailable, match="move its folder away"):
        await anext(other.watch(""))
    sqlite.root.rename(sqlite.root.with_name("damaged"))
    await until_there(other, {"k": b"1"})


async def test_a_file_overwritten_while_it_is_open_is_named_with_the_way_out(sqlite):
    store, other = sqlite.open(), sqlite.open()
    for number in range(300):
        await store.put(f"k{number}", bytes(1000), ttl=0.6)
    path = sqlite.root / NAME
    for file in (path, path.with_name(NAME + "-wal")):
        with file.open("r+b") as raw:
            raw.write(b"?" * file.stat().st_size)
    with pytest.raises(StoreUnavailable, match="move its folder away"):
        await SqliteStore(sqlite.root).list("")
    sqlite.root.rename(sqlite.root.with_name("damaged"))
    await until_there(other, {f"k{number}": bytes(1000) for number in range(300)})


async def test_what_is_not_ours_is_left_alone(sqlite):
    store = sqlite.open()
    await store.put("k", b"1", ttl=5.0)
    half = EntryCodec("here").encode("half", b"whole", None)[:-2]
    with opened(sqlite.root) as database:
        put = "INSERT INTO entries (key, lease, entry) VALUES (?, ?, ?)"
        copied = database.execute("SELECT lease, entry FROM entries WHERE key = 'k'").fetchone()
        database.execute(put, ("half", None, half))
        database.execute(put, ("junk", None, b"\xff\xfe\x00"))
        database.execute(put, ("copy of k", *copied))
        database.execute(put, ("large", None, bytes(3 << 20)))
        for row in ((b"bytes", None, b""), ("text", None, "text"), ("number", 7, 7), ("none", None, None)):
            database.execute(put, row)
        database.execute("INSERT INTO leases VALUES ('broken', 'soon', 'me', 7, 'never', x'00', NULL)")
        database.execute("CREATE TABLE notes (text)")
    assert await store.list("") == {"k": b"1"}
    assert await store.list("") == {"k": b"1"}
    assert store.codec.ignored == 3
    await store.put("k", b"2", ttl=7.0)  # grants another lease, which sweeps
    assert await store.list("") == {"k": b"2"}
    with opened(sqlite.root) as database:
        assert database.execute("SELECT count(*) FROM leases WHERE id = 'broken'").fetchone() == (1,)


async def test_a_key_of_a_lease_that_nobody_holds_is_not_alive(sqlite):
    store = sqlite.open()
    await store.put("k", b"1", ttl=5.0)
    with opened(sqlite.root) as database:
        orphan = EntryCodec("here").encode("orphan", b"", "never")
        database.execute("INSERT INTO entries (key, lease, entry) VALUES ('orphan', 'never', ?)", (orphan,))
    assert await store.list("") == {"k": b"1"}


async def test_the_next_owner_sweeps_out_what_a_crashed_one_left(sqlite):
    child = sqlite.spawn_owner("theirs", "2", 30.0)
    child.kill()
    child.wait()
    keep = sqlite.spawn_owner("alive", "3", 30.0)
    store = sqlite.open()
    await store.put("k", b"1", ttl=5.0)
    assert keep.poll() is None
    with opened(sqlite.root) as database:
        assert database.execute("SELECT key FROM entries WHERE key != '' ORDER BY key").fetchall() == [
            ("alive",),
            ("k",),
        ]
        assert database.execute("SELECT count(*) FROM leases").fetchone() == (2,)


@pytest.mark.skipif(shutil.which("sqlite3") is None, reason="sqlite3: its shell is not installed")
async def test_an_operator_reads_it_with_one_command(sqlite):
    await sqlite.open().put("workers/a", b'{"card": 1}', ttl=30.0)
    command = ["sqlite3", str(sqlite.root / NAME), "SELECT key, lease, entry FROM entries"]
    shown = (await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=True)).stdout
    assert shown.startswith("workers/a|") and shown.endswith('{"card": 1}\n')


def test_a_database_that_can_not_be_written_has_a_next_step(tmp_path):
    path = tmp_path / NAME
    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE t (x)")
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database, pytest.raises(sqlite3.Error) as caught:
        database.execute("INSERT INTO t VALUES (1)")
    assert "let this user write" in str(unavailable("write", path, caught.value))


# --- leases, on clocks of our own -----------------------------------------------------------------------------------


class Room:
    """One lease of ttl 9 s, seen by a book whose clocks the test moves."""

    def __init__(self, age: float = 0.0) -> None:
        self.now, self.wall = 1000.0, 50_000.0
        self.row = LeaseRow("owner", ttl=9.0, renewals=0, renewed=self.wall - age)
        self.book = LeaseBook(monotonic=lambda: self.now, wall=lambda: self.wall)
        self.look()

    def look(self) -> None:
        self.book.look([self.row])
        self.book.judge()

    def renew(self) -> None:
        self.row = self.row._replace(renewals=self.row.renewals + 1, renewed=self.wall)

    def pass_time(self, seconds: float, *, renewed: bool, step: float = 0.5) -> bool:
        for _ in range(round(seconds / step)):
            self.now += step
            self.wall += step
            if renewed:
                self.renew()
            self.look()
        return "owner" in self.book.alive


@pytest.fixture
def room() -> Room:
    return Room()


def test_a_lease_that_is_renewed_stands_and_one_that_is_not_ends_after_its_ttl(room):
    assert room.pass_time(60, renewed=True)
    assert room.pass_time(9, renewed=False)
    assert not room.pass_time(0.5, renewed=False)
    assert room.pass_time(0.5, renewed=True)  # its owner was only slow


@pytest.mark.parametrize("jump", [-86_400.0, 86_400.0])
def test_a_step_of_the_wall_clock_drops_nobody(room, jump):
    room.pass_time(5, renewed=True)
    room.wall += jump
    room.look()
    assert "owner" in room.book.alive
    assert room.pass_time(8, renewed=False)
    assert not room.pass_time(2, renewed=False)


def test_a_watcher_that_was_suspended_first_listens_again(room):
    room.pass_time(5, renewed=True)
    room.now += 3600
    room.look()
    assert "owner" in room.book.alive
    assert not room.pass_time(9, renewed=False)


def test_a_lease_left_by_a_process_long_gone_never_stands():
    room = Room(age=3600.0)
    assert "owner" not in room.book.alive and not room.book.is_fresh("owner")
    assert room.pass_time(0.5, renewed=True)


def test_a_lease_is_late_before_it_ends(room):
    room.pass_time(4.5, renewed=False)
    assert room.book.late() == []
    room.pass_time(0.5, renewed=False)
    assert room.book.late() == ["owner"]
    room.pass_time(4.5, renewed=False)
    assert "owner" not in room.book.alive and room.book.late() == []
