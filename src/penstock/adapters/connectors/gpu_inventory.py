"""GPU inventory of this machine: reads nvidia-smi and CUDA_VISIBLE_DEVICES."""

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.kernel.errors import ConfigError

SMI_TIMEOUT = 20.0
"""Seconds; the first call after a boot loads the driver."""
_KNOB = "say which with supervise.gpus, such as supervise.gpus=0,1"


@dataclass(frozen=True, slots=True)
class GpuInventory:
    """Indices of GPUs, and the source that lists them."""

    gpus: tuple[int, ...]
    source: str


def inventory(requested: Sequence[int] | None, env: Mapping[str, str]) -> GpuInventory:
    """Find the GPUs that engines may be given: those of the knob, else those that nvidia-smi lists and
    CUDA_VISIBLE_DEVICES leaves over, else those of CUDA_VISIBLE_DEVICES alone. A machine without a driver has none.

    Raises:
        ConfigError: CUDA_VISIBLE_DEVICES names what nvidia-smi does not list, or the knob names one twice.
    """
    if requested is not None:
        if len(set(requested)) != len(requested):
            raise ConfigError(f"supervise.gpus names a GPU twice: {', '.join(map(str, requested))}")
        return GpuInventory(tuple(requested), "supervise.gpus")
    listed = _listed_gpus(env)
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return GpuInventory(tuple(listed), "nvidia-smi") if listed else GpuInventory((), "no nvidia-smi here")
    names = [name.strip() for name in visible.split(",") if name.strip()]
    indices = []
    for name in names:
        if name.startswith("-"):
            break  # as CUDA reads it: nothing behind an index below 0 counts
        index = int(name) if name.isdigit() else next((i for i, uuid in listed.items() if uuid.startswith(name)), None)
        if index is None or (listed and index not in listed):
            raise ConfigError(f"CUDA_VISIBLE_DEVICES names {name!r}, which nvidia-smi does not list", hint=_KNOB)
        indices.append(index)
    return GpuInventory(tuple(dict.fromkeys(indices)), "CUDA_VISIBLE_DEVICES")


def _listed_gpus(env: Mapping[str, str]) -> dict[int, str]:
    """Return what nvidia-smi lists: index -> UUID; nothing where it is missing or its driver does not answer."""
    program = shutil.which("nvidia-smi", path=env.get("PATH"))
    if program is None:
        return {}
    try:
        done = subprocess.run(
            [program, "--query-gpu=index,uuid", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=SMI_TIMEOUT,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return {}
    if done.returncode != 0:
        return {}
    rows = [line.split(",") for line in done.stdout.splitlines()]
    return {int(row[0]): row[1].strip() for row in rows if len(row) == 2 and row[0].strip().isdigit()}
