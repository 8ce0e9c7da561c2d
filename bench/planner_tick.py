"""How long does a tick of policy slo take, by the number of workers? The time is taken around the machine.

usage: python bench/planner_tick.py [TICKS]      medians and the highest of so many ticks, 200 by default
"""

import math
import statistics
import sys
import time

from penstock.kernel.machine import Woken, nanos
from penstock.kernel.values import Pool, Role, Slo, StepStats, Traffic, WorkerId
from penstock.planner import events as planning
from penstock.planner.observation import EngineState, ModelState, Observation, PoolState
from penstock.planner.performance.speed_sources import KnownSpeeds
from penstock.planner.planner import Planner
from penstock.planner.policies import PolicyInputs, plugins_of
from penstock.planner.settings import BudgetSettings, PlannerSettings
from penstock.planner.sizing.workload_mix import shape_bin

TICK = 5.0
METRICS = {
    "prefill": [{"tokens": n, "seconds": 0.01 + n * 1e-4} for n in (100, 1000, 4000, 16_000)],
    "decode": [
        {"batch": b, "kv_tokens": kv, "seconds": 0.01 + b * 1e-5 + kv * 4e-8}
        for b in (1, 16, 64, 256)
        for kv in (1000, 50_000, 400_000)
    ],
}
STEPS = StepStats(
    passes=200, wall=4.0, prefill_tokens=20_000, prefill_requests=5, decode_seqs=4000, decode_kv=8_000_000
)


def look(at: float, rate: float, workers: dict[Role, int]) -> Observation:
    """Return what a planner sees of a fleet under a rate, with a mix of sixty kinds of requests."""
    arrived = round(rate * TICK)
    shapes = {shape_bin(500 * (n % 12 + 1), 50 * (n % 5 + 1), 0.0): max(1, arrived // 60) for n in range(60)}
    traffic = Traffic(
        seconds=TICK,
        arrived=arrived,
        prompt_tokens=arrived * 3000,
        answered=arrived,
        answered_prompt_tokens=arrived * 3000,
        output_tokens=arrived * 150,
        judged=arrived,
        in_slo=arrived,
        shapes=shapes,
    )
    pools = {
        role: PoolState(
            pool=Pool(model="m", role=role, desired=count),
            ready=count,
            engines=tuple(
                EngineState(worker=WorkerId(f"{role}-{n}"), role=role, steps=STEPS, running=20, waiting=0)
                for n in range(count)
            ),
        )
        for role, count in workers.items()
    }
    return Observation(at=at, window=TICK, models={"m": ModelState(traffic=traffic, pools=pools, queued=0)})


def measure(workers: dict[Role, int], ticks: int) -> tuple[float, float]:
    """Return median and highest milliseconds of a tick."""
    total = sum(workers.values())
    settings = PlannerSettings(budget=BudgetSettings(max_gpus=round(total * 1.25), min_replicas=1))
    known = PolicyInputs(
        slo=Slo(ttft=2.0, itl=0.03),
        speeds={"": {role: KnownSpeeds(metrics={"self-benchmark": METRICS}) for role in workers}},
    )
    planner = Planner(settings, plugins_of(settings, known), strict=True)
    taken = []
    for number in range(ticks + 20):
        at = (number + 1) * TICK
        seen = look(at, total * (0.8 + 0.2 * math.sin(at / 200.0)), workers)
        started = time.perf_counter()
        for effect in planner.handle(nanos(at), Woken()):
            if isinstance(effect, planning.Observe):
                planner.handle(nanos(at), planning.Observed(id=effect.id, observation=seen))
        if number >= 20:
            taken.append((time.perf_counter() - started) * 1e3)
    return statistics.median(taken), max(taken)


def main() -> None:
    ticks = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    layouts: list[dict[Role, int]] = [
        {"aggregated": 8},
        {"aggregated": 64},
        {"prefill": 24, "decode": 40},
        {"aggregated": 1024},
        {"prefill": 400, "decode": 624},
    ]
    for workers in layouts:
        median, highest = measure(workers, ticks)
        told = " + ".join(f"{count} {role}" for role, count in workers.items())
        print(f"{told}: median {median:.1f} ms, highest {highest:.1f} ms")


if __name__ == "__main__":
    main()
