"""A tier process for tests: a real one, started by its command."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kv.tiers.plain_engine import ROW_BYTES

PATIENT = str(Path(__file__).with_name("patient_penstock.py"))
"""The command, as tests run it whose tier processes are peers."""


class TierProcess:
    """One running ``penstock cache serve``, patient with its peers."""

    def __init__(self, folder: Path, *options: str, name: str = "kv") -> None:
        self.socket = folder / f"{name}.sock"
        command = [sys.executable, PATIENT, "cache", "serve", "--socket", str(self.socket), *options]
        self.log = folder / f"{name}.log"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, env=dict(os.environ))
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.log.read_text()
        self.ready = json.loads(line)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(20)

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        status = self.process.wait(20)
        with contextlib.suppress(AttributeError):
            self.process.stdout.close()  # type: ignore[union-attr]
        return status


class Start:
    """Starts tier processes with room for so many blocks; ``last`` is the newest."""

    def __init__(self, folder: Path) -> None:
        self.running: list[TierProcess] = []
        self._folder = folder

    def __call__(self, host: int = 64, disk: int = 0, *options: str, name: str = "kv") -> TierProcess:
        words = ["--host", str(host * ROW_BYTES)]
        if disk:
            words += ["--disk", str(disk * (ROW_BYTES + 4096)), "--disk-dir", str(self._folder / "disk")]
        self.running.append(TierProcess(self._folder, *words, *options, name=name))
        return self.last

    @property
    def last(self) -> TierProcess:
        return self.running[-1]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    starting = Start(tmp_path)
    yield starting
    for each in starting.running:
        each.stop()
