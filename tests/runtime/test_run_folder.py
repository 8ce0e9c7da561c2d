"""The run folder: what it holds, and that a disk that fails stops nothing."""

import json
import os
from pathlib import Path

import pytest

from penstock.kernel.errors import ConfigError
from penstock.runtime.records import segments
from penstock.runtime.records.run_folder import Cap, LineWriter, RunFolder


def test_a_run_has_its_anchor_and_its_config(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "up", config="name: x\n", seed=3)
    run = json.loads((folder.path / "run.json").read_text())
    assert run["command"] == "up" and run["seed"] == 3 and run["clock_anchor"]["wall_ns"] > 0
    assert (folder.path / "config.yaml").read_text() == "name: x\n"
    assert folder.path.name.split("-")[1] == "up"


def test_a_folder_that_cannot_be_made_is_a_config_error_with_a_way_out(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"runs\.dir"):
        RunFolder.create(tmp_path / "file", "up")


def test_lines_are_written_in_order_on_flush(tmp_path: Path) -> None:
    writer = LineWriter(tmp_path / "requests.jsonl")
    for number in range(3):
        writer.write({"n": number})
    writer.flush()
    writer.write({"n": 3})
    writer.flush()
    assert [json.loads(line)["n"] for line in writer.path.read_text().splitlines()] == [0, 1, 2, 3]
    assert writer.written == 4


def test_a_segment_that_is_full_begins_anew_and_the_oldest_go(tmp_path: Path) -> None:
    writer = LineWriter(tmp_path / "planner.jsonl", cap=Cap(20, 3))
    for number in range(10):  # 8 bytes each
        writer.write({"n": number})
        writer.flush()

    def numbers(path: Path) -> list[int]:
        return [json.loads(line)["n"] for line in path.read_text().splitlines()]

    assert sorted(path.name for path in tmp_path.iterdir()) == ["planner.2.jsonl", "planner.3.jsonl", "planner.jsonl"]
    assert numbers(tmp_path / "planner.2.jsonl") == [3, 4, 5]
    assert numbers(tmp_path / "planner.3.jsonl") == [6, 7, 8]
    assert numbers(writer.path) == [9]
    assert writer.written == 10
    assert segments.dropped(writer.path) == 1


def test_a_full_disk_keeps_the_lines_and_writes_them_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = LineWriter(tmp_path / "requests.jsonl", lines_max=5)
    writer.write({"n": 0})
    writer.flush()
    real = Path.open

    def full(self: Path, *arguments: object, **more: object) -> object:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "open", full)
    for number in range(1, 9):
        writer.write({"n": number})
        writer.flush()
    assert writer.failing is not None and writer.lost == 3
    monkeypatch.setattr(Path, "open", real)
    writer.flush()
    assert writer.failing is None
    assert [json.loads(line)["n"] for line in writer.path.read_text().splitlines()] == [0, 4, 5, 6, 7, 8]


def test_a_really_full_device_is_survived() -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("devfull: no /dev/full on this system")
    writer = LineWriter(full)
    writer.write({"n": 1})
    writer.flush()
    assert writer.failing is not None


def test_a_killed_supervisors_run_goes_on_unless_it_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder.create(tmp_path, "up", config="name: x\n")
    before = json.loads((folder.path / "run.json").read_text())
    resumed = RunFolder.resume(folder.path, "up", config="name: y\n")
    assert resumed is not None and resumed.path == folder.path
    after = json.loads((folder.path / "run.json").read_text())
    assert after["clock_anchor"] == before["clock_anchor"], "records keep their times"
    assert (folder.path / "config.yaml").read_text() == "name: y\n"

    assert RunFolder.resume(tmp_path / "gone", "up") is None
    anchor = {**before["clock_anchor"], "monotonic_ns": before["clock_anchor"]["monotonic_ns"] + 10**15}
    (folder.path / "run.json").write_text(json.dumps({**before, "clock_anchor": anchor}))
    assert RunFolder.resume(folder.path, "up") is None, "the machine was started again meanwhile"
    (folder.path / "run.json").write_text(json.dumps(before))
    for file in folder.path.iterdir():
        os.utime(file, (1e9, 1e9))
    assert RunFolder.resume(folder.path, "up") is None, "nobody wrote there for an hour"
