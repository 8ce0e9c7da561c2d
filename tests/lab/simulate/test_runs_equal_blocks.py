"""Is a cluster that keeps runs of blocks the same, to the byte, as one that keeps every block by itself?"""

import random
from typing import Any, get_args
from unittest import mock

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.router.settings import AffinitySettings, CostSettings, IndexSettings, Mode, RouterSettings
from penstock_lab.engine.settings import SimSettings
from penstock_lab.simulate.simulation_plan import Fault, PoolPlan, SimulationPlan
from tests.depth import deep
from tests.lab.simulate.test_simulated_cluster import Run, chat

CASES = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**20),
        "mode": st.sampled_from(sorted(set(get_args(Mode)) - {"direct"})),
        "kind": st.sampled_from(["auto", "exact", "approximate", "none"]),
        "kv_blocks": st.sampled_from([300, 500, 4000]),
        "decoded": st.booleans(),
        "affinity": st.sampled_from(["off", "soft", "hard"]),
        "latency": st.booleans(),
        "approximate_max": st.sampled_from([200, 1 << 20]),
        "faults": st.lists(
            st.builds(
                Fault,
                at=st.floats(0, 40),
                kind=st.sampled_from(["fail", "drain", "add", "cordon"]),
                worker=st.sampled_from(["main-0", "main-1", "main-2"]),
            ),
            max_size=3,
        ),
    }
)


def plans(case: dict[str, Any]) -> SimulationPlan:
    sim = SimSettings(
        block_size=16,
        kv_blocks=case["kv_blocks"],
        max_model_len=case["kv_blocks"] * 15,
        emit_decode_blocks=case["decoded"],
        max_num_seqs=8,
    )
    return SimulationPlan(
        model="m",
        pools={"main": PoolPlan(sim=sim, replicas=3)},
        router=RouterSettings(
            mode=case["mode"],
            index=IndexSettings(kind=case["kind"], approximate_ttl=20.0),
            cost=CostSettings(kind="latency" if case["latency"] else "blocks"),
            affinity=AffinitySettings(mode=case["affinity"]),
        ),
        seed=case["seed"],
        faults=case["faults"],
        drain_timeout=5.0,
    )


@settings(max_examples=deep(60), deadline=None)
@given(CASES)
def test_runs_and_blocks_come_to_the_same(case: dict[str, Any]) -> None:
    plan = plans(case)
    traffic = chat(40, rate=4.0, seed=case["seed"])
    with mock.patch("penstock.router.kv_index.pool_index.APPROXIMATE_BLOCKS_MAX", case["approximate_max"]):
        runs = Run(plan, traffic)
        blocks = Run(msgspec.structs.replace(plan, by_block=True), traffic)
    assert runs.bytes() == blocks.bytes()
    assert runs.cluster.gaps() == blocks.cluster.gaps()


@pytest.mark.parametrize("mode", ["kv", "round_robin"])
def test_every_machine_checks_after_every_event(mode: str) -> None:
    case = {
        "seed": 3,
        "mode": mode,
        "kind": "auto",
        "kv_blocks": 300,
        "decoded": True,
        "affinity": "soft",
        "latency": False,
        "faults": [Fault(at=10.0, kind="fail", worker="main-1"), Fault(at=20.0, kind="drain", worker="main-0")],
    }
    Run(msgspec.structs.replace(plans(case), checked=True), chat(30, rate=random.Random(1).uniform(3, 5)))


@settings(max_examples=deep(30), deadline=None)
@given(CASES, st.booleans(), st.booleans())
def test_prices_in_columns_and_one_by_one_come_to_the_same(case: dict[str, Any], split: bool, by_block: bool) -> None:
    plan = plans({**case, "kv_blocks": 4000} if split else case)
    if split:
        main = plan.pools["main"]
        pools = {role: msgspec.structs.replace(main, role=role, replicas=2) for role in ("prefill", "decode")}
        plan = msgspec.structs.replace(plan, pools=pools)
    plan = msgspec.structs.replace(plan, by_block=by_block)
    traffic = chat(20, rate=4.0, seed=case["seed"])
    one_by_one = Run(plan, traffic)
    few = mock.patch("penstock_lab.runs.run_reach.ROW_MIN", 2)
    with mock.patch("penstock.router.selection.select.COLUMNS_MIN", 1), few:
        columns = Run(msgspec.structs.replace(plan, checked=True), traffic)
    assert columns.bytes() == one_by_one.bytes()
