"""Writer of profile folders, for tests of what reads them."""

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from penstock.planner.performance.speed_sources import Profile
from penstock_dynamo.profile_folder import (
    DECODE_JSON,
    DECODE_KEYS,
    DECODE_NPZ,
    KV_KEY,
    PREFILL_JSON,
    PREFILL_KEYS,
    PREFILL_NPZ,
)


def write_profile(profile: Profile, folder: str | Path, layout: Literal["npz", "json"] = "npz") -> list[Path]:
    """Write a profile into a folder, made if absent; return the files."""
    root = Path(folder)
    parts: list[tuple[str, str, dict[str, Any]]] = []
    if profile.prefill_isl:
        ttft = [1000.0 * each for each in profile.prefill_ttft]
        values = dict(zip(PREFILL_KEYS, (profile.prefill_isl, ttft, profile.prefill_per_gpu), strict=True))
        parts.append((PREFILL_NPZ, PREFILL_JSON, values))
    if profile.usage:
        itl = [1000.0 * each for each in profile.itl]
        columns = (profile.usage, profile.context, itl, profile.decode_per_gpu)
        parts.append((DECODE_NPZ, DECODE_JSON, {**dict(zip(DECODE_KEYS, columns, strict=True)), KV_KEY: None}))
    written = []
    for npz, plain, values in parts:
        path = root / (npz if layout == "npz" else plain)
        room = [profile.kv_tokens] if layout == "npz" else profile.kv_tokens
        told = {key: room if key == KV_KEY else list(value) for key, value in values.items()}
        raw = _npz(told) if layout == "npz" else json.dumps(told, indent=1).encode()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(raw)
        written.append(path)
    return written


def _npz(values: Mapping[str, Any]) -> bytes:
    out = io.BytesIO()
    whole = ("prefill_isl", KV_KEY)
    arrays: dict[str, Any] = {
        key: np.asarray(value, dtype=np.int64 if key in whole else np.float64) for key, value in values.items()
    }
    np.savez(out, **arrays)
    return out.getvalue()
