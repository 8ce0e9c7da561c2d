"""Is a region shared, removed by who made it, and removed by the next engine where nobody did?"""

import os
import time
from pathlib import Path

import pytest

from penstock_kv.inside import staging_region
from penstock_kv.inside.restored_blocks import RESTORED_ENV, restored_blocks
from penstock_kv.inside.staging_region import StagingRegion, remove_leftovers


@pytest.fixture(autouse=True)
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging_region, "SHARED", tmp_path)


def test_two_processes_see_one_row(tmp_path: Path) -> None:
    path = tmp_path / "one.rows"
    maker = StagingRegion(path, 4, 4096, create=True)
    other = StagingRegion(path, 4, 4096)
    maker.row(2)[:5] = b"hello"
    assert bytes(other.row(2)[:5]) == b"hello" and bytes(other.row(1)[:5]) == bytes(5)
    other.close()
    assert path.exists()
    maker.close()
    assert not path.exists()


def test_only_regions_of_engines_that_are_gone_are_removed(tmp_path: Path) -> None:
    old = time.time() - 2 * staging_region.YOUNG
    live = StagingRegion(tmp_path / "live.rows", 1, 4096, create=True)
    (tmp_path / "left.rows").write_bytes(b"x")
    (tmp_path / "other.mmap").write_bytes(b"x")
    for name in ("live.rows", "left.rows", "other.mmap"):
        os.utime(tmp_path / name, (old, old))
    (tmp_path / "young.rows").write_bytes(b"x")
    remove_leftovers("*.rows")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["live.rows", "other.mmap", "young.rows"]
    live.close()


def test_restored_blocks_are_compared_with_all_that_was_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(RESTORED_ENV, raising=False)
    assert restored_blocks() is None
    monkeypatch.setenv(RESTORED_ENV, str(tmp_path / "sums"))
    check = restored_blocks()
    assert check is not None
    check.stored(b"k", memoryview(b"one"))
    check.stored(b"k", memoryview(b"two"))
    for key, data in ((b"k", b"one"), (b"k", b"two"), (b"k", b"three"), (b"other", b"one")):
        check.restored(key, memoryview(data))
    assert (tmp_path / "sums").read_text().split() == ["right", "right", "wrong", "new"]
