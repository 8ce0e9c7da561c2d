"""Curves of a profile, of scattered points as of grids: exact where measured, monotone in load, level beyond."""

import math
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.kernel.values import RequestShape
from penstock.planner.forecast.predictor import IntervalCounts
from penstock.planner.performance.interpolators import STEPS, DecodeInterpolator, PrefillInterpolator
from penstock_dynamo.policies.sla_classic import decode_replicas, prefill_replicas

ROOM, SEQS_MAX = 400_000, 256
NOMINAL = st.sampled_from([(100, 1416, 2732, 3075, 4048, 5364), (3075,), (100, 5478, 10_856, 27_000), (500, 2000)])


class Sweep(NamedTuple):
    """Fill level, context, ITL and throughput of each point."""

    points: np.ndarray

    @property
    def decode(self) -> DecodeInterpolator:
        return DecodeInterpolator(*self.points.T, ROOM)


def itl_of(seqs: float, context: float) -> float:
    return 0.006 + 2e-5 * seqs + 4e-8 * seqs * context


def sweep(contexts: tuple[int, ...], jitter: float = 0.0, noise: float = 0.0, seed: int = 0) -> Sweep:
    """Return what a sweep of one engine measures, each point at a context of its own."""
    rng = np.random.default_rng(seed)
    points = []
    for nominal in contexts:
        most = max(1, min(SEQS_MAX, ROOM // (nominal + 96)))
        for seqs in sorted({round(each) for each in np.geomspace(1, most, 9)}):
            context = (nominal + 24) * (1.0 + rng.uniform(-jitter, jitter))
            seconds = itl_of(seqs, context) * math.exp(noise * rng.standard_normal())
            points.append((min(1.0, seqs * context / ROOM), context, seconds, seqs / seconds))
    return Sweep(np.array(points))


sweeps = st.builds(sweep, NOMINAL, st.floats(0.0, 0.12), st.sampled_from([0.0, 0.01, 0.05]), st.integers(0, 1_000_000))
targets = st.floats(0.004, 0.08)


def workers(decode: DecodeInterpolator, itl: float, requests: float, isl: float, osl: float = 150.0) -> int:
    best = decode.find_best_throughput_per_gpu(itl, isl + osl / 2.0)
    return decode_replicas(IntervalCounts(requests, RequestShape(isl, osl)), 1.0, best.per_gpu, 1)


@given(sweeps)
def test_measured_points_are_exact(swept):
    decode = swept.decode
    for usage, context, itl, per_gpu in swept.points:
        assert decode.itl(usage, context) == pytest.approx(itl, rel=1e-9)
        assert decode.throughput_per_gpu(usage, context) == pytest.approx(per_gpu, rel=1e-9)


@given(sweeps, targets, targets)
def test_more_load_never_needs_fewer_workers(swept, one, other):
    """Longer prompts, more requests, a tighter target (as a higher correction makes it): whatever was measured."""
    decode = swept.decode
    lengths = np.concatenate([np.linspace(50, 30_000, 150), swept.points[:, 1] - 75, swept.points[:, 1] - 74])
    lengths = np.unique(np.maximum(1.0, lengths))
    rates = [decode.find_best_throughput_per_gpu(one, isl + 75).per_gpu for isl in lengths]
    assert (np.diff(rates) <= 1e-9 * max(rates)).all()
    for isl in lengths[::30]:
        assert workers(decode, one, 8, isl) <= workers(decode, one, 9, isl)
        assert workers(decode, max(one, other), 8, isl) <= workers(decode, min(one, other), 8, isl)
        assert workers(decode, one, 8, isl) <= workers(decode, one, 8, isl, osl=160.0)


@given(NOMINAL, st.floats(0.0, 0.03), st.integers(0, 1000), st.sampled_from([0.012, 0.02, 0.05]))
def test_jitter_of_the_contexts_hardly_changes_an_answer(contexts, jitter, seed, itl):
    """Between contexts that lie far apart, 1 % of a context is up to 4 % of the throughput."""
    grid, scattered = sweep(contexts).decode, sweep(contexts, jitter, 0.0, seed).decode
    for context in np.linspace(contexts[0] + 24, contexts[-1] + 24, 40):
        plain, other = (each.find_best_throughput_per_gpu(itl, context).per_gpu for each in (grid, scattered))
        assert other == pytest.approx(plain, rel=0.02 + 4 * jitter)


def test_neighbouring_prompts_need_the_same_workers():
    """As a sweep at 13 contexts that were each measured at their own: rows of one would need 1 worker or 9."""
    decode = sweep((100, 1416, 3000, 5364), 0.01, 0.01, seed=5).decode
    counts = [workers(decode, 0.02, 8, isl) for isl in range(2900, 3200)]
    assert max(counts) - min(counts) <= 1


# --- grids ------------------------------------------------------------------------------------------------------------

shares = st.floats(0.0, 1.0)


def two_contexts() -> DecodeInterpolator:
    """Return a profile of two contexts: ITL from 10 to 60 ms, and 5 ms more at four times the context."""
    usage = [0.0, 0.5, 1.0]
    return DecodeInterpolator(
        [*usage, *usage],
        [500.0] * 3 + [2000.0] * 3,
        [0.010, 0.035, 0.060, 0.015, 0.040, 0.065],
        [100, 550, 1000, 50, 300, 550],
        100_000,
    )


def test_prefill_is_read_off_the_line_in_any_order_and_is_level_beyond():
    found = PrefillInterpolator([4000, 1000], [0.4, 0.1], [8000, 10_000])
    assert found.ttft(2500) == pytest.approx(0.25) and found.throughput_per_gpu(2500) == pytest.approx(9000)
    assert (found.ttft(1), found.ttft(10**6)) == (0.1, 0.4)
    with pytest.raises(ValueError, match="needs points"):
        PrefillInterpolator([], [], [])


def test_decode_goes_straight_along_the_fill_level_and_between_contexts():
    found = two_contexts()
    assert found.itl(0.25, 500) == pytest.approx(0.0225)
    assert found.itl(0.25, 1250) == pytest.approx(0.025)
    assert found.itl_at(50, 1000) == found.itl(0.5, 1000)
    assert found.throughput_per_gpu(1.0, 10**6) == 550


def test_the_best_throughput_is_at_the_fullest_cache_that_keeps_the_itl():
    best = two_contexts().find_best_throughput_per_gpu(0.035, 500)
    assert best.met and best.itl <= 0.035 and best.usage == pytest.approx(0.5, abs=0.01)
    assert best.per_gpu == pytest.approx(550, rel=0.02)
    assert two_contexts().find_best_throughput_per_gpu(1.0, 500).per_gpu == 1000


def test_an_itl_out_of_reach_gives_the_emptiest_cache():
    best = two_contexts().find_best_throughput_per_gpu(0.001, 500)
    assert not best.met and (best.per_gpu, best.usage, best.itl) == (100, 0.0, 0.010)


res = st.floats(0.0, 1.0)


@given(
    st.lists(st.integers(100, 30_000), min_size=1, max_size=6, unique=True),
    st.lists(shares, min_size=2, max_size=6, unique=True),
    st.integers(0, 1_000_000),
    st.lists(st.tuples(shares, st.floats(1, 40_000)), min_size=1, max_size=20),
)
def test_a_grid_is_interpolated_along_the_fill_level_and_then_between_contexts(contexts, usages, seed, asked):
    """Dynamo's format: contexts by fill levels, whatever the values are. The plain way beside ours."""
    rng = np.random.default_rng(seed)
    usages = sorted(usages)
    itl = rng.uniform(0.001, 0.1, (len(contexts), len(usages)))
    decode = DecodeInterpolator(
        np.tile(usages, len(contexts)), np.repeat(contexts, len(usages)), itl.ravel(), 1.0 / itl.ravel(), ROOM
    )
    order = np.argsort(contexts)
    for usage, context in asked:
        for told, values in ((decode.itl, itl), (decode.throughput_per_gpu, 1.0 / itl)):
            rows = [np.interp(usage, usages, values[row]) for row in order]
            assert told(usage, context) == pytest.approx(np.interp(context, np.sort(contexts), rows), rel=1e-12)


@given(NOMINAL, targets)
def test_a_grid_of_sequences_is_one_too_and_its_best_level_lies_where_the_target_is_met(contexts, itl):
    swept = sweep(contexts)
    decode = swept.decode
    for context in np.unique(swept.points[:, 1]):
        row = swept.points[swept.points[:, 1] == context]
        levels = np.linspace(1.0, 0.0, STEPS)
        within = [level for level in levels if np.interp(level, row[:, 0], row[:, 2]) <= itl]
        best = decode.find_best_throughput_per_gpu(itl, context)
        if not within:
            assert not best.met and best.per_gpu == pytest.approx(row[0, 3])
            continue
        assert best.met and within[0] <= best.usage <= within[0] + 1.0 / (STEPS - 1)
        assert best.per_gpu >= np.interp(within[0], row[:, 0], row[:, 3]) * (1 - 1e-9)
        assert best.per_gpu == pytest.approx(np.interp(best.usage, row[:, 0], row[:, 3]), rel=1e-3)


# --- prefill ----------------------------------------------------------------------------------------------------------


@given(st.integers(2, 12), st.sampled_from([0.0, 0.05, 0.3]), st.integers(0, 1_000_000))
def test_longer_prompts_never_need_fewer_prefill_workers(count, noise, seed):
    rng = np.random.default_rng(seed)
    isl = np.unique(rng.integers(100, 20_000, count))
    ttft = (0.01 + 5e-5 * isl) * np.exp(noise * rng.standard_normal(len(isl)))
    prefill = PrefillInterpolator(isl, ttft, isl / ttft)
    lengths = np.unique(np.concatenate([np.linspace(1, 25_000, 200), isl]))
    counts = [
        prefill_replicas(IntervalCounts(50, RequestShape(each, 150)), 1.0, prefill.throughput_per_gpu(each), 1)
        for each in lengths
    ]
    assert counts == sorted(counts)
    for tokens, seconds in zip(isl, ttft, strict=True):
        assert prefill.ttft(tokens) == seconds
        if not noise:
            assert prefill.throughput_per_gpu(tokens) == pytest.approx(tokens / seconds)
