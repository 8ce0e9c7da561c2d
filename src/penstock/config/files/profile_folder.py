"""Profile folder in Dynamo's NPZ and JSON layouts, as read; the models built from it are pure.

A folder has ``selected_prefill_interpolation/raw_data.npz`` and ``selected_decode_interpolation/raw_data.npz`` (either
alone serves a planner of one role), or ``prefill_raw_data.json`` and ``decode_raw_data.json``. Older folders have
``prefill_tp<N>_interpolation`` and ``decode_tp<N>_interpolation`` instead. Their milliseconds are seconds here.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.config.files.data_files import BYTES_MAX, json_object, npz_arrays
from penstock.config.files.profile_manifest import check_profile, grid_of, has_manifest, timing_table
from penstock.kernel.errors import ConfigError
from penstock.planner.performance.speed_sources import Profile

PREFILL_NPZ = "selected_prefill_interpolation/raw_data.npz"
DECODE_NPZ = "selected_decode_interpolation/raw_data.npz"
PREFILL_JSON = "prefill_raw_data.json"
DECODE_JSON = "decode_raw_data.json"
PREFILL_KEYS = ("prefill_isl", "prefill_ttft", "prefill_thpt_per_gpu")
DECODE_KEYS = ("x_kv_usage", "y_context_length", "z_itl", "z_thpt_per_gpu")
KV_KEY = "max_kv_tokens"


def read_profile(folder: str | Path) -> Profile:
    """Return the profile of a folder; a part that it lacks is empty.

    Raises:
        ConfigError: it has neither part, or a part is not as it must be; the message names file and key.
    """
    root = Path(folder)
    prefill = _part(root, PREFILL_NPZ, PREFILL_JSON)
    decode = _part(root, DECODE_NPZ, DECODE_JSON)
    if prefill is None and decode is None:
        raise ConfigError(
            f"profile folder {root} has no profile",
            hint=f"it needs {PREFILL_NPZ} or {PREFILL_JSON}, and the same of decode",
        )
    found: dict[str, Any] = {}
    if prefill is not None:
        path, table = prefill
        isl, ttft, per_gpu = _columns(path, table, PREFILL_KEYS)
        found |= {"prefill_isl": isl, "prefill_ttft": _seconds(ttft), "prefill_per_gpu": per_gpu}
    if decode is not None:
        path, table = decode
        usage, context, itl, per_gpu = _columns(path, table, DECODE_KEYS)
        if max(usage) > 1.0 + 1e-6:
            raise ConfigError(f"{path}: x_kv_usage goes to {max(usage):g}", hint="it is a share, 0 to 1")
        room = _numbers(path, KV_KEY, table.get(KV_KEY))
        if len(room) != 1 or room[0] < 1:
            raise ConfigError(f"{path}: {KV_KEY} is {room}", hint="it is one number above 0, in tokens")
        found |= {"usage": usage, "context": context, "itl": _seconds(itl), "decode_per_gpu": per_gpu}
        found["kv_tokens"] = int(room[0])
    return Profile(**found)


def table_of_folder(folder: str | Path, tp: int, model: str | None = None) -> Mapping[str, Any]:
    """Return the table that timing of kind table takes, from a profile folder of ours or of Dynamo.

    Args:
        tp: tensor-parallel size; Dynamo's folders have one, and do not say which.
        model: what is to be simulated, where it is known.
    Raises:
        ConfigError: the profile is of another model, lacks that size, or has too few points.
    """
    if has_manifest(folder):
        if model is not None:
            check_profile(folder, model)
        return timing_table(folder, tp)
    metrics = read_profile(folder).metrics()
    prefill = [(point["tokens"], point["seconds"]) for point in metrics["prefill"]]
    decode = [(point["batch"], point["kv_tokens"], point["seconds"]) for point in metrics["decode"]]
    return grid_of(prefill, decode, str(folder))


def _part(root: Path, npz: str, plain: str) -> tuple[Path, Mapping[str, Any]] | None:
    # Dynamo's documents of 2025 spell it "interploation".
    older = sorted(root.glob(npz.replace("selected_", "").replace("_interpolation", "_tp*_interp*ation")))
    for path in (root / npz, root / plain, *older):
        if path.is_file():
            if path in older and len(older) > 1:
                names = " and ".join(each.parent.name for each in older)
                raise ConfigError(
                    f"profile folder {root} has several: {names}",
                    hint=f"rename the one that is served to {Path(npz).parent}",
                )
            if path.stat().st_size > BYTES_MAX:
                raise ConfigError(f"profile {path} is larger than {BYTES_MAX} bytes", hint="name the folder meant")
            if path.suffix == ".npz":
                return path, npz_arrays(path, f"profile {path}")
            return path, json_object(path, "profile", hint="it has one list of numbers per key")
    return None


def _columns(path: Path, table: Mapping[str, Any], keys: Sequence[str]) -> list[tuple[float, ...]]:
    found = [_numbers(path, key, table.get(key)) for key in keys]
    for key, values in zip(keys, found, strict=True):
        if len(values) != len(found[0]):
            raise ConfigError(f"{path}: {key} has {len(values)} values, {keys[0]} has {len(found[0])}")
        if not values:
            raise ConfigError(f"{path}: {key} is empty", hint="measure the engine again")
    return found


def _numbers(path: Path, key: str, value: Any) -> tuple[float, ...]:
    import numpy as np

    if value is None:
        raise ConfigError(f"{path}: lacks {key}", hint="profile the engine again, or name another folder")
    try:
        numbers = np.atleast_1d(np.asarray(value, dtype=np.float64))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{path}: {key} has something that is no number: {error}") from error
    if numbers.ndim != 1 or not np.isfinite(numbers).all() or (numbers < 0.0).any():
        raise ConfigError(f"{path}: {key} must be a list of numbers, none of them negative or infinite")
    return tuple(numbers.tolist())


def _seconds(ms: Sequence[float]) -> tuple[float, ...]:
    return tuple(each / 1000.0 for each in ms)
