"""Is what the router expects of caches what engines take from them, where tiers weigh loading against computing?"""

import random
from typing import Any

import msgspec
import pytest

from penstock.kernel.request_record import RequestRecord
from penstock.router.events import Decision
from penstock.router.settings import IndexSettings, RouterSettings
from penstock_lab.engine.settings import SimSettings, TierLinks, TimingSettings
from penstock_lab.simulate.simulated_cluster import SimulatedCluster
from penstock_lab.simulate.simulation_plan import PoolPlan, SimulationPlan
from penstock_lab.simulate.tiers.tier_plan import TierPlan
from penstock_lab.traffic.traffic_request import TrafficRequest
from tests.depth import deep
from tests.lab.simulate.test_tier_hit_rates import generated

BYTES = 1 << 20
"""Of one block."""


def run(
    requests: list[TrafficRequest],
    cache: TierPlan,
    *,
    size: int,
    blocks: int,
    compute: float,
    replicas: int = 1,
    **links: Any,
) -> tuple[list[RequestRecord], list[Decision]]:
    """Simulate engines that compute a token of a prompt in so many milliseconds; return what ended and was decided."""
    timing = TimingSettings(prefill=(0.0, compute, 1.0), decode=(0.0, 0.0, 5.0))
    sim = SimSettings(
        block_size=size, kv_blocks=blocks, max_model_len=1 << 20, timing=timing, tier_links=TierLinks(**links)
    )
    sim = msgspec.structs.replace(sim, transfer=msgspec.structs.replace(sim.transfer, kv_bytes_per_token=BYTES // size))
    # What a decision predicts may be evicted within its seconds: here the events alone say who has what.
    router = RouterSettings(mode="kv", index=IndexSettings(predicted_ttl=0.0))
    pools = {"main": PoolPlan(sim=sim, replicas=replicas, cache=cache)}
    found: list[RequestRecord] = []
    decided: list[Decision] = []
    plan = SimulationPlan(model="m", pools=pools, router=router)
    SimulatedCluster(plan, iter(requests), record=found.append, decided=decided.append).run()
    assert {record.outcome for record in found} == {"ok"}
    return found, decided


@pytest.mark.parametrize(
    ("disk_read", "had", "costly"),
    [(1e8, 16, 27), (7e9, 448, 0)],  # 10 ms and 0.15 ms for a block that is computed in 1.6 ms
)
def test_blocks_on_a_disk_too_slow_for_them_are_not_promised(disk_read: float, had: int, costly: int) -> None:
    others = [[0, *range(start, start + 37)] for start in (100, 200)]  # they begin as the first prompt does
    prompts = [list(range(29)), *others, [*range(28), 99]]
    requests = [
        TrafficRequest(at=10.0 * number, isl=16 * len(ids), osl=2, hash_ids=ids, block_size=16)
        for number, ids in enumerate(prompts)
    ]
    cache = TierPlan(host=64 * BYTES, disk=1000 * BYTES, order="lru")
    found, decided = run(requests, cache, size=16, blocks=40, compute=0.1, disk_read=disk_read)
    (cost,) = decided[-1].candidates
    assert (found[-1].expected_cached, found[-1].cached) == (had, had)
    assert cost.costly_blocks == costly and cost.overlap_tokens == had == decided[-1].expected_cached_tokens
    left_out = f"{costly} blocks of its lower tiers left out, slower to load than to compute"
    assert (left_out in decided[-1].reason) == bool(costly)


def case(seed: int) -> list[int]:
    """Simulate sizes, speeds and prefixes of a seed; return tokens of cache, host and disk, and blocks left out."""
    rng = random.Random(seed)
    size, blocks = 512, 100
    cache = TierPlan(host=rng.choice((110, 200)) * BYTES, disk=rng.choice((300, 2000)) * BYTES, order="lru")
    gap = rng.choice((6.0, 61.0, 900.0))  # slowness that is not measured again is forgotten meanwhile
    requests = [
        msgspec.structs.replace(each, at=number * gap, osl=2) for number, each in enumerate(generated(100, seed))
    ]
    found, decided = run(
        requests,
        cache,
        size=size,
        blocks=blocks,
        compute=10 ** rng.uniform(-4, -2),
        replicas=rng.choice((1, 2, 30)),  # 30 are priced in columns
        host_bandwidth=10 ** rng.uniform(9, 11),
        disk_read=10 ** rng.uniform(8, 10),
    )
    assert [(record.id, record.expected_cached) for record in found] == [(record.id, record.cached) for record in found]
    chosen = [cost for each in decided for cost in each.candidates if cost.target == each.chosen]
    tiers = [sum((record.cached_by_tier or {}).get(tier, 0) for record in found) for tier in ("host", "disk")]
    return [sum(record.cached or 0 for record in found), *tiers, sum(cost.costly_blocks for cost in chosen)]


def test_what_is_promised_is_had_over_sizes_speeds_and_prefixes() -> None:
    sums = [sum(column) for column in zip(*(case(seed) for seed in range(deep(16))), strict=True)]
    assert all(sums), "tokens of all tiers came from cache, and others were left out"
