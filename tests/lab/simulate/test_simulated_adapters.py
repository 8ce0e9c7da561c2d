"""LoRA adapters on virtual time: what is loaded, evicted and waited for, by the decisions of the live router."""

from collections import Counter

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.kernel.request_record import RequestRecord
from penstock.router.settings import RouterSettings
from penstock_lab.simulate.simulation_plan import Fault, PoolPlan
from penstock_lab.traffic.adapter_mix import AdapterMix
from penstock_lab.traffic.traffic_request import TrafficRequest
from tests.depth import deep
from tests.lab.simulate.test_simulated_cluster import SIM, Run, chat, plan

LOAD = 0.5
SLOW = msgspec.structs.replace(SIM, adapter_load=LOAD)


def named(seconds: float = 30.0, count: int = 12, skew: float = 1.0, rate: float = 6.0) -> list[TrafficRequest]:
    return list(AdapterMix(count=count, skew=skew).named(chat(seconds, rate), seed=1))


def run(requests: list[TrafficRequest], slots: int, replicas: int = 2, **more: object) -> Run:
    pools = {"main": PoolPlan(sim=SLOW, replicas=replicas, adapter_slots=slots)}
    return Run(plan(**{"pools": pools, "checked": True, **more}), requests)


def alone(number: int, adapter: str | None, at: float) -> TrafficRequest:
    return TrafficRequest(at=at, isl=64, osl=2, hash_ids=[number], block_size=64, adapter=adapter)


def ttft_of(record: RequestRecord) -> float:
    assert record.ttft is not None
    return record.ttft


def test_a_cold_adapter_costs_its_load_and_a_warm_one_nothing() -> None:
    requests = [alone(number, name, number * 2.0) for number, name in enumerate(("a", "a", "b", "a", None))]
    found = run(requests, slots=1, replicas=1)
    assert found.cluster.adapters() == {"hit": 1, "wait": 0, "load": 3, "unload": 2, "failed": 0, "missing": 0}
    assert [ttft_of(record) > LOAD for record in found.records] == [True, False, True, True, False]
    assert [ttft_of(record) < LOAD + 0.2 for record in found.records] == [True] * 5


def test_requests_for_one_adapter_share_its_load_and_loads_come_one_after_the_other() -> None:
    requests = [alone(number, name, 0.0) for number, name in enumerate(("a", "a", "b"))]
    found = run(requests, slots=2, replicas=1)
    counts = found.cluster.adapters()
    assert (counts["wait"], counts["load"], counts["unload"]) == (1, 2, 0)
    first, second, third = (ttft_of(record) for record in sorted(found.records, key=lambda each: each.id))
    assert LOAD < first <= second < 1.5 * LOAD and third > 2 * LOAD


def test_blocks_of_one_adapter_are_no_cache_for_another() -> None:
    prompt = {"isl": 640, "osl": 2, "hash_ids": list(range(10)), "block_size": 64}
    names = ("a", "b", None, "a", "b", None)
    requests = [TrafficRequest(at=2.0 * number, adapter=name, **prompt) for number, name in enumerate(names)]
    found = run(requests, slots=4, replicas=1)
    assert [(record.cached or 0) > 500 for record in found.records] == [False] * 3 + [True] * 3
    assert [record.cached for record in found.records] == [record.expected_cached for record in found.records]


def test_every_request_is_counted_once_and_more_room_means_fewer_loads() -> None:
    plain = [alone(number, None, number / 4) for number in range(200)]
    requests = list(AdapterMix(count=24).named(plain, seed=2))
    loads = []
    for slots in (2, 6, 24):
        found = run(requests, slots)
        assert found.outcomes() == {"ok": len(requests)}
        counts = found.cluster.adapters()
        assert counts["hit"] + counts["wait"] + counts["load"] == len(requests)
        loads.append(counts["load"])
        assert (counts["unload"] > 0) == (slots < 24)
    assert loads[0] > 2 * loads[1] and loads[1] > loads[2]
    assert len({request.adapter for request in requests}) <= loads[-1] <= 48


@settings(max_examples=deep(20), deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=30), st.integers(1, 4))
def test_one_worker_with_one_request_at_a_time_evicts_as_a_plain_lru(names: list[int], slots: int) -> None:
    found = run([alone(place, f"a{name}", 2.0 * place) for place, name in enumerate(names)], slots, replicas=1)
    held: list[int] = []
    loads = unloads = 0
    for name in names:
        if name in held:
            held.remove(name)
        else:
            loads += 1
            if len(held) == slots:
                held.pop(0)
                unloads += 1
        held.append(name)
    counts = found.cluster.adapters()
    assert (counts["load"], counts["unload"], counts["hit"]) == (loads, unloads, len(names) - loads)


def test_a_router_that_weighs_adapters_loads_fewer_than_one_that_does_not() -> None:
    plain = [alone(number, None, number / 4) for number in range(300)]
    requests = list(AdapterMix(count=24, skew=0.0).named(plain, seed=2))
    weighs, blind = (run(requests, 4, 4, router=RouterSettings(mode=mode)) for mode in ("kv", "round_robin"))
    assert weighs.cluster.adapters()["load"] < 0.7 * blind.cluster.adapters()["load"]


@pytest.mark.parametrize("kind", ["fail", "drain", "restart"])
def test_workers_that_go_take_their_adapters_along_and_lose_no_request(kind: str) -> None:
    requests = named(20.0)
    faults = [Fault(at=6.0, kind=kind, worker=None if kind == "restart" else "main-0")]  # type: ignore[arg-type]
    found = run(requests, 6, 3, faults=faults)
    assert sum(found.outcomes().values()) == len(requests) and found.outcomes()["ok"] > 0.95 * len(requests)


def test_requests_whose_time_is_over_while_they_wait_end_and_are_never_sent() -> None:
    requests = [alone(number, f"a{number}", 0.0) for number in range(6)]
    found = run(requests, 6, 1, router=RouterSettings(request_timeout=1.2))
    assert found.outcomes() == {"ok": 2, "expired": 4}


def test_runs_are_the_same_each_time_and_block_by_block() -> None:
    requests = named(10.0)
    assert run(requests, 3).bytes() == run(requests, 3).bytes()
    assert run(requests, 3).cluster.adapters() == run(requests, 3, by_block=True).cluster.adapters()


def test_a_mix_is_a_zipf_whose_sessions_stay_with_one_adapter() -> None:
    plain = [TrafficRequest(at=0.0, isl=1, osl=1) for _ in range(8000)]
    counts = Counter(request.adapter for request in AdapterMix(count=10, skew=1.0, base=0.25).named(plain, seed=3))
    # Four standard deviations of a binomial of 8,000: 155 at a quarter, 120 at 0.75 / 2.93, 67 at a tenth of that.
    harmonic = sum(1 / rank for rank in range(1, 11))
    assert abs(counts[None] - 2000) < 155
    assert abs(counts["adapter-1"] - 6000 / harmonic) < 160 and abs(counts["adapter-10"] - 600 / harmonic) < 67
    chats = [request for request in named(40.0) if request.session is not None]
    by_session: dict[str | None, set[str | None]] = {}
    for request in chats:
        by_session.setdefault(request.session, set()).add(request.adapter)
    assert len(by_session) > 5 and all(len(adapters) == 1 for adapters in by_session.values())
