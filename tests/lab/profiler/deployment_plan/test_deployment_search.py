"""Candidates and the search over them: what fits, what is fewest, what is cheapest, and which source timed it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import yaml

from penstock.kernel.errors import ConfigError
from penstock.kernel.values import EngineLimits
from penstock.planner.sizing.attainment import TAIL, AttainmentModel
from penstock_lab.engine.timing.gpus import GPUS
from penstock_lab.engine.timing.known_models import model_named
from penstock_lab.engine.timing.model_shape import shape_of
from penstock_lab.engine.timing.roofline import REQUEST_OVERHEAD
from penstock_lab.profiler.deployment_plan.deployment_config import config_yaml
from penstock_lab.profiler.deployment_plan.deployment_search import Deployment, DeploymentSearch
from penstock_lab.profiler.deployment_plan.engine_candidates import EngineCandidate, EngineCatalog, layouts
from penstock_lab.profiler.deployment_plan.plan_request import PlanRequest
from penstock_lab.profiler.deployment_plan.planned_traffic import traffic_of
from tests.lab.profiler.deployment_plan.questions import model_folder, question


def searched(request: PlanRequest) -> list[Deployment]:
    traffic = traffic_of(request)
    return DeploymentSearch(request, traffic, EngineCatalog(request, traffic)).deployments()


def naive_share(request: PlanRequest, engine: EngineCandidate, replicas: int) -> float:
    traffic = traffic_of(request)
    limits = EngineLimits(
        max_num_batched_tokens=engine.chunk, max_num_seqs=engine.sim.max_num_seqs, kv_tokens=engine.sim.capacity
    )
    extra = engine.sim.request_overhead
    model = AttainmentModel(engine.times, limits, traffic.mix, request.slo.of(None), extra=extra)
    shares = [
        weight * float(model.attainment(engine.role, np.array([rate]), np.array([float(replicas)])).both[0])
        for rate, weight in zip(traffic.rates, traffic.weights, strict=True)
    ]
    return sum(shares)


@pytest.mark.parametrize("rate", [1.0, 7.0, 40.0, 150.0])
def test_one_replica_fewer_would_miss_the_target(rate: float) -> None:
    request = question(rate=rate, requests=200)
    catalog = EngineCatalog(request, traffic_of(request))
    (best, *_) = [each for each in searched(request) if each.key == (("aggregated", "h200"),)]
    (pool,) = best.pools
    engine = next(each for each in catalog.candidates["aggregated"] if each.sim == pool.sim)
    assert naive_share(request, engine, pool.replicas) == pytest.approx(best.expected) and best.expected >= 0.95
    assert pool.replicas == 1 or naive_share(request, engine, pool.replicas - 1) < 0.95
    assert (pool.binds == "one replica") == (pool.replicas == 1)


def test_a_pair_is_matched_in_whole_numbers_and_the_cheapest_of_its_kind() -> None:
    request = question(rate=40.0)
    traffic = traffic_of(request)
    search = DeploymentSearch(request, traffic, EngineCatalog(request, traffic))
    best = next(each for each in search.deployments() if each.key == (("prefill", "h200"), ("decode", "h200")))
    prefill, decode = (
        next(each for each in search._catalog.candidates[pool.role] if each.sim == pool.sim) for pool in best.pools
    )
    before = search._model(prefill, extra=search._handoff(prefill, decode))
    after = search._model(decode)

    def share(p: int, d: int) -> float:
        return search._share(before, "prefill", p) * search._share(after, "decode", d) / (1 - TAIL)

    counts = [(p, d) for p in range(1, 25) for d in range(1, 25) if share(p, d) >= 0.95]
    assert min(sum(each) for each in counts) == sum(pool.replicas for pool in best.pools)
    assert best.expected == pytest.approx(share(*(pool.replicas for pool in best.pools)))


def test_what_an_engine_takes_beside_its_passes_counts_to_ttft_and_not_to_itl() -> None:
    request = question(rate=7.0, requests=200, engine="vllm")
    traffic = traffic_of(request)
    catalog = EngineCatalog(request, traffic)
    search = DeploymentSearch(request, traffic, catalog)
    engine = catalog.candidates["aggregated"][0]
    assert engine.sim.request_overhead == REQUEST_OVERHEAD["vllm"] > 0
    assert catalog.idle[0].prompt > REQUEST_OVERHEAD["vllm"] + float(engine.times.prefill(traffic.prompt)) / 2
    seconds = [0.0, 0.1, 10.0]
    made = [replace(engine, sim=msgspec.structs.replace(engine.sim, request_overhead=each)) for each in seconds]
    rates, workers = np.array([7.0]), np.array([4.0])
    shares = [search._model(each).attainment("aggregated", rates, workers) for each in made]
    assert [float(each.ttft[0]) for each in shares] == sorted((float(each.ttft[0]) for each in shares), reverse=True)
    assert float(shares[-1].ttft[0]) < 0.01 and len({float(each.itl[0]) for each in shares}) == 1


def test_more_load_and_tighter_targets_never_cost_less() -> None:
    prices = [searched(question(rate=rate, requests=200))[0].price for rate in (2.0, 10.0, 50.0, 200.0)]
    assert prices == sorted(prices) and prices[0] < prices[-1]
    assert searched(question(itl=0.009))[0].price >= searched(question(itl=0.03))[0].price
    assert searched(question(ttft=0.2))[0].price >= searched(question(ttft=2.0))[0].price


def test_the_prices_decide_which_gpus_the_pools_have() -> None:
    fields = {"gpus": ("h200", "l40s"), "ttft": 2.0, "itl": 0.04}
    dear = searched(question(**fields, prices={"h200": 100.0, "l40s": 0.1}))[0]
    cheap = searched(question(**fields, prices={"h200": 0.1, "l40s": 100.0}))[0]
    assert {pool.gpu for pool in dear.pools} == {"l40s"} and {pool.gpu for pool in cheap.pools} == {"h200"}
    both = [{pool.gpu for pool in each.pools} for each in searched(question(**fields))]
    assert {"h200", "l40s"} in both, "pools of one deployment may have different GPUs"


def test_the_limit_of_gpus_is_a_limit() -> None:
    gpus = {each.gpus for each in searched(question(rate=50.0))}
    limit = sorted(gpus)[len(gpus) // 2]
    assert {each.gpus for each in searched(question(rate=50.0, max_gpus=limit))} <= set(range(limit + 1))


def test_layouts_follow_the_model_and_the_link() -> None:
    dense, experts = (shape_of(model_named(name)) for name in ("Llama-3.1-8B", "DeepSeek-R1"))
    assert list(layouts(dense, GPUS["h200"], None)) == [(1, 1), (2, 1), (4, 1), (8, 1)]
    assert list(layouts(dense, GPUS["gb200"], 64))[-1] == (16, 1)
    assert list(layouts(dense, GPUS["h200"], 3)) == [(1, 1), (2, 1)]
    assert set(layouts(experts, GPUS["h200"], None)) >= {(8, 1), (8, 8), (1, 8)}


def test_what_does_not_fit_is_no_candidate_and_says_why() -> None:
    request = question(model="Qwen3-32B", gpus=("l40s",), max_gpus=1)
    catalog = EngineCatalog(request, traffic_of(request))
    assert not any(catalog.candidates.values()) and not catalog.idle
    assert "can be used" in catalog.refused["l40s"][0]
    longest = question(model="Qwen3-32B", gpus=("h100",), prompt="40000", max_gpus=1, requests=100)
    assert "the longest request has 40,300" in EngineCatalog(longest, traffic_of(longest)).refused["h100"][0]


def test_stages_are_joined_where_no_other_layout_holds_the_model() -> None:
    fields: dict[str, Any] = {"model": "Llama-3.1-405B", "rate": 1.0, "ttft": 5.0, "itl": 0.1, "engine": "vllm"}
    request = question(**fields, gpus=("h100", "h200"))
    catalog = EngineCatalog(request, traffic_of(request))
    sizes = {each.gpu: (each.gpus, each.sim.timing.pipeline_parallel_size) for each in catalog.candidates["aggregated"]}
    assert sizes == {"h100": (16, 2), "h200": (8, 1)}, "810 GB of weights; 640 GB in a node of eight"
    assert any("pipelines of 2 stages" in note for note in catalog.notes)
    idle = {each.gpu: each for each in catalog.idle}
    assert idle["h100"].label == "h100 TP8 PP2" and idle["h100"].gpus == 16
    assert idle["h100"].weights == pytest.approx(idle["h200"].weights * 4.8 / 3.35, rel=0.01), "one stage after another"
    best = searched(question(**fields, gpus=("h100",)))[0]
    config = yaml.safe_load(config_yaml(request, best))
    pool = next(iter(config["models"]["Llama-3.1-405B"]["pools"].values()))
    assert "--tensor-parallel-size 8 --pipeline-parallel-size 2" in " ".join(pool["args"]) and pool["gpus"] == 16
    assert pool["sim"]["timing"]["pipeline_parallel_size"] == 2
    few = question(**fields, gpus=("h100",), max_gpus=8)
    assert not EngineCatalog(few, traffic_of(few)).idle


def write_profile(path: Path, step_ms: float) -> Path:
    np.savez(
        path,
        prefill_isl=np.array([100, 2000, 8000]),
        prefill_ttft_ms=np.array([5.0, 60.0, 260.0]),
        decode_active_kv_tokens=np.array([1000, 400_000]),
        decode_context_length=np.array([500, 6000]),
        decode_itl=np.full((2, 2), step_ms),
    )
    return path


def test_a_profile_counts_for_its_engine_and_the_roofline_for_the_others(tmp_path: Path) -> None:
    profile = write_profile(tmp_path / "profile.npz", 7.0)
    request = question(profiles={"h200:2": str(profile)}, gpus=("h200",))
    catalog = EngineCatalog(request, traffic_of(request))
    kinds = {each.gpus: each.sim.timing.kind for each in catalog.candidates["aggregated"]}
    assert kinds == {1: "roofline", 2: "table", 4: "roofline", 8: "roofline"}
    measured = next(each for each in catalog.candidates["decode"] if each.gpus == 2)
    assert float(measured.times.decode(8.0, 8.0)) == pytest.approx(0.007)
    assert measured.times.extrapolated is not None and 0.0 < measured.times.extrapolated < 1.0
    assert next(each for each in catalog.candidates["decode"] if each.gpus == 1).times.extrapolated is None
    alone = question(profiles={"": str(profile)})
    assert alone.profiles == {"h200:1": str(profile)}, "a file is of one size"
    folder = tmp_path / "of-dynamo" / "selected_decode_interpolation"
    folder.mkdir(parents=True)
    (folder / "raw_data.npz").write_bytes(profile.read_bytes())
    assert question(profiles={"": str(folder.parent)}).profiles == {"h200:1": str(folder.parent)}
    with pytest.raises(ConfigError, match="has no profile"):
        broken = question(profiles={"h200:1": str(model_folder(tmp_path))})
        EngineCatalog(broken, traffic_of(broken))


def test_passes_of_a_chunk_add_up_and_decoding_beside_them_shares_what_it_can() -> None:
    request = question()
    candidates = EngineCatalog(request, traffic_of(request)).candidates
    small, large = (
        next(each.times for each in candidates["aggregated"] if each.chunk == chunk) for chunk in (1024, 16_384)
    )
    alone = candidates["prefill"][0].times
    assert float(small.prefill(3000)) == pytest.approx(float(large.prefill(3000)), rel=0.25)
    assert float(large.prefill(3000)) < float(alone.prefill(3000)), "its weights are read by the decode step beside it"
    assert list(large.prefill(np.array([10.0, 3000.0]))) == [float(large.prefill(10)), float(large.prefill(3000))]
    steps = large.decode(np.array([1.0, 16.0, 256.0]), np.zeros(3))
    assert steps[0] < steps[1] < steps[2]


def test_no_engine_is_planned_that_cannot_split_heads_or_scales() -> None:
    """vLLM refuses both: 10 KV heads over 4 GPUs, and blocks of 128 columns of FP8 over parts of them."""
    phi = shape_of(model_named("phi-4"))
    assert list(layouts(phi, GPUS["h200"], None)) == [(1, 1), (2, 1)]
    blocks = shape_of(model_named("Qwen3-30B-A3B-FP8"))
    sliced = [tensor for tensor, expert in layouts(blocks, GPUS["h200"], None) if expert == 1]
    assert sliced == [1, 2] and (4, 4) in set(layouts(blocks, GPUS["h200"], None)), "768 columns are six blocks"
    rows = shape_of(model_named("RedHatAI/Llama-3.1-8B-Instruct-FP8"))
    assert [tensor for tensor, _ in layouts(rows, GPUS["h200"], None)] == [1, 2, 4, 8]
    groups = shape_of(model_named("Qwen2.5-72B-Instruct-AWQ"))
    assert 8 not in [tensor for tensor, _ in layouts(groups, GPUS["h200"], None)], "29,568 columns are 231 groups"


def test_windows_are_counted_at_the_lengths_of_the_traffic() -> None:
    """gpt-oss-20b attends to 128 tokens in every second layer: long sequences take about half."""

    def capacity(prompt: str) -> int:
        request = question(model="gpt-oss-20b", gpus=("h100",), prompt=prompt, answer="100", itl=0.05)
        engines = EngineCatalog(request, traffic_of(request)).candidates["aggregated"]
        return next(each.sim.capacity for each in engines if each.gpus == 1 and each.chunk == 1024)

    assert capacity("30000") > 1.8 * capacity("100")


def test_an_engine_takes_the_longest_request_and_no_more_than_the_model() -> None:
    for model, prompt, longest in (
        ("Qwen3-8B", "3000", 7168),
        ("Qwen3-8B", "30000", 40_960),
        ("Llama-2-7b", "3000", 4096),
    ):
        request = question(model=model, prompt=prompt, ttft=20.0, requests=20)
        engines = EngineCatalog(request, traffic_of(request)).candidates["aggregated"]
        assert {each.sim.max_model_len for each in engines} == {longest}
    tight = question(model="Qwen3-32B", gpus=("h100",), prompt="5000", ttft=20.0, requests=20, max_gpus=1)
    engine = EngineCatalog(tight, traffic_of(tight)).candidates["aggregated"][-1]
    assert 5300 <= engine.sim.max_model_len < 0.81 * engine.sim.capacity


def test_blocks_and_chunks_are_those_that_kernels_take() -> None:
    latent, hybrid = (
        EngineCatalog(request, traffic_of(request))
        for request in (question(model=name, itl=0.1) for name in ("DeepSeek-V3.2", "Qwen3.5-35B-A3B"))
    )
    assert {each.sim.block_size for each in latent.candidates["aggregated"]} == {64}
    chunks = [
        each.chunk // max(1, each.sim.timing.expert_parallel_size // each.sim.timing.tensor_parallel_size)
        for each in hybrid.candidates["aggregated"]
    ]
    block = (3 * 8192 * 2 + 32 * 128 * 128 * 4) / (2 * 2 * 256 * 2)
    assert min(chunks) >= block > 1024


def test_limits_of_data_parallel_ranks_are_written_for_each_of_them() -> None:
    request = question(model="Qwen3-30B-A3B", engine="vllm", itl=0.05)
    traffic = traffic_of(request)
    found = DeploymentSearch(request, traffic, EngineCatalog(request, traffic)).deployments()
    spread = next(each for each in found if each.mode == "aggregated" and "DP" in each.label)
    (pool,) = spread.pools
    ranks = pool.sim.timing.expert_parallel_size // pool.sim.timing.tensor_parallel_size
    written = yaml.safe_load(config_yaml(request, spread))["models"]["Qwen3-30B-A3B"]["pools"]["main"]
    assert ranks > 1 and written["max_num_batched_tokens"] == pool.sim.max_num_batched_tokens // ranks
    assert written["args"][:2] == ["--max-num-seqs", str(pool.sim.max_num_seqs // ranks)]
    sglang = question(model="Qwen3-30B-A3B", engine="sglang", itl=0.05)
    other = yaml.safe_load(config_yaml(sglang, spread))["models"]["Qwen3-30B-A3B"]["pools"]["main"]
    assert other["max_num_batched_tokens"] == pool.sim.max_num_batched_tokens, "SGLang splits its limits itself"
    words = " ".join(other["args"])
    assert f"--context-length {pool.sim.max_model_len} --page-size 16" in words


def test_the_model_is_named_as_an_engine_finds_it(tmp_path: Path) -> None:
    folder = model_folder(tmp_path)
    for model, repository in (("Qwen3-8B", "Qwen/Qwen3-8B"), (str(folder / "config.json"), str(folder))):
        assert question(model=model, engine="vllm").repository == repository
    with pytest.raises(ConfigError, match="give the repository whole"):
        question(model="Llama-3.1-8B-FP8", engine="vllm")
    assert question(model="Llama-3.1-8B-FP8").answers
