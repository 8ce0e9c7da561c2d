"""Measured engines: those that a profile starts itself, one per tensor-parallel size, and those that run at a URL."""

import os
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import aiohttp
import msgspec

from penstock.adapters.connectors.gpu_inventory import SMI_TIMEOUT, inventory
from penstock.adapters.connectors.shim_client import ShimClient, ending, tail
from penstock.adapters.engines.describe import describe, ready
from penstock.adapters.engines.http.engine_access import key_env, read_access
from penstock.adapters.engines.launch import launch_of
from penstock.adapters.listen_address import free_port
from penstock.config.cluster_secret_file import without_secrets
from penstock.config.derived.engine_flags import TP_SIZE
from penstock.config.settings.cluster_settings import PoolSettings
from penstock.kernel.errors import ConfigError, EngineError
from penstock.kernel.values import WorkerCard, WorkerId

STOP_GRACE = 30.0
"""Seconds that an engine gets to end; vLLM frees its GPUs in that time."""
SIM_SIZES = (1, 2, 4, 8)
"""Sizes of a simulated engine whose timing knows of sizes, as of one machine with eight GPUs."""


class FoundGpus(NamedTuple):
    """GPUs of this machine. ``name``, ``memory_mib``: of the first; ``links``: what joins two of them, such as NV18."""

    indices: tuple[int, ...] = ()
    name: str | None = None
    memory_mib: int | None = None
    links: str | None = None


def machine_gpus(env: Mapping[str, str]) -> FoundGpus:
    """Return the GPUs that engines may use, with their memory and links; a machine without a driver has none."""
    indices = inventory(None, env).gpus
    if not indices:
        return FoundGpus()
    listing = _nvidia_smi(env, "--query-gpu=index,name,memory.total", "--format=csv,noheader,nounits")
    rows = {int(row[0]): row for line in listing.splitlines() if len(row := line.split(", ")) == 3}
    if (first := rows.get(indices[0])) is None:
        return FoundGpus(indices)
    memory = int(first[2]) if first[2].isdecimal() else None  # some have none of their own, and say so in words
    return FoundGpus(indices, first[1], memory, link_between(_nvidia_smi(env, "topo", "-m"), indices[:2]))


def link_between(topology: str, gpus: Sequence[int]) -> str | None:
    """Return what joins two GPUs in nvidia-smi's matrix: NV and a number of links, PIX, NODE, SYS; None for fewer."""
    rows = {cells[0]: cells[1:] for line in topology.splitlines() if (cells := line.split())}
    row = rows.get(f"GPU{gpus[0]}") if gpus else None
    if row is None or len(gpus) < 2 or gpus[1] >= len(row):
        return None
    return row[gpus[1]]


def _nvidia_smi(env: Mapping[str, str], *words: str) -> str:
    program = shutil.which("nvidia-smi", path=env.get("PATH"))
    if program is None:
        return ""
    try:
        done = subprocess.run([program, *words], capture_output=True, text=True, timeout=SMI_TIMEOUT, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def sizes_of(pool: PoolSettings, wanted: Sequence[int], gpus: int) -> tuple[int, ...]:
    """Return the tensor-parallel sizes to measure: those wanted, else all powers of two that the machine has GPUs for.

    Raises:
        ConfigError: a size needs more GPUs than there are, or this kind of engine has no sizes.
    """
    if pool.engine == "sim":
        sized = pool.sim.timing.kind in ("roofline", "operators", "aiconfigurator")
        return tuple(wanted) or (SIM_SIZES if sized else (1,))
    if pool.engine != "vllm" and any(size > 1 for size in wanted):
        raise ConfigError(f"--tp: {pool.engine} is started with one size only", hint="leave --tp out")
    if wanted and max(wanted) > max(1, gpus):
        raise ConfigError(f"--tp {max(wanted)} needs as many GPUs, and there are {gpus}", hint="ask for fewer")
    if wanted or pool.engine != "vllm":
        return tuple(wanted) or (1,)
    return tuple(1 << power for power in range(max(1, gpus).bit_length()))


def of_size(pool: PoolSettings, tp: int) -> PoolSettings:
    """Return a pool's settings for an engine of a size."""
    if pool.engine != "sim":
        return pool
    timing = msgspec.structs.replace(pool.sim.timing, tensor_parallel_size=tp)
    return msgspec.structs.replace(pool, sim=msgspec.structs.replace(pool.sim, timing=timing))


class StartedEngine(NamedTuple):
    """An engine that serves, and the seconds from its command to its first answer."""

    card: WorkerCard
    seconds: float


def _log_path(logs: Path, name: str) -> Path:
    logs.mkdir(parents=True, exist_ok=True)
    return logs / f"{name}.log"


@asynccontextmanager
async def started_engine(
    http: aiohttp.ClientSession, model: str, pool: PoolSettings, tp: int, gpus: Sequence[int], logs: Path
) -> AsyncIterator[StartedEngine]:
    """Start an engine, wait until it answers, and end it with the block.

    Raises:
        EngineError: it did not start; the message has the end of its log.
    """
    name = f"{pool.role}-tp{tp}"
    log_path = _log_path(logs, name)
    launch = launch_of(name, model, of_size(pool, tp), port=free_port(), gpus=tuple(gpus[:tp]))
    begun = time.monotonic()
    env = {**without_secrets(os.environ), **key_env(pool.engine, read_access(pool.access, "access"))}
    shim = await ShimClient.start(name, launch, log_path=log_path, grace=0.0, end=STOP_GRACE, env=env)
    try:
        url = launch.url
        if url is None:
            url = str((await shim.first_line(launch.start_timeout)).get("url"))

        def ended() -> str | None:
            return f"{name} ended at its start: {tail(log_path)}" if shim.ended else None

        await ready(http, url, launch.start_timeout, ended=ended)
        seconds = time.monotonic() - begun
        card = await describe(http, url, worker=WorkerId(name), epoch=1, overrides=launch.card)
        yield StartedEngine(card, seconds)
        if shim.ended:
            raise EngineError(f"{name} {ending(await shim.wait())} while it was measured", hint=tail(log_path))
    finally:
        await shim.stop(STOP_GRACE)


async def attached_engine(
    http: aiohttp.ClientSession,
    url: str,
    model: str | None,
    name: str,
    stats: str | None = None,
    labels: Mapping[str, str] | None = None,
) -> WorkerCard:
    """Return the card of an engine that runs at a URL.

    Args:
        stats: endpoint of its statistics plug-in; a simulated engine needs none. ``labels``: those of its card that
            others know, such as its size.
    Raises:
        EngineError: it can't be reached, or does not serve the model.
    """
    known = {"stats": stats, "labels": dict(labels or {})}
    return await describe(http, url.removesuffix("/v1"), worker=WorkerId(name), epoch=1, model=model, overrides=known)


def size_of(card: WorkerCard, wanted: Sequence[int]) -> int:
    """Return the tensor-parallel size of an engine that others started: as told, else by its card, else 1."""
    return wanted[0] if wanted else int(card.labels.get(TP_SIZE, "1"))
