"""What does a tenant that floods do to the others? p95 TTFT on virtual time, with and without shares.

usage: python bench/tenants.py [--seeds 5] [--docs docs/guides/tenants.md]

Four tenants of equal weight share four simulated engines that they fill to three quarters. Then one of them sends ten
times as much. The production router decides, on virtual time: the same seed gives the same numbers on every machine.
"""

import argparse
import heapq
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from penstock.kernel.request_record import RequestRecord, weighted_percentile
from penstock.router.settings import QueueSettings, RouterSettings
from penstock_lab.engine.settings import SimSettings
from penstock_lab.report.markdown import write_part
from penstock_lab.simulate.simulated_cluster import SimulatedCluster
from penstock_lab.simulate.simulation_plan import PoolPlan, SimulationPlan
from penstock_lab.traffic.arrivals import poisson
from penstock_lab.traffic.traffic_request import TrafficRequest

FLOODER = "flooder"
TENANTS = (FLOODER, "one", "two", "three")
ENGINES = 4
RATE = 10.0
"""Requests per second of each tenant: together about three quarters of what the engines can do."""
TIMES = 10
"""How many times its share the flooder sends."""
SECONDS = 60.0
SETTLE = 10.0
"""Seconds at the start that are not counted: the fleet fills."""
SHARES = QueueSettings(shares=dict.fromkeys(TENANTS, 1.0), wait_max=20.0)


def requests(tenant: str, rate: float, seed: str) -> Iterator[TrafficRequest]:
    """Return a tenant's requests: prompts of 500 to 3,000 tokens, answers of 50 to 250."""
    rng = random.Random(seed)
    lengths = random.Random(f"{seed} lengths")
    for at in poisson(rate, rng):
        if at >= SECONDS:
            return
        isl, osl = lengths.randint(500, 3000), lengths.randint(50, 250)
        yield TrafficRequest(at=at, isl=isl, osl=osl, tenant=tenant)


def traffic(seed: int, times: float) -> Iterator[TrafficRequest]:
    """Return all tenants' requests; the flooder sends ``times`` its share, the others the same whatever it does."""
    rates = {tenant: RATE * (times if tenant == FLOODER else 1) for tenant in TENANTS}
    streams = [requests(tenant, rate, f"{seed} {tenant}") for tenant, rate in rates.items()]
    return heapq.merge(*streams, key=lambda request: request.at)


def run(seed: int, times: float, queue: QueueSettings) -> list[RequestRecord]:
    """Return the records of one simulated run."""
    sim = SimSettings(kv_blocks=8192, emit_decode_blocks=False)
    plan = SimulationPlan(
        model="m",
        pools={"main": PoolPlan(sim=sim, replicas=ENGINES)},
        router=RouterSettings(queue=queue),
        seed=seed,
    )
    records: list[RequestRecord] = []
    SimulatedCluster(plan, traffic(seed, times), record=records.append).run()
    return records


def ttft_p95(records: Sequence[RequestRecord]) -> float:
    """Return the p95 of the others' TTFT in seconds; a request that was not answered counts as the worst."""
    others = [record for record in records if record.tenant != FLOODER and record.arrival >= SETTLE]
    values = sorted(float("inf") if record.ttft is None else record.ttft for record in others)
    return weighted_percentile([(value, 1) for value in values], 0.95)


def moved(seed: int, queue: QueueSettings) -> tuple[float, float]:
    """Return the others' p95 TTFT in seconds before the flood and in it."""
    return ttft_p95(run(seed, 1.0, queue)), ttft_p95(run(seed, TIMES, queue))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--docs", type=Path)
    given = parser.parse_args()
    lines = [
        "| seed | `router.queue.shares` | the others' p95 TTFT, all at their shares | in the flood | moved |",
        "|---:|---|---:|---:|---:|",
    ]
    for seed in range(1, given.seeds + 1):
        for name, queue in (("off", QueueSettings()), ("on", SHARES)):
            before, after = moved(seed, queue)
            lines.append(
                f"| {seed} | {name} | {before * 1e3:.0f} ms | {after * 1e3:,.0f} ms | {after / before - 1:+.1%} |"
            )
    text = "\n".join(lines)
    print(text)
    if given.docs is not None:
        write_part(given.docs, text, "tenants")


if __name__ == "__main__":
    main()
