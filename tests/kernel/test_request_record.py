"""Are gaps between tokens counted as the words say, and is a cut-off run still readable?"""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.kernel.request_record import (
    RequestLeg,
    RequestRecord,
    decode_records,
    gaps_of,
    summarise_gaps,
)
from penstock.kernel.statistics import percentile, weighted_percentile
from penstock.kernel.values import LatencyTargets, Slo, SloClass
from penstock_lab.runs.block_runs import Chain


def test_a_chunk_of_k_tokens_is_k_gaps_of_a_kth_each() -> None:
    chunks = [(0.0, 1), (0.4, 4), (0.4, 0), (0.5, 1)]
    assert gaps_of(chunks) == [(0.1, 4), (pytest.approx(0.1), 1)]
    found = summarise_gaps(chunks)
    assert found is not None
    assert (found.gaps, found.mean) == (5, pytest.approx(0.1))


def test_a_first_chunk_of_several_tokens_has_gaps_of_nothing_inside() -> None:
    assert gaps_of([(0.0, 3), (1.0, 1)]) == [(0.0, 2), (1.0, 1)]
    assert summarise_gaps([(0.0, 1)]) is None
    assert summarise_gaps([]) is None


@given(st.lists(st.tuples(st.floats(0, 1), st.integers(1, 40)), min_size=1, max_size=30))
def test_mean_gap_is_tpot(steps: list[tuple[float, int]]) -> None:
    chunks, at = [(0.0, 1)], 0.0
    for gap, tokens in steps:
        at += gap
        chunks.append((at, tokens))
    found = summarise_gaps(chunks)
    osl = sum(tokens for _, tokens in chunks)
    record = RequestRecord(id="r", arrival=0, model="m", outcome="ok", osl=osl, ttft=0.25, e2e=0.25 + at)
    assert found is not None
    assert found.gaps == osl - 1
    assert found.mean == pytest.approx(record.tpot, abs=1e-9)


@given(st.lists(st.floats(0, 10), min_size=1, max_size=80))
def test_streams_of_single_tokens_are_summed_up_like_all_others(steps: list[float]) -> None:
    chunks = [(0.0, 1)]
    for step in steps:
        chunks.append((chunks[-1][0] + step, 1))
    found = summarise_gaps(chunks)
    ordered = sorted(gaps_of(chunks))
    assert found is not None
    for q, value in ((0.5, found.p50), (0.9, found.p90), (0.99, found.p99)):
        assert value == weighted_percentile(ordered, q)
    assert (found.gaps, found.max) == (len(steps), ordered[-1][0])
    assert found.mean == sum(gap for gap, _ in ordered) / len(ordered)


@given(st.lists(st.tuples(st.integers(0, 9).map(float), st.integers(1, 5)), min_size=1, max_size=9), st.floats(0, 1))
def test_weighted_percentile_is_that_of_the_values_written_out(pairs: list[tuple[float, int]], q: float) -> None:
    pairs.sort()
    written = [value for value, count in pairs for _ in range(count)]
    assert weighted_percentile(pairs, q) == pytest.approx(percentile(written, q))


def test_a_percentile_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown"):
        weighted_percentile([], 0.5)


def test_in_slo_wants_an_answer_in_full_and_both_times_within() -> None:
    itl = summarise_gaps([(0.0, 1), (0.03, 1)])
    good = RequestRecord(id="r", arrival=0, model="m", outcome="ok", osl=2, ttft=1.0, itl=itl)
    assert good.within(Slo(ttft=1.0, itl=0.03))
    assert good.within(Slo())
    assert not good.within(Slo(ttft=0.9, itl=0.03))
    assert not good.within(Slo(ttft=1.0, itl=0.02))
    assert not RequestRecord(id="r", arrival=0, model="m", outcome="failed", ttft=0.1).within(Slo(ttft=1.0, itl=1.0))


def test_records_survive_the_file_and_a_crash_in_the_last_line() -> None:
    record = RequestRecord(
        id="r",
        arrival=1.5,
        model="m",
        outcome="ok",
        service_class="chat",
        legs=[RequestLeg(role="aggregated", worker="w", dispatched=1.5)],
    )
    line = msgspec.json.encode(record)
    assert b'"class":"chat"' in line
    assert decode_records([line, b"\n", line[:20]]) == [record]
    with pytest.raises(msgspec.DecodeError):
        decode_records([line[:20], line])
    assert record.worker == "w"
    assert record.tpot is None


def test_names_of_blocks_are_hashes_or_ranges_of_a_simulation() -> None:
    chain = Chain([(3, 2), (7, 1)])
    record = RequestRecord(id="r", arrival=0, model="m", outcome="ok", blocks=[5, *chain.ranges()])
    [read] = decode_records([msgspec.json.encode(record)])
    assert read.block_names == record.block_names == [5, *chain]
    assert RequestRecord(id="r", arrival=0, model="m", outcome="ok").block_names == []


def test_a_request_of_a_class_is_judged_by_the_targets_of_its_class() -> None:
    slo = Slo(ttft=1.0, itl=0.03, classes={"batch": SloClass(ttft=60.0), "voice": SloClass(itl=0.01)})
    assert slo.of("batch") == LatencyTargets(60.0, 0.03) and slo.of("voice") == LatencyTargets(1.0, 0.01)
    assert slo.of(None) == slo.of("unnamed") == LatencyTargets(1.0, 0.03)

    def late(service_class: str | None) -> RequestRecord:
        return RequestRecord(id="r", arrival=0, model="m", outcome="ok", ttft=30.0, service_class=service_class)

    assert late("batch").within(slo)
    assert not late("voice").within(slo) and not late(None).within(slo)
