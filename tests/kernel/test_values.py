"""Shared values keep their promises: sums add, the unknown stays unknown, cards survive the wire."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.kernel.machine import nanos, seconds
from penstock.kernel.statistics import LineFit, percentile
from penstock.kernel.values import PoolKey, StepStats, Target, WorkerCard, WorkerId

counts = st.one_of(st.none(), st.integers(0, 10**6))
windows = st.builds(StepStats, passes=st.integers(0, 100), wall=st.just(0.5), prefill_tokens=counts, decode_kv=counts)


@given(windows, windows, windows)
def test_windows_add_up_in_any_order(a: StepStats, b: StepStats, c: StepStats) -> None:
    assert (a + b) + c == a + (b + c) and a + b == b + a


def test_a_sum_unknown_in_one_window_is_unknown_in_both() -> None:
    total = StepStats(passes=1, wall=0.1, prefill_tokens=5) + StepStats(passes=1, wall=0.1)
    assert total.prefill_tokens is None and total.passes == 2


def test_estimates_stay_marked() -> None:
    total = StepStats(passes=1, wall=0.1, decode_kv=5, estimated=("decode_kv",)) + StepStats(
        passes=1, wall=0.1, decode_kv=6
    )
    assert total.decode_kv == 11 and total.estimated == ("decode_kv",)


def test_a_card_survives_the_wire() -> None:
    card = WorkerCard(id=WorkerId("a"), epoch=3, model="m", url="http://x", events=("tcp://1",), labels={"zone": "z"})
    assert msgspec.json.decode(msgspec.json.encode(card), type=WorkerCard) == card
    assert card.pool == PoolKey("m") and card.block_size is None


def test_names_for_people() -> None:
    assert str(Target(WorkerId("a"))) == "a" and str(Target(WorkerId("a"), 2)) == "a/2"
    assert str(PoolKey("m", "decode", "h100")) == "m:decode:h100"


@given(st.floats(0, 1e6))
def test_seconds_and_nanoseconds_agree(value: float) -> None:
    assert seconds(nanos(value)) == pytest.approx(value, abs=1e-9)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1), st.floats(0, 1))
def test_a_percentile_lies_between_the_ends_and_never_falls(values: list[float], q: float) -> None:
    ordered = sorted(values)
    assert ordered[0] <= percentile(ordered, q) <= ordered[-1]
    assert percentile(ordered, q / 2) <= percentile(ordered, q) + 1e-9


def test_a_percentile_of_nothing_is_unknown() -> None:
    with pytest.raises(ValueError, match="unknown"):
        percentile([], 0.5)


def test_a_line_is_found_again_and_survives_a_dump() -> None:
    fit = LineFit()
    assert fit.line() is None
    for x in range(20):
        fit.add(float(x), 0.25 + 0.5 * x)
    again = LineFit()
    again.restore(fit.snapshot())
    line = again.line()
    assert line is not None and line == pytest.approx((0.25, 0.5))


def test_points_without_spread_give_no_line() -> None:
    fit = LineFit()
    for _ in range(20):
        fit.add(3.0, 1.0)
    assert fit.line() is None
