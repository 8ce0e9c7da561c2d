"""Which size is suggested, by which bounds, and in which words? The first case is Dynamo's own example."""

from pathlib import Path

import pytest

from penstock.config.files.profile_manifest import ProfilePoint
from penstock.kernel.values import EngineLimits, RequestShape, Slo
from penstock_lab.profiler.measurement.recommendation import (
    kv_bounds,
    pick_decode,
    pick_prefill,
    queue_bounds,
    recommendation_lines,
)
from tests.lab.profiler.measurement.swept import SHAPE, swept


def ttft(tp: int, ms: float, tokens: int = 3000) -> ProfilePoint:
    return ProfilePoint(kind="prefill", tp=tp, tokens=tokens, mean=ms / 1e3)


def itl(tp: int, ms: float, seqs: int, context: float = 3075.0) -> ProfilePoint:
    return ProfilePoint(kind="decode", tp=tp, seqs=seqs, context=context, mean=ms / 1e3)


def limits(kv_tokens: int | None) -> EngineLimits[int | None]:
    return EngineLimits(max_num_batched_tokens=None, max_num_seqs=None, kv_tokens=kv_tokens)


def test_the_example_of_dynamos_documents() -> None:
    """TTFT 48.37 ms and ITL 4.83 ms at TP 4 give 0.24/0.10 and 0.20/0.10, with these lines."""
    shape = RequestShape(3000.0, 150.0)
    prefill = pick_prefill([ttft(1, 140.0), ttft(2, 80.0), ttft(4, 48.37)], 3000, 0.05)
    decode = pick_decode(
        [itl(1, 12.0, 1), itl(2, 8.0, 1), itl(4, 4.83, 1)],
        shape,
        0.005,
        {tp: limits(3_000_000 * tp) for tp in (1, 2, 4)},
    )
    assert recommendation_lines(prefill, decode) == [
        "Suggested prefill TP:4 (TTFT 48.37 ms, throughput 15505.48 tokens/s/GPU)",
        "Suggested planner upper/lower bound for prefill queue size: 0.24/0.10",
        "Suggested decode TP:4 (ITL 4.83 ms, throughput 51.76 tokens/s/GPU)",
        "Suggested planner upper/lower bound for decode kv cache utilization: 0.20/0.10",
    ]


def test_of_the_sizes_that_meet_the_sla_the_one_with_most_per_gpu_is_taken() -> None:
    prefill = pick_prefill([ttft(1, 180.0), ttft(2, 100.0), ttft(4, 70.0)], 3000, 0.2)
    assert prefill is not None and (prefill.tp, prefill.met) == (1, True)
    assert pick_prefill([ttft(1, 180.0)], 4000, 0.2) is None, "the target itself must have been measured"
    points = [
        itl(1, 10.0, 4),
        itl(1, 19.0, 16),
        itl(1, 26.0, 32),
        itl(2, 8.0, 16),
        itl(2, 18.0, 60),
        itl(1, 1, 64, 100),
    ]
    decode = pick_decode(points, SHAPE, 0.02, {1: limits(100_000), 2: limits(250_000)})
    assert decode is not None and (decode.tp, decode.seqs, decode.met) == (2, 60, True)
    used = 60 * 3075 / 250_000
    assert (decode.upper, decode.lower) == pytest.approx((used + 0.2, used - 0.2))


def test_the_pick_lies_on_the_line_between_measured_points() -> None:
    """Whatever grid was measured: 20 ms lie a sixth of the way from 18 to 30 ms, so of that from 16 to 64 in flight."""
    points = [itl(1, 10.0, 1), itl(1, 18.0, 16), itl(1, 30.0, 64)]
    decode = pick_decode(points, SHAPE, 0.02, {1: limits(1_000_000)})
    assert decode is not None and (decode.seqs, decode.met) == (24, True)
    assert decode.seconds == pytest.approx(0.02, rel=1e-3) and decode.per_gpu == pytest.approx(24 / 0.02, rel=1e-3)
    all_met = pick_decode(points, SHAPE, 0.05, {1: limits(1_000_000)})
    assert all_met is not None and all_met.seqs == 64, "not beyond the line"
    rows = ((2_900.0, 16.0, 30.0), (3_250.0, 18.0, 34.0))
    between = [itl(1, ms, seqs, context) for context, *pair in rows for seqs, ms in zip((16, 64), pair, strict=True)]
    decode = pick_decode(between, SHAPE, 0.02, {1: limits(1_000_000)})
    assert decode is not None and 16 < decode.seqs < 32


def test_an_sla_that_nobody_meets_takes_the_nearest_and_says_what_it_would_need() -> None:
    points = [ttft(1, 180.0), ttft(4, 80.0), ttft(4, 40.0, 1000), ttft(4, 10.0, 100)]
    prefill = pick_prefill(points, 3000, 0.05)
    decode = pick_decode([itl(1, 12.0, 1), itl(4, 6.0, 1)], SHAPE, 0.005, {})
    assert prefill is not None and decode is not None and not prefill.met and not decode.met
    assert recommendation_lines(prefill, decode) == [
        "Suggested prefill TP:4 (TTFT 80.00 ms, throughput 9375.00 tokens/s/GPU, misses the SLA)",
        "Suggested planner upper/lower bound for prefill queue size: 0.10/0.10",
        "No prefill size meets the SLA: it needs a TTFT SLA of 80.00 ms, or prompts of at most 1,000 tokens (TTFT "
        "within the SLA), or an engine 1.60 times as fast",
        "Suggested decode TP:4 (ITL 6.00 ms, throughput 41.67 tokens/s/GPU, misses the SLA)",
        "Suggested planner upper/lower bound for decode kv cache utilization: 0.20/0.10",
        "No decode size meets the SLA: it needs an ITL SLA of 6.00 ms, or an engine 1.20 times as fast",
    ]
    assert recommendation_lines(None, None)[0] == "No suggestion for prefill: the target was not measured"


def test_bounds_stay_within_what_makes_sense() -> None:
    assert queue_bounds(0.1, 0.5) == pytest.approx((5.0, 3.0))
    assert queue_bounds(1.0, 0.5) == (0.1, 0.1)
    assert kv_bounds(1_000, SHAPE, 100_000) == (1.0, pytest.approx(30.55))
    assert kv_bounds(5, SHAPE, None) == (0.2, 0.1)


async def test_a_tight_ttft_takes_more_gpus_than_a_loose_one(tmp_path: Path) -> None:
    loose = await swept(tmp_path / "loose", 1, 2, 4, 8)
    tight = await swept(tmp_path / "tight", 1, 2, 4, 8, slo=Slo(ttft=0.06, itl=0.0045))
    assert (
        loose.prefill is not None
        and tight.prefill is not None
        and loose.decode is not None
        and tight.decode is not None
    )
    assert loose.prefill.tp == 1 and tight.prefill.tp > 1 and tight.prefill.met
    assert tight.decode.tp > loose.decode.tp or tight.decode.seqs < loose.decode.seqs
