"""Prefill and decode workers on virtual time: hand-offs, what they cost, and pools that change while requests run."""

import random
from typing import Any

import msgspec
import pytest

from penstock.kernel.errors import ConfigError
from penstock.kernel.values import WorkerId
from penstock.router.settings import HandoffSettings, RouterSettings
from penstock_lab.engine.settings import SimSettings, TransferSettings
from penstock_lab.simulate.simulation_plan import Fault, PoolPlan, SimulationPlan, StartUp, checked
from tests.lab.simulate.test_simulated_cluster import SIM, Run, chat, plan

ALWAYS = RouterSettings(handoff=HandoffSettings(conditional="off"))


def split(prefill: int = 2, decode: int = 2, sim: SimSettings = SIM, **more: Any) -> SimulationPlan:
    pools = {
        "prefill": PoolPlan(sim=sim, replicas=prefill, role="prefill"),
        "decode": PoolPlan(sim=sim, replicas=decode, role="decode"),
    }
    return plan(**{"pools": pools, "router": ALWAYS, **more})


def test_every_request_is_prefilled_here_and_decoded_there() -> None:
    asked = chat(8)
    run = Run(split(checked=True), asked)
    assert run.outcomes() == {"ok": len(asked)}
    for record in run.records:
        assert [leg.role for leg in record.legs] == ["prefill", "decode"]
        assert record.legs[0].worker.startswith("prefill") and record.legs[1].worker.startswith("decode")
        assert record.osl == record.osl_requested
    assert run.cluster.handoffs()["done"] == len(asked)


def test_both_ways_to_keep_blocks_come_to_the_same() -> None:
    asked = chat(20)
    one = Run(split(), asked)
    assert one.bytes() == Run(split(by_block=True), asked).bytes()


def test_kv_takes_its_time_on_the_wire_and_shares_it() -> None:
    def mean_ttft(bandwidth: float, rate: float) -> float:
        sim = msgspec.structs.replace(SIM, transfer=TransferSettings(bandwidth=bandwidth))
        run = Run(split(prefill=2, decode=1, sim=sim), chat(20, rate=rate))
        found = [record.ttft for record in run.records if record.ttft is not None]
        assert len(found) == len(run.records)
        return sum(found) / len(found)

    quick, slow = mean_ttft(1e12, 1.0), mean_ttft(2e9, 1.0)
    assert slow > quick, "some 100 MB a prompt at 2 GB/s are not nothing"
    crowded = mean_ttft(2e9, 12.0) - mean_ttft(1e12, 12.0)
    assert crowded > 1.5 * (slow - quick), "hand-offs that run at once share the link into the one decode worker"


def test_a_leg_that_its_engine_refuses_leaves_no_hand_off_open() -> None:
    asked = chat(20, rate=4.0)
    longest = sorted(request.isl for request in asked)[-3]
    small = msgspec.structs.replace(SIM, kv_blocks=300, max_model_len=longest)
    outcomes = Run(split(sim=small, checked=True), asked).outcomes()  # its end compares the books
    assert outcomes["ok"] > 0 and outcomes["failed"] > 0, "some prompts are longer than an engine takes"


@pytest.mark.parametrize("handoff", ["push", "bootstrap"])
def test_both_legs_at_once_lose_nothing(handoff: str) -> None:
    pools = {
        "prefill": PoolPlan(sim=SIM, replicas=2, role="prefill", handoff=handoff),
        "decode": PoolPlan(sim=SIM, replicas=2, role="decode", handoff=handoff),
    }
    faults = [
        Fault(at=5.0, kind="fail", worker=WorkerId("prefill-0")),
        Fault(at=9.0, kind="fail", worker=WorkerId("decode-0")),
    ]
    asked = chat(20)
    run = Run(plan(pools=pools, router=ALWAYS, faults=faults), asked)
    assert run.outcomes() == {"ok": len(asked)}


@pytest.mark.parametrize("seed", range(8))
def test_nothing_is_lost_when_workers_of_either_kind_die(seed: int) -> None:
    rng = random.Random(seed)
    faults = [
        Fault(
            at=rng.uniform(0, 25),
            kind=rng.choice(("fail", "fail", "drain")),
            worker=WorkerId(f"{rng.choice(('prefill', 'decode'))}-{rng.randrange(2)}"),
            restart=rng.uniform(0.5, 4),
        )
        for _ in range(4)
    ]
    asked = chat(30, seed=seed)
    run = Run(split(faults=faults, seed=seed, drain_timeout=5.0), asked)
    assert sum(run.outcomes().values()) == len(asked)
    assert run.outcomes().get("ok", 0) >= len(asked) - 2, run.outcomes()


ROLLING = (
    # 2P2D -> 3P1D -> all aggregated
    Fault(at=10.0, kind="flip", worker=WorkerId("decode-1"), role="prefill"),
    Fault(at=25.0, kind="flip", worker=WorkerId("prefill-0"), role="aggregated"),
    Fault(at=30.0, kind="flip", worker=WorkerId("prefill-1"), role="aggregated"),
    Fault(at=35.0, kind="flip", worker=WorkerId("decode-0"), role="aggregated"),
    Fault(at=40.0, kind="flip", worker=WorkerId("decode-1"), role="aggregated"),
)


@pytest.mark.parametrize("seed", range(12))
def test_nothing_fails_while_roles_change_one_by_one(seed: int) -> None:
    asked = chat(60, rate=10.0, seed=seed)
    conditional = random.Random(seed).choice(("off", "auto", "thresholds", "slo"))
    router = RouterSettings(handoff=HandoffSettings(conditional=conditional))
    sim = msgspec.structs.replace(SIM, kv_blocks=16_000)
    run = Run(split(sim=sim, faults=ROLLING, seed=seed, router=router), asked)
    assert run.outcomes() == {"ok": len(asked)}
    assert run.cluster.refused == []
    roles = {worker.id: worker.card.role for worker in run.cluster.fleet.workers.values()}
    assert set(roles.values()) == {"aggregated"}
    late = [record for record in run.records if record.arrival > 55.0]
    assert late and all([leg.role for leg in record.legs] == ["aggregated"] for record in late)
    three = [r for r in run.records if 15.0 < r.arrival < 24.0]
    assert {leg.worker for r in three for leg in r.legs if leg.role == "prefill"} <= {
        "prefill-0",
        "prefill-1",
        "decode-1",
    }


def test_pools_grow_and_shrink_while_requests_run() -> None:
    faults = [
        Fault(at=5.0, kind="add", pool="decode"),
        Fault(at=8.0, kind="drain", worker=WorkerId("prefill-1")),
        Fault(at=12.0, kind="drain", worker=WorkerId("decode-0")),
    ]
    asked = chat(30)
    run = Run(split(faults=faults, start_up=StartUp(median=2.0)), asked)
    assert run.outcomes() == {"ok": len(asked)}
    assert {worker.id for worker in run.cluster.fleet.workers.values()} == {"prefill-0", "decode-1", "decode-2"}


def test_conditional_hand_off_keeps_short_work_at_home() -> None:
    asked = chat(30)
    auto = Run(split(router=RouterSettings()), asked)
    off = Run(split(), asked)
    assert auto.cluster.handoffs()["local"] > 0
    assert auto.cluster.handoffs()["done"] < off.cluster.handoffs()["done"] == len(asked)
    assert all(decision.flow for decision in auto.decisions), "every branch is explained"


def test_a_plan_without_anybody_who_answers_is_refused() -> None:
    pools = {"prefill": PoolPlan(sim=SIM, replicas=1, role="prefill")}
    with pytest.raises(ConfigError, match="no pool of m answers clients"):
        checked(plan(pools=pools))
    with pytest.raises(ConfigError, match=r"faults\[0\].role is missing"):
        checked(plan(faults=[Fault(at=1.0, kind="flip", worker=WorkerId("main-0"))]))
