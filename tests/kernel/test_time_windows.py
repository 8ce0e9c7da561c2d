"""Windows of a run: what counts where, what is unknown, and that several processes' windows add up."""

import random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.kernel.latency_bins import LEAST, Bins, count, join, quantiles
from penstock.kernel.request_record import ItlSummary, RequestRecord
from penstock.kernel.statistics import percentile
from penstock.kernel.time_windows import LoadSample, Timeline, TimeWindow, columns_of, pools_of
from penstock.kernel.values import Slo

SLO = Slo(ttft=0.5, itl=0.03)


def record(outcome: str = "ok", **more: Any) -> RequestRecord:
    fields: dict[str, Any] = {"id": "r", "arrival": 0.0, "model": "m", "isl": 100, "osl": 10, "cached": 25, **more}
    return msgspec.convert({**fields, "outcome": outcome}, RequestRecord)


def answered(ttft: float | None = 0.2, itl: float | None = 0.02) -> RequestRecord:
    return record(ttft=ttft, itl=None if itl is None else ItlSummary(gaps=9, mean=itl))


@given(st.lists(st.floats(LEAST, 1e4), min_size=1), st.floats(0, 1))
def test_a_quantile_is_within_a_per_cent_of_the_percentile_that_a_bench_shows(values: list[float], rank: float) -> None:
    bins: Bins = {}
    for value in values:
        count(bins, value)
    (found,) = quantiles(bins, [rank])
    assert found == pytest.approx(percentile(sorted(values), rank), rel=0.0101)


@given(st.lists(st.floats(0, 1e3)), st.lists(st.floats(0, 1e3)))
def test_bins_of_two_are_those_of_both(mine: list[float], theirs: list[float]) -> None:
    one, other, both = {}, {}, {}  # type: ignore[var-annotated]
    for bins, values in ((one, mine), (other, theirs), (both, mine + theirs)):
        for value in values:
            count(bins, value)
    join(one, other)
    assert one == both
    assert quantiles({}, [0.5, 0.99]) == [None, None]


def test_a_request_counts_where_it_arrives_where_its_token_comes_and_where_it_ends() -> None:
    line = Timeline(5.0)
    line.arrived(4.0, 100)
    line.first(7.0, 3.0)
    line.ended(21.0, answered(ttft=3.0), SLO)
    columns = columns_of(line.between(0, 5))
    assert columns["arrived"] == [1, 0, None, None, 0] and columns["prompt_tokens"] == [100, 0, None, None, 0]
    assert columns["ttft_p50"][1] == pytest.approx(3.0, rel=0.01) and columns["ttft_p99"][4] is None
    assert columns["ok"][4] == 1 and columns["output_tokens"][4] == 10
    assert columns["itl_p95"][4] == pytest.approx(0.02, rel=0.01)
    assert (columns["cached_tokens"][4], columns["cache_reported_tokens"][4]) == (25, 100)


@pytest.mark.parametrize(
    ("ended", "judged", "in_slo"),
    [
        (answered(0.4, 0.02), 1, 1),
        (answered(0.6, 0.02), 1, 0),
        (answered(0.4, 0.04), 1, 0),
        (answered(0.4, None), 1, 1),
        (answered(None, None), 0, 0),  # nobody saw its first token: unknown is no miss
        (record("failed"), 1, 0),
        (record("rejected"), 1, 0),
        (record("expired"), 1, 0),
        (record("cancelled"), 0, 0),
    ],
)
def test_who_is_in_slo(ended: RequestRecord, judged: int, in_slo: int) -> None:
    line = Timeline(5.0)
    line.ended(0.0, ended, SLO)
    assert (line.windows[0].judged, line.windows[0].in_slo) == (judged, in_slo)


def test_where_nothing_is_promised_an_answer_is_enough() -> None:
    line = Timeline(5.0)
    for ended in (answered(9.0, 9.0), answered(None, None), record("failed")):
        line.ended(0.0, ended, Slo())
    assert (line.windows[0].judged, line.windows[0].in_slo) == (3, 2)


def test_what_nobody_looked_at_is_unknown_and_not_nought() -> None:
    line = Timeline(5.0)
    line.arrived(0.0, None)
    columns = columns_of(line.between(0, 1))
    assert columns["running"] == columns["queued"] == columns["kv_use"] == columns["slo_ttft"] == [None]
    assert pools_of(line.between(0, 1)) == {}
    assert line.loads_at(0.0) is None and line.worker_columns("main-0") is None


def test_loads_come_back_as_they_were_and_names_are_shared() -> None:
    line = Timeline(5.0)
    loads = {
        "main-0": LoadSample(3, 500, 40, 100, True),
        "main-1": LoadSample(None, None, None, None, False),
        "b-0": LoadSample(0, 0, 0, 7, True),
    }
    for at in (0.0, 5.0):
        line.window(at).take_loads(loads, line.before(line.window(at)))
    first, second = line.windows[0], line.windows[1]
    assert second.all_loads() == loads and second.workers is first.workers
    assert first.kv_use is None  # one does not tell
    assert pools_of(line.between(0, 3)) == {
        "b": {"there": [1, 1, None], "ready": [1, 1, None]},
        "main": {"there": [2, 2, None], "ready": [1, 1, None]},
    }
    told = line.worker_columns("main-0")
    assert told is not None and told.columns["blocks"] == [40, 40]
    second.take_loads({"main-0": LoadSample(1, 2, 30, 60, True), "b-0": LoadSample(1, 2, 10, 20, True)}, first)
    assert second.kv_use == 0.5
    missing = line.worker_columns("main-1")
    assert missing is not None and missing.columns["requests"] == [None, None]


def test_the_oldest_windows_go() -> None:
    line = Timeline(5.0, windows_max=3)
    for at in (0.0, 5.0, 10.0, 15.0):
        line.arrived(at, 1)
    assert sorted(line.windows) == [1, 2, 3]
    line.arrived(500.0, 1)  # a long silence
    assert sorted(line.windows) == [100]


@given(st.integers(0, 2**32), st.integers(1, 4))
def test_windows_of_several_processes_add_up_to_those_of_one(seed: int, processes: int) -> None:
    rng = random.Random(seed)
    one = Timeline(5.0)
    parts = [Timeline(5.0) for _ in range(processes)]
    for _ in range(40):
        part, at, ttft = rng.choice(parts), rng.uniform(0, 20), rng.lognormvariate(-1, 1)
        ended = rng.choice([answered(ttft, rng.uniform(0.01, 0.05)), record("failed"), record("cancelled")])
        for line in (one, part):
            line.arrived(at, 7)
            line.first(at, ttft)
            line.ended(at, ended, SLO)
    for number, window in one.windows.items():
        added = TimeWindow(running=0, queued=0)
        for part in parts:
            if number in part.windows:
                found = msgspec.json.decode(msgspec.json.encode(part.windows[number]), type=TimeWindow)
                added.add(found)
        assert columns_of([added]) == {**columns_of([window]), "running": [None], "queued": [None]}


def test_a_sum_that_one_process_does_not_know_is_unknown() -> None:
    added = TimeWindow(running=0, queued=0)
    added.add(TimeWindow(running=2, queued=1, pools={"main": (2, 2)}, slo_ttft=1.0))
    added.add(TimeWindow(running=3, queued=0, pools={"main": (2, 2)}))
    assert (added.running, added.queued, added.pools, added.slo_ttft) == (5, 1, {"main": (2, 2)}, 1.0)
    added.add(TimeWindow())
    assert (added.running, added.queued) == (None, None)


def test_without_loads_only_the_loads_are_missing() -> None:
    window = TimeWindow(arrived=2)
    window.take_loads({"main-0": LoadSample(1, 2, 3, 4, True)}, None)
    bare = window.without_loads()
    assert (
        bare.workers is None and bare.pools == {"main": (1, 1)} and bare.arrived == 2 and window.workers == ("main-0",)
    )
