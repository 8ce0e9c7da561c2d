"""Performance models: tables of benchmarks, what is learnt live, capacity, and where they come from."""

import shutil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.kernel.errors import ConfigError
from penstock.kernel.values import EngineLimits, StepStats
from penstock.planner.performance.benchmark_table import BenchmarkTable, nonnegative
from penstock.planner.performance.isotonic import IsotonicCurve, rising
from penstock.planner.performance.live_regression import LiveRegression
from penstock.planner.performance.performance_model import numbers
from penstock.planner.performance.speed_sources import KnownSpeeds, pick, profile_of
from penstock_dynamo.policies.engine_throughput import (
    aggregated_capacity,
    batches,
    decode_capacity,
    prefill_capacity,
)
from penstock_dynamo.profile_folder import read_profile
from penstock_lab.engine.self_benchmark import perf_metrics
from penstock_lab.engine.settings import SimSettings
from tests.planner.performance.profile_writer import write_profile


class Straight:
    """Pass times of the golden case: prefill 1e-4 t + 5 ms, decode 1e-7 kv + 2e-4 n + 4 ms."""

    source = "golden"

    def prefill(self, tokens):
        tokens = numbers(tokens)
        return np.where(tokens > 0, 1e-4 * tokens + 0.005, 0.0)

    def decode(self, seqs, kv):
        seqs, kv = numbers(seqs), numbers(kv)
        return np.where(seqs > 0, 1e-7 * kv + 2e-4 * seqs + 0.004, 0.0)

    def mixed(self, tokens, seqs, kv):
        return self.prefill(tokens) + self.decode(seqs, kv)

    def extrapolating(self, tokens, seqs, kv):
        return False

    def ratio(self, q):
        return 1.0


LIMITS = EngineLimits(max_num_batched_tokens=2048, max_num_seqs=256, kv_tokens=100_000)


def test_sla_end_to_end_the_capacities():
    prefill = prefill_capacity(Straight(), LIMITS, isl=1000, ttft=0.5)
    assert prefill.rate == pytest.approx(9.7561, rel=1e-4) and prefill.seconds == pytest.approx(0.205)
    decode = decode_capacity(Straight(), LIMITS, isl=1000, osl=200, itl=0.020)
    assert decode.rate == pytest.approx(12.8723, rel=1e-4) and decode.seconds == pytest.approx(0.01981)


def test_hits_and_speculation_are_inputs():
    plain = prefill_capacity(Straight(), LIMITS, isl=1000, ttft=0.5)
    cached = prefill_capacity(Straight(), LIMITS, isl=1000, ttft=0.5, hit_rate=0.5)
    assert cached.rate > 1.8 * plain.rate
    one = decode_capacity(Straight(), LIMITS, isl=1000, osl=200, itl=0.02)
    two = decode_capacity(Straight(), LIMITS, isl=1000, osl=200, itl=0.02, accept=2.0)
    assert two.rate > 1.5 * one.rate


def test_a_service_level_out_of_reach_gives_the_best_there_is():
    found = decode_capacity(Straight(), LIMITS, isl=1000, osl=200, itl=0.001)
    assert found.batch == 90 and not found.met
    assert (
        prefill_capacity(
            Straight(), EngineLimits(max_num_batched_tokens=0, max_num_seqs=1, kv_tokens=1), isl=10, ttft=1.0
        )
        is None
    )


def test_aggregated_capacity_lies_below_both_of_its_parts():
    both = aggregated_capacity(Straight(), LIMITS, isl=1000, osl=200, ttft=0.5, itl=0.05)
    assert both.met
    assert both.rate < prefill_capacity(Straight(), LIMITS, isl=1000, ttft=0.5).rate
    assert both.rate < decode_capacity(Straight(), LIMITS, isl=1000, osl=200, itl=0.05).rate
    stuck = aggregated_capacity(Straight(), LIMITS, isl=3000, osl=1, ttft=0.5, itl=0.05)
    assert stuck is not None and not stuck.met and stuck.rate > 0


def test_few_batches_are_all_tried_and_many_evenly():
    assert list(batches(5)) == [1, 2, 3, 4, 5]
    many = list(batches(10_000))
    assert len(many) == 128 and many[0] == 1 and many[-1] == 10_000


# --- tables -----------------------------------------------------------------------------------------------------------

METRICS = perf_metrics(SimSettings())


def test_a_table_of_a_benchmark_says_what_was_measured():
    table = BenchmarkTable.of_metrics(METRICS)
    for point in METRICS["prefill"]:
        assert float(table.prefill(point["tokens"])) == pytest.approx(point["seconds"], rel=0.02)
    for point in METRICS["decode"]:
        assert float(table.decode(point["batch"], point["kv_tokens"])) == pytest.approx(point["seconds"], rel=0.05)
    assert not table.extrapolating(1000, 1, 1000) and table.extrapolating(1e9, 1, 1000)
    assert float(table.decode(0, 0)) == 0.0 and float(table.prefill(0)) == 0.0


amounts = st.floats(1.0, 1e5)


@given(
    st.lists(st.tuples(st.floats(1.0, 512.0), amounts, st.floats(1e-4, 10.0)), min_size=1, max_size=40),
    st.lists(st.tuples(amounts, st.floats(1e-4, 10.0)), min_size=1, max_size=20),
)
def test_more_work_never_takes_less_whatever_was_measured(decode, prefill):
    table = BenchmarkTable(prefill, decode)
    axis = np.concatenate(([0.0], np.geomspace(0.5, 3e5, 40)))
    assert (np.diff(table.prefill(axis)) >= -1e-9).all()
    seqs = np.geomspace(0.5, 2000, 25)
    grid = table.decode(seqs[:, None], axis[None, :])
    assert (np.diff(grid, axis=1) >= -1e-9 * np.abs(grid).max()).all()
    assert (np.diff(grid, axis=0) >= -1e-9 * np.abs(grid).max()).all()


@given(st.lists(st.tuples(st.floats(-10, 10), st.floats(0.1, 5)), min_size=1, max_size=12))
def test_rising_is_the_nearest_rising_row(points):
    values, weights = (np.asarray(column) for column in zip(*points, strict=True))
    found = rising(values, weights)
    assert (np.diff(found) >= -1e-12).all()
    # The definition by minima of maxima of means, computed the slow way.
    n = len(values)
    mean = lambda a, b: float(np.average(values[a : b + 1], weights=weights[a : b + 1]))  # noqa: E731
    slow = [max(min(mean(a, b) for b in range(i, n)) for a in range(i + 1)) for i in range(n)]
    assert found == pytest.approx(slow, abs=1e-9)


def test_points_measured_again_tell_how_sure_they_are():
    table = BenchmarkTable([(100, 0.1), (100, 0.2), (100, 0.3), (200, 0.5)], [])
    assert table.ratio(0.5) == pytest.approx(1.0) and table.ratio(1.0) == pytest.approx(1.5)
    assert BenchmarkTable([(100, 0.1)], []).ratio(0.9) == 1.0
    with pytest.raises(ConfigError, match="no point"):
        BenchmarkTable([], [])
    with pytest.raises(ConfigError, match="batch"):
        BenchmarkTable.of_metrics({"decode": [{"kv_tokens": 1, "seconds": 1.0}]})


def test_scattered_points_are_fitted_too():
    rng = np.random.default_rng(1)
    points = [(n, kv, 1e-7 * kv + 2e-4 * n + 0.004) for n, kv in zip(rng.uniform(1, 200, 60), rng.uniform(1, 2e5, 60))]
    table = BenchmarkTable([], points)
    assert float(table.decode(50, 50_000)) == pytest.approx(1e-7 * 50_000 + 2e-4 * 50 + 0.004, rel=0.05)
    assert nonnegative(np.array([[1.0], [2.0], [3.0]]), np.array([3.0, 2.0, 1.0]))[1] == 0.0
    assert IsotonicCurve(np.array([1.0]), np.array([2.0]))(np.array([3.0]))[0] > 2.0


# --- live -------------------------------------------------------------------------------------------------------------


def window(tokens: int, seqs: int, kv: int, factor: float = 1.0, passes: int = 10) -> StepStats:
    wall = factor * float(Straight().mixed(tokens, seqs, kv)) if tokens else factor * float(Straight().decode(seqs, kv))
    return StepStats(
        passes=passes,
        wall=passes * wall,
        prefill_tokens=passes * tokens,
        decode_seqs=passes * seqs,
        decode_kv=passes * kv,
    )


def loads(count: int, seed: int = 3):
    rng = np.random.default_rng(seed)
    for _ in range(count):
        n = int(rng.integers(1, 100))
        yield 0 if rng.random() < 0.3 else int(rng.integers(50, 2000)), n, n * int(rng.integers(200, 2000))


def test_passes_alone_make_a_model():
    live = LiveRegression()
    assert not live.ready
    for load in loads(60):
        assert live.learn(window(*load))
    assert live.ready and live.source == "live passes (60 windows)"
    told = float(live.decode(50, 60_000))
    assert told == pytest.approx(float(Straight().decode(50, 60_000)), rel=0.25)
    assert live.extrapolating(100, 5000, 1000) and not live.extrapolating(100, 50, 60_000)


def test_a_prior_is_corrected_and_old_passes_are_forgotten():
    live = LiveRegression(Straight(), memory=30.0)
    for load in loads(100):
        live.learn(window(*load, factor=1.5))
    assert live.factor == pytest.approx(1.5, rel=0.15)
    for load in loads(300, seed=4):
        live.learn(window(*load, factor=0.8))
    assert live.factor == pytest.approx(0.8, rel=0.15)
    assert "corrected" in live.source and 0.0 < live.ratio(0.1) <= live.ratio(0.9)


def test_windows_that_tell_too_little_teach_nothing():
    live = LiveRegression(Straight())
    for wall in (0.0, 5e-324, 2e-6):
        assert not live.learn(StepStats(passes=3, wall=wall, prefill_tokens=9000, decode_seqs=1, decode_kv=1))
    assert not live.learn(StepStats(passes=3, wall=None, prefill_tokens=1, decode_seqs=1, decode_kv=1))
    assert not live.learn(StepStats(passes=3, wall=0.1, prefill_tokens=1, decode_seqs=1))
    assert not live.learn(
        StepStats(passes=1, wall=1.0, prefill_tokens=1, decode_seqs=1, decode_kv=1, estimated=("wall",))
    )
    assert live.count == 0 and live.factor == 1.0


def test_what_was_learnt_survives_a_restart():
    live, other = LiveRegression(), LiveRegression()
    for load in loads(40):
        live.learn(window(*load))
    other.restore(live.snapshot())
    assert float(other.mixed(500, 20, 20_000)) == float(live.mixed(500, 20, 20_000))


# --- sources ----------------------------------------------------------------------------------------------------------


def test_the_first_source_that_there_is_counts_and_the_others_say_why_not():
    live = LiveRegression()
    assert pick(KnownSpeeds(), live) is None
    found = pick(KnownSpeeds(metrics={"roofline": METRICS}, why_not={"aiconfigurator": "it is not installed"}), live)
    assert found.source == "roofline" and "aiconfigurator: it is not installed" in found.passed
    for load in loads(20):
        live.learn(window(*load))
    assert pick(KnownSpeeds(metrics={"roofline": METRICS}), live).source == "live"
    assert pick(KnownSpeeds(metrics={"roofline": METRICS, "self-benchmark": METRICS}), live).source == "self-benchmark"


@pytest.mark.parametrize("layout", ["npz", "json"])
def test_a_profile_goes_to_a_folder_and_back(tmp_path, layout):
    profile = profile_of(METRICS, gpus=2, kv_tokens=131_072)
    write_profile(profile, tmp_path, layout)
    back = read_profile(tmp_path)
    assert back.kv_tokens == 131_072
    assert back.prefill_isl == profile.prefill_isl
    assert back.itl == pytest.approx(profile.itl) and back.decode_per_gpu == pytest.approx(profile.decode_per_gpu)
    assert pick(KnownSpeeds(profile=back)).source == "profile"
    table, interpolator = BenchmarkTable.of_metrics(METRICS), back.decode()
    for sequences, context in ((4, 1000.0), (30, 500.0), (60, 700.0)):
        told = interpolator.itl_at(sequences, context)
        assert told == pytest.approx(float(table.decode(sequences, sequences * context)), rel=0.15)


def test_an_older_folder_names_its_width_and_two_widths_are_refused(tmp_path):
    write_profile(profile_of(METRICS, gpus=2, kv_tokens=131_072), tmp_path)
    profile = read_profile(tmp_path)
    for role in ("prefill", "decode"):
        (tmp_path / f"selected_{role}_interpolation").rename(tmp_path / f"{role}_tp4_interpolation")
    assert read_profile(tmp_path) == profile
    shutil.copytree(tmp_path / "decode_tp4_interpolation", tmp_path / "decode_tp8_interpolation")
    with pytest.raises(ConfigError, match="decode_tp4_interpolation and decode_tp8_interpolation"):
        read_profile(tmp_path)


def test_a_broken_folder_is_told_by_file_and_key(tmp_path):
    with pytest.raises(ConfigError, match="has no profile"):
        read_profile(tmp_path)
    (tmp_path / "prefill_raw_data.json").write_text('{"prefill_isl": [1, 2], "prefill_ttft": [1]}')
    with pytest.raises(ConfigError, match=r"prefill_raw_data\.json: lacks prefill_thpt_per_gpu"):
        read_profile(tmp_path)
    (tmp_path / "prefill_raw_data.json").write_text(
        '{"prefill_isl": [1, 2], "prefill_ttft": [1], "prefill_thpt_per_gpu": [1, 2]}'
    )
    with pytest.raises(ConfigError, match="prefill_ttft has 1 values"):
        read_profile(tmp_path)
    (tmp_path / "prefill_raw_data.json").unlink()
    folder = tmp_path / "selected_decode_interpolation"
    folder.mkdir()
    np.savez(folder / "raw_data.npz", x_kv_usage=[0.5], y_context_length=[100], z_itl=[5.0], z_thpt_per_gpu=[10.0])
    with pytest.raises(ConfigError, match="max_kv_tokens"):
        read_profile(tmp_path)
    (folder / "raw_data.npz").write_bytes(b"no zip")
    with pytest.raises(ConfigError, match=r"raw_data\.npz can't be read"):
        read_profile(tmp_path)
