"""Tests for what answers alone show of an engine's passes."""

import pytest

from penstock.kernel import latency_bins
from penstock.kernel.values import Traffic
from penstock.planner.performance.streamed_answers import FEWEST, decode_row, prefill_row


def answers(count: int, *, ttft: float, itl: float, seconds: float = 10.0, isl: int = 1000, osl: int = 101) -> Traffic:
    """Return a window of answers that are all alike."""
    ttfts: latency_bins.Bins = {}
    for _ in range(count):
        latency_bins.count(ttfts, ttft)
    return Traffic(
        seconds=seconds,
        arrived=count,
        prompt_tokens=count * isl,
        answered=count,
        answered_prompt_tokens=count * isl,
        output_tokens=count * osl,
        ttft=ttfts,
        ttft_sum=count * ttft,
        ttft_count=count,
        itl_sum=count * itl,
        itl_count=count,
    )


def test_a_quick_answers_ttft_is_a_prefill() -> None:
    row = prefill_row(answers(10, ttft=0.2, itl=0.01), engines=2, max_num_seqs=64.0)
    assert row is not None and row.tokens == pytest.approx(1000.0, rel=0.1)
    assert row.seconds == pytest.approx(0.2, rel=0.05) and row.seqs == 0.0


def test_where_all_answers_waited_a_prefill_is_no_longer_than_its_share_of_the_window() -> None:
    """An engine that takes one at a time answered ten in ten seconds: 0.7 s of each were decoding."""
    row = prefill_row(answers(10, ttft=9.0, itl=0.007), engines=1, max_num_seqs=1.0)
    assert row is not None and row.seconds == pytest.approx(0.3, rel=0.01)
    many = prefill_row(answers(10, ttft=9.0, itl=0.007), engines=1, max_num_seqs=64.0)
    assert many is not None and many.seconds == pytest.approx(1.0, rel=0.01)


def test_a_decode_step_is_shared_by_as_many_as_littles_law_says() -> None:
    """Forty answers of a second of decoding each in ten seconds on two engines: two at a time on each, and itself."""
    row = decode_row(answers(40, ttft=0.2, itl=0.01), engines=2, max_num_seqs=64.0)
    assert row is not None and row.seconds == pytest.approx(0.01)
    assert row.seqs == pytest.approx(3.0) and row.kv == pytest.approx(3.0 * 1050.5, rel=0.1)
    assert row.tokens == pytest.approx(20.0, rel=0.1), "prompt tokens that come to an engine in 10 ms"
    alone = decode_row(answers(10, ttft=0.2, itl=0.007), engines=1, max_num_seqs=1.0)
    assert alone is not None and alone.seqs == 1.0 and alone.tokens == 0.0


def test_too_little_shows_nothing() -> None:
    few = answers(FEWEST - 1, ttft=0.2, itl=0.01)
    assert prefill_row(few, 1, 64.0) is None and decode_row(few, 1, 64.0) is None
    assert decode_row(answers(10, ttft=0.2, itl=0.0, osl=1), 1, 64.0) is None
    assert prefill_row(Traffic(seconds=10.0, arrived=10, prompt_tokens=10, answered=10), 1, 64.0) is None
