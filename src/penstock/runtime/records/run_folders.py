"""Run folders: lists them with size and use, and selects those to delete."""

import json
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from penstock.kernel.errors import ConfigError

WRITTEN_LATELY = 60.0
"""Seconds since the last write within which a folder is in use, by any process: engines outlive a killed supervisor."""


class RunFolderInfo(NamedTuple):
    """One run folder. ``started``, ``written``: wall clock, seconds; ``live``: whether it is in use."""

    path: Path
    command: str
    started: float
    written: float
    size: int
    live: bool


def runs_of(root: Path) -> list[RunFolderInfo]:
    """Return the run folders under a folder, the oldest first. A folder without a readable run.json is none."""
    paths = sorted(root.iterdir()) if root.is_dir() else []
    runs = [run for run in map(_run_info, paths) if run is not None]
    return sorted(runs, key=lambda run: run.started)


def run_of(path: Path) -> RunFolderInfo:
    """Return one run folder.

    Raises:
        ConfigError: it is no run folder.
    """
    run = _run_info(path)
    if run is None:
        raise ConfigError(f"{path} is not a run folder", hint="'penstock runs ls' lists them")
    return run


def spare(
    runs: Sequence[RunFolderInfo], *, now: float, keep_for: float | None, keep_bytes: int | None
) -> list[RunFolderInfo]:
    """Return the runs to delete, the oldest first; one that is in use stays.

    Args:
        keep_for: seconds since the last write after which a run goes; None keeps all.
        keep_bytes: that all together may have: the oldest go until they fit; None keeps all.
    """
    deleted = [run for run in runs if not run.live and keep_for is not None and now - run.written > keep_for]
    left = sum(run.size for run in runs) - sum(run.size for run in deleted)
    for run in runs:
        if keep_bytes is None or left <= keep_bytes:
            break
        if not run.live and run not in deleted:
            deleted.append(run)
            left -= run.size
    return sorted(deleted, key=lambda run: run.started)


def remove(run: RunFolderInfo) -> None:
    """Delete a run folder.

    Raises:
        ConfigError: it is in use, or can't be deleted.
    """
    if run.live:
        raise ConfigError(f"{run.path} is in use", hint="end that run first; its folder is free a minute after it")
    try:
        shutil.rmtree(run.path)
    except OSError as error:
        raise ConfigError(f"{run.path} can't be deleted: {error}") from error


def _run_info(path: Path) -> RunFolderInfo | None:
    try:
        info = json.loads((path / "run.json").read_bytes())
        command, pid, started = str(info["command"]), int(info["pid"]), info["clock_anchor"]["wall_ns"] / 1e9
        owned = info.get("owned_ns", info["clock_anchor"]["wall_ns"]) / 1e9
    except (OSError, ValueError, KeyError, TypeError):
        return None
    size, written = 0, started
    for status in _file_stats(path):
        size += status.st_size
        written = max(written, status.st_mtime)
    live = time.time() - written < WRITTEN_LATELY or _alive(pid, owned)
    return RunFolderInfo(path, command, started, written, size, live)


def _file_stats(path: Path) -> Iterator[os.stat_result]:
    for folder, _, names in os.walk(path):
        for name in names:
            try:
                yield (Path(folder) / name).lstat()
            except OSError:
                continue  # a segment that was full a moment ago


def _alive(pid: int, since: float) -> bool:
    """Return whether the process that owned a folder then still runs; a later one may have its number."""
    try:
        begun = Path(f"/proc/{pid}").stat().st_mtime
    except OSError:
        return False
    return begun < since + 5.0
