"""GPU inventory of this machine: reads nvidia-smi and CUDA_VISIBLE_DEVICES, gives each GPU to at most one engine."""

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
    listed = _listed(env)
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


class GpuAllocator:
    """The GPUs of the inventory that no engine has."""

    def __init__(self, available: GpuInventory) -> None:
        self.all = available.gpus
        self.source = available.source
        self._free = list(available.gpus)

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> tuple[int, ...] | None:
        """Take the lowest free GPUs, or return None where there are too few."""
        if count > len(self._free):
            return None
        taken, self._free = tuple(self._free[:count]), self._free[count:]
        return taken

    def claim(self, gpus: Sequence[int]) -> bool:
        """Take the GPUs of an adopted engine; return False where one of them is not free."""
        if not set(gpus) <= set(self._free):
            return False
        self._free = [gpu for gpu in self._free if gpu not in gpus]
        return True

    def give(self, gpus: Sequence[int]) -> None:
        """Give some GPUs back."""
        self._free = [gpu for gpu in self.all if gpu in self._free or gpu in gpus]

    def __str__(self) -> str:
        return f"{', '.join(map(str, self.all)) or 'none'} ({self.source})"


def _listed(env: Mapping[str, str]) -> dict[int, str]:
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
