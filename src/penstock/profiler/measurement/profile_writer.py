"""Profile writer: a profile folder with its manifest, its points, and the tables that Dynamo's planners read."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from penstock.config.files.profile_folder import DECODE_JSON, DECODE_NPZ, KV_KEY, PREFILL_JSON, PREFILL_NPZ
from penstock.config.files.profile_manifest import MANIFEST, POINTS, ProfileManifest, ProfilePoint
from penstock.kernel.errors import ConfigError, write_hint
from penstock.report.csv_file import write_csv

Column = npt.NDArray[np.generic]


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


def prefill_table(manifest: ProfileManifest, points: Sequence[ProfilePoint]) -> Mapping[str, Column]:
    """Return Dynamo's prefill table of the picked size: tokens, milliseconds, tokens/s/GPU; empty where none is."""
    tp = manifest.sizes[0] if manifest.prefill is None else manifest.prefill.tp
    mine = sorted((p for p in points if p.kind == "prefill" and p.tp == tp), key=lambda p: p.tokens)
    if not mine:
        return {}
    isl = np.asarray([point.tokens for point in mine])
    seconds = np.asarray([point.mean for point in mine])
    return {"prefill_isl": isl, "prefill_ttft": 1e3 * seconds, "prefill_thpt_per_gpu": isl / seconds / tp}


def decode_table(manifest: ProfileManifest, points: Sequence[ProfilePoint]) -> Mapping[str, Column]:
    """Return Dynamo's decode table: KV use 0..1, tokens, milliseconds, tokens/s/GPU, and the cache's tokens.

    It is empty where the engine does not say how many tokens its cache holds.
    """
    tp = manifest.sizes[0] if manifest.decode is None else manifest.decode.tp
    room = manifest.limits_of(tp).kv_tokens
    mine = sorted((p for p in points if p.kind == "decode" and p.tp == tp), key=lambda p: (p.context, p.seqs))
    if not mine or not room:
        return {}
    seqs, context, seconds = (np.asarray([getattr(p, name) for p in mine]) for name in ("seqs", "context", "mean"))
    return {
        "x_kv_usage": np.minimum(1.0, seqs * context / room),
        "y_context_length": context,
        "z_itl": 1e3 * seconds,
        "z_thpt_per_gpu": seqs / seconds / tp,
        KV_KEY: np.asarray([room]),
    }


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
