"""Counter ledger of frontend processes: keeps the cluster's counts when a process is replaced or crashes.

Each process writes its own counts into the run folder every few seconds and at its end. A process that reports the
whole cluster's counts adds those of ended processes. Metrics are not kept so: Prometheus handles restarts.
"""

import json
import logging
from collections.abc import Collection
from pathlib import Path
from typing import Any

log = logging.getLogger("penstock.frontend")

FOLDER = "counts"
"""Folder in the run folder, with a file for each frontend process that there was."""
_OUTCOMES = ("ok", "failed", "rejected", "cancelled", "expired")


class CounterLedger:
    """The counts of one process, and those of ended processes.

    Args:
        run: the run folder.
        name: of this process.
    """

    def __init__(self, run: Path, name: str) -> None:
        self._folder = run / FOLDER
        self._path = self._folder / f"{name}.json"
        self._name = name
        self._read: dict[str, tuple[int, dict[str, Any]]] = {}
        """Process -> (when its file was written, what it holds)."""
        self._failing = False

    def write(self, status: dict[str, Any]) -> None:
        """Write this process's own counts; blocks. A failed write is logged once, and tried again the next time."""
        fresh = self._path.with_suffix(".new")
        try:
            self._folder.mkdir(exist_ok=True)
            fresh.write_text(json.dumps(counts_of(status)))
            fresh.replace(self._path)  # whole or not at all: others read it
        except OSError as error:
            if not self._failing:
                log.warning("%s can't be written, so its counts end with this process: %s", self._path, error)
            self._failing = True
            return
        self._failing = False

    def ended(self, alive: Collection[str]) -> list[dict[str, Any]]:
        """Return the counts of ended processes, in the shape of a status; blocks."""
        counts = []
        for path in sorted(self._folder.glob("*.json")):
            name = path.stem
            if name == self._name or name in alive:
                continue
            written = path.stat().st_mtime_ns
            known = self._read.get(name)
            if known is None or known[0] != written:
                known = self._read[name] = (written, json.loads(path.read_text()))
            counts.append(known[1])
        return counts


def counts_of(status: dict[str, Any]) -> dict[str, Any]:
    """Return the counts of a status to keep: those of ended requests."""
    over = {name: status["requests"].get(name, 0) for name in _OUTCOMES}
    return {
        "requests": {**over, "total": sum(over.values())},
        "queue": {},
        "models": [
            {"name": model["name"], **{name: model[name] for name in _OUTCOMES if name in model}}
            for model in status["models"]
        ],
        "workers": [{name: worker[name] for name in ("id", "requests", "failures")} for worker in status["workers"]],
        "findings": [],
    }
