"""The sketch of a mix: bins that add up, means that stay, and what fades."""

import math
import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.planner.sizing.workload_mix import DecayedWorkloadMix, WorkloadMix, count_into, length_bin, shape_bin


@given(st.integers(1, 1_000_000))
def test_the_middle_of_a_bin_is_at_most_a_tenth_off(tokens):
    assert 2.0 ** (length_bin(tokens) / 4) == pytest.approx(tokens, rel=0.1)


@given(st.integers(1, 1_000_000), st.integers(1, 100_000), st.floats(0.0, 1.0))
def test_a_bin_is_read_back_as_what_was_counted(isl, osl, hit):
    found = WorkloadMix.of_bins({shape_bin(isl, osl, hit): 3})
    assert found.isl[0] == pytest.approx(isl, rel=0.1) and found.osl[0] == pytest.approx(osl, rel=0.1)
    assert found.hit[0] == pytest.approx(hit, abs=1 / 16 + 1e-9) and found.weight.tolist() == [1.0]


def test_a_mix_keeps_its_means_and_what_goes_together():
    dice = random.Random(1)
    bins: dict[int, int] = {}
    kinds = [(500, 800, 0.0), (8000, 100, 0.75)]
    for _ in range(4000):
        count_into(bins, shape_bin(*dice.choices(kinds, (3, 1))[0]))
    found = WorkloadMix.of_bins(bins)
    assert len(found.weight) == 2 and found.weight.sum() == pytest.approx(1.0)
    assert found.mean(found.isl) == pytest.approx(0.75 * 500 + 0.25 * 8000, rel=0.1)
    assert found.osl[found.isl.argmax()] < found.osl[found.isl.argmin()], "long prompts have short answers here"


def test_the_last_token_of_a_prompt_is_always_computed():
    assert WorkloadMix.of_bins({shape_bin(1000, 10, 1.0): 1}).fresh.tolist() == [1.0]


def test_means_that_are_told_exactly_replace_those_of_bins():
    found = WorkloadMix.of_bins({shape_bin(1000, 100, 0.0): 1, shape_bin(3000, 50, 0.0): 1}).scaled(2500.0, 90.0)
    assert found.mean(found.isl) == pytest.approx(2500.0) and found.mean(found.osl) == pytest.approx(90.0)
    same = found.scaled(None, None)
    assert (same.isl == found.isl).all() and (same.osl == found.osl).all()


def test_a_mix_of_nothing_is_unknown():
    with pytest.raises(ValueError, match="nothing"):
        WorkloadMix.of_bins({})
    assert DecayedWorkloadMix(60.0).shapes() is None


def test_a_count_fades_by_half_in_its_half_life():
    shapes = DecayedWorkloadMix(60.0)
    old, new = shape_bin(100, 10, 0.0), shape_bin(10_000, 10, 0.0)
    shapes.add(0.0, {old: 8})
    shapes.add(120.0, {new: 2})
    assert shapes.count == pytest.approx(4.0)
    found = shapes.shapes()
    assert found is not None and found.weight.tolist() == pytest.approx([0.5, 0.5])
    shapes.add(3600.0, {})
    assert shapes.shapes() is None and shapes.count == 0.0


def test_what_is_kept_and_read_again_is_the_same():
    shapes, twin = DecayedWorkloadMix(60.0), DecayedWorkloadMix(1.0)
    shapes.add(5.0, {shape_bin(100, 10, 0.0): 8})
    twin.restore(msgspec.msgpack.decode(msgspec.msgpack.encode(shapes.snapshot()), strict=False))
    for each in (shapes, twin):
        each.add(30.0, {shape_bin(100, 10, 0.5): 1})
    assert twin.snapshot() == shapes.snapshot() and math.isfinite(twin.count)
