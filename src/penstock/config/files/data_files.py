"""Reads data files that settings name, JSON objects and NumPy arrays, with errors that name the file."""

import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.kernel.errors import ConfigError, read_hint

BYTES_MAX = 256 * 1024 * 1024
"""Largest file that is read; the profile of a large grid has 1 MB."""


def npz_arrays(path: str | Path, name: str) -> Mapping[str, Any]:
    """Return the arrays of a NumPy .npz file by name.

    Args:
        name: of the file, for messages.
    Raises:
        ConfigError: it can't be read.
    """
    import numpy as np  # 0.1 s that commands without an engine need not pay

    try:
        with np.load(path, allow_pickle=False) as table:
            return {name: table[name] for name in table.files}
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        hint = read_hint(error, content="it must be a NumPy .npz file")
        raise ConfigError(f"{name} can't be read: {error}", hint=hint) from error


def json_object(path: Path, name: str, *, hint: str) -> Mapping[str, Any]:
    """Return the JSON object in a file.

    Args:
        name: of the file, for messages.
        hint: what the file should hold.
    Raises:
        ConfigError: it can't be read, or holds something else.
    """
    try:
        found = json.loads(text_of(path, name))
    except ValueError as error:
        raise ConfigError(f"{name} {path} is not valid JSON: {error}", hint=hint) from error
    if not isinstance(found, dict):
        raise ConfigError(f"{name} {path} is not a JSON object", hint=hint)
    return found


def text_of(path: Path, knob: str) -> str:
    """Return the text of a file that a knob names.

    Raises:
        ConfigError: it can't be read, or is too large to be meant.
    """
    try:
        if path.stat().st_size > BYTES_MAX:
            raise ConfigError(f"{knob} {path} is larger than {BYTES_MAX} bytes", hint="name the file that is meant")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{knob} {path} can't be read: {error}", hint=read_hint(error)) from error
