"""Profile writer: a profile folder with its manifest, its points, and the tables that Dynamo's planners read."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from penstock.config.files.profile_folder import DECODE_JSON, DECODE_NPZ, PREFILL_JSON, PREFILL_NPZ
from penstock.config.files.profile_manifest import (
    KV_KEY,
    MANIFEST,
    POINTS,
    Column,
    ProfileManifest,
    ProfilePoint,
    decode_table,
    prefill_table,
)
from penstock.kernel.errors import ConfigError, write_hint
from penstock.report.csv_file import write_csv


def write_profile(folder: Path, manifest: ProfileManifest, points: Sequence[ProfilePoint]) -> None:
    """Write a profile; the manifest last, so that a folder with one is whole.

    Raises:
        ConfigError: the folder can't be written.
    """
    names = ProfilePoint.__struct_fields__
    try:
        folder.mkdir(parents=True, exist_ok=True)
        columns: dict[str, Column] = {name: _column([getattr(point, name) for point in points]) for name in names}
        np.savez_compressed(folder / POINTS, **columns)  # type: ignore[arg-type]
        rows = [[getattr(point, name) for name in names] for point in points]
        write_csv(folder / "points.csv", names, [["" if cell is None else cell for cell in row] for row in rows])
        _write_table(folder, PREFILL_NPZ, PREFILL_JSON, prefill_table(manifest, points))
        _write_table(folder, DECODE_NPZ, DECODE_JSON, decode_table(manifest, points))
        fresh = folder / f"{MANIFEST}.new"
        fresh.write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n")
        fresh.replace(folder / MANIFEST)
    except OSError as error:
        hint = write_hint(error, "give another --out")
        raise ConfigError(f"profile {folder} can't be written: {error.strerror}", hint=hint) from error


def _write_table(folder: Path, npz: str, plain: str, table: Mapping[str, Column]) -> None:
    path = folder / npz
    if not table:
        path.unlink(missing_ok=True)  # of an earlier run in this folder
        (folder / plain).unlink(missing_ok=True)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, **table)  # type: ignore[arg-type]
    lists = {name: column.tolist() if name != KV_KEY else column.tolist()[0] for name, column in table.items()}
    (folder / plain).write_text(json.dumps(lists) + "\n")


def _column(values: Sequence[str | float | None]) -> Column:
    """Return a column; an unknown number is NaN."""
    if any(value is None for value in values):
        return np.asarray([math.nan if value is None else value for value in values], dtype=np.float64)
    return np.asarray(values)
