"""What stands in the files that a timing model is made from? They are read here; the model itself is pure."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.engine.gpus import GPUS
from penstock.engine.operators import COLUMNS
from penstock.engine.settings import TimingSettings
from penstock.kernel.errors import ConfigError

BYTES_MAX = 256 * 1024 * 1024
"""Largest file that is read; a profile of a large grid has 1 MB."""


def load_timing(settings: TimingSettings) -> Mapping[str, Any] | None:
    """Return what `penstock.engine.timing.timing_of` takes as its table; None for kinds that need no file.

    Raises:
        ConfigError: a file is not there or is not what it must be; the message names it.
    """
    if settings.kind == "table" and settings.table is not None:
        return _arrays(settings.table)
    if settings.kind == "aiconfigurator":
        from penstock.config.timing_aiconfigurator import predicted_profile  # only those who have it pay for it

        return predicted_profile(settings)
    if settings.kind not in ("roofline", "operators"):
        return None
    found: dict[str, Any] = {}
    if settings.model is not None:
        found["model"] = _model(Path(settings.model))
    if settings.gpu is not None and settings.gpu.lower() not in GPUS:
        found["gpu"] = _gpu(Path(settings.gpu))
    if settings.kind == "operators" and settings.profile is not None:
        for name, columns in COLUMNS.items():
            path = Path(settings.profile) / f"{name}.csv"
            if name != "moe" or path.exists():  # models without experts have none
                found[name] = _columns(path, columns)
    return found


def timing_files(settings: TimingSettings) -> dict[str, str]:
    """Return the files and folders that the settings name, by knob: what must be there before an engine starts."""
    if settings.kind == "table":
        named = {"table": settings.table}
    elif settings.kind == "roofline":
        named = {"model": settings.model, "gpu": settings.gpu}
    elif settings.kind == "operators":
        named = {"model": settings.model, "gpu": settings.gpu, "profile": settings.profile}
    else:
        named = {}
    return {
        knob: path for knob, path in named.items() if path is not None and not (knob == "gpu" and path.lower() in GPUS)
    }


def _arrays(path: str) -> Mapping[str, Any]:
    import numpy as np  # 0.1 s that commands without an engine need not pay

    try:
        with np.load(path, allow_pickle=False) as table:
            return {name: table[name] for name in table.files}
    except (OSError, ValueError) as error:
        raise ConfigError(f"timing.table {path} can't be read: {error}", hint="it must be a NumPy .npz file") from error


def _model(path: Path) -> Mapping[str, Any]:
    if path.is_dir():
        path = path / "config.json"
    try:
        found = json.loads(_text(path, "timing.model"))
    except ValueError as error:
        raise ConfigError(f"timing.model {path} is no JSON: {error}", hint="name a model's config.json") from error
    if not isinstance(found, dict):
        raise ConfigError(f"timing.model {path} is no JSON object", hint="name a model's config.json")
    return found


def _gpu(path: Path) -> Mapping[str, Any]:
    if not path.exists():
        raise ConfigError(
            f"timing.gpu {str(path)!r} is neither in the table nor a file", hint=f"the table has {', '.join(GPUS)}"
        )
    import yaml

    try:
        found = yaml.safe_load(_text(path, "timing.gpu"))
    except yaml.YAMLError as error:
        raise ConfigError(f"timing.gpu {path} is no YAML: {error}") from error
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise ConfigError(f"timing.gpu {path} is no mapping", hint="write it as 'bf16_tflops: 989' and so on")
    return {"name": path.stem, **found}


def _columns(path: Path, columns: tuple[str, ...]) -> Mapping[str, list[str] | list[float]]:
    lines = _text(path, "timing.profile").splitlines()
    head = lines[0].split(",") if lines else []
    absent = [name for name in columns if name not in head]
    if absent:
        raise ConfigError(
            f"timing.profile {path}, line 1: lacks the column {', '.join(absent)}",
            hint=f"it needs {', '.join(columns)}",
        )
    found: dict[str, Any] = {name: [] for name in columns}
    for number, line in enumerate(lines[1:], 2):
        if not line.strip():
            continue
        cells = line.split(",")
        if len(cells) != len(head):
            raise ConfigError(f"timing.profile {path}, line {number}: has {len(cells)} cells, its head {len(head)}")
        for name, cell in zip(head, cells, strict=True):
            if name not in found:
                continue
            try:
                found[name].append(cell if name == "layer" else float(cell))
            except ValueError as error:
                raise ConfigError(
                    f"timing.profile {path}, line {number}: {name} is {cell!r}, which is no number"
                ) from error
    return found


def _text(path: Path, knob: str) -> str:
    try:
        if path.stat().st_size > BYTES_MAX:
            raise ConfigError(f"{knob} {path} is larger than {BYTES_MAX} bytes", hint="name the file that is meant")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{knob} {path} can't be read: {error}", hint="paths count from the current folder"
        ) from error
