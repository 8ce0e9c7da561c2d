"""How many LoRA adapters should an engine hold? Cold loads, evictions and TTFT on virtual time, by slots and router.

usage: python bench/adapters.py [--seeds 3] [--docs docs/bench/adapters.md]

Four simulated engines get requests that name 200 adapters by a Zipf. The production router decides, so that the same
seed gives the same numbers on every machine.
"""

import argparse
import random
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from penstock.kernel.request_record import RequestRecord, weighted_percentile
from penstock.router.settings import QueueSettings, RouterSettings
from penstock_lab.engine.settings import SimSettings
from penstock_lab.report.markdown import write_part
from penstock_lab.simulate.simulated_cluster import SimulatedCluster
from penstock_lab.simulate.simulation_plan import PoolPlan, SimulationPlan
from penstock_lab.traffic.adapter_mix import AdapterMix
from penstock_lab.traffic.arrivals import poisson
from penstock_lab.traffic.traffic_request import TrafficRequest

ENGINES = 4
ADAPTERS = 200
RATE = 12.0
"""Requests per second."""
SECONDS = 240.0
SLOTS = (8, 16, 32, 64)
MODES: tuple[Any, ...] = ("kv", "round_robin")
SIM = SimSettings(kv_blocks=8192, emit_decode_blocks=False)


def requests(seed: int) -> Iterator[TrafficRequest]:
    """Return requests of 500 to 1,500 prompt tokens and answers of 50 to 150."""
    lengths = random.Random(f"{seed} lengths")
    for at in poisson(RATE, random.Random(f"{seed} arrivals")):
        if at >= SECONDS:
            return
        yield TrafficRequest(at=at, isl=lengths.randint(500, 1500), osl=lengths.randint(50, 150))


def run(seed: int, slots: int, mode: Any) -> tuple[dict[str, int], list[RequestRecord]]:
    """Return what became of the adapters in one simulated run, and its records."""
    plan = SimulationPlan(
        model="m",
        pools={"main": PoolPlan(sim=SIM, replicas=ENGINES, adapter_slots=slots)},
        router=RouterSettings(mode=mode, queue=QueueSettings(wait_max=60.0)),
        seed=seed,
    )
    records: list[RequestRecord] = []
    cluster = SimulatedCluster(plan, AdapterMix(count=ADAPTERS).named(requests(seed), seed), record=records.append)
    cluster.run()
    return cluster.adapters(), records


def row(slots: int, mode: Any, seeds: int) -> str:
    """Return medians over the seeds as a line of the table."""
    columns: list[list[float]] = []
    for seed in range(1, seeds + 1):
        counts, records = run(seed, slots, mode)
        waits = sorted(float("inf") if record.ttft is None else record.ttft for record in records)
        points = [weighted_percentile([(value, 1) for value in waits], q) * 1e3 for q in (0.5, 0.95, 0.99)]
        columns.append([100 * counts["load"] / len(records), counts["unload"], *points])
    cold, unloads, *points = (median(column) for column in zip(*columns, strict=True))
    shown = (f"{point:,.0f} ms" if point < float("inf") else "not answered" for point in points)
    return f"| {slots} | `{mode}` | {cold:.1f} % | {unloads:,.0f} | {' | '.join(shown)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--docs", type=Path)
    given = parser.parse_args()
    lines = [
        "| `max_cpu_loras` | `router.mode` | requests that had it loaded | unloaded for others "
        "| TTFT p50 | p95 | p99 |",
        "|---:|---|---:|---:|---:|---:|---:|",
    ]
    for slots in SLOTS:
        for mode in MODES:
            lines.append(row(slots, mode, given.seeds))
            print(lines[-1], flush=True)
    if given.docs is not None:
        write_part(given.docs, "\n".join(lines))


if __name__ == "__main__":
    main()
