"""Lines through passes, by their golden cases: TTFT in chunks, capacity, and which samples are kept."""

import numpy as np
import pytest

from penstock.planner.performance.regressions import AggregatedRegression, DecodeRegression, PrefillRegression
from penstock.planner.performance.sample_retention import SampleRetention


def prefill_line() -> PrefillRegression:
    line = PrefillRegression()
    for tokens in (100, 500, 1000, 1500, 2000, 2500):
        line.add([tokens], 0.001 * tokens + 0.002)
    return line


@pytest.mark.parametrize(
    ("queued", "chunk", "hit", "expected"),
    [(0, 2048, None, 1.502), (3000, 2048, None, 4.506), (3000, 2048, 0.5, 2.254), (10000, 8192, None, 11.504)],
)
def test_ttft_behind_a_queue_in_chunks(queued, chunk, hit, expected):
    assert prefill_line().ttft(queued, 1500, chunk, hit) == pytest.approx(expected, rel=1e-4)


def test_prefill_capacity_and_the_best_effort_where_the_ttft_is_missed():
    line = prefill_line()
    found = line.capacity(1000, 2048, ttft=2.0)
    assert found.rate == pytest.approx(0.998004, rel=1e-4) and found.seconds == pytest.approx(1.002) and found.met
    found = line.capacity(3000, 2048, ttft=2.0)
    assert found.rate == pytest.approx(0.332889, rel=1e-4) and found.seconds == pytest.approx(3.004) and not found.met


def test_decode_capacity_where_batch_and_kv_always_rose_together():
    line = DecodeRegression()
    for n in range(5, 45, 5):
        line.add([n, 1000 * n], 1e-5 * 1000 * n + 0.001)
    found = line.capacity(1000, 150, itl=0.050)
    assert found.rate == pytest.approx(0.65041, rel=1e-4) and found.seconds == pytest.approx(0.041)
    assert found.batch == 4
    worst = line.capacity(1000, 150, itl=0.001)
    assert worst.batch == 1 and not worst.met


def test_aggregated_ttft_with_decodes_beside_it():
    line = AggregatedRegression()
    for p in (0, 200, 800, 1600, 2000):
        for kv in (1000, 20_000, 50_000):
            line.add([p, kv], 1e-5 * p + 5e-7 * kv + 0.004)
    assert line.ttft(0, 989.6, 2048, 30_000) == pytest.approx(0.028896, rel=1e-4)
    assert line.itl(100, 30_000, 1000) == pytest.approx(1e-3 + 5e-7 * 31_000 + 0.004)


def test_too_few_samples_and_signs_of_life_say_nothing():
    line = PrefillRegression()
    for tokens in (1, 2, 3, 4):
        line.add([tokens], 0.1)
    line.add([5], 0.0)
    assert line.fit is None and line.ttft(0, 100, 2048) is None and line.capacity(100, 2048, 1.0) is None


def test_a_falling_line_is_not_used():
    line = PrefillRegression()
    for tokens in range(1, 9):
        line.add([tokens], 1.0 / tokens)
    assert line.fit is None


def test_a_decode_line_does_without_a_falling_number_of_sequences():
    line = DecodeRegression()
    for n in range(1, 10):
        for kv in (1000, 5000, 9000):
            line.add([n, kv], 1e-5 * kv - 1e-4 * n + 0.01)
    base, per_seq, per_kv = line.fit
    assert per_seq == 0.0 and per_kv > 0.0 and base > 0.0


def test_busy_samples_survive_a_quiet_hour():
    kept = SampleRetention(1, samples=64, buckets=16)
    for tokens in range(0, 1600, 100):
        kept.add([tokens], 1.0)
    for _ in range(1000):
        kept.add([0], 1.0)
    inputs, _ = kept.arrays()
    assert len(kept) == 64
    assert {float(each) for each in inputs[:, 0]} >= {float(each) for each in range(100, 1600, 100)}


def test_two_dimensions_have_four_by_four_buckets():
    kept = SampleRetention(2, samples=16, buckets=16)
    for a in range(4):
        for b in range(4):
            kept.add([a, b], 1.0)
    for _ in range(50):
        kept.add([0, 0], 1.0)
    inputs, _ = kept.arrays()
    assert len({tuple(row) for row in inputs.tolist()}) == 16


def test_a_line_goes_on_from_its_snapshot():
    line, other = prefill_line(), PrefillRegression()
    other.restore(line.snapshot())
    assert other.fit == line.fit
    line.add([9000], 1.0)
    other.add([9000], 1.0)
    assert other.fit == line.fit and np.isfinite(other.fit[0])
