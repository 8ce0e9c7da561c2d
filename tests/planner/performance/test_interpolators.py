"""Curves of a profile: straight between points, level beyond them, and the best throughput that keeps an ITL."""

import pytest

from penstock.planner.performance.interpolators import DecodeInterpolator, PrefillInterpolator


def decode() -> DecodeInterpolator:
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
    found = decode()
    assert found.itl(0.25, 500) == pytest.approx(0.0225)
    assert found.itl(0.25, 1250) == pytest.approx(0.025)
    assert found.itl_at(50, 1000) == found.itl(0.5, 1000)
    assert found.throughput_per_gpu(1.0, 10**6) == 550


def test_the_best_throughput_is_at_the_fullest_cache_that_keeps_the_itl():
    best = decode().find_best_throughput_per_gpu(0.035, 500)
    assert best.met and best.itl <= 0.035 and best.usage == pytest.approx(0.5, abs=0.01)
    assert best.per_gpu == pytest.approx(550, rel=0.02)
    assert decode().find_best_throughput_per_gpu(1.0, 500).per_gpu == 1000


def test_an_itl_out_of_reach_gives_the_emptiest_cache():
    best = decode().find_best_throughput_per_gpu(0.001, 500)
    assert not best.met and (best.per_gpu, best.usage, best.itl) == (100, 0.0, 0.010)
