"""Hit rates of bounded tiers, exactly: each request's cached tokens equal an independent brute-force computation."""

import random
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest

from penstock.kernel.request_record import RequestRecord
from penstock.router.settings import RouterSettings
from penstock_lab.engine.settings import SimSettings, TierLinks
from penstock_lab.simulate.simulated_cluster import SimulatedCluster
from penstock_lab.simulate.simulation_plan import PoolPlan, SimulationPlan
from penstock_lab.simulate.tiers.tier_plan import TierPlan
from penstock_lab.traffic.formats.mooncake import MooncakeTrace
from penstock_lab.traffic.traffic_request import TrafficRequest

SIZE = 512
BYTES = 1 << 20
"""Of one block."""
CHUNK = 8192 // SIZE
FREE = TierLinks(host_bandwidth=1e15, disk_read=1e15, disk_write=1e15)
"""Links that always make loading pay, and end every move before the next pass."""


def spaced(requests: Sequence[TrafficRequest]) -> Iterator[TrafficRequest]:
    """Yield requests so far apart that each is alone."""
    for number, request in enumerate(requests):
        yield msgspec.structs.replace(request, at=number * 1000.0, osl=max(2, min(request.osl, 20)))


def generated(count: int, seed: int) -> list[TrafficRequest]:
    """Return prompts that share beginnings, and some that are whole repetitions."""
    rng = random.Random(seed)
    prompts: list[list[int]] = [[0]]
    for number in range(count):
        before = rng.choice(prompts[-40:])
        fresh = [1000 * number + place for place in range(1, rng.randint(1, 30))]
        prompts.append(before[: rng.randint(1, len(before))] + fresh * rng.randint(0, 1))
    return [
        TrafficRequest(at=0.0, isl=len(ids) * SIZE - rng.randint(0, 300), osl=9, hash_ids=ids, block_size=SIZE)
        for ids in prompts
    ]


class Lru:
    """A set of blocks of bounded size; a group that is used together is used from its end."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.blocks: OrderedDict[object, None] = OrderedDict()

    def use(self, group: Sequence[object]) -> None:
        for block in reversed(group):
            if block in self.blocks:
                self.blocks.move_to_end(block)

    def leading(self, group: Sequence[object]) -> int:
        return next((place for place, block in enumerate(group) if block not in self.blocks), len(group))

    def put(self, group: Sequence[object]) -> None:
        fresh = [block for block in group if block not in self.blocks]
        self.use(group)
        while len(self.blocks) + len(fresh) > self.size:
            self.blocks.popitem(last=False)
        self.blocks.update(dict.fromkeys(reversed(fresh)))


def brute_force(requests: Sequence[TrafficRequest], device_blocks: int, host_blocks: int) -> list[tuple[int, int]]:
    """Return, per request, the tokens found in the engine's memory and those loaded from the host tier."""
    device, host = OrderedDict[object, None](), Lru(host_blocks)
    found = []
    for request in requests:
        full = request.isl // SIZE
        chain = [tuple(request.hash_ids[: place + 1]) for place in range(full)]
        most = (request.isl - 1) // SIZE
        own = 0
        while own < most and chain[own] in device:
            own += 1
        host.use(chain[:own])
        reach = own + host.leading(chain[own:most])
        host.use(chain[own:reach])
        for block in chain[:own]:
            del device[block]
        need = -(-(request.isl + request.osl - 1) // SIZE)
        while len(device) + need > device_blocks:
            device.popitem(last=False)
        for start in range(reach, full, CHUNK):
            host.put(chain[start : start + CHUNK])
        host.use(chain)
        for block in reversed(chain):
            device.pop(block, None)
            device[block] = None
        found.append((own * SIZE, (reach - own) * SIZE))
    return found


def simulated(requests: Sequence[TrafficRequest], device_blocks: int, host_blocks: int) -> list[RequestRecord]:
    sim = SimSettings(block_size=SIZE, kv_blocks=device_blocks, max_model_len=1 << 20, tier_links=FREE)
    sim = msgspec.structs.replace(sim, transfer=msgspec.structs.replace(sim.transfer, kv_bytes_per_token=BYTES // SIZE))
    pool = PoolPlan(sim=sim, replicas=1, cache=TierPlan(host=host_blocks * BYTES, order="lru"))
    plan = SimulationPlan(model="m", pools={"main": pool}, router=RouterSettings(mode="round_robin"))
    ended: list[RequestRecord] = []
    SimulatedCluster(plan, iter(requests), record=ended.append).run()
    return ended


def compare(requests: Sequence[TrafficRequest], device_blocks: int, host_blocks: int) -> float:
    """Hold every request to the brute force; returns the share of prompt tokens that came from the host tier."""
    ended = simulated(requests, device_blocks, host_blocks)
    expected = brute_force(requests, device_blocks, host_blocks)
    assert len(ended) == len(requests)
    for record, (own, loaded) in zip(ended, expected, strict=True):
        assert (record.cached, record.cached_by_tier) == (own + loaded, {"host": loaded} if loaded else {}), record.id
    return sum(loaded for _, loaded in expected) / sum(request.isl for request in requests)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("host_blocks", [80, 300])
def test_generated_prompts_hit_what_the_brute_force_says(seed: int, host_blocks: int) -> None:
    requests = list(spaced(generated(300, seed)))
    longest = max(-(-(request.isl + request.osl) // SIZE) for request in requests)
    assert compare(requests, longest + 8, max(host_blocks, 4 * CHUNK)) > 0


@pytest.mark.parametrize("host_blocks", [1024, 8192])
def test_a_mooncake_trace_hits_what_the_brute_force_says(traces: Path, host_blocks: int) -> None:
    with (traces / "mooncake_conversation_first6000.jsonl").open("rb") as lines:
        requests = list(spaced(list(MooncakeTrace(lines))[:800]))
    assert compare(requests, 300, host_blocks) > 0
