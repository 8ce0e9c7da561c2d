"""How are the files of a run folder read? Lines, rows of numbers and JSON; what a crash cut off is left out."""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from penstock.kernel.errors import ConfigError

TAIL = 65_536
"""Bytes at a file's end in which its last line is looked for."""


def lines(path: Path, *, needed: bool) -> Iterator[bytes]:
    """Go through a file's whole lines; one that a crash cut off at the end is left out.

    Raises:
        ConfigError: it can't be read, or is needed and not there.
    """
    try:
        file = path.open("rb")
    except FileNotFoundError as error:
        if not needed:
            return
        raise ConfigError(
            f"{path.parent} is no folder of a run: it has no {path.name}", hint="a run says its folder at its start"
        ) from error
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}") from error
    with file:
        for line in file:
            if line.endswith(b"\n"):
                yield line


def last_line(path: Path) -> bytes | None:
    """Return a file's last whole line; None where there is none."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL))
            whole = file.read().rpartition(b"\n")[0]
    except FileNotFoundError:
        return None
    return whole.rpartition(b"\n")[2] or None


def number_rows(path: Path) -> list[dict[str, float]]:
    """Read a CSV file of numbers; cells that are empty or cut off are left out."""
    try:
        head, *found = path.read_text().splitlines() or [""]
    except FileNotFoundError:
        return []
    names = head.split(",")
    read = []
    for line in found:
        row: dict[str, float] = {}
        for name, cell in zip(names, line.split(",")):
            with contextlib.suppress(ValueError):
                row[name] = float(cell)
        read.append(row)
    return read


def json_of(path: Path) -> dict[str, Any]:
    """Return the object that a file holds; an empty one where there is no such file."""
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    return found if isinstance(found, dict) else {}
