"""Options of ``penstock simulate``, and the faults and scaling policies that they name."""

import importlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import msgspec

from penstock.kernel.errors import ConfigError
from penstock_lab.report.traffic_options import TrafficOptions
from penstock_lab.simulate.scale_policy import ScalePolicy
from penstock_lab.simulate.simulation_plan import Fault, FaultKind


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateOptions(TrafficOptions):
    """One call of ``penstock simulate``. Times in seconds.

    Args:
        config: YAML file of a cluster, as ``penstock up`` takes it; None is the embedded default.
        overrides: ``name=value`` for every variant.
        compare: ``name=value,value``: a variant for each value, and for each combination of several such.
        workers: engines of every pool, instead of the number in the config.
        host_cache, disk_cache: bytes of each engine's tiers, instead of the config's.
        adapters: LoRA adapters that requests name, such as ``count=200,skew=1``; None names none.
        encode: engines that only encode images, beside the others.
        prefill, decode: engines with only that role; where the config has no such pools, its one pool is split in two.
        closed_loop: a session's next turn comes a pause after the answer before it, not at its planned time.
        model: which of the config's models; unset where there is only one. With ``gpu``, a known model or a file.
        gpu, gpus: simulate that model on so many of these GPUs per engine, by their data sheet.
        concurrency: so many clients with one request at a time each, in place of a rate.
        start_up, start_up_sigma: how long a worker that is added or returns takes until it serves.
        policy: ``MODULE:NAME`` of a scaling policy, called every ``policy_interval``.
        slo_ttft, slo_itl: targets instead of the config's.
        decisions: write decisions.jsonl.
        jobs: variants that run at once, each in a process of its own; None is one for each core.
    """

    config: str | None = None
    overrides: Sequence[str] = ()
    compare: Sequence[str] = ()
    closed_loop: bool = False
    workers: int | None = None
    host_cache: float | None = None
    disk_cache: float | None = None
    prefill: int | None = None
    decode: int | None = None
    encode: int | None = None
    adapters: str | None = None
    model: str | None = None
    gpu: str | None = None
    gpus: int = 1
    concurrency: int | None = None
    faults: Sequence[Fault] = ()
    start_up: float = 0.0
    start_up_sigma: float = 0.0
    policy: str | None = None
    policy_interval: float = 30.0
    slo_ttft: float | None = None
    slo_itl: float | None = None
    json: bool = False
    out: Path = Path("runs")
    html: bool = True
    decisions: bool = True
    jobs: int | None = None


def policy_of(text: str) -> ScalePolicy:
    """Import a scaling policy by ``MODULE:NAME``; a class is made without arguments.

    Raises:
        ConfigError: it can't be imported, or has no method decide.
    """
    module, colon, name = text.partition(":")
    if not colon or not module or not name:
        raise ConfigError(f"the policy {text!r} is not MODULE:NAME", hint="such as my_policies:Reactive")
    here = str(Path.cwd())
    if here not in sys.path:  # an installed program does not look for modules in the current folder
        sys.path.insert(0, here)
    try:
        policy = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"the policy {text!r} can't be imported: {error}") from error
    made = policy() if isinstance(policy, type) else policy
    if not isinstance(made, ScalePolicy):
        raise ConfigError(
            f"the policy {text!r} has no method decide(seen)", hint="see penstock_lab.simulate.scale_policy.ScalePolicy"
        )
    return made


def fault_of(text: str) -> Fault:
    """Read ``at=60,kind=fail,worker=main-0,restart=5``.

    Raises:
        ConfigError: a field or its value is none of a fault's.
    """
    fields = dict(part.partition("=")[::2] for part in text.split(","))
    return _checked_fault({name.strip(): value.strip() for name, value in fields.items()}, f"the fault {text!r}")


def faults_of(path: Path) -> list[Fault]:
    """Read a JSON list of faults.

    Raises:
        ConfigError: the file can't be read, or an entry is no fault.
    """
    try:
        entries = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(entries, list):
        raise ConfigError(f"{path} holds no list of faults")
    return [_checked_fault(entry, f"{path}[{number}]") for number, entry in enumerate(entries)]


def _checked_fault(entry: Any, where: str) -> Fault:
    if isinstance(entry, dict) and entry.get("restart") == "never":
        entry = {**entry, "restart": None}
    try:
        return msgspec.convert(entry, Fault, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"{where}: {error}",
            hint=f"a fault has at, kind ({', '.join(get_args(FaultKind))}), worker, pool, restart, role",
        ) from error
