"""What comes of one layout under one load? One simulated run, judged by every service level at once."""

import gc
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from plan import BLOCK, GPU, MAX_LEN, Layout, Model, Work
from workloads import requests_of

from penstock.kernel.request_record import RequestRecord, weighted_percentile
from penstock.kernel.statistics import percentile
from penstock.kernel.values import Slo
from penstock.router.settings import HandoffSettings, RouterSettings
from penstock_lab.engine.kv_capacity import kv_blocks_of
from penstock_lab.engine.settings import SimSettings, TimingSettings, TransferSettings
from penstock_lab.engine.timing.gpus import GPUS
from penstock_lab.engine.timing.model_shape import shape_of
from penstock_lab.simulate.simulated_cluster import SimulatedCluster
from penstock_lab.simulate.simulation_plan import PoolPlan, SimulationPlan
from penstock_lab.traffic.traffic_request import TrafficRequest


@dataclass(frozen=True, slots=True)
class Cell:
    """One run: ``work`` at ``rate`` requests per second on ``layout``."""

    work: Work
    layout: Layout
    rate: float
    seed: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a cell. ``shares``: of all submitted, in SLO, for each pair of the work; times in seconds."""

    submitted: int
    ok: int
    shares: Sequence[float]
    ttft_mean: float | None
    ttft_p90: float | None
    itl_mean: float | None
    itl_p90: float | None
    gap_p99: float | None
    """Of all waits between two tokens, not of requests' means."""
    hit_rate: float
    handed: int
    local: int
    preemptions: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def measure(cell: Cell, traces: Path | None, count: int | None = None) -> Outcome:
    """Simulate one cell; ``count`` requests instead of the plan's."""
    traffic = requests_of(cell.work, cell.rate, cell.seed, traces, count or cell.work.count(cell.rate))
    return judged(simulated(plan_of(cell), traffic), cell.work.pairs)


def plan_of(cell: Cell) -> SimulationPlan:
    """Return the cluster of a cell: one pool for each role, on the same GPUs."""
    layout, model = cell.layout, cell.work.model
    chunks = {"aggregated": layout.chunk}
    pools = {
        role: PoolPlan(
            sim=sim_of(model, chunks.get(role, 8192), layout.link, whole=layout.whole),
            replicas=count,
            gpus=model.tensor_parallel_size,
            role=role,
            table={"model": model.config},
        )
        for role, count in layout.workers.items()
    }
    router = RouterSettings(handoff=HandoffSettings(conditional=layout.conditional))
    ttft, itl = layout.slo or (None, None)
    slo = Slo(ttft=ttft, itl=itl)
    return SimulationPlan(model=model.name, pools=pools, router=router, slo=slo, seed=cell.seed)


def sim_of(model: Model, chunk: int, link: float = 1.0, *, whole: bool = False) -> SimSettings:
    """Return the engine of a model: by its shape and the GPU's data sheet, with the KV blocks that fit."""
    shape, gpu, width = shape_of(model.config), GPUS[GPU], model.tensor_parallel_size
    return SimSettings(
        block_size=BLOCK,
        kv_blocks=kv_blocks_of(shape, gpu, block_size=BLOCK, tensor_parallel_size=width),
        max_model_len=MAX_LEN,
        max_num_batched_tokens=chunk,
        enable_chunked_prefill=not whole,
        emit_decode_blocks=False,
        timing=TimingSettings(kind="roofline", model=model.name, gpu=GPU, tensor_parallel_size=width),
        transfer=TransferSettings(
            bandwidth=link * gpu.network_gb_per_s * 1e9 * width, kv_bytes_per_token=kv_bytes(model)
        ),
    )


def kv_bytes(model: Model) -> int:
    """Return the bytes of KV per token, all layers together."""
    shape = shape_of(model.config)
    return round(shape.kv_bytes(shape.dtype))


def simulated(plan: SimulationPlan, traffic: Sequence[TrafficRequest]) -> tuple[SimulatedCluster, list[RequestRecord]]:
    """Run a cluster to its end."""
    records: list[RequestRecord] = []
    cluster = SimulatedCluster(plan, traffic, record=records.append)
    gc.disable()  # a run makes no cycles, and a walk over its growing heap costs a fifth of it
    try:
        cluster.run()
    finally:
        gc.enable()
    return cluster, records


def judged(run: tuple[SimulatedCluster, list[RequestRecord]], pairs: Sequence[tuple[float, float]]) -> Outcome:
    """Hold a run's records against service levels."""
    cluster, records = run
    done = [one for one in records if one.outcome == "ok"]
    ttft = sorted(one.ttft for one in done if one.ttft is not None)
    itl = sorted(one.itl.mean for one in done if one.itl is not None)
    prompt = sum(one.isl or 0 for one in done)
    counts, gaps = cluster.handoffs(), cluster.gaps()
    return Outcome(
        submitted=len(records),
        ok=len(done),
        shares=[sum(one.within(Slo(ttft=pair[0], itl=pair[1])) for one in records) / len(records) for pair in pairs],
        ttft_mean=mean(ttft) if ttft else None,
        ttft_p90=percentile(ttft, 0.9) if ttft else None,
        itl_mean=mean(itl) if itl else None,
        itl_p90=percentile(itl, 0.9) if itl else None,
        gap_p99=weighted_percentile(gaps, 0.99) if gaps else None,
        hit_rate=sum(one.cached or 0 for one in done) / prompt if prompt else 0.0,
        handed=counts.get("done", 0),
        local=counts.get("local", 0),
        preemptions=cluster.world.preemptions,
    )
