"""Is the fidelity bench's arithmetic right, and does it say what it lacks? Without starting an engine of its own."""

import importlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

from penstock_lab.config.timing_files import load_timing
from penstock_lab.engine.settings import SimSettings, TimingSettings
from penstock_lab.engine.timing.timing_model import timing_of

BENCH = Path(__file__).resolve().parents[3] / "bench" / "fidelity"
NAMES = ("errors", "replay", "measured", "passes", "tail", "sweep", "live", "table", "run")
RUN = Path(os.environ.get("PENSTOCK_TRACES") or "../shared/traces") / "vllm_real"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    """The bench's modules, which are imported as its script imports them."""
    monkeypatch.syspath_prepend(str(BENCH))
    yield {name: importlib.import_module(name) for name in NAMES}
    for name in NAMES:
        sys.modules.pop(name, None)


def test_errors_are_those_of_the_figures_and_of_each_request(bench: dict[str, ModuleType]) -> None:
    errors = bench["errors"]
    # TTFT 1, 2, 3; TPOT 0.1, 0.2 and none; end to end 2, 4, 3.
    real = [
        errors.Served(0.0, 1.0, 2.0, 11),
        errors.Served(1.0, 3.0, 5.0, 11),
        errors.Served(2.0, 5.0, 5.0, 1),
    ]
    ours = [
        errors.Served(0.0, 1.1, 2.1, 11),
        errors.Served(1.0, 2.0, 4.0, 11),
        errors.Served(2.0, 5.0, 5.0, 1),
    ]
    found = {(row.name, row.point): row for row in errors.compare(real, ours)}
    assert found["TTFT", "mean"].error == pytest.approx((1.1 + 1 + 3) / 6 - 1)
    assert found["TTFT", "mean"].requests == pytest.approx(0.1)  # of 10 %, 50 % and none
    assert found["TTFT", "p50"].real == 2.0 and found["TTFT", "p50"].ours == pytest.approx(1.1)
    assert found["TTFT", "p90"].real == pytest.approx(2.8)  # lines between the values
    assert found["TPOT", "mean"].real == pytest.approx(0.15) and found["TPOT", "mean"].error == pytest.approx(0.0)
    assert found["end to end", "p50"].ours == pytest.approx(3.0)
    assert found["throughput", "mean"].real == pytest.approx(23 / 5)
    assert found["TTFT", "p99"].requests is None
    with pytest.raises(ValueError, match="not of the same requests"):
        errors.compare(real, ours[:2])


def test_two_real_runs_count_by_their_mean(bench: dict[str, ModuleType]) -> None:
    errors = bench["errors"]
    one, other = ([errors.Compared("TTFT", "mean", real, 3.0, each)] for real, each in ((2.0, 0.5), (4.0, 0.3)))
    (found,) = errors.between(one, other)
    assert (found.real, found.ours, found.requests, found.error) == (3.0, 3.0, 0.4, 0.0)


def test_a_cost_comes_back_from_its_own_passes_and_through_the_profile(
    bench: dict[str, ModuleType], tmp_path: Path
) -> None:
    sweep, live = bench["sweep"], bench["live"]
    cost = sweep.Cost(
        (0.006, 0.008, 0.007, 0.006, 0.007, 0.008, 0.009, 0.01, 0.02, 0.03, 0.06, 0.11), 0.0002, 6e-8, 2e-6
    )
    passes = made(sweep, cost)
    found = sweep.fit(passes)
    for one in passes:
        assert found.of(one) == pytest.approx(one.seconds, rel=1e-6)
    sweep.write_profile(tmp_path / "profile", found, 4, 2048)
    (tmp_path / "config.json").write_text(json.dumps(live.MODEL))
    settings = TimingSettings(
        kind="operators",
        model=str(tmp_path / "config.json"),
        profile=str(tmp_path / "profile"),
    )
    timing = timing_of(settings, 16_384, load_timing(settings))
    for one in passes:
        if one.new:
            told = timing.mixed(one.new, [(one.past, one.new)], one.kv, one.seqs)
        else:
            told = timing.decode(one.kv, one.seqs)
        assert told / 1e9 == pytest.approx(one.seconds, rel=0.005), one
    assert timing.extrapolated == 0
    with pytest.raises(ValueError, match="can't tell"):
        sweep.fit(passes[:3])


def made(sweep: ModuleType, cost: Any) -> list[Any]:
    """Return the passes that the sweep's cases have, each with what the cost says."""
    found = []
    for case in sweep.cases(1):
        seqs, kv, past = case["seqs"], case["seqs"] * case["kv"], 0
        for _ in range(case["steps"]):
            new = min(case["prompt"] - past, case["budget"] - seqs)
            one = sweep.Pass(past, new, seqs, kv, 0.0)
            found.append(sweep.Pass(past, new, seqs, kv, cost.of(one)))
            past, kv = past + new, kv + seqs
            if case["prompt"] and past == case["prompt"]:
                break
    return found


def test_no_term_of_a_fit_is_below_zero(bench: dict[str, ModuleType]) -> None:
    sweep = bench["sweep"]
    noisy = [
        sweep.Pass(one.past, one.new, one.seqs, one.kv, one.seconds * (1.3 if number % 3 else 0.6))
        for number, one in enumerate(made(sweep, sweep.Cost((0.006,) * len(sweep.KNOTS), 0.0, 0.0, 0.0)))
    ]
    found = sweep.fit(noisy)
    assert min(*found.by_tokens, found.output, found.pair, found.read) >= 0


def test_a_stalled_pass_is_no_cost(bench: dict[str, ModuleType]) -> None:
    def one(seconds: float, **changes: int) -> dict[str, float]:
        return {"past": 0, "new": 0, "seqs": 2, "kv": 64, "case_kv": 32, "seconds": seconds, **changes}

    alike = bench["sweep"].alike
    (found,) = alike([one(0.010), one(0.012, kv=66), one(0.011), one(0.5)])
    assert found.seconds == pytest.approx(0.011) and found.kv == 65
    assert len(alike([one(0.010), one(0.010, case_kv=256)])) == 2
    with pytest.raises(ValueError, match="took 0"):
        alike([one(0.0)])


def test_the_trace_is_not_in_the_sweep(bench: dict[str, ModuleType]) -> None:
    live, sweep = bench["live"], bench["sweep"]
    trace = live.arrivals(live.TRACE_SEED, live.REQUESTS)
    assert trace == live.arrivals(live.TRACE_SEED, live.REQUESTS)
    assert trace != live.arrivals(live.WARM_UP_SEED, live.REQUESTS)
    swept = {case["prompt"] for case in sweep.cases(1)}
    assert sum(row.isl in swept for row in trace) < 0.05 * len(trace)
    assert max(row.isl + row.osl for row in trace) <= live.MAX_LEN
    assert live.TRACE_SEED not in live.SWEEP_SEEDS and len(live.SWEEP_SEEDS) == 3  # before, between and after two runs


def test_replay_keeps_the_order_and_refuses_to_lose_a_request(bench: dict[str, ModuleType]) -> None:
    replay, arrival = bench["replay"].replay, bench["replay"].Arrival
    timing = TimingSettings(prefill=(0.0, 0.0, 10.0), decode=(0.0, 0.0, 5.0))
    settings = SimSettings(max_model_len=100, timing=timing)
    found = replay([arrival(0.0, 20, 3), arrival(1.0, 20, 1)], settings, None)
    assert [(row.at, row.first, row.last, row.tokens) for row in found] == [(0.0, 0.01, 0.02, 3), (1.0, 1.01, 1.01, 1)]
    with pytest.raises(RuntimeError, match="finished 0 of 1"):
        replay([arrival(0.0, 200, 3)], settings, None)


def rows(bench: dict[str, ModuleType], error: float) -> list[Any]:
    errors = bench["errors"]
    found = [
        errors.Compared(name, point, 2.0, 2.0 * (1 + error), 0.05 if point == "mean" else None)
        for name in errors.LATENCIES
        for point in errors.POINTS
    ]
    return [*found, errors.Compared("throughput", "mean", 100.0, 100.0 * (1 + error))]


def test_steps_at_the_end_are_counted_from_tokens(bench: dict[str, ModuleType]) -> None:
    measured, settings = bench["measured"], TimingSettings(prefill=(0.0, 0.02, 5.0), decode=(0.0, 0.0, 10.0))
    # Two sequences, then one, a token of each every 12.5 ms; the series' clock is ten seconds ahead.
    requests = [measured.Request(0.0, 0.0, 0.0, 0.5, last, 100, osl) for last, osl in ((3.5, 241), (4.75, 341))]
    tokens = {11.0: 40.0, 12.0: 160.0, 13.0: 160.0, 14.0: 120.0, 15.0: 60.0}
    series = [measured.Second(end, 200.0 if end == 11.0 else 0.0, made) for end, made in tokens.items()]
    steps = bench["tail"].steps_at_the_end(requests, series, timing_of(settings, 1000))
    assert [one.seqs for one in steps] == pytest.approx([2.0, 1.5, 0.75])
    for one in steps:
        assert one.real == pytest.approx(0.0125) and one.operators == pytest.approx(0.010)


def test_tables_say_whether_the_goals_are_met(bench: dict[str, ModuleType]) -> None:
    table = bench["table"]
    run = bench["measured"].Run("a", Path(), {"model": "m", "max_num_seqs": 8}, 16, 100, True)
    text = table.measured(run, {"operators": rows(bench, 0.03), "roofline": rows(bench, -0.2)}, "2026-01-01")
    assert "- Mean TPOT: +3.0 %, goal 1%: missed." in text and "- Mean TTFT: +3.0 %, goal 4%: met." in text
    assert "| roofline | -20.0 % | -20.0 % | -20.0 % | -20.0 % | 5.0 % |" in text
    found = bench["live"].Live(rows(bench, 0.14), rows(bench, 0.1), 500, 60.0, 0.03, [0.01, 0.02])
    text = table.live(found, "2026-01-01", "two cores")
    assert "Met for 12 of 12 latencies." in text  # 14 % is within 1.5 times 10 %
    assert "quiet enough" in text
    found = bench["live"].Live(rows(bench, 0.14), rows(bench, 0.05), 500, 60.0, 0.03, [0.0, 0.01])
    assert "| goal met | no | no | no | no | |" in table.live(found, "2026-01-01", "two cores")


def test_errors_of_a_busy_machine_are_not_judged(bench: dict[str, ModuleType]) -> None:
    found = bench["live"].Live(rows(bench, 0.14), rows(bench, 0.5), 500, 60.0, 0.03, [0.01, 0.2])
    text = bench["table"].live(found, "2026-01-01", "two cores")
    assert "goal met" not in text and "Not judged." in text
    assert "1% and 20% of its passes' time. **The machine was busy" in text


def test_what_is_absent_is_named_and_leaves_the_page_alone(
    bench: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PENSTOCK_TRACES", str(tmp_path / "none"))
    monkeypatch.setenv("PENSTOCK_VLLM_VENV", str(tmp_path / "nothing"))
    page = tmp_path / "page.md"
    page.write_text("as it was")
    assert bench["run"].main(["--docs", str(page)]) == 77
    said = capsys.readouterr().err
    assert "left out: measured (no measured run in" in said and "left out: live (no vLLM in" in said
    assert page.read_text() == "as it was"


@pytest.mark.skipif(not RUN.is_dir(), reason="the real run is not here: set PENSTOCK_TRACES")
def test_the_measured_run_was_planned_one_pass_ahead(bench: dict[str, ModuleType], tmp_path: Path) -> None:
    measured = bench["measured"]
    run = measured.run_of(RUN / "RTXPRO6000_Llama-3.1-8B__meta.json")
    measured.write_model(run, tmp_path / "config.json")
    settings = measured.timings(run, tmp_path / "config.json")[measured.OPERATORS]
    timing, requests = timing_of(settings, 1, load_timing(settings)), run.requests()
    sync, ahead = (bench["passes"].recover(run, timing, planned, 22.0) for planned in (0, 1))
    assert ahead.contradicted < 0.01 * ahead.milestones > 2.5
    assert sync.contradicted > 0.1 * sync.milestones
    tokens = sum(each.prompt_tokens for one in ahead.stretches for each in one.passes)
    came = [request for request in requests if request.first <= ahead.stretches[-1].passes[-1].end]
    assert tokens >= sum(request.isl for request in came)


@pytest.mark.skipif(not RUN.is_dir(), reason="the real runs are not here: set PENSTOCK_TRACES")
@pytest.mark.parametrize("name", ["RTXPRO6000_Llama-3.1-8B", "RTX4090_Llama-3.1-8B"])
def test_the_measured_runs_are_met_within_their_goals(bench: dict[str, ModuleType], tmp_path: Path, name: str) -> None:
    measured = bench["measured"]
    run = measured.run_of(RUN / f"{name}__meta.json")
    found = measured.compared(run, tmp_path / "config.json")[measured.OPERATORS]
    errors = {(row.name, row.point): row.error for row in found}
    assert abs(errors["TPOT", "mean"]) < 0.01 and abs(errors["TTFT", "mean"]) < 0.04
    assert all(abs(error) < 0.1 for error in errors.values())


def test_a_run_says_what_its_engine_was(bench: dict[str, ModuleType], tmp_path: Path) -> None:
    measured = bench["measured"]
    kwargs = {"model": "Qwen/Qwen3-30B-A3B", "max_num_seqs": 64, "max_num_batched_tokens": 2048}
    told = {"engine_kwargs": {**kwargs, "data_parallel_size": 2, "enable_expert_parallel": True}}
    (tmp_path / "H100_moe__meta.json").write_text(json.dumps({**told, "kv_cache": {"num_gpu_blocks": 101}}))
    (tmp_path / "profile_H100_moe" / "bf16" / "tp1").mkdir(parents=True)
    (run,) = measured.runs_of([tmp_path])
    assert (run.name, run.gpu, run.kv_blocks, run.block_size) == ("H100_moe", "h100", 100, 16)
    assert (run.tensor_parallel_size, run.data_parallel, run.expert_parallel_size, run.max_num_seqs) == (1, 2, 2, 64)
    assert run.profile == tmp_path / "profile_H100_moe" / "bf16" / "tp1"
    with pytest.raises(measured.NotARun, match="no measured run"):
        measured.runs_of([tmp_path / "profile_H100_moe"])


def test_a_preempted_request_finds_its_own_blocks_again(bench: dict[str, ModuleType]) -> None:
    """A real engine names the blocks of prompts and answers: what was preempted is not all computed again."""
    arrivals = [bench["replay"].Arrival(0.0, 100, 60) for _ in range(3)]
    timing = TimingSettings(prefill=(0.0, 1.0, 5.0), decode=(0.0, 0.0, 10.0))
    tight = SimSettings(block_size=4, kv_blocks=90, max_num_seqs=4, max_num_batched_tokens=64, timing=timing)
    named, unnamed = (
        bench["replay"].replay(arrivals, msgspec.structs.replace(tight, enable_prefix_caching=caching), None)
        for caching in (True, False)
    )
    assert max(one.last for one in named) < max(one.last for one in unnamed) - 0.02
