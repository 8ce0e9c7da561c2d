"""`penstock serve MODEL --engine vllm` with a program that takes vLLM's command line: start, log, crash, end."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.live.cluster import Served, served, until

FAKE = Path(__file__).with_name("fake_vllm.py")


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """A `vllm` of our own."""
    path = tmp_path / "vllm"
    path.write_text(f'#!/bin/sh\nexec {sys.executable} {FAKE} "$@"\n')
    path.chmod(0o755)
    return path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A checkpoint's folder, with the simulated engine's tokenizer."""
    from penstock_lab.sim.sim_tokenizer import DATA_DIR

    folder = tmp_path / "tiny-1.5"
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((DATA_DIR / name).read_bytes())
    return folder


def arguments(program: Path, model: Path) -> list[str]:
    flags = ["--engine", "vllm", "--command", str(program), "--args=--extra,7", "--block_size", "32"]
    return ["serve", str(model), *flags, "--frontend.port", "0", "--supervise.restart_backoff", "50ms"]


def worker(up: Served) -> dict[str, object]:
    rows = up.get("/admin/status")[1]["workers"]
    return dict(rows[0]) if rows else {}


def test_it_serves_a_folder_keeps_the_log_and_restarts_what_crashed(tmp_path: Path, program: Path, model: Path) -> None:
    with served(tmp_path, *arguments(program, model)) as up:
        status, _, headers = up.chat("Hello", model="tiny-1.5")
        assert status == 200 and headers["x-penstock-worker"] == "main-0"
        until(lambda: worker(up)["index"] == "exact", 30)
        row = worker(up)
        assert (row["engine"], row["block_size"]) == ("vllm", 32)
        log = up.run / "logs" / "main-0.log"
        text = log.read_text()
        assert f"serving {model} at {row['url']}, host ip 127.0.0.1" in text and "extra='7'" in text
        first = int(str(row["pid"]))
        engines = [pid for pid in up.children() if str(FAKE) in command_line(pid)]
        for pid in engines:
            os.kill(pid, signal.SIGKILL)
        until(
            lambda: worker(up).get("pid") not in (None, first) and worker(up)["state"] == "ready", 30.0, lambda: up.text
        )
        assert up.chat("Hello again", model="tiny-1.5")[0] == 200
        assert log.read_text().count("serving ") == 2, "the new process goes on in the same log"
        assert up.stop() == 0


@pytest.mark.slow
def test_a_running_cluster_is_joined_by_one_more(tmp_path: Path, program: Path, model: Path) -> None:
    with served(tmp_path, *arguments(program, model)) as up:
        flags = [
            "--engine",
            "vllm",
            "--command",
            str(program),
            "--model_path",
            str(model),
            "--args=--extra,7",
        ]
        more = Served(["join", "--run", str(up.run), "--model", "tiny-1.5", *flags, "--block_size", "32"], tmp_path)
        try:
            until(lambda: "Joined with 1 worker" in more.text, 30.0, lambda: more.text)
            until(lambda: len(up.get("/admin/status")[1]["workers"]) == 2, 30.0, lambda: up.text)
        finally:
            assert more.stop() == 0
        until(lambda: len(up.get("/admin/status")[1]["workers"]) == 1, 30.0, lambda: up.text)


def test_a_server_that_does_not_come_up_is_told_with_the_end_of_its_log(tmp_path: Path, program: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "penstock", *arguments(program, broken)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PENSTOCK_STATE_DIR": str(tmp_path / "state")},
        check=False,
    )
    assert done.returncode == 1
    assert "ended with status 1 at its start" in done.stdout + done.stderr
    assert "the checkpoint has no config.json" in done.stdout + done.stderr


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""
