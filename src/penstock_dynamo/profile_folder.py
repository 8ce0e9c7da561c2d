"""Profile folder in Dynamo's NPZ and JSON layouts, as read; the models built from it are pure.

A folder has ``selected_prefill_interpolation/raw_data.npz`` and ``selected_decode_interpolation/raw_data.npz`` (either
alone serves a planner of one role), or ``prefill_raw_data.json`` and ``decode_raw_data.json``. Older folders have
``prefill_tp<N>_interpolation`` and ``decode_tp<N>_interpolation`` instead. Their milliseconds are seconds here.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.config.derived.engine_flags import tensor_parallel_size
from penstock.config.files.data_files import BYTES_MAX, json_object, npz_arrays
from penstock.config.files.profile_manifest import (
    KV_KEY,
    POINTS,
    check_profile,
    check_size,
    decode_table,
    grid_of,
    has_manifest,
    prefill_table,
    read_measured,
    sizes_measured,
    timing_table,
)
from penstock.config.settings.cluster_settings import ClusterSettings, PoolSettings
from penstock.kernel.errors import ConfigError
from penstock.planner.performance.speed_sources import Profile

PREFILL_NPZ = "selected_prefill_interpolation/raw_data.npz"
DECODE_NPZ = "selected_decode_interpolation/raw_data.npz"
PREFILL_JSON = "prefill_raw_data.json"
DECODE_JSON = "decode_raw_data.json"
PREFILL_KEYS = ("prefill_isl", "prefill_ttft", "prefill_thpt_per_gpu")
DECODE_KEYS = ("x_kv_usage", "y_context_length", "z_itl", "z_thpt_per_gpu")


def read_profile(folder: str | Path, tp: int | None = None) -> Profile:
    """Return the profile of a folder; a part that it lacks is empty.

    Args:
        tp: tensor-parallel size of the engines in question; None takes the size that was picked for each phase. Folders
            of Dynamo have one, and only older ones say which.
    Raises:
        ConfigError: it was not measured at that size, has neither part, or a part is not as it must be; the message
            names size, file and key.
    """
    root = Path(folder)
    prefill = _read_profile_part(root, PREFILL_NPZ, PREFILL_JSON, tp)
    decode = _read_profile_part(root, DECODE_NPZ, DECODE_JSON, tp)
    if tp is not None and has_manifest(root):
        manifest, points = read_measured(root)
        check_size(root, tp, sizes_measured(points))
        tables = (prefill_table(manifest, points, tp), decode_table(manifest, points, tp))
        prefill, decode = ((root / POINTS, table) if table else None for table in tables)
    if prefill is None and decode is None:
        sizes = {*_older(root, PREFILL_NPZ).values(), *_older(root, DECODE_NPZ).values()}
        if tp is not None and sizes:
            check_size(root, tp, sorted(sizes))
        raise ConfigError(
            f"profile folder {root} has no profile",
            hint=f"it needs {PREFILL_NPZ} or {PREFILL_JSON}, and the same of decode",
        )
    found: dict[str, Any] = {}
    if prefill is not None:
        path, table = prefill
        isl, ttft, per_gpu = _columns_of_profile(path, table, PREFILL_KEYS)
        found |= {"prefill_isl": isl, "prefill_ttft": _seconds_from_ms(ttft), "prefill_per_gpu": per_gpu}
    if decode is not None:
        path, table = decode
        usage, context, itl, per_gpu = _columns_of_profile(path, table, DECODE_KEYS)
        if max(usage) > 1.0 + 1e-6:
            raise ConfigError(f"{path}: x_kv_usage goes to {max(usage):g}", hint="it is a share, 0 to 1")
        room = _checked_numbers(path, KV_KEY, table.get(KV_KEY))
        if len(room) != 1 or room[0] < 1:
            raise ConfigError(f"{path}: {KV_KEY} is {room}", hint="it is one number above 0, in tokens")
        found |= {"usage": usage, "context": context, "itl": _seconds_from_ms(itl), "decode_per_gpu": per_gpu}
        found["kv_tokens"] = int(room[0])
    return Profile(**found)


def pool_profile(model: str, name: str, pool: PoolSettings, of_all: str | None = None) -> Profile | None:
    """Return the curves of a pool's engines: of the folder that its own timing names, else of the one of all pools.

    Args:
        of_all: folder of ``planner.classic.profile``.
    Raises:
        ConfigError: the profile is of another model or engine, or of other tensor-parallel sizes.
    """
    timing, folder, size = pool.sim.timing, of_all, tensor_parallel_size(pool)
    if timing.kind == "table" and timing.profile is not None and Path(timing.profile).is_dir():
        folder, model = timing.profile, timing.model or model
        if timing.tensor_parallel_size != size:
            raise ConfigError(
                f"pool {name} of {model}: sim.timing.tensor_parallel_size is {timing.tensor_parallel_size}, and by its "
                f"labels, args or gpus its engines have {size}",
                hint=f"set sim.timing.tensor_parallel_size to {size}: curves are of one size",
            )
    if folder is None:
        return None
    check_profile(folder, model, None if pool.engine in ("sim", "openai") else pool.engine)
    try:
        return read_profile(folder, size)
    except ConfigError as error:
        raise ConfigError(f"pool {name} of {model}: {error.message}", hint=error.hint) from error


def table_of_folder(folder: str | Path, tp: int, model: str | None = None) -> Mapping[str, Any]:
    """Return the table that timing of kind table takes, from a profile folder of ours or of Dynamo.

    Args:
        tp: tensor-parallel size; Dynamo's folders have one, and only older ones say which.
        model: what is to be simulated, where it is known.
    Raises:
        ConfigError: the profile is of another model, lacks that size, or has too few points.
    """
    if has_manifest(folder):
        if model is not None:
            check_profile(folder, model)
        return timing_table(folder, tp)
    metrics = read_profile(folder, tp).metrics()
    prefill = [(point["tokens"], point["seconds"]) for point in metrics["prefill"]]
    decode = [(point["batch"], point["kv_tokens"], point["seconds"]) for point in metrics["decode"]]
    return grid_of(prefill, decode, str(folder))


def warm_up_trace(settings: ClusterSettings) -> Iterator[tuple[tuple[str, ...], str, str]]:
    """Return that the trace which predictors are to see first is not there: an entry of the seam ``file check``."""
    trace = settings.planner.classic.forecast.warm_up_trace
    if trace is not None and not Path(trace).exists():
        path = ("planner", "classic", "forecast", "warm_up_trace")
        yield path, f"{trace} is not there", "paths count from the current folder"


def says_size(folder: str | Path) -> bool:
    """Return whether a profile says of which tensor-parallel sizes it is: Dynamo's later ones do not."""
    return has_manifest(folder) or bool(_older(Path(folder), PREFILL_NPZ) or _older(Path(folder), DECODE_NPZ))


def _read_profile_part(root: Path, npz: str, plain: str, tp: int | None) -> tuple[Path, Mapping[str, Any]] | None:
    path = next((path for path in (root / npz, root / plain) if path.is_file()), None)
    if path is None:
        older = [each for each, size in _older(root, npz).items() if tp in (None, size)]
        if len(older) > 1:
            raise ConfigError(
                f"profile folder {root} has several: {' and '.join(each.parent.name for each in older)}",
                hint=f"rename the one that is served to {Path(npz).parent}",
            )
        if not older:
            return None
        path = older[0]
    if path.stat().st_size > BYTES_MAX:
        raise ConfigError(f"profile {path} is larger than {BYTES_MAX} bytes", hint="name the folder meant")
    if path.suffix == ".npz":
        return path, npz_arrays(path, f"profile {path}")
    return path, json_object(path, "profile", hint="it has one list of numbers per key")


def _older(root: Path, npz: str) -> dict[Path, int]:
    """Return the older files of a phase, with the tensor-parallel size in their folders' names."""
    # Dynamo's documents of 2025 spell it "interploation".
    names = npz.replace("selected_", "").replace("_interpolation", "_tp*_interp*ation")
    sizes = {path: re.search(r"_tp(\d+)_", path.parent.name) for path in sorted(root.glob(names)) if path.is_file()}
    return {path: int(size[1]) for path, size in sizes.items() if size is not None}


def _columns_of_profile(path: Path, table: Mapping[str, Any], keys: Sequence[str]) -> list[tuple[float, ...]]:
    found = [_checked_numbers(path, key, table.get(key)) for key in keys]
    for key, values in zip(keys, found, strict=True):
        if len(values) != len(found[0]):
            raise ConfigError(f"{path}: {key} has {len(values)} values, {keys[0]} has {len(found[0])}")
        if not values:
            raise ConfigError(f"{path}: {key} is empty", hint="measure the engine again")
    return found


def _checked_numbers(path: Path, key: str, value: Any) -> tuple[float, ...]:
    import numpy as np

    if value is None:
        raise ConfigError(f"{path}: lacks {key}", hint="profile the engine again, or name another folder")
    try:
        numbers = np.atleast_1d(np.asarray(value, dtype=np.float64))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{path}: {key} has something that is not a number: {error}") from error
    if numbers.ndim != 1 or not np.isfinite(numbers).all() or (numbers < 0.0).any():
        raise ConfigError(f"{path}: {key} must be a list of numbers, none of them negative or infinite")
    return tuple(numbers.tolist())


def _seconds_from_ms(ms: Sequence[float]) -> tuple[float, ...]:
    return tuple(each / 1000.0 for each in ms)
