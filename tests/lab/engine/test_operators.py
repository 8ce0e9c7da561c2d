"""Does a profile give back what was measured, draw lines in between, and count what lies outside?"""

import msgspec
import numpy as np
import pytest

from penstock.kernel.errors import ConfigError
from penstock_lab.engine.settings import Calibration, TimingSettings
from penstock_lab.engine.timing.collectives import link_by_hand, link_measured
from penstock_lab.engine.timing.timing_model import TimingModel, timing_of
from tests.lab.engine.models import profile, profile_with_experts

LAYERS = 4
SETTINGS = TimingSettings(kind="operators", model="given", profile="given")
MICROSECOND = 1e3


def model(tables: dict | None = None, settings: TimingSettings = SETTINGS) -> TimingModel:
    return timing_of(settings, 1000, tables or profile())


def measured(tables: dict, table: str, axis: str, at: float) -> float:
    """Return nanoseconds of all operators of a table at a measured point, as often as a pass has them."""
    times = {"embedding": 1, "final_layernorm": 1, "lm_head": 1, "sampler": 1, "layernorm": 2 * LAYERS}
    columns = tables[table]
    rows = zip(columns["layer"], columns[axis], columns["time_us"], strict=True)
    return sum(times.get(name, LAYERS) * time * MICROSECOND for name, place, time in rows if place == at)


def test_every_measured_point_comes_back_exactly() -> None:
    tables = profile(chunks=(0, 1, 4, 15, 63), seqs=(0, 1, 3, 12))
    timing, attention = model(tables), tables["attention"]
    dense = {tokens: measured(tables, "dense", "tokens", tokens) for tokens in (1, 4, 16, 64)}
    outputs = {count: measured(tables, "per_sequence", "sequences", count) for count in (1, 4, 16)}
    checked = 0
    for chunk, past, count, read, time in zip(*attention.values(), strict=True):
        new, seqs = int(chunk), int(count)
        tokens, sequences = new + seqs, seqs + (1 if new else 0)
        if tokens not in dense or sequences not in outputs:
            continue
        chunks = [(int(past), new)] if new else []
        want = LAYERS * time * MICROSECOND + dense[tokens] + outputs[sequences]
        assert timing.mixed(new, iter(chunks), int(read) * seqs, seqs) == pytest.approx(want, rel=1e-12)
        if not new:
            assert timing.decode(int(read) * seqs, seqs) == pytest.approx(want, rel=1e-12)
        checked += 1
    assert checked >= 18
    assert timing.extrapolated == 0 and timing.lookups >= checked


def test_between_two_operators_of_a_pass_lies_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    # Per layer two norms, two projections and attention; once the embedding, the last norm, the head and the sampler.
    # A layer with experts has their block in place of the second projection.
    for tables in (profile(), profile_with_experts()):
        close = model(tables).decode(400, 4)
        with monkeypatch.context() as patched:
            patched.setattr("penstock_lab.engine.timing.operators.OPERATOR_GAP_MS", 0.004)
            more = model(tables).decode(400, 4) - close
        assert more == pytest.approx((LAYERS * 5 + 4) * 4 * MICROSECOND)


def test_between_measured_points_lines_are_drawn() -> None:
    timing = model()
    low, high = timing.decode(4 * 64, 4), timing.decode(4 * 256, 4)
    assert timing.decode(4 * 160, 4) == pytest.approx((low + high) / 2)
    run = timing.run(4 * 64, 4, 100)
    assert run.after(100) == pytest.approx(sum(timing.decode(4 * (64 + i), 4) for i in range(100)), abs=2)


def test_several_prompts_count_as_one_that_attends_to_as_many_pairs() -> None:
    timing = model()
    # 16 tokens after 8 and 16 after 8: as many pairs as 32 tokens in one prompt that has hardly any before it.
    assert timing.mixed(32, iter([(8, 16), (8, 16)]), 0, 0) == pytest.approx(
        timing.mixed(32, iter([(0, 32)]), 0, 0) - timing_outputs(1) + timing_outputs(2)
    )


def timing_outputs(count: int) -> float:
    tables = profile()
    at = [1.0, 4.0, 16.0]
    return float(np.interp(count, at, [measured(tables, "per_sequence", "sequences", place) for place in at]))


def test_what_was_not_measured_is_counted() -> None:
    timing = model()
    timing.decode(8 * 200, 8)
    assert (timing.lookups, timing.extrapolated) == (1, 0)
    timing.decode(8 * 300, 8)  # each reads more than 256 tokens
    timing.decode(9 * 10, 9)  # more sequences than attention was measured with
    timing.mixed(40, iter([(0, 40)]), 0, 0)  # a longer chunk
    assert (timing.lookups, timing.extrapolated) == (4, 3)
    timing.run(4 * 250, 4, 20)
    assert (timing.lookups, timing.extrapolated) == (24, 3 + 13)
    assert timing.decode(8 * 400, 8) > timing.decode(8 * 300, 8)


def test_cells_that_a_profile_leaves_out_are_counted_where_no_line_crosses_them() -> None:
    tables = profile()
    columns = tables["attention"]
    keep = [not (chunk == 32 and count == 8) for chunk, count in zip(columns["prefill_chunk"], columns["n_decode"])]
    tables["attention"] = {
        name: [value for value, kept in zip(values, keep, strict=True) if kept] for name, values in columns.items()
    }
    timing = model(tables)
    timing.mixed(32, iter([(0, 32)]), 4 * 64, 4)
    assert timing.extrapolated == 0
    assert timing.mixed(32, iter([(0, 32)]), 8 * 64, 8) > 0
    assert timing.extrapolated == 1


def test_experts_take_what_a_block_takes_that_touches_as_many_as_are_expected() -> None:
    tables, plain = profile_with_experts(), profile()
    for seqs in (1, 4, 5, 11, 16):
        touched = 8 * (1 - (1 - 2 / 8) ** seqs)
        block = 10.0 + 6.0 * touched + 0.5 * seqs
        down = float(np.interp(seqs, [1, 4, 16, 64], [9.0 + count * 9.0 / 20 for count in (1, 4, 16, 64)]))
        more = model(tables).decode(20 * seqs, seqs) - model(plain).decode(20 * seqs, seqs)
        # It has experts in place of the down projection of each layer.
        assert more == pytest.approx(LAYERS * (block - down) * MICROSECOND, rel=1e-9)
    timing = model(tables)
    timing.mixed(64, iter([(0, 64)]), 0, 0)
    assert timing.extrapolated == 1  # attention was measured up to chunks of 32
    with pytest.raises(ConfigError, match=r"moe\.csv"):
        model({**tables, "moe": None})


def test_a_table_reaches_as_far_as_its_shortest_operator() -> None:
    tables = profile()
    tables["dense"] = {
        "layer": ["qkv_proj"] * 3 + ["o_proj"] * 2,
        "tokens": [1.0, 4.0, 64.0, 1.0, 4.0],
        "time_us": [1.0, 2.0, 9.0, 1.0, 2.0],
    }
    timing = model(tables)
    inside = timing.mixed(4, iter([(0, 4)]), 0, 0)
    assert timing.extrapolated == 0
    assert timing.mixed(7, iter([(0, 7)]), 0, 0) > inside + LAYERS * 2 * MICROSECOND * 0.99
    assert timing.extrapolated == 1


def test_fewer_sequences_than_were_measured_lie_between_those_and_none() -> None:
    timing = model(profile(seqs=(0, 4, 8)))
    none, four = timing.mixed(8, iter([(16, 8)]), 0, 0), timing.mixed(8, iter([(16, 8)]), 4 * 64, 4)
    assert none < timing.mixed(8, iter([(16, 8)]), 2 * 64, 2) < four
    assert timing.extrapolated == 0


def test_constants_of_the_roofline_are_no_part_of_a_profile() -> None:
    calibration = Calibration(pass_overhead_ms=1.0, sequence_overhead_ms=0.5, layer_overhead_ms=1.0)
    settings = msgspec.structs.replace(SETTINGS, calibration=calibration)
    assert model(settings=settings).decode(400, 4) == model().decode(400, 4)


def test_collectives_come_from_the_gpu_s_link() -> None:
    settings = msgspec.structs.replace(
        SETTINGS,
        gpu="h100",
        tensor_parallel_size=2,
        calibration=Calibration(link_latency_ms=0.01, link_efficiency=1.0),
    )
    sent = 2 * LAYERS * (2 * 1 / 2) * 4 * 64 * 2 / 450e9
    more = model(settings=settings).decode(400, 4) - model().decode(400, 4)
    assert more == pytest.approx((2 * LAYERS * 10e-6 + sent) * 1e9)


def test_a_link_can_be_given_and_measured() -> None:
    settings = msgspec.structs.replace(SETTINGS, gpu="rtxpro6000", tensor_parallel_size=2)
    alone = model().decode(400, 4)
    sent = 2 * LAYERS * 4 * 64 * 2
    by_table = model(settings=settings).decode(400, 4) - alone
    assert by_table == pytest.approx((2 * LAYERS * 20e-6 + sent / 16e9) * 1e9)
    given = model({**profile(), "link": link_by_hand("32GB/s, 5us")}, settings).decode(400, 4) - alone
    assert given == pytest.approx((2 * LAYERS * 5e-6 + sent / 32e9) * 1e9)
    # Two GPUs: as many bytes on the bus as there are; 10 us and 20 GB/s.
    rows = [f"{size} {size // 4} float sum -1 {10 + size / 20e3:.3f} {1} {1} 0" for size in (1024, 65536, 1 << 24)]
    found = link_measured(["# size count", *rows], "nccl.txt")
    assert found.rate == pytest.approx(20e9, rel=1e-3) and found.latency == pytest.approx(10e-6, rel=1e-3)
    with pytest.raises(ConfigError, match="all_reduce_perf"):
        link_by_hand("fast")
    with pytest.raises(ConfigError, match="two sizes"):
        link_measured(rows[:1], "nccl.txt")


def test_ranks_with_experts_between_them_wait_for_the_fullest() -> None:
    settings = msgspec.structs.replace(SETTINGS, gpu="h100", expert_parallel_size=2)
    spread, whole = (model(profile_with_experts(), each) for each in (settings, SETTINGS))
    # Each rank decodes half of the sequences; all of them go through the experts of both.
    assert spread.decode(64 * 8, 8) < whole.decode(64 * 8, 8) + 1e6
    assert spread.decode(64 * 7, 7) == pytest.approx(spread.decode(64 * 8, 8), rel=0.02)
    # One prompt is one rank's: the other waits. Two of that size take both ranks as long.
    one = spread.mixed(8, iter([(0, 8)]), 64 * 2, 2)
    two = spread.mixed(16, iter([(0, 8), (0, 8)]), 64 * 2, 2)
    assert two - one < whole.mixed(16, iter([(0, 8), (0, 8)]), 64 * 2, 2) - whole.mixed(8, iter([(0, 8)]), 64 * 2, 2)


def test_uneven_sequences_take_longer_as_the_profile_says() -> None:
    skew = {"n": [4.0], "pc": [0.0], "kv_big": [256.0], "kv_mean": [128.0]}
    skew |= {"t_mean_us": [10.0], "t_max_us": [20.0], "t_skew_us": [12.5]}
    timing = model({**profile(), "skew": skew})
    assert timing.uneven and not model().uneven
    even, most = timing.run(4 * 100, 4, 1).after(1), timing.run(4 * 200, 4, 1).after(1)
    uneven = timing.run(4 * 100, 4, 1, 200).after(1)
    assert uneven == pytest.approx(even + 0.25 * (most - even), abs=2)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"dense": None}, r"dense\.csv"),
        ({"dense": {"layer": ["a"], "tokens": [1.0]}}, "column time_us"),
        ({"dense": {"layer": [], "tokens": [], "time_us": []}}, "no rows"),
        ({"dense": {"layer": ["a"], "tokens": [1.0], "time_us": [float("nan")]}}, "time_us"),
        ({"dense": {"layer": ["a"], "tokens": [-1.0], "time_us": [1.0]}}, "tokens"),
        ({"per_sequence": {"layer": ["a"], "sequences": [1.0, 2.0], "time_us": [1.0]}}, "different lengths"),
        ({"model": {"model_type": "llama"}}, "num_hidden_layers"),
    ],
)
def test_a_malformed_profile_is_refused(change: dict, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        model({**profile(), **change})


def test_a_profile_without_decoding_is_refused() -> None:
    with pytest.raises(ConfigError, match="at 0 only"):
        model(profile(seqs=(0,)))
