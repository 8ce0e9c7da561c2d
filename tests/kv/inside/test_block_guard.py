"""Does the guard let a block through only where its bytes are those that were stored?"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock_kv.inside.block_guard import BlockGuard, GuardedJob, GuardResult
from penstock_kv.inside.guard_index import GuardIndex

ROW = 64


class Region:
    """Rows, and a guard over them."""

    def __init__(self, path: Path) -> None:
        self.data = bytearray(range(256)) * 2
        self.discarded: list[bytes] = []
        self.guard = BlockGuard(GuardIndex(path), self.row, self.discarded.append)

    def row(self, row: int) -> memoryview:
        return memoryview(self.data)[row * ROW : (row + 1) * ROW]

    def result(self) -> GuardResult:
        self.guard.wait_idle()
        (result,) = self.guard.finished()
        return result

    def store(self, *keys: bytes) -> GuardResult:
        self.guard.stored(GuardedJob(1, keys, range(len(keys))))
        return self.result()

    def load(self, keys: list[bytes], rows: list[int]) -> GuardResult:
        generations = [self.guard.generation(key) or -1 for key in keys]
        self.guard.loaded(GuardedJob(2, keys, rows, generations))
        return self.result()


@pytest.fixture
def region(tmp_path: Path) -> Iterator[Region]:
    region = Region(tmp_path / "index.log")
    yield region
    region.guard.close()


def test_a_block_that_is_as_stored_is_served_from_any_row(region: Region) -> None:
    assert region.store(b"a", b"b") == GuardResult(1, [b"a", b"b"], [], load=False)
    region.row(5)[:] = region.row(1)
    assert region.load([b"b", b"a"], [5, 0]) == GuardResult(2, [b"b", b"a"], [], load=True)
    assert region.guard.take_counts() == {"stored": 2, "served": 2, "corrupt": 0, "stale": 0, "unrecorded": 0}


def test_one_flipped_bit_is_a_miss_from_then_on_and_the_rest_is_served(region: Region) -> None:
    region.store(b"a", b"b", b"c")
    region.data[ROW + 7] ^= 4
    assert region.load([b"a", b"b", b"c"], [0, 1, 2]) == GuardResult(2, [b"a", b"c"], [b"b"], load=True)
    assert region.guard.generation(b"b") is None
    assert region.discarded == [b"b"]
    assert region.guard.take_counts()["corrupt"] == 1
    region.store(b"a", b"b")
    assert region.load([b"b"], [1]).right == [b"b"]


def test_another_block_s_bytes_are_no_hit(region: Region) -> None:
    region.store(b"a", b"b")
    assert region.load([b"a"], [1]).wrong == [b"a"]


def test_bytes_of_an_earlier_store_are_stale(region: Region) -> None:
    region.store(b"a")
    old = bytes(region.row(0))
    generation = region.guard.generation(b"a")
    assert generation == 1
    region.data[3] ^= 1
    region.store(b"a")
    region.row(0)[:] = old
    region.guard.loaded(GuardedJob(3, [b"a"], [0], [generation]))
    assert region.result().wrong == [b"a"]
    assert region.guard.take_counts()["stale"] == 1


def test_a_block_that_was_forgotten_while_it_was_loaded_is_no_hit(region: Region) -> None:
    region.store(b"a")
    region.guard.forget([b"a"])
    assert region.load([b"a"], [0]).wrong == [b"a"]


def test_what_cannot_be_recorded_is_stored_for_nobody(region: Region, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: GuardIndex, sums: object) -> None:
        raise OSError("no space")

    monkeypatch.setattr(GuardIndex, "put", full)
    assert region.store(b"a") == GuardResult(1, [], [b"a"], load=False)
    assert region.guard.generation(b"a") is None
    assert region.guard.take_counts()["unrecorded"] == 1


def test_a_row_that_cannot_be_read_is_no_hit_and_the_thread_lives_on(region: Region) -> None:
    region.store(b"a")
    assert region.load([b"a"], [10_000]).wrong == [b"a"]
    region.store(b"a")
    assert region.load([b"a"], [0]).right == [b"a"]
