"""Do KV tiers pay? Simulates traces with and without them, per size and eviction order, and prints where they do not.

usage: python bench/tiers/run.py [--traces FOLDER] [--requests 1200] [--docs FILE]

The machine that decides about blocks is the one that serves; engines are the roofline of a model on a GPU, links are
the defaults of ``sim.tier_links``. The Mooncake trace is that of --traces, PENSTOCK_TRACES or ../shared/traces; where
it is absent, our own agent workload is all that there is.
"""

import argparse
import os
import platform
import random
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Literal, NamedTuple

from table import Cell, break_even, cells

import penstock
import penstock_lab
from penstock_lab.config.timing_files import load_timing
from penstock_lab.engine.kv_capacity import with_blocks
from penstock_lab.engine.settings import SimSettings, TimingSettings
from penstock_lab.report.markdown import write_part
from penstock_lab.simulate.simulated_cluster import SimulatedCluster
from penstock_lab.simulate.simulation_plan import PoolPlan, SimulationPlan
from penstock_lab.simulate.tiers.tier_plan import TierPlan
from penstock_lab.traffic.formats.mooncake import MooncakeTrace
from penstock_lab.traffic.traffic_request import TrafficRequest

ROOT = Path(__file__).resolve().parents[2]
TRACE = "mooncake_conversation_first6000.jsonl"
GIB = 1 << 30
ENGINES = 4
BLOCK = 512
"""Tokens: the block of the Mooncake traces, which know nothing finer."""
NONE = TierPlan()
HOST = TierPlan(host=128 * GIB, order="lru")
BOTH = TierPlan(host=128 * GIB, disk=2048 * GIB, order="lru")
PEERS = TierPlan(host=128 * GIB, order="lru", peers=True)
SMALL = TierPlan(host=32 * GIB, order="lru")
ORDERS = {order: TierPlan(host=64 * GIB, order=order) for order in ("lru", "priority")}
RATES = {("conversation", "Llama-3.1-8B"): 2.0, ("agent", "Llama-3.1-8B"): 5.0}
"""Requests per second at which these engines are busy and keep up; others get `RATE`."""
RATE = 1.5
FULL = 10.0
"""Times that rate: engines are never idle then, and the GPU-hours until the last answer are what the work takes."""


class Job(NamedTuple):
    """One row of a table; ``full``: also its GPU-hours at full load."""

    traffic: str
    model: str
    gpus: int
    label: str
    plan: TierPlan
    mode: Literal["kv", "round_robin"] = "kv"
    full: bool = True


def jobs_of(traffic: str) -> list[Job]:
    """Return the rows for one kind of traffic."""
    small = (traffic, "Llama-3.1-8B", 1)
    large = (traffic, "Llama-3.1-70B", 4)
    rows = [Job(*small, "none", NONE), Job(*small, "host 128 GiB", HOST), Job(*small, "host + disk 2 TiB", BOTH)]
    if traffic == "agent":
        return rows
    return [
        *rows,
        Job(*small, "host 32 GiB", SMALL, full=False),
        *(Job(*small, f"host 64 GiB, {order}", plan, full=False) for order, plan in ORDERS.items()),
        Job(*small, "round robin: none", NONE, "round_robin"),
        Job(*small, "round robin: host 128 GiB", HOST, "round_robin"),
        Job(*small, "round robin: host + peers", PEERS, "round_robin"),
        Job(*large, "none", NONE),
        Job(*large, "host + disk 2 TiB", BOTH),
    ]


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    trace = options.traces / TRACE
    kinds = ["conversation", "agent"] if trace.exists() else ["agent"]
    if not trace.exists():
        print(f"no trace {trace}: name its folder with --traces or PENSTOCK_TRACES", file=sys.stderr)
    jobs = [job for kind in kinds for job in jobs_of(kind)]
    found: list[Cell] = []
    with ProcessPoolExecutor() as pool:
        for cell in pool.map(partial(measure, trace, options.requests), jobs):
            found.append(cell)
            print(cell, flush=True)
    text = "\n\n".join((about(options), cells(found), break_even()))
    print(text)
    if options.docs is not None:
        write_part(options.docs, text)
    return 0


def measure(trace: Path, count: int, job: Job) -> Cell:
    """Simulate one row."""
    rate = RATES.get((job.traffic, job.model), RATE)

    def requests(speed: float) -> Iterator[TrafficRequest]:
        return islice(agent(rate * speed) if job.traffic == "agent" else conversation(trace, rate * speed), count)

    cluster, ended, wall = simulate(job, requests(1.0))
    cell = cell_of(job, ended)._replace(wall=wall)
    if job.full:
        cluster, _, _ = simulate(job, requests(FULL))
        cell = cell._replace(full_hours=cluster.gpu_hours())
    return cell


def simulate(
    job: Job, requests: Iterator[TrafficRequest]
) -> tuple[SimulatedCluster, list[penstock.RequestRecord], float]:
    """Simulate one run; returns it with its records and the seconds that it took."""
    timing = TimingSettings(kind="roofline", model=job.model, gpu="h100", tensor_parallel_size=job.gpus)
    sim = SimSettings(block_size=BLOCK, async_scheduling=True, max_model_len=1_000_000, timing=timing)
    table = load_timing(timing)
    sim = with_blocks(sim, table)
    pool = PoolPlan(sim=sim, replicas=ENGINES, gpus=job.gpus, table=table, cache=job.plan)
    ended: list[penstock.RequestRecord] = []
    router = penstock.RouterSettings(mode=job.mode, request_timeout=100_000.0)
    cluster = SimulatedCluster(
        SimulationPlan(model="m", pools={"main": pool}, router=router), requests, record=ended.append
    )
    began = time.perf_counter()
    cluster.run()
    return cluster, ended, time.perf_counter() - began


def cell_of(job: Job, ended: list[penstock.RequestRecord]) -> Cell:
    """Return the figures of a run."""
    prompt = sum(each.isl or 0 for each in ended)
    ttfts = sorted(each.ttft for each in ended if each.ttft is not None)
    tiers: dict[str, int] = {}
    for each in ended:
        for tier, tokens in (each.cached_by_tier or {}).items():
            tiers[tier] = tiers.get(tier, 0) + tokens
    return Cell(
        traffic=job.traffic,
        model=job.model,
        gpus=job.gpus,
        label=job.label,
        requests=len(ended),
        hit_rate=sum(each.cached or 0 for each in ended) / prompt,
        tiers={tier: tokens / prompt for tier, tokens in tiers.items()},
        ttft_mean=sum(ttfts) / len(ttfts),
        ttft_p90=ttfts[int(0.9 * len(ttfts))],
    )


def conversation(trace: Path, rate: float) -> Iterator[TrafficRequest]:
    """Yield the trace at another mean rate."""
    with trace.open("rb") as lines:
        rows = list(MooncakeTrace(lines))
    slower = (len(rows) - 1) / (rows[-1].at - rows[0].at) / rate
    for row in rows:
        yield TrafficRequest(
            at=row.at * slower, isl=row.isl, osl=row.osl, hash_ids=row.hash_ids, block_size=row.block_size
        )


def agent(rate: float) -> Iterator[TrafficRequest]:
    return penstock_lab.workload("agent", rate, random.Random(1))


def about(options: argparse.Namespace) -> str:
    day = time.strftime("%Y-%m-%d")
    return (
        f"{day}, Python {platform.python_version()}, {os.cpu_count()} cores; {options.requests:,} requests per cell, "
        f"{ENGINES} engines, blocks of {BLOCK} tokens, KV-aware routing."
    )


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    traces = Path(os.environ.get("PENSTOCK_TRACES") or ROOT.parent / "shared" / "traces")
    parser.add_argument("--traces", type=Path, default=traces)
    parser.add_argument("--requests", type=int, default=1200)
    parser.add_argument("--docs", type=Path)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
