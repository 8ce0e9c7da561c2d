"""Do planner, simulator and router cost read one profile folder, and refuse one of another model or engine?"""

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest

from penstock.config.files.profile_manifest import check_profile, read_manifest, read_measured
from penstock.config.reading.load import load
from penstock.config.reading.problems import ConfigProblems
from penstock.config.settings.cluster_settings import ClusterSettings
from penstock.kernel.errors import ConfigError
from penstock.kernel.values import RequestShape, Role, WorkerCard, WorkerId
from penstock.planner.forecast.predictor import IntervalCounts
from penstock.planner.performance.speed_sources import pick
from penstock_dynamo.policies.sla_classic import decode_replicas
from penstock_dynamo.profile_folder import read_profile
from penstock_lab.config.described_speeds import described_speed, inputs_of
from penstock_lab.config.timing_files import load_timing
from penstock_lab.engine.settings import TimingSettings
from penstock_lab.engine.timing.timing_model import timing_of
from penstock_lab.profiler.measurement.profile_diff import difference
from penstock_lab.profiler.measurement.profile_writer import write_profile
from tests.lab.profiler.measurement.swept import swept
from tests.lab.profiler.measurement.virtual_probe import MODEL, VirtualProbe, h100


@pytest.fixture
async def folder(tmp_path: Path) -> Path:
    """A profile of vLLM, as its manifest says; simulated engines of sizes 1 and 2 gave the numbers."""
    manifest = await swept(tmp_path / "profile", 1, 2)
    points = read_measured(tmp_path / "profile").points
    write_profile(tmp_path / "profile", msgspec.structs.replace(manifest, engine="vllm"), points)
    return tmp_path / "profile"


def cluster(folder: Path, engine: str = "vllm", model: str = MODEL) -> ClusterSettings:
    pool = {"engine": engine, "sim": {"timing": {"kind": "table", "profile": str(folder)}}}
    return msgspec.convert({"models": {model: {"pools": {"main": pool}}}}, ClusterSettings)


def planned(folder: Path, **pools: dict[str, object]) -> ClusterSettings:
    """A cluster of some pools whose planner has one profile for all."""
    told = {"models": {MODEL: {"pools": pools}}, "planner": {"classic": {"profile": str(folder)}}}
    return msgspec.convert(told, ClusterSettings)


def test_dynamos_tables_have_its_keys_and_units(folder: Path) -> None:
    with np.load(folder / "selected_prefill_interpolation/raw_data.npz") as table:
        assert set(table.files) == {"prefill_isl", "prefill_ttft", "prefill_thpt_per_gpu"}
        isl, ttft, rate = (table[name] for name in ("prefill_isl", "prefill_ttft", "prefill_thpt_per_gpu"))
        assert isl.dtype.kind == "i" and (np.diff(isl) > 0).all() and len(isl) >= 3
        assert rate == pytest.approx(isl / ttft * 1000), "milliseconds, and tokens per second and GPU"
        assert 20 < float(np.interp(3000, isl, ttft)) < 500
    with np.load(folder / "selected_decode_interpolation/raw_data.npz") as table:
        assert set(table.files) == {"x_kv_usage", "y_context_length", "z_itl", "z_thpt_per_gpu", "max_kv_tokens"}
        assert table["max_kv_tokens"].shape == (1,) and 0 < table["x_kv_usage"].max() <= 1
        assert table["x_kv_usage"].shape == table["y_context_length"].shape == table["z_itl"].shape
    plain = json.loads((folder / "decode_raw_data.json").read_text())
    assert isinstance(plain["max_kv_tokens"], int) and len(plain["z_itl"]) == len(plain["x_kv_usage"])
    assert read_profile(folder).kv_tokens == plain["max_kv_tokens"]


async def test_prompts_of_like_lengths_need_like_numbers_of_decode_workers(tmp_path: Path) -> None:
    """Each point stands at the mean context that was measured, so no two share one."""
    await swept(tmp_path, 1, noise=0.01)
    curves = read_profile(tmp_path).decode()
    assert curves is not None
    rates = [curves.find_best_throughput_per_gpu(0.02, isl + 75).per_gpu for isl in range(200, 7_000, 10)]
    assert rates == sorted(rates, reverse=True)
    workers = [
        decode_replicas(IntervalCounts(8, RequestShape(isl, 150)), 1.0, rate, 1)
        for isl, rate in zip(range(200, 7_000, 10), rates, strict=True)
    ]
    assert max(np.diff(workers)) <= 1


def test_a_planner_of_vllm_knows_its_speed_from_that_folder_alone(folder: Path) -> None:
    known = inputs_of(cluster(folder)).of(MODEL)["aggregated"]
    picked = pick(known, role="aggregated")
    assert picked is not None and picked.source == "profile" and known.profile is not None
    own = VirtualProbe(h100(1, max_num_seqs=64)).timing
    assert 1e9 * float(picked.model.prefill(2_500.0)) == pytest.approx(own.prefill(2_500), rel=0.05)
    assert 1e9 * float(picked.model.decode(20.0, 60_000.0)) == pytest.approx(own.decode(60_000, 20), rel=0.05)
    assert known.profile.prefill() is not None and known.profile.decode() is not None, "sla-classic interpolates"


def test_the_routers_latency_cost_takes_its_lines_in_the_engines_own_blocks(folder: Path) -> None:
    card = WorkerCard(id=WorkerId("w"), epoch=1, model=MODEL, url="http://x", engine="vllm", block_size=16)
    speed = described_speed(cluster(folder), card)
    assert speed is not None
    own = VirtualProbe(h100(1, max_num_seqs=64)).timing
    assert 1e9 * (speed["prefill_intercept"] + 4_000 * speed["prefill_slope"]) == pytest.approx(
        own.prefill(4_000), rel=0.25
    )
    per_token = (own.decode(200_000, 50) - own.decode(100_000, 50)) / 100_000
    assert 1e9 * speed["decode_slope"] / 16 == pytest.approx(per_token, rel=0.25)
    assert described_speed(cluster(folder), msgspec.structs.replace(card, role="decode")) is None


def test_another_model_or_engine_is_refused_everywhere(folder: Path) -> None:
    check_profile(folder, f"meta-llama/{MODEL.lower()}", "vllm")
    with pytest.raises(ConfigError, match=r"is of model llama-3.1-8b, not of qwen3-8b"):
        check_profile(folder, "Qwen/Qwen3-8B")
    with pytest.raises(ConfigError, match="is of engine vllm, not of llamacpp"):
        check_profile(folder, MODEL, "llamacpp")
    with pytest.raises(ConfigError, match="not of other"):
        inputs_of(cluster(folder, model="other"))
    other = msgspec.convert(
        {"models": {"other": {"pools": {"a": {"engine": "vllm"}}}}, "planner": {"classic": {"profile": str(folder)}}},
        ClusterSettings,
    )
    with pytest.raises(ConfigError, match="not of other"):
        inputs_of(other)
    with pytest.raises(ConfigError, match="not of qwen3-8b"):
        load_timing(TimingSettings(kind="table", profile=str(folder), model="Qwen3-8B"))
    card = WorkerCard(id=WorkerId("w"), epoch=1, model="other", url="http://x", engine="vllm")
    with pytest.raises(ConfigError, match="not of other"):
        described_speed(cluster(folder, model="other"), card)
    config = folder.parent / "cluster.yaml"
    config.write_text(
        "models: {other: {tokenizer: 'builtin:sim', pools: {main: "
        f"{{sim: {{timing: {{kind: table, profile: {folder}}}}}}}}}}}}}\n"
    )
    with pytest.raises(ConfigProblems, match="not of other"):
        load(str(config), (), {}, files=True)


def test_a_size_that_was_not_measured_is_refused(folder: Path) -> None:
    refused = r"tensor_parallel_size is 4; profile .* has 1, 2"
    with pytest.raises(ConfigError, match=refused):
        load_timing(TimingSettings(kind="table", profile=str(folder), tensor_parallel_size=4))
    with pytest.raises(ConfigError, match=refused):
        read_profile(folder, 4)
    for pool in ({"args": ["-tp", "4"]}, {"labels": {"tp_size": "4"}, "urls": ["http://x"]}, {"gpus": 4}):
        with pytest.raises(ConfigError, match=f"pool main of {MODEL}: {refused}"):
            inputs_of(planned(folder, main={"engine": "vllm", **pool}))
    points = [point for point in read_measured(folder).points if point.kind != "decode"]
    write_profile(folder, read_manifest(folder), points)
    with pytest.raises(ConfigError, match="fewer than two points"):
        load_timing(TimingSettings(kind="table", profile=str(folder)))
    assert not (folder / "decode_raw_data.json").exists(), "no table of an earlier run stays"


def test_each_pool_gets_the_curves_of_its_own_size(folder: Path) -> None:
    """Whatever was picked for the phase: engines of one GPU are not as fast as those of two."""
    two: dict[str, object] = {"engine": "vllm", "role": "prefill", "args": ["--tensor-parallel-size=2"]}
    known = inputs_of(planned(folder, p=two, d={"engine": "vllm", "role": "decode"})).of(MODEL)
    sizes: dict[Role, int] = {"prefill": 2, "decode": 1}
    for role, tp in sizes.items():
        profile, own = known[role].profile, VirtualProbe(h100(tp, max_num_seqs=64)).timing
        assert profile is not None and profile.kv_tokens == VirtualProbe(h100(tp, max_num_seqs=64)).limits.kv_tokens
        prefill, decode = profile.prefill(), profile.decode()
        assert prefill is not None and decode is not None
        assert 1e9 * prefill.ttft(3000) == pytest.approx(own.prefill(3000), rel=0.05)
        assert 1e9 * decode.itl_at(20, 3000) == pytest.approx(own.decode(60_000, 20), rel=0.05)
        picked = pick(known[role], role=role)
        assert picked is not None
        assert 1e9 * float(picked.model.decode(20.0, 60_000.0)) == pytest.approx(own.decode(60_000, 20), rel=0.05)
    assert read_profile(folder, 1) != read_profile(folder, 2)


def test_the_size_that_a_pool_says_and_the_one_that_it_is_timed_by_must_agree(folder: Path) -> None:
    timing: dict[str, object] = {"kind": "table", "profile": str(folder)}
    pool: dict[str, object] = {"engine": "vllm", "gpus": 2, "sim": {"timing": timing}}
    with pytest.raises(ConfigError, match=r"sim.timing.tensor_parallel_size is 1, and .* have 2"):
        inputs_of(planned(folder, main=pool))
    timing["tensor_parallel_size"] = 2
    assert inputs_of(planned(folder, main=pool)).of(MODEL)["aggregated"].profile == read_profile(folder, 2)


def test_the_first_pool_of_a_role_is_planned_by_its_own_size(folder: Path) -> None:
    told = planned(folder, b={"engine": "vllm"}, a={"engine": "vllm", "gpus": 2})
    assert inputs_of(told).of(MODEL)["aggregated"].profile == read_profile(folder, 2)


@pytest.mark.parametrize("spelled", ["interpolation", "interploation"])
def test_folders_of_dynamo_are_simulated_and_planned_with_as_well(tmp_path: Path, folder: Path, spelled: str) -> None:
    """Older ones have a size in their name, in either spelling, and none has a manifest."""
    for phase in ("prefill", "decode"):
        to = tmp_path / "older" / f"{phase}_tp2_{spelled}"
        to.mkdir(parents=True)
        (folder / f"selected_{phase}_interpolation" / "raw_data.npz").rename(to / "raw_data.npz")
    settings = TimingSettings(kind="table", profile=str(tmp_path / "older"), tensor_parallel_size=2)
    for wrong in (
        lambda: load_timing(msgspec.structs.replace(settings, tensor_parallel_size=1)),
        lambda: inputs_of(planned(tmp_path / "older", main={"engine": "vllm"})),
    ):
        with pytest.raises(ConfigError, match=r"tensor_parallel_size is 1; profile .* has 2"):
            wrong()
    own = VirtualProbe(h100(1, max_num_seqs=64)).timing
    table = timing_of(settings, 100_000, load_timing(settings))
    assert table.prefill(2_500) == pytest.approx(own.prefill(2_500), rel=0.05)
    assert table.decode(60_000, 20) == pytest.approx(own.decode(60_000, 20), rel=0.05)
    check_profile(tmp_path / "older", "whatever")


def test_a_broken_folder_names_its_file(folder: Path) -> None:
    (folder / "profile.json").write_text('{"model": 3}')
    with pytest.raises(ConfigError, match=r"profile.json: .*engine|profile.json: Expected"):
        read_manifest(folder)
    (folder / "profile.json").write_text('{"model": "m", "engine": "sim", "version": 9}')
    with pytest.raises(ConfigError, match="has version 9"):
        read_manifest(folder)
    with pytest.raises(ConfigError, match="can't be read"):
        read_manifest(folder / "nowhere")


async def test_a_difference_names_facts_and_points_beyond_their_noise(tmp_path: Path) -> None:
    await swept(tmp_path / "a", 1, noise=0.01)
    await swept(tmp_path / "b", 1, noise=0.01)
    before, now = read_measured(tmp_path / "a"), read_measured(tmp_path / "b")
    same = difference(before, now)
    assert same.facts == [] and not any(each.changed for each in same.points) and same.points
    slower = [
        msgspec.structs.replace(point, mean=1.2 * point.mean) if point.kind == "decode" and point.seqs > 9 else point
        for point in now.points
    ]
    other = msgspec.structs.replace(now.manifest, engine_version="0.33")
    lines = list(difference(before, now._replace(manifest=other, points=slower[1:])).lines())
    assert lines[0] == "engine_version: null -> 0.33"
    assert all("(+" in line and line.startswith("decode, TP 1") for line in lines[1:-1]) and len(lines) > 4
    assert lines[-1].endswith("1 are only in the first, 0 only in the second")
