"""Contract suite of a `Store`: what its users rely on, whichever adapter it is.

A test module imports all names and has a fixture ``stores``, a `StoreHarness` over the store under test:

    from penstock.testing.store_contract import *
"""

import asyncio
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Protocol

import pytest

from penstock.adapters.seams import Store, StoreChange, StoreUnavailable

TTL = 0.6
PATIENCE = 30.0
"""Seconds after which a wait is given up; only a broken adapter meets it."""

ODD_KEYS = ["workers/a", "../../etc/passwd", "..", ".", "/", "a b%2Fc", "ünicode/☃", "nul\x00", "~", "x/" * 400]
ODD_KEYS += ["a" * 240, "a" * 190 + ".key"]


class StoreHarness(Protocol):
    """Handles on one store as of several processes, real owners that can be killed, an outage and its end."""

    has_processes: bool
    """Whether other processes see the store; else `spawn_owner` is not called."""

    def open(self) -> Store:
        """Return a handle of its own."""
        ...

    def spawn_owner(self, key: str, value: str, ttl: float) -> "subprocess.Popen[str]":
        """Start a process that puts a key under a lease, and return once it is there."""
        ...

    def fail(self) -> None:
        """Begin an outage."""
        ...

    def mend(self) -> None:
        """End the outage."""
        ...

    async def close(self) -> None:
        """End all handles and processes."""
        ...


class Watcher:
    """Follow a store the way its users do, and note each change."""

    def __init__(self, changes: AsyncIterator[Sequence[StoreChange]]) -> None:
        self._changes = changes
        self.alive: dict[str, bytes] = {}
        self.left: list[str] = []

    async def step(self) -> None:
        for key, value in await asyncio.wait_for(anext(self._changes), PATIENCE):
            if value is None:
                del self.alive[key]
                self.left.append(key)
            else:
                self.alive[key] = value

    async def until(self, wanted: dict[str, bytes]) -> None:
        while self.alive != wanted:
            await self.step()


@asynccontextmanager
async def watching(store: Store, prefix: str) -> AsyncIterator[Watcher]:
    async with aclosing(store.watch(prefix)) as changes:  # type: ignore[type-var]
        watcher = Watcher(changes)
        await watcher.step()
        yield watcher


async def alive_again(store: Store, prefix: str) -> dict[str, bytes]:
    """Watch anew until the store answers; returns the first full answer."""
    async with asyncio.timeout(PATIENCE):
        while True:
            try:
                async with watching(store, prefix) as watcher:
                    return watcher.alive
            except StoreUnavailable:
                await asyncio.sleep(0.02)


async def test_what_is_put_is_listed_by_others_until_it_is_deleted(stores: StoreHarness) -> None:
    mine, other = stores.open(), stores.open()
    await mine.put("workers/a", b"1")
    await mine.put("workers/b", b"2", ttl=TTL)
    await mine.put("frontends/a", b"3")
    assert await other.list("workers/") == {"workers/a": b"1", "workers/b": b"2"}
    assert await other.list("") == {"workers/a": b"1", "workers/b": b"2", "frontends/a": b"3"}
    await mine.put("workers/a", b"new")
    await other.delete("workers/b")
    assert await other.list("workers/") == {"workers/a": b"new"}


async def test_deleting_what_is_absent_is_no_error(stores: StoreHarness) -> None:
    await stores.open().delete("workers/never")


async def test_an_empty_store_answers_a_watch_at_once(stores: StoreHarness) -> None:
    async with watching(stores.open(), "workers/") as watcher:
        assert watcher.alive == {}


async def test_a_watch_begins_with_all_that_is_alive_and_goes_on_with_changes(stores: StoreHarness) -> None:
    mine, other = stores.open(), stores.open()
    await mine.put("workers/a", b"1", ttl=TTL)
    async with watching(other, "workers/") as watcher:
        assert watcher.alive == {"workers/a": b"1"}
        await mine.put("frontends/x", b"not asked for")
        await mine.put("workers/b", b"2", ttl=TTL)
        await watcher.until({"workers/a": b"1", "workers/b": b"2"})
        await mine.put("workers/a", b"new", ttl=TTL)
        await watcher.until({"workers/a": b"new", "workers/b": b"2"})
        await mine.delete("workers/a")
        await watcher.until({"workers/b": b"2"})
        assert watcher.left == ["workers/a"]


@pytest.mark.parametrize("key", ODD_KEYS)
async def test_any_text_is_a_key(stores: StoreHarness, key: str) -> None:
    store, other = stores.open(), stores.open()
    await store.put(key, b"value", ttl=TTL)
    await store.put(key + "x", b"neighbour", ttl=TTL)
    assert await other.list(key) == {key: b"value", key + "x": b"neighbour"}
    await other.delete(key)
    assert await other.list(key) == {key + "x": b"neighbour"}


async def test_a_value_is_any_bytes(stores: StoreHarness) -> None:
    store, other = stores.open(), stores.open()
    value = bytes(range(256)) + b"\n\n"
    await store.put("k", value)
    await store.put("empty", b"")
    assert await other.list("") == {"k": value, "empty": b""}


async def test_an_empty_key_and_a_ttl_of_nothing_are_refused(stores: StoreHarness) -> None:
    store = stores.open()
    with pytest.raises(ValueError, match="empty"):
        await store.put("", b"")
    with pytest.raises(ValueError, match="above 0"):
        await store.put("k", b"", ttl=0)


async def test_what_is_alive_comes_in_the_order_of_its_keys(stores: StoreHarness) -> None:
    a, b = stores.open(), stores.open()
    for key in ("workers/c", "workers/a", "workers/b"):
        await a.put(key, b"")
    async with watching(b, "workers/") as watcher:
        await watcher.until(dict.fromkeys(("workers/a", "workers/b", "workers/c"), b""))
        assert list(watcher.alive) == ["workers/a", "workers/b", "workers/c"]


async def test_closing_takes_out_what_was_leased_and_nothing_else(stores: StoreHarness) -> None:
    mine, other = stores.open(), stores.open()
    await mine.put("leased", b"1", ttl=TTL)
    await mine.put("kept", b"2")
    async with watching(other, "") as watcher:
        await mine.close()
        await watcher.until({"kept": b"2"})
    await mine.close()  # twice is no error
    with pytest.raises(StoreUnavailable):
        await mine.put("k", b"")


async def test_closing_leaves_a_key_that_another_took_over(stores: StoreHarness) -> None:
    mine, other = stores.open(), stores.open()
    await mine.put("k", b"mine", ttl=TTL)
    await other.put("k", b"theirs", ttl=TTL)
    await mine.close()
    assert await other.list("") == {"k": b"theirs"}


async def test_a_living_owner_keeps_its_keys_for_longer_than_the_ttl(stores: StoreHarness) -> None:
    mine, other = stores.open(), stores.open()
    await mine.put("k", b"1", ttl=TTL)
    async with watching(other, "") as watcher:
        loop = asyncio.get_running_loop()
        end = loop.time() + 3 * TTL  # time has to pass here: what we wait for is that nothing happens
        while loop.time() < end:
            try:
                await asyncio.wait_for(watcher.step(), end - loop.time())
            except TimeoutError:
                break
        assert watcher.left == []
    assert await other.list("") == {"k": b"1"}


async def test_many_keys_arrive_whole_and_once(stores: StoreHarness) -> None:
    mine, other = stores.open(), stores.open()
    wanted = {f"workers/{i}": str(i).encode() for i in range(300)}
    async with watching(other, "workers/") as watcher:
        for key, value in wanted.items():
            await mine.put(key, value, ttl=30.0)
        await watcher.until(wanted)
        assert watcher.left == []
        await mine.close()
        await watcher.until({})
        assert sorted(watcher.left) == sorted(wanted)


async def test_two_watchers_of_one_handle_see_the_same(stores: StoreHarness) -> None:
    mine, other = stores.open(), stores.open()
    async with watching(other, "") as first, watching(other, "") as second:
        await mine.put("k", b"1", ttl=TTL)
        await first.until({"k": b"1"})
        await second.until({"k": b"1"})


async def test_an_outage_is_reported_drops_nobody_and_ends(stores: StoreHarness) -> None:
    mine, other = stores.open(), stores.open()
    await mine.put("workers/a", b"1", ttl=TTL)
    async with watching(other, "workers/") as watcher:
        stores.fail()
        with pytest.raises(StoreUnavailable) as told:
            while True:
                await watcher.step()
        assert str(told.value)
        assert watcher.left == []
    for call in (mine.put("workers/b", b"2", ttl=TTL), mine.delete("workers/a"), other.list("")):
        with pytest.raises(StoreUnavailable):
            await call
    await asyncio.sleep(2 * TTL)  # longer than any lease: silence in an outage means nothing
    stores.mend()
    first = await alive_again(other, "workers/")
    assert first == {"workers/a": b"1"}
    await mine.put("workers/b", b"2", ttl=TTL)
    assert await other.list("workers/") == {"workers/a": b"1", "workers/b": b"2"}


async def test_a_killed_owner_leaves_after_its_ttl_and_only_that_one(stores: StoreHarness) -> None:
    if not stores.has_processes:
        pytest.skip("one process only")
    mine, other = stores.open(), stores.open()
    await mine.put("workers/mine", b"1", ttl=30.0)  # on a busy machine we may be too late to renew a short one
    child = stores.spawn_owner("workers/theirs", "2", TTL)
    async with watching(other, "workers/") as watcher:
        await watcher.until({"workers/mine": b"1", "workers/theirs": b"2"})
        child.kill()  # SIGKILL: no chance to say goodbye
        child.wait()
        loop = asyncio.get_running_loop()
        start = loop.time()
        await watcher.until({"workers/mine": b"1"})
        # Never before its ttl would be over, had it just renewed; the upper bound is the machine's, not ours.
        assert loop.time() - start > TTL / 2
        assert set(watcher.left) == {"workers/theirs"}


async def test_two_processes_see_and_delete_each_others_keys(stores: StoreHarness) -> None:
    if not stores.has_processes:
        pytest.skip("one process only")
    mine = stores.open()
    stores.spawn_owner("workers/theirs", "2", 30.0)
    assert await mine.list("") == {"workers/theirs": b"2"}
    await mine.delete("workers/theirs")
    assert await mine.list("") == {}
