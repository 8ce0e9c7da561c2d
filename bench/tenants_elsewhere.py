"""Does the rule of tenants' shares hold on other traffic, on traffic that it was not chosen on, and without a flood?

usage: python bench/tenants_elsewhere.py [--seeds 5] [--docs docs/guides/tenants.md]

The rule was chosen on `SEEN` and `STEADY`. Nobody looked at `UNSEEN` while choosing: those ran once, when it stood.
Virtual time, the production router.
"""

import argparse
import heapq
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from bench.tenants import ENGINES, RATE, SETTLE
from penstock.kernel.machine import Effect, Event, Nanos, Wake, Woken
from penstock.kernel.request_record import RequestRecord
from penstock.kernel.values import RequestId
from penstock.router.events import Arrived, PeerUpdate, Publish
from penstock.router.router import Router
from penstock.router.settings import QueueSettings, RouterSettings
from penstock_lab.engine.settings import SimSettings
from penstock_lab.report.markdown import write_part
from penstock_lab.simulate.effect_handlers import ROUTER
from penstock_lab.simulate.simulated_cluster import SimulatedCluster
from penstock_lab.simulate.simulation_plan import PoolPlan, SimulationPlan
from penstock_lab.traffic.arrival_patterns import parse_arrivals
from penstock_lab.traffic.traffic_request import TrafficRequest

SECONDS = 60.0
SEEDS = 101
"""First seed: bench/tenants.py has those from 1 on."""
FLOODERS = ("flooder", "second", "third")

Lengths = Callable[[random.Random], tuple[int, int]]


def even(rng: random.Random) -> tuple[int, int]:
    """Return prompts and answers as bench/tenants.py has them."""
    return rng.randint(500, 3000), rng.randint(50, 250)


def tailed(rng: random.Random) -> tuple[int, int]:
    """Return prompts of a long tail, with about the same mean of 1,750 tokens, and answers of one."""
    return min(12_000, round(rng.lognormvariate(7.0, 0.95))) + 16, min(1500, round(rng.lognormvariate(4.6, 0.8))) + 1


def chatty(rng: random.Random) -> tuple[int, int]:
    """Return short prompts and long answers."""
    return rng.randint(50, 400), rng.randint(300, 1200)


def long_prompts(rng: random.Random) -> tuple[int, int]:
    """Return prompts ten times as long."""
    return rng.randint(5_000, 15_000), rng.randint(50, 250)


@dataclass(frozen=True)
class TenantStream:
    """What one tenant asks for: at ``rate`` requests per second, and in the flood at ``flood``."""

    name: str
    arrivals: str = "poisson"
    lengths: Lengths = even
    rate: float = RATE
    flood_rate: float | None = None
    flood_arrivals: str | None = None
    flood_lengths: Lengths | None = None

    def requests(self, seed: str, flooding: bool) -> Iterator[TrafficRequest]:
        """Yield its requests; a tenant that does not flood has the same ones in both cases."""
        rate = (self.flood_rate if flooding else None) or self.rate
        pattern = parse_arrivals(
            (self.flood_arrivals if flooding else None) or self.arrivals, lambda text, unit: float(text)
        )
        lengths = (self.flood_lengths if flooding else None) or self.lengths
        own = random.Random(f"{seed} {self.name} lengths")
        for at in pattern.stream(rate, random.Random(f"{seed} {self.name}")):
            if at >= SECONDS:
                return
            isl, osl = lengths(own)
            yield TrafficRequest(at=at, isl=isl, osl=osl, tenant=self.name)


@dataclass(frozen=True)
class FloodCase:
    """Tenants that share the fleet."""

    name: str
    streams: tuple[TenantStream, ...]
    weights: dict[str, float] = field(default_factory=dict)
    engines: int = ENGINES
    kv_blocks: int = 8192

    def shares(self) -> QueueSettings:
        return QueueSettings(
            shares={each.name: self.weights.get(each.name, 1.0) for each in self.streams}, wait_max=20.0
        )


def others(count: int = 3, **more: object) -> tuple[TenantStream, ...]:
    return tuple(TenantStream(f"other-{number}", **more) for number in range(count))  # type: ignore[arg-type]


SEEN = (
    FloodCase(
        "ten times the share (the traffic of bench/tenants.py, other seeds)",
        (TenantStream("flooder", flood_rate=100.0), *others()),
    ),
    *(
        FloodCase(f"{times} times the share", (TenantStream("flooder", flood_rate=RATE * times), *others()))
        for times in (2, 3, 5)
    ),
    FloodCase(
        "bursty arrivals (gamma, cv 2)", (TenantStream("flooder", flood_rate=100.0), *others(arrivals="gamma:cv=2"))
    ),
    FloodCase(
        "prompts and answers with a long tail",
        (TenantStream("flooder", lengths=tailed, flood_rate=100.0), *others(lengths=tailed, rate=9.0)),
    ),
    FloodCase(
        "two tenants flood at once",
        (TenantStream("flooder", flood_rate=60.0), TenantStream("second", flood_rate=60.0), *others(2)),
    ),
    FloodCase(
        "a slow burst: up to ten times in 40 s",
        (TenantStream("flooder", flood_rate=100.0, flood_arrivals="ramp:first=0.1,last=1,over=40"), *others()),
    ),
    FloodCase(
        "on and off: 10 s of flood, 10 s of none",
        (TenantStream("flooder", flood_rate=40.0, flood_arrivals="bursts:on=10,off=10,quiet=0.05"), *others()),
    ),
    FloodCase(
        "as many requests, prompts six times as long",
        (TenantStream("flooder", flood_lengths=long_prompts), *others()),
    ),
    FloodCase(
        "eight tenants of unequal rates",
        (
            TenantStream("flooder", rate=5.0, flood_rate=50.0),
            *(TenantStream(f"other-{n}", rate=r) for n, r in enumerate((1, 2, 3, 5, 6, 8, 10))),
        ),
    ),
    FloodCase(
        "unequal weights: the flooder has half of what another has",
        (TenantStream("flooder", flood_rate=100.0), *others()),
        weights={"other-0": 2.0},
    ),
)

UNSEEN = (
    FloodCase(
        "eight engines, six tenants",
        (TenantStream("flooder", rate=13.0, flood_rate=150.0), *others(5, rate=13.0)),
        engines=8,
    ),
    FloodCase(
        "sixteen tenants, three flood",
        (
            *(TenantStream(name, rate=2.5, flood_rate=30.0) for name in FLOODERS),
            *others(13, rate=2.5),
        ),
    ),
    FloodCase(
        "short prompts, long answers",
        (TenantStream("flooder", rate=6.0, flood_rate=80.0, lengths=chatty), *others(rate=6.0, lengths=chatty)),
    ),
    FloodCase(
        "little KV (2,048 blocks an engine)",
        (TenantStream("flooder", rate=7.0, flood_rate=70.0), *others(rate=7.0)),
        kv_blocks=2048,
    ),
    FloodCase(
        "the flooder alone has long answers",
        (TenantStream("flooder", flood_rate=60.0, flood_lengths=chatty), *others()),
    ),
    FloodCase(
        "spells: 3 s of flood, 6 s of none",
        (TenantStream("flooder", flood_rate=40.0, flood_arrivals="bursts:on=3,off=6,quiet=0.05"), *others()),
    ),
    FloodCase(
        "weights 4, 2, 1, and 1 of the flooder, asked for by weight",
        (
            TenantStream("flooder", rate=5.0, flood_rate=80.0),
            TenantStream("other-0", rate=20.0),
            TenantStream("other-1", rate=10.0),
            TenantStream("other-2", rate=5.0),
        ),
        weights={"other-0": 4.0, "other-1": 2.0},
    ),
    FloodCase(
        "a half empty fleet",
        (TenantStream("flooder", rate=5.0, flood_rate=100.0), *others(rate=5.0)),
    ),
)
STEADY = tuple(
    FloodCase(
        f"{', '.join(map(str, rates))} requests/s, {times:.0%}",
        tuple(TenantStream(f"tenant-{place}", rate=rate * times) for place, rate in enumerate(rates)),
    )
    for rates in ((22, 10, 8, 5), (30, 5, 5, 5), (10, 8, 6, 5, 5, 3, 2, 1))
    for times in (0.75, 1.0, 1.15)
)
"""Nobody floods: the first tenant is merely larger than the others, and the fleet can serve all."""


class RouterPair:
    """Two routers in the place of one, which hear of each other's placements as frontends do.

    Args:
        second: tells whether a request comes to the second of them.
    """

    def __init__(self, first: Router, other: Router, second: Callable[[Arrived], bool]) -> None:
        self.routers = (first, other)
        self._second = second
        self._owner: dict[RequestId, int] = {}
        self._wakes: list[Nanos | None] = [None, None]
        self._armed: Nanos | None = None

    def handle(self, now: Nanos, event: Event) -> Sequence[Effect]:
        """Give an event to the router that it is for, or to both, and each what the other publishes."""
        out: list[Effect] = []
        if isinstance(event, Woken):
            self._armed = None
            due = [number for number, at in enumerate(self._wakes) if at is not None and at <= now]
            for number in due:
                self._wakes[number] = None
                self._give(number, now, event, out)
        elif isinstance(event, Arrived):
            self._owner[event.id] = int(self._second(event))
            self._give(self._owner[event.id], now, event, out)
        elif isinstance(request := getattr(event, "id", None), str):
            self._give(self._owner[RequestId(request)], now, event, out)
        else:
            for number in (0, 1):
                self._give(number, now, event, out)
        first = min((at for at in self._wakes if at is not None), default=None)
        if first is not None and first != self._armed:
            self._armed = first
            out.append(Wake(at=first))
        return out

    def _give(self, number: int, now: Nanos, event: Event, out: list[Effect]) -> None:
        for effect in self.routers[number].handle(now, event):
            if isinstance(effect, Publish):
                self._give(1 - number, now, PeerUpdate(router=f"r{number}", placement=effect.placement), out)
            elif isinstance(effect, Wake):
                self._wakes[number] = effect.at
            else:
                out.append(effect)

    def check(self) -> None:
        for router in self.routers:
            router.check()


def run(
    case: FloodCase,
    seed: int,
    flooding: bool,
    second: Callable[[Arrived], bool] | None = None,
    queue: QueueSettings | None = None,
) -> list[RequestRecord]:
    """Return the records of one simulated run; with ``second`` there are two frontends; ``queue``: not by shares."""
    streams = [each.requests(str(seed), flooding) for each in case.streams]
    settings = RouterSettings(queue=queue or case.shares())
    plan = SimulationPlan(
        model="m",
        pools={
            "main": PoolPlan(sim=SimSettings(kv_blocks=case.kv_blocks, emit_decode_blocks=False), replicas=case.engines)
        },
        router=settings,
        seed=seed,
    )
    records: list[RequestRecord] = []
    cluster = SimulatedCluster(plan, heapq.merge(*streams, key=lambda one: one.at), record=records.append)
    if second is not None:
        pair = RouterPair(
            *(Router(settings, name=f"r{n}", seed=seed, shared=True, form=cluster.router.form) for n in (0, 1)), second
        )
        cluster.simulation.machines[ROUTER] = pair  # type: ignore[assignment]
    cluster.run()
    return records


def ttft_p95(records: Sequence[RequestRecord]) -> float:
    """Return the p95 of the others' TTFT in seconds; a request that was not answered counts as the worst."""
    mine = [each for each in records if each.tenant not in FLOODERS and each.arrival >= SETTLE]
    values = sorted(float("inf") if each.ttft is None else each.ttft for each in mine)
    return values[math.ceil(0.95 * len(values)) - 1]


def moved(case: FloodCase, seed: int, second: Callable[[Arrived], bool] | None = None) -> tuple[float, float]:
    """Return the others' p95 TTFT in seconds before the flood and in it."""
    return ttft_p95(run(case, seed, False, second)), ttft_p95(run(case, seed, True, second))


def alternating() -> Callable[[Arrived], bool]:
    """Spread every tenant over both frontends."""
    return lambda arrived: int(arrived.id[1:]) % 2 == 1


def others_at_one() -> Callable[[Arrived], bool]:
    """Have the others' connections at the first frontend, and the flood at both."""
    return lambda arrived: arrived.tenant in FLOODERS and int(arrived.id[1:]) % 2 == 1


def flood_at_other() -> Callable[[Arrived], bool]:
    """Have the flood alone at the second frontend."""
    return lambda arrived: arrived.tenant in FLOODERS


def largest_p95(case: FloodCase, records: Sequence[RequestRecord]) -> float:
    """Return the p95 of the first tenant's TTFT in seconds."""
    return ttft_p95([each for each in records if each.tenant == case.streams[0].name])


PLAIN = SEEN[0]
FRONTENDS = {
    "all tenants at both": alternating,
    "the others at one, the flood at both": others_at_one,
    "the flood alone at one": flood_at_other,
}


def row(name: str, before_after: Sequence[tuple[float, float]]) -> str:
    before, after = (median(column) for column in zip(*before_after, strict=True))
    if math.inf in (before, after):
        shown = ("not answered" if each == math.inf else f"{each * 1e3:,.0f} ms" for each in (before, after))
        return f"| {name} | {' | '.join(shown)} | - | - | 0 of {len(before_after)} |"
    shifts = [after / before - 1 for before, after in before_after]
    within = sum(shift <= 0.10 for shift in shifts)
    return (
        f"| {name} | {before * 1e3:.0f} ms | {after * 1e3:,.0f} ms | {median(shifts):+.1%} | {max(shifts):+.1%} | "
        f"{within} of {len(shifts)} |"
    )


def steady_row(case: FloodCase, seeds: Sequence[int]) -> str:
    """Return what shares cost the largest tenant where nobody floods."""
    off = [largest_p95(case, run(case, seed, False, queue=QueueSettings())) for seed in seeds]
    runs = [run(case, seed, False) for seed in seeds]
    asked = [each for records in runs for each in records if each.tenant == case.streams[0].name]
    refused = sum(each.ttft is None for each in asked) / len(asked)
    on = median(largest_p95(case, records) for records in runs)
    shown = "not answered" if on == math.inf else f"{on * 1e3:,.0f} ms"
    return f"| {case.name} | {median(off) * 1e3:,.0f} ms | {shown} | {refused:.1%} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--docs", type=Path)
    given = parser.parse_args()
    seeds = range(SEEDS, SEEDS + given.seeds)
    head = [
        "| traffic | the others' p95 TTFT without the flood | in it | moved (median) | at worst | within 10 % |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    lines: list[str] = []

    def add(line: str) -> None:
        lines.append(line)
        print(line, flush=True)

    looks = (("Looked at while the rule was chosen:", SEEN), ("Not looked at until the rule stood:", UNSEEN))
    for title, cases in looks:
        for line in (title, "", *head):
            add(line)
        for case in cases:
            add(row(case.name, [moved(case, seed) for seed in seeds]))
        if cases is SEEN:
            for name, second in FRONTENDS.items():
                add(row(f"two frontends, {name}", [moved(PLAIN, seed, second()) for seed in seeds]))
        add("")
    add("No flood (looked at while the rule was chosen):")
    add("")
    add("| traffic | the largest tenant's p95 TTFT, no shares | with shares | of its requests, refused |")
    add("|---|---:|---:|---:|")
    for case in STEADY:
        add(steady_row(case, seeds))
    if given.docs is not None:
        write_part(given.docs, "\n".join(lines), "tenants_elsewhere")


if __name__ == "__main__":
    main()
