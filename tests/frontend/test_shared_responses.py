"""Shared responses: bounded in size and time, a key's own, and no worse than without where shared memory fails."""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.frontend.response_store import HeldResponse, ResponseStore, SharedResponses, StoredResponse
from penstock.runtime.records import response_folder
from penstock.runtime.records.response_folder import RESPONSE_TTL, drop_responses, take_over_responses


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Let a folder of the test stand for the machine's shared memory."""
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(response_folder, "SHARED", folder)
    yield folder


def held(id: str, size: int = 10, owner: str = "a") -> HeldResponse:
    return HeldResponse(id, owner, "s", b"x" * size)


async def test_it_is_bounded_and_the_longest_unused_go_first(tmp_path: Path) -> None:
    now = 0.0
    shared = SharedResponses(tmp_path, 10_000, lambda: now)
    for number in range(200):
        now += 0.1
        shared.put(held(f"r{number}", 400), running=False)
        if number == 190:
            assert await shared.get("r185", "a") is not None, "it was used now, and stays longer"
    there = [number for number in range(200) if await shared.get(f"r{number}", "a") is not None]
    assert 15 <= len(there) <= 26 and 185 in there and there[-1] == 199
    now += RESPONSE_TTL + 1
    assert await shared.get("r199", "a") is None
    await shared.close()


async def test_another_process_reads_and_removes_what_one_wrote(tmp_path: Path) -> None:
    one, other = (SharedResponses(tmp_path, 1 << 20) for _ in range(2))
    one.put(held("r"), running=False)
    await one.close()
    assert await other.get("r", "b") is None and not await other.remove("r", "b"), "another key's"
    kept = await other.get("r", "a")
    assert kept is not None and kept.response == held("r")
    assert await other.remove("r", "a") and await other.get("r", "a") is None
    await other.close()
    folder = response_folder.response_folder(tmp_path)
    assert folder.stat().st_mode & 0o077 == 0 and folder.parent.stat().st_mode & 0o077 == 0
    take_over_responses(tmp_path, tmp_path / "next")
    assert not folder.exists() and response_folder.response_folder(tmp_path / "next").exists()
    drop_responses(tmp_path / "next")
    assert not response_folder.response_folder(tmp_path / "next").exists()


async def test_one_that_nobody_makes_any_more_has_failed(tmp_path: Path) -> None:
    shared = SharedResponses(tmp_path, 1 << 20)
    shared.put(HeldResponse("r", "", "s", b'{"status":"in_progress"}'), running=True)
    store = ResponseStore(shared=shared)
    found = await store.from_shared("r", "")
    assert found is not None and json.loads(found.body)["status"] == "failed"
    await store.close()


async def test_a_process_serves_its_own_where_shared_memory_fails(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(response_folder, "SHARED", tmp_path / "nowhere")
    store = ResponseStore(shared=SharedResponses(tmp_path, 1 << 20))
    store.put(StoredResponse("r", "", "s", b"{}"))
    assert store.get("r", "") is not None and await store.from_shared("r", "") is None
    assert await store.erase("r", "") and not await store.erase("r", "")
    assert caplog.text.count("end with this process") == 1
    await store.close()


async def test_what_nobody_used_for_long_goes_with_the_next_start(tmp_path: Path) -> None:
    for name in ("old", "live"):
        shared = SharedResponses(tmp_path / name, 1 << 20)
        shared.put(held("r"), running=False)
        await shared.close()
    long_ago = time.time() - RESPONSE_TTL - 10
    for file in response_folder.response_folder(tmp_path / "old").iterdir():
        os.utime(file, (long_ago, long_ago))
    take_over_responses(None, tmp_path / "new")
    there = [response_folder.response_folder(tmp_path / name).exists() for name in ("old", "live")]
    assert there == [False, True]


async def test_another_users_folder_is_not_trusted(tmp_path: Path, memory: Path) -> None:
    (memory / f"penstock-responses-{os.geteuid()}").mkdir(mode=0o755)
    store = ResponseStore(shared=SharedResponses(tmp_path, 1 << 20))
    store.put(StoredResponse("r", "", "s", b"{}"))
    assert await store.from_shared("r", "") is None
    await store.close()
