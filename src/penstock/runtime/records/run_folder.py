"""Run folder: one folder of records per run, with one schema for live, bench and simulation.

runs/<utc>-<command>-<hex>/
  run.json          schema, versions, config hash, seed, clock anchor
  config.yaml       resolved, secrets removed
  requests.jsonl    one line per ended request       decisions.jsonl  one line per placement
                    (of a live cluster in segments: `penstock.runtime.records.segments`)
  copies.jsonl      one line per ended copy that a shadow got: no client waited for it
  metrics.csv       a row every few seconds          logs/            one file per process
"""

import hashlib
import json
import logging
import os
import platform
import secrets
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

import penstock
from penstock.config.redact import without_secrets
from penstock.config.settings.cluster_settings import RunSettings
from penstock.kernel.errors import ConfigError, write_hint
from penstock.kernel.values import plain
from penstock.runtime.records.segments import SEGMENTS, rotate

log = logging.getLogger("penstock.run_folder")
SCHEMA = 2
RESUMED_MAX = 3600.0
"""Seconds without a sign of life after which a killed supervisor's run is over: who comes back later begins another."""
CLOCK_STEP_MAX = 60 * 10**9
"""Nanoseconds that the wall clock may have been set by; a boot moves the monotonic clock by far more."""


def _clock() -> dict[str, int]:
    return {"wall_ns": time.time_ns(), "monotonic_ns": time.monotonic_ns()}


class RunFolder:
    """A run's folder; `create` makes it, `open` finds one that a supervisor made."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, root: Path | str, command: str, *, config: str = "", seed: int = 0) -> "RunFolder":
        """Make the folder with run.json and config.yaml.

        Args:
            root: folder of all runs, made where absent.
            command: word in the folder's name, such as ``up``.
            config: resolved YAML without secrets.
        Raises:
            ConfigError: the folder can't be written.
        """
        name = f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{command}-{secrets.token_hex(3)}"
        return cls(Path(root).resolve() / name)._begin(command, config, seed, _clock())

    @classmethod
    def resume(cls, path: Path, command: str, *, config: str = "") -> "RunFolder | None":
        """Go on with the run of a supervisor that was killed, in the same folder; records keep their times.

        Returns: None where that run is no longer there, of before a boot of this machine, or older than `RESUMED_MAX`.
        Raises:
            ConfigError: the folder can't be written.
        """
        try:
            run = json.loads((path / "run.json").read_bytes())
            anchor, age = run["clock_anchor"], time.time() - max(each.stat().st_mtime for each in path.iterdir())
            boot = anchor["wall_ns"] - anchor["monotonic_ns"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        now = _clock()
        if age > RESUMED_MAX or abs(now["wall_ns"] - now["monotonic_ns"] - boot) > CLOCK_STEP_MAX:
            return None
        return cls(path)._begin(command, config, 0, anchor)

    def _begin(self, command: str, config: str, seed: int, anchor: dict[str, int]) -> "RunFolder":
        path = self.path
        described = {
            "schema": SCHEMA,
            "command": command,
            "argv": [Path(sys.argv[0]).name, *without_secrets(sys.argv[1:])],
            "penstock": penstock.__version__,
            "python": platform.python_version(),
            "config_sha256": hashlib.sha256(config.encode()).hexdigest(),
            "seed": seed,
            "pid": os.getpid(),
            "owned_ns": time.time_ns(),
            "clock_anchor": anchor,
        }
        try:
            (path / "logs").mkdir(parents=True, exist_ok=True)
            (path / "run.json").write_text(json.dumps(described, indent=2) + "\n")
            (path / "config.yaml").write_text(config)
        except OSError as error:
            raise ConfigError(
                f"the run folder {path} can't be written: {error.strerror}",
                hint=write_hint(error, "set runs.dir to another folder"),
            ) from error
        return self

    def writer(self, name: str, cap: "Cap | None" = None) -> "LineWriter":
        """Return a buffered writer of JSON lines, such as for ``requests.jsonl``."""
        return LineWriter(self.path / name, cap=cap)


class Cap(NamedTuple):
    """How large a file of records of a live cluster gets: bytes of a segment, and how many segments are kept."""

    segment: int
    segments: int

    @classmethod
    def of(cls, settings: RunSettings) -> "Cap":
        return cls(settings.records_bytes // SEGMENTS, SEGMENTS)


class LineWriter:
    """Append JSON lines off the hot path: `write` only buffers, `flush` does the I/O and never raises.

    A full or vanished disk must not stop traffic: lines are kept up to ``lines_max``, then the oldest are dropped
    and counted, and the first error and the recovery are logged. `flush` may run in a thread of its own.

    Args:
        cap: begin a segment anew where this one is full; None lets the file grow.
    """

    def __init__(self, path: Path, lines_max: int = 20_000, cap: "Cap | None" = None) -> None:
        self.path = path
        self._cap = cap
        self.written = 0
        self.lost = 0
        self.failing: str | None = None
        self._lines: list[bytes] = []
        self._most = lines_max
        self._encode = msgspec.json.Encoder(enc_hook=plain).encode
        self._lock = threading.Lock()

    def write(self, record: Any) -> None:
        """Buffer one record (a msgspec struct or plain data)."""
        line = self._encode(record)
        with self._lock:
            self._lines.append(line)
            self._trim()

    def flush(self) -> None:
        """Write what is buffered; what can't be written stays for the next time."""
        with self._lock:
            lines, self._lines = self._lines, []
        if not lines:
            return
        try:
            if self._cap is not None:
                rotate(self.path, *self._cap)
            self._append(b"\n".join(lines) + b"\n")
        except OSError as error:
            if self.failing is None:
                log.warning("%s can't be written, lines are kept: %s", self.path, error)
            self.failing = str(error)
            with self._lock:
                self._lines[:0] = lines  # newer lines stay behind them
                self._trim()
            return
        if self.failing is not None:
            log.warning("%s can be written again", self.path)
            self.failing = None
        self.written += len(lines)

    def _trim(self) -> None:
        excess = len(self._lines) - self._most
        if excess > 0:
            del self._lines[:excess]
            self.lost += excess

    def _append(self, data: bytes) -> None:
        """Append all or nothing: half a line would spoil the next one, and the whole batch is tried again."""
        with self.path.open("ab", buffering=0) as file:
            start = file.seek(0, os.SEEK_END)
            written = 0
            try:
                while written < len(data):
                    written += file.write(data[written:])
            except OSError:
                # Only our own half may be cut: another frontend process may have written behind it.
                if written and file.seek(0, os.SEEK_END) == start + written:
                    file.truncate(start)
                raise


class CsvRows:
    """Append rows of numbers to a CSV file; unknown values are empty cells."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lost = 0
        self._columns: list[str] | None = None

    def append(self, row: dict[str, float | None]) -> None:
        """Write one row; the first row's names are the header. Blocks; counts what could not be written."""
        if self._columns is None:
            self._columns = list(row)
        cells = ",".join("" if row.get(name) is None else f"{row[name]:.9g}" for name in self._columns)
        try:
            fresh = not self.path.exists()
            with self.path.open("a") as file:
                if fresh:
                    file.write(",".join(self._columns) + "\n")
                file.write(cells + "\n")
        except OSError as error:
            if not self.lost:
                log.warning("%s can't be written: %s", self.path, error)
            self.lost += 1
