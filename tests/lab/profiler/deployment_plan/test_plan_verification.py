"""Verification: replicas are given or taken until the simulation just keeps the SLO, and the config says the same."""

from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.config.reading.load import load
from penstock.kernel.errors import ConfigError
from penstock.kernel.values import Slo
from penstock_lab.profiler.deployment_plan import plan_run
from penstock_lab.profiler.deployment_plan.deployment_config import engine_args
from penstock_lab.profiler.deployment_plan.deployment_search import Deployment, DeploymentSearch
from penstock_lab.profiler.deployment_plan.engine_candidates import EngineCatalog
from penstock_lab.profiler.deployment_plan.plan_request import PlanRequest, checked_request
from penstock_lab.profiler.deployment_plan.plan_run import (
    outcome_json,
    plan,
    rows,
    sentences,
    to_verify,
    with_gpus,
    with_highest_rate,
)
from penstock_lab.profiler.deployment_plan.plan_verification import TRIES, simulated, verified_one
from penstock_lab.profiler.deployment_plan.planned_traffic import PlannedTraffic, traffic_of
from penstock_lab.profiler.measurement.measured_engines import FoundGpus
from penstock_lab.report.simulation.simulation_options import SimulateOptions
from penstock_lab.report.simulation.simulation_run import run, variants_of
from tests.lab.profiler.deployment_plan.questions import model_folder, question


def planned(request: PlanRequest, mode: str) -> tuple[PlannedTraffic, Deployment]:
    traffic = traffic_of(request)
    deployments = DeploymentSearch(request, traffic, EngineCatalog(request, traffic)).deployments()
    return traffic, next(each for each in deployments if each.mode == mode)


def share(request: PlanRequest, traffic: PlannedTraffic, deployment: Deployment, folder: Path) -> float:
    return simulated(request, traffic, deployment, folder).summary.goodput_share or 0.0


@pytest.mark.parametrize("first", [3, *(pytest.param(each, marks=pytest.mark.slow) for each in (1, 9))])
def test_from_too_few_or_too_many_it_comes_to_the_fewest_that_meet_the_slo(tmp_path: Path, first: int) -> None:
    request = question(rate=20.0, requests=600)
    traffic, deployment = planned(request, "aggregated")
    done = verified_one(request, traffic, tmp_path, deployment.with_replicas([first]))
    (pool,) = done.deployment.pools
    assert done.meets and done.attainment >= 0.95 and done.simulations <= TRIES
    assert done.attainment == share(request, traffic, done.deployment, tmp_path)
    assert share(request, traffic, done.deployment.with_replicas([pool.replicas - 1]), tmp_path) < 0.95
    assert done.binds in ("TTFT", "ITL"), "one fewer was simulated, and missed one of them"
    assert done.sources[0].startswith("timing of main: roofline of Qwen3-8B on 1 h200")


def test_of_a_pair_the_pool_that_lacks_gets_more(tmp_path: Path) -> None:
    request = question(rate=20.0, requests=600)
    traffic, deployment = planned(request, "disaggregated")
    decode = deployment.pools[1].replicas
    done = verified_one(request, traffic, tmp_path, deployment.with_replicas([1, decode]))
    assert done.meets and done.deployment.pools[0].replicas > 1
    assert "prefill: TTFT" in done.binds


def test_the_limit_of_gpus_ends_the_corrections(tmp_path: Path) -> None:
    request = question(rate=20.0, requests=600, max_gpus=2)
    traffic, deployment = planned(question(rate=20.0, requests=600), "aggregated")
    done = verified_one(request, traffic, tmp_path, deployment.with_replicas([1]))
    assert not done.meets and done.deployment.gpus <= 2


def test_the_written_configs_are_valid_and_simulate_to_the_same_share(tmp_path: Path) -> None:
    model = model_folder(tmp_path)
    request = question(model=str(model), rate=15.0, requests=300)
    outcome = plan(request, output=tmp_path / "plan", jobs=1)
    traffic = traffic_of(request)
    for mode in ("aggregated", "disaggregated"):
        number, best = next((n, each) for n, each in enumerate(outcome.best) if each.deployment.mode == mode)
        config = tmp_path / "plan" / ("penstock.yaml" if number == 0 else f"deployment-{number + 1}.yaml")
        loaded = load(config, files=True).settings
        pools = loaded.models["my-model"].pools
        assert {pool.role: pool.replicas for pool in pools.values()} == {
            pool.role: pool.replicas for pool in best.deployment.pools
        }
        assert (loaded.slo.ttft, loaded.slo.itl) == (0.5, 0.02)
        assert loaded.planner.enabled and loaded.planner.budget.max_gpus == best.deployment.gpus
        alone = ("planner.enabled=false",)
        options = SimulateOptions(config=str(config), out=tmp_path / mode, html=False, json=True, overrides=alone)
        (variant,) = variants_of(options)
        again = run(options, partial(iter, traffic.requests), variant)
        assert again.summary.goodput_share == best.attainment
    assert outcome.page is not None and Path(outcome.page).is_file()


def test_both_modes_are_verified_where_there_are_both(tmp_path: Path) -> None:
    request = question(rate=30.0, requests=300, verify=1)
    traffic = traffic_of(request)
    deployments = DeploymentSearch(request, traffic, EngineCatalog(request, traffic)).deployments()
    chosen = to_verify(deployments, 1)
    assert [each.mode for each in chosen] in (["aggregated", "disaggregated"], ["disaggregated", "aggregated"])
    outcome = plan(request, jobs=1)
    assert {each.deployment.mode for each in outcome.best} == {"aggregated", "disaggregated"}
    ranks = [(not each.meets, each.deployment.price) for each in outcome.best]
    assert ranks == sorted(ranks) and outcome.feasible and outcome.config is None
    table = rows(outcome)
    assert table[0][0].startswith("* ") and len({len(row) for row in table}) == 1
    told = outcome_json(outcome)
    dollars = told["deployments"][0]["price_per_million_answer_tokens"]
    tokens = 30.0 * 300 * 3600 / 1e6  # at the rate that was asked for, whatever the sample's is
    assert traffic.seconds * 30.0 != len(traffic.requests)
    assert dollars == pytest.approx(outcome.best[0].deployment.price / tokens)
    assert any("guesses: h200 $3.5" in line for line in sentences(outcome))


def test_vllm_and_sglang_get_flags_and_simulate_by_their_sim_settings(tmp_path: Path) -> None:
    for engine in ("vllm", "sglang"):
        request = question(model="Qwen3-30B-A3B", rate=5.0, requests=200, verify=1, engine=engine, served="moe")
        outcome = plan(request, output=tmp_path / engine, jobs=1)
        loaded = load(tmp_path / engine / "penstock.yaml").settings
        for pool, written in zip(outcome.best[0].deployment.pools, loaded.models["moe"].pools.values(), strict=True):
            flags = " ".join(written.args)
            timing = pool.sim.timing
            assert written.engine == engine and written.gpus == pool.gpus
            assert written.sim.timing == timing and written.max_num_batched_tokens == pool.sim.max_num_batched_tokens
            if engine == "vllm":
                assert f"--tensor-parallel-size {timing.tensor_parallel_size}" in flags
                assert f"--max-num-seqs {pool.sim.max_num_seqs}" in flags
                assert ("--enable-expert-parallel" in flags) == (timing.expert_parallel_size > 1)
            else:
                assert f"--tp-size {pool.gpus}" in flags and len(written.urls) == pool.replicas


def test_without_a_rate_it_is_the_highest_that_the_gpus_keep() -> None:
    request = question(rate=None, max_gpus=3)
    highest = with_highest_rate(request)
    assert highest.rate is not None and "3 GPUs" in highest.notes[-1]

    def feasible(rate: float) -> bool:
        at = question(rate=rate, max_gpus=3)
        traffic = traffic_of(at)
        return bool(DeploymentSearch(at, traffic, EngineCatalog(at, traffic)).deployments())

    assert feasible(highest.rate) and not feasible(highest.rate * 1.05)
    assert with_highest_rate(question(rate=None, max_gpus=3, itl=0.0001)).rate == 1.0


def test_a_trace_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match=r"nowhere.jsonl"):
        plan(question(trace="nowhere.jsonl"))


@pytest.mark.parametrize("model", ["BAAI/bge-reranker-v2-m3", "Qwen3-Embedding-0.6B"])
def test_models_that_make_no_tokens_are_planned_without_decode(tmp_path: Path, model: str) -> None:
    slo = Slo(ttft=0.2)
    fields: dict[str, Any] = {"rate": 60.0, "prompt": "512", "requests": 300, "verify": 1, "engine": "vllm"}
    request = checked_request(PlanRequest(model=model, gpus=("l40s",), slo=slo, **fields))
    outcome = plan(request, output=tmp_path, jobs=1)
    best = outcome.best[0]
    assert outcome.feasible and {each.deployment.mode for each in outcome.best} == {"aggregated"}
    assert best.itl is None and best.ttft is not None and best.ttft.p95 <= 0.2
    assert outcome.per_million(best.deployment) == pytest.approx(best.deployment.price / (60.0 * 512 * 3600 / 1e6))
    assert any("without decode" in note for note in outcome.notes)
    settings = load(tmp_path / "penstock.yaml").settings
    pool = next(iter(settings.models[model].pools.values()))
    assert " ".join(pool.args).endswith("--runner pooling") and not settings.planner.enabled
    limit = pool.max_num_batched_tokens or 0
    assert limit >= (pool.max_model_len or 0) >= 513, "a prompt is one pass"
    other = checked_request(PlanRequest(model=model, gpus=("l40s",), slo=Slo(ttft=0.2, itl=1.0), answer="9", **fields))
    assert (other.slo, other.answer) == (request.slo, request.answer) and "itl and osl change nothing" in other.notes[0]


def test_rerankers_of_qwen_are_told_to_rank() -> None:
    slo = Slo(ttft=0.5)
    request = PlanRequest(model="Qwen3-Reranker-0.6B", engine="vllm", gpus=("l40s",), slo=slo, rate=5.0, prompt="256")
    request = checked_request(msgspec.structs.replace(request, requests=50))
    traffic = traffic_of(request)
    (best, *_) = DeploymentSearch(request, traffic, EngineCatalog(request, traffic)).deployments()
    assert "--hf-overrides" in engine_args(request, best.pools[0])


def test_without_a_gpu_it_is_planned_for_those_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    base = PlanRequest(model="Qwen/Qwen3-0.6B", slo=Slo(ttft=0.2, itl=0.02), prompt="4000", answer="1000", max_gpus=32)
    monkeypatch.setattr(plan_run, "machine_gpus", lambda env: FoundGpus())
    with pytest.raises(ConfigError, match=r"this machine has none.*gpuSku: h200_sxm"):
        plan(base)
    monkeypatch.setattr(plan_run, "machine_gpus", lambda env: FoundGpus((0, 1), "NVIDIA H200", 143_771))
    request = checked_request(with_gpus(base))
    assert (request.gpus, request.max_gpus) == (("h200",), 2) and "2 NVIDIA H200" in request.notes[0]
    assert with_gpus(msgspec.structs.replace(base, gpus=("h100",))).max_gpus == 32


@pytest.mark.slow
def test_the_public_conversation_trace_is_planned(traces: Path) -> None:
    trace = str(traces / "mooncake_conversation_first6000.jsonl")
    request = question(model="Llama-3.1-8B", trace=trace, requests=2000, ttft=2.0, itl=0.04, verify=1)
    outcome = plan(request, jobs=1)
    assert outcome.feasible and outcome.best[0].hit_rate is not None and outcome.best[0].hit_rate > 0.1
