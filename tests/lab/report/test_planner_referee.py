"""Does our planner see in Dynamo's simulator what its snapshots tell, and does the bench compare at equal cost?"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from penstock.kernel.values import EngineLimits
from penstock.planner.observation import Observation
from penstock.planner.performance.speed_sources import KnownSpeeds
from penstock.planner.planner import Planner
from penstock.planner.plugins.proposals import Override, PoolTarget
from penstock.planner.settings import PlannerSettings
from tests.conftest import skip_or_fail

ROOT = Path(__file__).resolve().parents[3]
BENCH = ROOT / "bench" / "planner_referee"
NAMES = ("traffic", "plan", "policy", "table", "run")
FAST = KnownSpeeds(
    metrics={
        "self-benchmark": {
            "unit": "seconds",
            "prefill": [{"tokens": n, "seconds": n / 40_000} for n in (500, 4000, 8000)],
            "decode": [{"batch": n, "kv_tokens": n * 4000, "seconds": 0.006 + n * 1e-4} for n in (1, 32, 128)],
        }
    }
)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    """The bench's modules, which are imported as its script imports them."""
    monkeypatch.syspath_prepend(str(BENCH))
    import importlib

    yield {name: importlib.import_module(name) for name in NAMES}
    for name in NAMES:
        sys.modules.pop(name, None)


def snapshot(at: float, active: list[int], **more: Any) -> dict[str, Any]:
    """Return what the simulator tells at a second, of engines that do everything; ``more``: what differs."""
    told: dict[str, Any] = {"now_ms": at * 1e3, "decode_fpm_snapshots": [passed(worker) for worker in active]}
    for name, ids in (("decode", active), ("prefill", [])):
        told |= {f"active_{name}_ids": ids, f"starting_{name}_ids": [], f"draining_{name}_ids": []}
        told[f"non_draining_{name}_count"] = len(ids)
    told["prefill_fpm_snapshots"] = []
    told["traffic"] = {
        "duration_s": 5.0,
        "num_req": 40,
        "shape_count": 20,
        "avg_isl": 3000.0,
        "avg_osl": 150.0,
        "ttft_count": 20,
        "avg_ttft_ms": 100.0,
        "itl_count": 20,
        "avg_itl_ms": 10.0,
    }
    return told | more


def passed(worker: int, **more: Any) -> dict[str, Any]:
    """Return the newest pass of an engine."""
    return {
        "worker_id": worker,
        "wall_time": 0.01,
        "num_prefill_requests": 0,
        "sum_prefill_tokens": 0,
        "num_decode_requests": 12,
        "sum_decode_kv_tokens": 40_000,
        "num_queued_prefill": 0,
        "sum_queued_prefill_tokens": 0,
        "num_queued_decode": 0,
        "sum_queued_decode_kv_tokens": 0,
    } | more


def adapter(
    bench: dict[str, ModuleType], wants: Any = None, layout: str = "aggregated"
) -> tuple[Any, list[Observation]]:
    """Return the adapter around a planner with one plugin that wants what it is told to, and what that one sees."""
    from penstock.planner.plugins.plugin_registry import PluginSpec

    seen: list[Observation] = []

    class Wants:
        spec = PluginSpec(id="wants", stage="propose")

        def evaluate(self, context: Any) -> Override:
            seen.append(context.observation)
            targets = {} if wants is None else wants(context.at)
            return Override(targets=tuple(PoolTarget(pool=pool, replicas=count) for pool, count in targets.items()))

        def snapshot(self) -> None: ...

        def restore(self, state: Any) -> None: ...

    planner = Planner(PlannerSettings(enabled=True), [Wants()], strict=True)
    engine = EngineLimits(kv_tokens=500_000, max_num_seqs=256, max_num_batched_tokens=8192, max_model_len=16_384)
    return bench["policy"].Policy(planner, layout, engine), seen


def test_arrivals_are_told_as_arrivals_and_means_as_sums(bench: dict[str, ModuleType]) -> None:
    policy, seen = adapter(bench)
    assert policy.initial_tick_ms() == 5000.0
    policy.on_tick(snapshot(5.0, [0, 1]))
    traffic = seen[0].models["model"].traffic
    assert traffic is not None and not traffic.at_end
    assert (traffic.rate, traffic.shape.isl, traffic.shape.osl) == (8.0, 3000.0, 150.0)
    assert (traffic.arrived, traffic.answered, traffic.judged) == (40, 20, 0)
    assert traffic.ttft_mean == pytest.approx(0.1)
    assert traffic.itl_mean == pytest.approx(0.01)
    assert not traffic.shapes and not traffic.prompts


def test_a_window_without_answers_keeps_the_mean_prompt_it_was_last_told(bench: dict[str, ModuleType]) -> None:
    policy, seen = adapter(bench)
    policy.on_tick(snapshot(5.0, [0]))
    none = {**snapshot(10.0, [0])["traffic"], "shape_count": 0, "avg_isl": 0.0, "avg_osl": 0.0}
    policy.on_tick(snapshot(10.0, [0], traffic=none))
    traffic = seen[1].models["model"].traffic
    assert traffic is not None
    assert (traffic.shape.isl, traffic.shape.osl, traffic.answered) == (3000.0, None, 0)


def test_traffic_that_is_not_told_is_unknown_and_not_none(bench: dict[str, ModuleType]) -> None:
    policy, seen = adapter(bench)
    policy.on_tick(snapshot(5.0, [0], traffic=None))
    assert seen[0].models["model"].traffic is None
    assert seen[0].window == 5.0


def test_a_worker_ages_from_when_it_was_ordered_and_its_start_up_is_told_once(bench: dict[str, ModuleType]) -> None:
    policy, seen = adapter(bench, lambda at: {"decode": 3})
    assert policy.on_tick(snapshot(5.0, [0, 1])) == {
        "target_prefill": None,
        "target_decode": 3,
        "next_tick_ms": 10_000.0,
    }
    policy.on_tick(snapshot(10.0, [0, 1], starting_decode_ids=[2]))
    policy.on_tick(snapshot(15.0, [0, 1], starting_decode_ids=[2]))
    policy.on_tick(snapshot(20.0, [0, 1, 2]))
    policy.on_tick(snapshot(25.0, [0, 1, 2]))
    pools = [each.models["model"].pools["decode"] for each in seen]
    assert [pool.starting for pool in pools] == [(), (5.0,), (10.0,), (), ()]
    assert [pool.start_up_times for pool in pools] == [(), (), (), (15.0,), ()]
    assert [each.pool.desired for each in pools] == [2, 3, 3, 3, 3]
    assert pools[0].pool.role == "aggregated" and not pools[0].flips


def test_without_a_start_up_time_a_worker_serves_when_it_is_first_seen(bench: dict[str, ModuleType]) -> None:
    policy, seen = adapter(bench, lambda at: {"decode": 2})
    policy.on_tick(snapshot(5.0, [0]))
    policy.on_tick(snapshot(10.0, [0, 1]))
    assert seen[1].models["model"].pools["decode"].start_up_times == (5.0,)


def test_engines_tell_their_newest_pass_and_their_queue_and_silent_ones_nothing(bench: dict[str, ModuleType]) -> None:
    policy, seen = adapter(bench)
    busy = passed(0, num_prefill_requests=1, sum_prefill_tokens=4000, num_queued_prefill=3, num_queued_decode=1)
    policy.on_tick(snapshot(5.0, [0, 1], decode_fpm_snapshots=[busy], draining_decode_ids=[7]))
    pool = seen[0].models["model"].pools["decode"]
    first, second = pool.engines
    assert pool.draining == 1
    assert (first.running, first.waiting, first.decode_kv, first.limits.kv_tokens) == (13, 4, 40_000, 500_000)
    assert first.steps is not None and (first.steps.passes, first.steps.prefill_tokens) == (1, 4000)
    assert second.steps is None and second.running is None


def test_both_pools_of_a_split_are_seen_and_scaled(bench: dict[str, ModuleType]) -> None:
    policy, seen = adapter(bench, lambda at: {"prefill": 3, "decode": 2}, "disaggregated")
    told = snapshot(5.0, [4, 5], active_prefill_ids=[0, 1], prefill_fpm_snapshots=[passed(0), passed(1)])
    said = policy.on_tick(told)
    assert (said["target_prefill"], said["target_decode"]) == (3, None)  # two decode workers are there already
    assert {name: state.pool.role for name, state in seen[0].models["model"].pools.items()} == {
        "prefill": "prefill",
        "decode": "decode",
    }


def test_our_planner_orders_more_as_arrivals_grow_and_gives_back_when_they_fall(bench: dict[str, ModuleType]) -> None:
    policy_module = bench["policy"]
    planner = policy_module.planner_of("aggregated", FAST, ttft=0.5, itl=0.02, gpus=16)
    engine = EngineLimits(kv_tokens=500_000, max_num_seqs=256, max_num_batched_tokens=8192, max_model_len=16_384)
    policy = policy_module.Watched(policy_module.Policy(planner, "aggregated", engine))
    active, wanted = [0, 1], []
    for tick in range(1, 361):
        arrived = 20 if tick < 120 else 150 if tick < 240 else 10
        base = snapshot(tick * 5.0, list(active))
        traffic = {**base["traffic"], "num_req": arrived, "shape_count": arrived}
        said = policy.on_tick({**base, "traffic": traffic})
        count = said["target_decode"]
        if count is not None:
            active = [*active, *range(100 + tick * 20, 100 + tick * 20 + count - len(active))][:count]
        wanted.append(len(active))
    assert wanted[230] > wanted[110] and wanted[-1] < wanted[230]
    assert min(wanted) >= 1 and max(wanted) <= 16
    assert policy.ticks == 360 and policy.changes > 1 and policy.seconds > 0.0


def test_a_front_is_read_between_its_points_and_not_below_its_first(bench: dict[str, ModuleType]) -> None:
    table = bench["table"]
    found = table.front([table.Point(4, 0.5), table.Point(6, 0.9), table.Point(5, 0.4), table.Point(8, 0.9)])
    assert [point.gpu_hours for point in found] == [4, 6]
    assert table.at(found, 3.9) is None
    assert table.at(found, 5.0).kept == pytest.approx(0.7)
    assert table.at(found, 9.0).kept == 0.9


def test_the_page_tells_gains_over_seeds_and_calls_a_mixed_sign_a_tie(bench: dict[str, ModuleType]) -> None:
    plan, table = bench["plan"], bench["table"]
    place = plan.QUICK[0]
    done = {}
    for seed, kept in ((1, 0.95), (2, 0.85)):
        for entry, hours, share in (
            (plan.Entry("static", "static", "3", {}), 3.0, 0.8),
            (plan.Entry("static", "static", "5", {}), 5.0, 1.0),
            (plan.Entry("ours", "slo", "miss_cost 20", {}), 4.0, kept),
            (plan.Entry("peer", "latency", "default", {}), 3.5, 0.5),
        ):
            row = {"gpu_hours": hours, "attainment": share, "turns": 2.0, "ttft_p99": 0.4}
            done[plan.Cell(place, seed, entry)] = row
    begun = plan.Cell(place, 3, plan.Entry("ours", "slo", "miss_cost 20", {}))
    half = {begun: {"gpu_hours": 4.0, "attainment": 0.1, "turns": 2.0, "ttft_p99": 0.4}}
    text = table.page(done | half, [*done, begun, plan.Cell(place, 3, plan.Entry("static", "static", "3", {}))])
    assert "Seeds that are not whole are left out: 2 of 10 runs." in text
    assert "| +0.0 (-5.0 to +5.0) tie | +40.0 (+35.0 to +45.0) | 80% (70% to 90%) | latency | 2 |" in text
    assert "| Dynamo: latency | default | 50.0% | 3.50 | -35.0 (-35.0 to -35.0) | - | 2 | 0.40 |" in text
    default = text.partition("**At the default knob, miss_cost 20**")[2].partition("**At every knob**")[0]
    assert {line.split(" | ")[1] for line in default.splitlines() if line.startswith("| a")} <= {"20"}


def test_every_run_has_its_own_name_and_every_place_comes_before_a_second_seed(
    bench: dict[str, ModuleType],
) -> None:
    plan = bench["plan"]
    cells = plan.cells(3, quick=False, public=True)
    assert len({cell.key for cell in cells}) == len(cells)
    assert [cell.seed for cell in cells] == sorted(cell.seed for cell in cells)
    assert {cell.place for cell in cells if cell.seed == 1} == {*plan.MAIN, *plan.MORE}
    assert {cell.place for cell in cells if cell.seed == 3} == {*plan.MAIN}
    assert not [cell for cell in plan.cells(3, quick=False, public=False) if cell.place.traffic == "conversation"]
    assert {cell.entry.policy for cell in plan.cells(1, quick=True, public=True)} == {"static", "slo", *plan.PEER}


def test_traces_are_the_same_for_a_seed_and_share_no_prefix(bench: dict[str, ModuleType], tmp_path: Path) -> None:
    traffic = bench["traffic"]
    found = traffic.requests("six-fold spike", 1, None)
    assert found == traffic.requests("six-fold spike", 1, None) != traffic.requests("six-fold spike", 2, None)
    assert [one.at for one in found] == sorted(one.at for one in found)
    traffic.write(found[:50], tmp_path / "trace.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "trace.jsonl").read_text().splitlines()]
    blocks = [block for row in rows for block in row["hash_ids"]]
    assert len(blocks) == len(set(blocks))
    assert all(len(row["hash_ids"]) == -(-row["input_length"] // 512) for row in rows)


def test_without_the_peer_the_bench_says_what_to_do(
    bench: dict[str, ModuleType], capsys: Any, monkeypatch: Any
) -> None:
    monkeypatch.delenv("PEERS", raising=False)
    assert bench["run"].main(["--quick"]) == 2
    assert "PEERS" in capsys.readouterr().err


def test_both_planners_decide_in_the_peer_s_simulator(bench: dict[str, ModuleType], tmp_path: Path) -> None:
    python = bench["run"].peer_of_environment()
    if python is None:
        skip_or_fail("dynamo", f"there is no {os.environ.get('PEERS', '$PEERS')}/planner/bin/python")
    traffic, plan, run = bench["traffic"], bench["plan"], bench["run"]
    trace = tmp_path / "trace.jsonl"
    traffic.write([one for one in traffic.requests("six-fold spike", 1, None) if one.at < 400.0], trace)
    peer = run.Peer(python, tmp_path / "profile.npz", tmp_path / "log")
    place = plan.Place("six-fold spike", "aggregated", 0.0)
    try:
        for entry in plan.entries(place, quick=True):
            if entry.kind != "static" or entry.knob == "3":
                found = peer.ask(run.job_of(plan.Cell(place, 1, entry), trace, 4.0))
                assert "error" not in found, found
                assert 0.0 <= found["attainment"] <= 1.0 and found["gpu_hours"] > 0.0
    except (subprocess.SubprocessError, OSError) as error:
        pytest.fail(f"{error}: {(tmp_path / 'log').read_text()[-2000:]}")
    finally:
        peer.end()
