"""Does the guard's index keep what was recorded, through restarts, torn ends, damage and several processes?"""

import errno
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_kv.inside import guard_index
from penstock_kv.inside.guard_index import RECORD_BYTES, BlockSum, GuardIndex, GuardRecord


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tier" / "index.log"


def known(path: Path, *keys: bytes) -> list[GuardRecord | None]:
    index = GuardIndex(path)
    try:
        return [index.get(key) for key in keys]
    finally:
        index.close()


def test_records_survive_a_restart_and_generations_count_up(path: Path) -> None:
    index = GuardIndex(path)
    index.put([BlockSum(b"a", 10, 1), BlockSum(b"b", 10, 2)])
    index.put([BlockSum(b"a", 10, 3)])
    index.forget([b"b", b"never stored"])
    assert index.get(b"a") == GuardRecord(2, 10, 3) and index.get(b"b") is None
    index.close()
    assert known(path, b"a", b"b") == [GuardRecord(2, 10, 3), None]


@given(cut=st.integers(1, RECORD_BYTES - 1))
def test_a_torn_end_costs_the_last_record_only(cut: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("torn") / "index.log"
    index = GuardIndex(path)
    index.put([BlockSum(b"a", 1, 1), BlockSum(b"b", 2, 2)])
    index.close()
    os.truncate(path, 2 * RECORD_BYTES - cut)
    index = GuardIndex(path)
    assert index.get(b"a") is not None and index.get(b"b") is None and index.damaged == 1
    index.put([BlockSum(b"c", 3, 3)])
    index.close()
    assert known(path, b"a", b"b", b"c") == [GuardRecord(1, 1, 1), None, GuardRecord(1, 3, 3)]


@given(at=st.integers(0, 3 * RECORD_BYTES - 1), bit=st.integers(0, 7))
def test_a_flipped_bit_costs_one_record_and_never_changes_one(
    at: int, bit: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("flip") / "index.log"
    index = GuardIndex(path)
    index.put([BlockSum(bytes([n]), n, n) for n in range(3)])
    index.close()
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)
    expected: list[GuardRecord | None] = [GuardRecord(1, n, n) for n in range(3)]
    expected[at // RECORD_BYTES] = None
    assert known(path, b"\0", b"\1", b"\2") == expected


def test_two_engines_share_one_log(path: Path) -> None:
    one, two = GuardIndex(path), GuardIndex(path)
    one.put([BlockSum(b"a", 1, 1)])
    assert two.get(b"a") is None
    two.refresh()
    assert two.get(b"a") == GuardRecord(1, 1, 1)
    two.put([BlockSum(b"a", 1, 9)])
    two.forget([b"unknown"])
    one.refresh()
    assert one.get(b"a") == GuardRecord(2, 1, 9)
    one.close()
    two.close()


def test_a_long_log_is_written_anew_and_the_others_follow(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard_index, "SPARE_RECORDS", 4)
    other = GuardIndex(path)
    for number in range(8):
        other.put([BlockSum(b"a", 1, number)])
    other.put([BlockSum(b"b", 2, 2)])
    long = path.stat().st_size
    fresh = GuardIndex(path)
    assert path.stat().st_size == 2 * RECORD_BYTES < long
    fresh.put([BlockSum(b"c", 3, 3)])
    other.put([BlockSum(b"d", 4, 4)])
    assert [other.get(key) for key in (b"a", b"b", b"c", b"d")] == [
        GuardRecord(8, 1, 7),
        GuardRecord(1, 2, 2),
        GuardRecord(1, 3, 3),
        GuardRecord(1, 4, 4),
    ]
    fresh.close()
    other.close()
    assert None not in known(path, b"a", b"b", b"c", b"d")


def test_a_full_disk_records_nothing_of_a_batch(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = GuardIndex(path)
    index.put([BlockSum(b"a", 1, 1)])
    write = os.write

    def full(file: int, data: bytes) -> int:
        if len(data) > 20:
            return write(file, data[:20])
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="no space"):
        index.put([BlockSum(b"b", 1, 1)])
    index.forget([b"a"])  # is heeded here at once
    assert index.get(b"a") is None and index.get(b"b") is None
    monkeypatch.undo()
    index.close()
    assert path.stat().st_size == RECORD_BYTES and known(path, b"b") == [None]


def test_a_log_that_was_removed_begins_anew(path: Path) -> None:
    index = GuardIndex(path)
    index.put([BlockSum(b"a", 1, 1)])
    path.unlink()
    index.refresh()
    assert index.get(b"a") is None
    index.put([BlockSum(b"b", 1, 1)])
    index.close()
    assert known(path, b"a", b"b") == [None, GuardRecord(1, 1, 1)]
