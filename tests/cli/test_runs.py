"""Are run folders listed, and deleted only where nobody needs them?"""

import json
import os
import time
from pathlib import Path

import pytest

from penstock.config.settings.cluster_settings import RunSettings
from penstock.kernel.errors import ConfigError
from penstock.runtime.records.run_folder import RunFolder
from penstock.runtime.records.run_folders import remove, run_of, runs_of, spare
from penstock.runtime.supervision.supervisor import prune


def made(root: Path, days: float, size: int, command: str = "up", pid: int = 2**22 - 1) -> Path:
    """Make a run folder that was written to some days ago, by a process that is gone."""
    path = RunFolder.create(root, command).path
    told = json.loads((path / "run.json").read_text())
    then = time.time() - 86400 * days
    told |= {"pid": pid, "clock_anchor": {"wall_ns": int(then * 1e9), "monotonic_ns": 0}}
    (path / "run.json").write_text(json.dumps(told))
    (path / "requests.jsonl").write_bytes(b"x" * size)
    for file in path.rglob("*"):
        os.utime(file, (then, then))
    return path


def test_the_oldest_go_first_by_age_and_by_size_and_none_that_is_in_use(tmp_path: Path) -> None:
    old, middle, new = made(tmp_path, 9, 1000), made(tmp_path, 5, 200_000), made(tmp_path, 1, 100_000)
    used = made(tmp_path, 20, 50_000, pid=os.getpid())
    told = json.loads((used / "run.json").read_text())
    told["clock_anchor"]["wall_ns"] = time.time_ns()
    (used / "run.json").write_text(json.dumps(told))
    (tmp_path / "no-run").mkdir()
    runs = runs_of(tmp_path)
    assert [run.path for run in runs] == [old, middle, new, used]
    assert [run.live for run in runs] == [False, False, False, True]

    def going(**keep: float) -> list[Path]:
        limits = {"keep_for": None, "keep_bytes": None, **keep}
        return [run.path for run in spare(runs, now=time.time(), **limits)]  # type: ignore[arg-type]

    assert going() == []
    assert going(keep_for=7 * 86400.0) == [old]
    assert going(keep_bytes=200_000) == [old, middle]
    assert going(keep_bytes=10) == [old, middle, new], "what is in use stays"
    with pytest.raises(ConfigError, match="in use"):
        remove(run_of(used))
    with pytest.raises(ConfigError, match="not a run folder"):
        run_of(tmp_path / "no-run")


def test_the_commands(penstock, tmp_path: Path) -> None:
    old, new = made(tmp_path, 9, 2048), made(tmp_path, 1, 5000, "bench")
    listed = penstock("runs", "ls", "--dir", str(tmp_path)).output
    assert old.name in listed and "9 d" in listed and "2 in all" in listed
    found = json.loads(penstock("runs", "ls", "--dir", str(tmp_path), "--json").output)
    assert [each["command"] for each in found] == ["up", "bench"]
    dry = penstock("runs", "prune", "--dir", str(tmp_path), "--keep-for", "7d", "--dry-run")
    assert "would go" in dry.output and old.exists()
    config = tmp_path / "c.yaml"
    config.write_text(f"runs: {{dir: {tmp_path}, keep_for: 7d}}\n")
    assert "is deleted" in penstock("runs", "prune", str(config)).output
    assert not old.exists() and new.exists()
    assert penstock("runs", "prune", "--dir", str(tmp_path)).exit_code == 2
    assert penstock("runs", "rm", str(new)).exit_code == 0 and not new.exists()
    assert "no run folder in" in penstock("runs", "ls", "--dir", str(tmp_path)).output


def test_a_cluster_prunes_when_it_starts_and_says_so(tmp_path: Path) -> None:
    old, new = made(tmp_path, 9, 10), made(tmp_path, 1, 10)
    said: list[str] = []
    prune(RunSettings(dir=str(tmp_path)), said.append)
    assert old.exists() and not said
    prune(RunSettings(dir=str(tmp_path), keep_for=7 * 86400.0), said.append)
    assert not old.exists() and new.exists() and str(old) in said[0]
