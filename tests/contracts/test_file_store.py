"""What does the file store promise beyond the contract, about its files, its clocks and its disk?"""

import asyncio
import errno
import os
from contextlib import aclosing
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.adapters.seams import StoreUnavailable
from penstock.adapters.stores.file_layout import FileEntry, FileLease, decode, encode, file_name
from penstock.adapters.stores.lease_book import LeaseBook

PATIENCE = 30.0


def refuse(number: int):
    def call(*args: object, **kwargs: object) -> None:
        raise OSError(number, os.strerror(number))

    return call


@given(st.sets(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=300), min_size=2, max_size=2))
def test_file_names_are_safe_and_tell_keys_apart(keys):
    names = [file_name(key) for key in keys]
    assert len(set(names)) == 2
    for name in names:
        assert "/" not in name and "\0" not in name and not name.startswith("..k/") and len(os.fsencode(name)) <= 255
        assert name.endswith(".key")


@given(st.binary(max_size=200), st.integers(0, 400))
def test_a_key_file_cut_short_anywhere_is_not_ours(value, cut):
    raw = encode(FileEntry(key="workers/ä", value=value, lease="l"))
    assert decode(raw) == FileEntry(key="workers/ä", value=value, lease="l")
    if cut < len(raw):
        assert decode(raw[:cut]) is None
    assert decode(value + b"\n" + raw) is None


async def test_a_full_disk_is_told_with_a_next_step_and_leaves_the_old_value(files, monkeypatch):
    store, other = files.open(), files.open()
    await store.put("k", b"old", ttl=5.0)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", refuse(errno.ENOSPC))
        with pytest.raises(StoreUnavailable, match="free some space"):
            await store.put("k", b"new", ttl=5.0)
    assert await other.list("") == {"k": b"old"}
    assert [p.suffix for p in (files.root / "keys").iterdir()] == [".key"]
    await store.put("k", b"new", ttl=5.0)
    assert await other.list("") == {"k": b"new"}


async def test_where_nobody_can_renew_nobody_is_dropped(files, monkeypatch):
    store, other = files.open(), files.open()
    await store.put("k", b"1", ttl=0.3)
    with monkeypatch.context() as patch:
        patch.setattr(os, "utime", refuse(errno.EROFS))
        async with aclosing(other.watch("")) as changes:
            assert list(await anext(changes)) == [("k", b"1")]
            with pytest.raises(StoreUnavailable, match="read-only"):
                await asyncio.wait_for(anext(changes), PATIENCE)
        with pytest.raises(StoreUnavailable):
            await anext(other.watch(""))
        assert store.renewal_failures > 0
    async with asyncio.timeout(PATIENCE):
        while True:
            try:
                assert list(await anext(other.watch(""))) == [("k", b"1")]
                break
            except StoreUnavailable:
                await asyncio.sleep(0.02)


async def test_an_emptied_directory_is_filled_again_by_its_owners(files):
    store, other = files.open(), files.open()
    await store.put("k", b"1", ttl=0.3)
    files.root.rename(files.root.with_name("taken away"))
    async with asyncio.timeout(PATIENCE), aclosing(other.watch("")) as changes:
        while list(await anext(changes)) != [("k", b"1")]:
            pass


async def test_what_is_not_ours_is_left_alone_and_counted(files):
    store = files.open()
    await store.put("k", b"1", ttl=5.0)
    keys, leases = files.root / "keys", files.root / "leases"
    (keys / "half.key").write_bytes(encode(FileEntry(key="half", value=b"whole", lease=None))[:-2])
    (keys / "junk.key").write_bytes(b"\xff\xfe\x00")
    (keys / "copy of k.key").write_bytes((keys / "k.key").read_bytes())
    (keys / "notes.txt").write_text("hello")
    (keys / "folder.key").mkdir()
    (leases / "broken.lease").write_bytes(b"{")
    assert await store.list("") == {"k": b"1"}
    assert await store.list("") == {"k": b"1"}
    assert store.ignored == 3
    assert (keys / "notes.txt").exists()


async def test_a_key_of_a_lease_that_nobody_holds_is_not_alive(files):
    store = files.open()
    await store.put("k", b"1", ttl=5.0)
    (files.root / "keys" / "orphan.key").write_bytes(encode(FileEntry(key="orphan", value=b"", lease="never")))
    assert await store.list("") == {"k": b"1"}


async def test_the_next_owner_sweeps_out_what_a_crashed_one_left(files):
    child = files.spawn_owner("theirs", "2", 30.0)
    child.kill()
    child.wait()
    keep = files.spawn_owner("alive", "3", 30.0)
    store = files.open()
    await store.put("k", b"1", ttl=5.0)
    assert keep.poll() is None
    assert sorted(p.name for p in (files.root / "keys").iterdir()) == ["alive.key", "k.key"]
    assert len(list((files.root / "leases").iterdir())) == 2


# --- leases, on clocks of our own -----------------------------------------------------------------------------------


class Room:
    """One lease file of ttl 9 s, seen by a book whose clocks the test moves."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "owner.lease"
        self.now, self.wall = 1000.0, 50_000.0
        self.path.write_bytes(msgspec.json.encode(FileLease(ttl=9.0, pid=1, host="here")))
        self.book = LeaseBook(folder, monotonic=lambda: self.now, wall=lambda: self.wall)

    def renew(self) -> None:
        os.utime(self.path, (self.wall, self.wall))

    def pass_time(self, seconds: float, *, renewed: bool, step: float = 0.5) -> bool:
        for _ in range(round(seconds / step)):
            self.now += step
            self.wall += step
            if renewed:
                self.renew()
            self.book.look()
            self.book.judge()
        return self.book.is_alive("owner")


@pytest.fixture
def room(tmp_path: Path) -> Room:
    room = Room(tmp_path)
    room.renew()
    room.book.look()
    return room


def test_a_lease_that_is_renewed_stands_and_one_that_is_not_ends_after_its_ttl(room):
    assert room.pass_time(60, renewed=True)
    assert room.pass_time(9, renewed=False)
    assert not room.pass_time(0.5, renewed=False)
    assert room.pass_time(0.5, renewed=True)  # its owner was only slow


@pytest.mark.parametrize("jump", [-86_400.0, 86_400.0])
def test_a_step_of_the_wall_clock_drops_nobody(room, jump):
    room.pass_time(5, renewed=True)
    room.wall += jump
    room.book.look()
    room.book.judge()
    assert room.book.is_alive("owner")
    assert room.pass_time(8, renewed=False)
    assert not room.pass_time(2, renewed=False)


def test_a_watcher_that_was_suspended_first_listens_again(room):
    room.pass_time(5, renewed=True)
    room.now += 3600
    room.book.look()
    room.book.judge()
    assert room.book.is_alive("owner")
    assert not room.pass_time(9, renewed=False)


def test_a_lease_left_by_a_process_long_gone_never_stands(tmp_path):
    room = Room(tmp_path)
    os.utime(room.path, (room.wall - 3600, room.wall - 3600))
    room.book.look()
    assert not room.book.is_alive("owner")
    assert room.pass_time(0.5, renewed=True)
