"""Options of ``penstock simulate``."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.report.traffic_options import TrafficOptions
from penstock.simulate.simulation_plan import Fault


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
