"""Rows by simulation: what the published study leaves out: queues and P99, KV reuse, slow links, failures, mixed GPUs.

A small, fixed set of scenarios: eight engines of one model, aggregated and split, under the same requests. The cluster
is the one of ``penstock simulate``.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from penstock.kernel.request_record import RequestRecord
from penstock.kernel.statistics import percentile, weighted_percentile
from penstock.kernel.values import Role, Slo, WorkerId
from penstock.page.page_schema import Section, table_section
from penstock.router.settings import HandoffSettings, RouterSettings
from penstock_lab.engine.kv_capacity import kv_blocks_of
from penstock_lab.engine.settings import SimSettings, TimingSettings, TransferSettings
from penstock_lab.engine.timing.gpus import GPUS
from penstock_lab.engine.timing.known_models import model_named
from penstock_lab.engine.timing.model_shape import shape_of
from penstock_lab.simulate.simulated_cluster import SimulatedCluster
from penstock_lab.simulate.simulation_plan import Fault, PoolPlan, SimulationPlan
from penstock_lab.simulate.tiers.tier_plan import TierPlan
from penstock_lab.traffic import trace_slices
from penstock_lab.traffic.formats.mooncake import MooncakeTrace
from penstock_lab.traffic.lengths import Lognormal
from penstock_lab.traffic.traffic_request import TrafficRequest
from penstock_lab.traffic.workloads import Plain, agent, plain

MODEL, WIDTH, BLOCK, MAX_LEN = "Llama-3.1-70B", 2, 64, 131_072
ENGINES = 8
PREFILL = {"6P2D": 6, "5P3D": 5, "4P4D": 4}
"""Splits: how many of the engines compute prompts."""
SLO = Slo(ttft=3.0, itl=0.04)
REQUESTS = 500
RATE, AGENTS_RATE, TRACE_RATE = 4.0, 12.0, 1.5
"""Requests per second of long prompts, of agents' steps, of the trace: what these engines can just hold."""
PRICES = {"h100": 1.0, "h200": 1.25}
"""Price of an hour, in those of an H100. A guess: lists differ by provider and term."""
TIERS = TierPlan(host=256 << 30, disk=2 << 40)
"""Of an engine that offloads KV: its share of a host with eight GPUs and 1 TiB of memory, and of its disks."""
TRACE = "mooncake_conversation_first6000.jsonl"


@dataclass(frozen=True, slots=True)
class SimulatedScenario:
    """One scenario. ``gpus``: of the engines that compute prompts, and of those that decode; co-located ones are one
    half each. ``failing``: seconds after which an engine of each kind dies and comes back after a minute. ``tiers``:
    below each engine's memory."""

    name: str
    requests: Callable[[], Sequence[TrafficRequest]]
    gpus: tuple[str, str] = ("h100", "h100")
    link: float = 1.0
    latency: float = 0.0
    failing: float | None = None
    tiers: TierPlan = TierPlan()


def scenarios(traces: Path | None) -> Iterator[SimulatedScenario]:
    """Return the scenarios; that of a real trace only where there is one."""
    yield SimulatedScenario("long prompts", _long_prompts)
    yield SimulatedScenario("KV is used again (agents)", _agent_sessions)
    yield SimulatedScenario("half of the GPUs are H200, for decoding", _long_prompts, gpus=("h100", "h200"))
    yield SimulatedScenario("links of a tenth", _long_prompts, link=0.1)
    yield SimulatedScenario("hand-offs begin 0.5 s late", _long_prompts, latency=0.5)
    yield SimulatedScenario("an engine dies", _long_prompts, failing=30.0)
    yield SimulatedScenario("KV is offloaded (agents)", _agent_sessions, tiers=TIERS)
    if traces is not None and (traces / TRACE).is_file():
        yield SimulatedScenario("a real trace (Mooncake's conversations)", lambda: _trace_requests(traces / TRACE))
        yield SimulatedScenario("a real trace, KV is offloaded", lambda: _trace_requests(traces / TRACE), tiers=TIERS)


def simulated_section(traces: Path | None) -> Section:
    """Simulate every scenario on every layout, and return the table."""
    rows = []
    for scenario in scenarios(traces):
        requests = scenario.requests()
        for layout in ("aggregated", *PREFILL):
            rows.append([scenario.name, layout, *_measured_row(scenario, layout, requests)])
    text = (
        f"{ENGINES} engines of {MODEL} (fp8, {WIDTH} H100 each) under the same {REQUESTS} requests, simulated with "
        f"queues, routing and hand-offs. In SLO: TTFT within {SLO.ttft:g} s and mean ITL within {SLO.itl or 0:g} s. "
        "Cost is in hours of an H100 per million tokens of answers in SLO, an H200 counted as "
        f"{PRICES['h200']:g} of them (a guess). Engines that die come back after a minute. Offloaded is to "
        f"{TIERS.host >> 30} GiB of host memory and {TIERS.disk >> 40} TiB of disk per engine, over the default links "
        "of `sim.tier_links`."
    )
    if not any(name.startswith("a real trace") for name, *_ in rows):
        text += f" The rows of a real trace are left out: no {TRACE} in --traces."
    head = ["scenario", "layout", "in SLO", "TTFT s", "P99", "ITL P99 ms", "hit rate", "cost", "failed"]
    return table_section("What the study leaves out, simulated", text, head, rows)


def _measured_row(scenario: SimulatedScenario, layout: str, requests: Sequence[TrafficRequest]) -> list[str]:
    records: list[RequestRecord] = []
    cluster = SimulatedCluster(plan_of(scenario, layout), requests, record=records.append)
    cluster.run()
    done = [one for one in records if one.outcome == "ok"]
    ttft = sorted(one.ttft for one in done if one.ttft is not None)
    good = [one for one in records if one.within(SLO)]
    prompts, tokens = sum(one.isl or 0 for one in done), sum(one.osl or 0 for one in good)
    price = sum(PRICES[gpu] for gpu in scenario.gpus) / len(scenario.gpus)
    if layout in PREFILL:
        share = PREFILL[layout] / ENGINES
        price = share * PRICES[scenario.gpus[0]] + (1.0 - share) * PRICES[scenario.gpus[1]]
    return [
        f"{len(good) / len(records):.0%}",
        f"{sum(ttft) / len(ttft):.2f}" if ttft else "unknown",
        f"{percentile(ttft, 0.99):.2f}" if ttft else "unknown",
        f"{1e3 * weighted_percentile(gaps, 0.99):.0f}" if (gaps := cluster.gaps()) else "unknown",
        f"{sum(one.cached or 0 for one in done) / prompts:.0%}" if prompts else "unknown",
        f"{cluster.gpu_hours() * price / tokens * 1e6:.1f}" if tokens else "unknown",
        str(len(records) - len(done)),
    ]


def plan_of(scenario: SimulatedScenario, layout: str) -> SimulationPlan:
    """Return the cluster of a scenario in one layout."""
    before = PREFILL.get(layout)
    kinds: Mapping[str, tuple[Role, int, str]] = (
        {
            "first": ("aggregated", ENGINES // 2, scenario.gpus[0]),
            "second": ("aggregated", ENGINES // 2, scenario.gpus[1]),
        }
        if before is None
        else {"first": ("prefill", before, scenario.gpus[0]), "second": ("decode", ENGINES - before, scenario.gpus[1])}
    )
    pools = {
        name: PoolPlan(
            sim=_engine_settings(scenario, gpu),
            replicas=count,
            gpus=WIDTH,
            role=role,
            table={"model": model_named(MODEL)},
            cache=scenario.tiers,
        )
        for name, (role, count, gpu) in kinds.items()
    }
    failing = scenario.failing
    faults = (
        [Fault(at=failing, kind="fail", worker=WorkerId(f"{name}-0"), restart=60.0) for name in pools]
        if failing
        else []
    )
    router = RouterSettings(handoff=HandoffSettings(conditional="off"))
    return SimulationPlan(model=MODEL, pools=pools, router=router, slo=SLO, faults=faults)


def _engine_settings(scenario: SimulatedScenario, gpu: str) -> SimSettings:
    shape = shape_of(model_named(MODEL), MODEL)
    rate = scenario.link * GPUS[gpu].network_gb_per_s * 1e9 * WIDTH
    blocks = kv_blocks_of(shape, GPUS[gpu], block_size=BLOCK, tensor_parallel_size=WIDTH, weight_dtype="fp8")
    return SimSettings(
        block_size=BLOCK,
        kv_blocks=blocks,
        max_model_len=MAX_LEN,
        emit_decode_blocks=False,
        timing=TimingSettings(kind="roofline", model=MODEL, gpu=gpu, tensor_parallel_size=WIDTH, weight_dtype="fp8"),
        transfer=TransferSettings(
            bandwidth=rate, latency=scenario.latency, kv_bytes_per_token=round(shape.kv_bytes(shape.dtype))
        ),
    )


# --- requests --------------------------------------------------------------------------------------------------------


def _long_prompts() -> Sequence[TrafficRequest]:
    shape = Plain(prompt=Lognormal(6000, 0.6, 256, 32_768), answer=Lognormal(300, 0.7, 8, 2048))
    return _first_requests(plain(RATE, random.Random(1), shape=shape, kind="long prompts"))


def _agent_sessions() -> Sequence[TrafficRequest]:
    return _first_requests(agent(AGENTS_RATE, random.Random(1)))


def _trace_requests(path: Path) -> Sequence[TrafficRequest]:
    with path.open("rb") as lines:
        rows = _first_requests(trace_slices.spread_ties(list(MooncakeTrace(lines))))
    return list(trace_slices.scale_rate(rows, TRACE_RATE * (rows[-1].at - rows[0].at) / len(rows)))


def _first_requests(requests: Iterator[TrafficRequest]) -> Sequence[TrafficRequest]:
    """Return the first requests that the engines can hold."""
    return list(trace_slices.rebase(islice((one for one in requests if one.isl + one.osl <= MAX_LEN), REQUESTS)))
