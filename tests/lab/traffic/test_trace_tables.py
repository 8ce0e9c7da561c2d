"""Is each tabled format read by its columns, in any order of its rows, and is no unit of times taken in silence?"""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from penstock.kernel.errors import ConfigError
from penstock_lab.traffic.formats import timed_rows
from penstock_lab.traffic.formats.time_units import PER_SECOND, TimeUnit, plain_name, split_unit
from penstock_lab.traffic.formats.trace_format import guess, reader
from penstock_lab.traffic.formats.trace_rows import BadRow, TraceRequests
from penstock_lab.traffic.traffic_request import TrafficRequest
from tests.lab.traffic.trace_examples import DAY, EXAMPLES, ROWS, ExampleRow, TraceExample, ns, otlp, span

NAMES = [example.format for example in EXAMPLES]


def facts(requests: Sequence[TrafficRequest]) -> list[Any]:
    return [(each.at, each.isl, each.osl, each.session, each.turn, each.think) for each in requests]


@pytest.mark.parametrize("example", EXAMPLES, ids=NAMES)
def test_every_format_reads_the_requests_that_it_was_written_of(example: TraceExample) -> None:
    trace = reader(None, example.lines(ROWS), name="f")
    requests = list(trace)
    assert (trace.format, trace.timed, trace.skipped, trace.unanswered) == (example.format, example.timed, 0, 0)
    assert [(each.isl, each.osl) for each in requests] == [(row.prompt, row.answer) for row in ROWS]
    times = [row.at if example.timed else 0.0 for row in ROWS]
    assert [each.at for each in requests] == pytest.approx(times, abs=1e-5)
    if example.sessions:
        assert [each.turn for each in requests] == [row.turn for row in ROWS]
        assert len({each.session for each in requests}) == 3
    if example.sessions and example.format != "bailian":  # which does not say when answers came
        pauses = [each.think for each in requests]
        assert pauses == [
            None,
            None,
            pytest.approx(1.3, abs=1e-5),
            None,
            pytest.approx(3.45, abs=1e-5),
            pytest.approx(7.25, abs=1e-5),
        ]


@pytest.mark.parametrize(
    "example", [each for each in EXAMPLES if each.timed], ids=[e.format for e in EXAMPLES if e.timed]
)
@given(order=st.permutations(ROWS))
def test_rows_in_any_order_are_the_same_requests(example: TraceExample, order: list[ExampleRow]) -> None:
    straight, shuffled = (list(reader(example.format, example.lines(rows))) for rows in (ROWS, order))
    assert facts(shuffled) == facts(straight)
    assert [each.at for each in shuffled] == sorted(each.at for each in shuffled)


def lined(format_name: str, moments: list[str]) -> list[str]:
    if format_name == "azure":
        return ["TIMESTAMP,ContextTokens,GeneratedTokens", *(f"2024-05-10 00:00:{at},7,3" for at in moments)]
    if format_name == "burstgpt":
        return ["Timestamp,Request tokens,Response tokens", *(f"{at},7,3" for at in moments)]
    rows = ({"timestamp": 1000 * float(at), "input_length": 7, "output_length": 3, "hash_ids": [1]} for at in moments)
    return list(map(json.dumps, rows))


@pytest.mark.parametrize("format_name", ["azure", "burstgpt", "mooncake"])
def test_older_formats_are_sorted_too(format_name: Any) -> None:
    found = [each.at for each in reader(format_name, lined(format_name, ["12", "10", "11.5", "10"]))]
    first = 10.0 if format_name == "mooncake" else 0.0  # whose clock begins at 0
    assert found == [first, first, first + 1.5, first + 2.0]


def test_a_row_that_comes_later_than_the_window_is_a_bad_one_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timed_rows.TimedRows, "window", 3)
    lines = lined("burstgpt", ["1", "3", "2", "5", "4", "6", "7", "0.5"])
    with pytest.raises(BadRow, match=r"line 9, field Timestamp: it comes more than 3 rows too late"):
        list(reader("burstgpt", lines))
    trace = reader("burstgpt", lines, skip_bad=True)
    assert [each.at for each in trace] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0] and trace.skipped == 1


# --- units ------------------------------------------------------------------------------------------------------------

UNITS: list[TimeUnit] = ["s", "ms", "us", "ns"]


def arrivals(rate: float, seed: int, count: int = 60) -> list[float]:
    rng = random.Random(seed)
    times = [0.0]
    for _ in range(count - 1):
        times.append(times[-1] + rng.expovariate(rate))
    return times


def rate_of(trace: TraceRequests) -> float:
    times = [each.at for each in trace]
    return (len(times) - 1) / (times[-1] - times[0])


def true_rate(times: list[float]) -> float:
    return (len(times) - 1) / (times[-1] - times[0])


def written(times: list[float], unit: TimeUnit, whole: bool, epoch: float, name: str, more: str = "") -> list[str]:
    scaled = [(epoch + at) * PER_SECOND[unit] for at in times]
    head = f"{name},prompt_tokens,completion_tokens"
    if not more:
        return [head, *(f"{round(at) if whole else round(at, 6)},900,120" for at in scaled)]
    lasted = 2.5 * PER_SECOND[unit]
    return [
        f"{head},{more}",
        *(f"{round(at, 6)},900,120,{lasted if more == 'latency' else at + lasted}" for at in scaled),
    ]


rates = st.floats(0.06, 20.0)
seeds = st.integers(0, 10_000)


@given(rate=rates, seed=seeds, unit=st.sampled_from(UNITS[:2]), whole=st.booleans(), mooncake=st.booleans())
def test_no_rate_is_a_thousandfold_in_silence(
    rate: float, seed: int, unit: TimeUnit, whole: bool, mooncake: bool
) -> None:
    """Times that no column names a unit of: the rate is right, or it is refused by the flag's name, or said aloud."""
    times = arrivals(rate, seed)
    lines = written(times, unit, whole, 0.0, "timestamp")
    if mooncake:
        cells = [line.split(",") for line in lines[1:]]
        rows = ({"timestamp": float(at), "input_length": int(p), "output_length": int(a)} for at, p, a in cells)
        lines = [json.dumps({**row, "hash_ids": [1, 2]}) for row in rows]
    trace = reader(None, lines, name="t.csv")
    try:
        found = rate_of(trace)
    except ConfigError as error:
        assert not mooncake and "--trace-time-unit s or ms" in str(error) and "t.csv" in str(error)
        assert 0.5 < rate_of(reader(None, lines, time_unit=unit)) / true_rate(times) < 2.0
        return
    if not 0.5 < found / true_rate(times) < 2.0:  # whole seconds of a fast trace are coarse
        # A Mooncake trace is in milliseconds by its documentation: whole seconds can't be told from them.
        assert mooncake and any("--trace-time-unit" in note for note in trace.notes)


@given(
    rate=rates,
    seed=seeds,
    unit=st.sampled_from(UNITS),
    whole=st.booleans(),
    format_name=st.sampled_from(["csv", "mooncake"]),
)
def test_dates_have_the_unit_of_their_size(
    rate: float, seed: int, unit: TimeUnit, whole: bool, format_name: str
) -> None:
    assume(not (whole and unit == "s"))  # whole seconds of a fast trace are a coarse clock, not another unit
    times = arrivals(rate, seed)
    lines = written(times, unit, whole, DAY, "time")
    if format_name == "mooncake":
        stamps = [line.split(",")[0] for line in lines[1:]]
        lines = [
            json.dumps({"timestamp": json.loads(at), "input_length": 900, "output_length": 120, "hash_ids": [1, 2]})
            for at in stamps
        ]
    trace = reader(None, lines)
    found = rate_of(trace)
    assert found == pytest.approx(true_rate(times), rel=0.01)
    assert any("dates of our years" in note for note in trace.notes) or (format_name == "mooncake" and unit == "ms")


@given(rate=rates, seed=seeds, unit=st.sampled_from(UNITS), more=st.sampled_from(["latency", "end"]))
def test_durations_beside_tokens_say_the_unit(rate: float, seed: int, unit: TimeUnit, more: str) -> None:
    times = arrivals(rate, seed)
    trace = reader(None, written(times, unit, False, 0.0, "timestamp", more))
    assert rate_of(trace) == pytest.approx(true_rate(times), rel=0.01)
    assert any("as long as tokens take" in note for note in trace.notes)


@given(rate=rates, seed=seeds, unit=st.sampled_from(UNITS), epoch=st.sampled_from([0.0, 77.0, DAY]))
def test_a_columns_name_says_the_unit_before_everything_else(
    rate: float, seed: int, unit: TimeUnit, epoch: float
) -> None:
    times = arrivals(rate, seed)
    assume(not (unit == "s" and epoch))
    trace = reader(None, written(times, unit, False, epoch, f"arrival_time_{unit}"))
    assert rate_of(trace) == pytest.approx(true_rate(times), rel=0.01) and not trace.notes


def test_the_flag_counts_before_what_the_rows_seem_to_say() -> None:
    lines = written(arrivals(5.0, 1), "s", False, 0.0, "timestamp")
    trace = reader(None, lines, time_unit="ms")
    assert rate_of(trace) > 1_000 and not trace.notes


def test_what_penstock_wrote_says_its_unit_whatever_its_rate() -> None:
    from penstock_lab.traffic.formats.trace_format import written as to_lines

    fast = [TrafficRequest(at=number * 1e-5, isl=100, osl=10) for number in range(50)]
    trace = reader("mooncake", to_lines("mooncake", fast))
    assert [each.at for each in trace] == pytest.approx([each.at for each in fast]) and not trace.notes


@pytest.mark.parametrize(
    ("name", "plain", "unit"),
    [
        ("startTimeUnixNano", "start_time_unix", "ns"),
        ("Arrival Time (ms)", "arrival_time", "ms"),
        ("latency_s", "latency", "s"),
        ("Timestamp", "timestamp", None),
        ("ms", "ms", None),
        ("usage.prompt_tokens", "usage.prompt_tokens", None),
    ],
)
def test_names_of_columns(name: str, plain: str, unit: TimeUnit | None) -> None:
    assert split_unit(plain_name(name)) == (plain, unit)


# --- one format each --------------------------------------------------------------------------------------------------


def read(lines: list[str], **more: Any) -> tuple[list[TrafficRequest], TraceRequests]:
    trace = reader(None, lines, name="f", **more)
    return list(trace), trace


def test_chats_whose_parents_are_not_in_the_trace_are_sessions_of_their_own() -> None:
    row = {"timestamp": 1.5, "input_length": 16, "output_length": 4, "hash_ids": [1], "type": "text"}
    chats = [(1, -1), (2, 1), (5, 99), (3, 2), (6, 99), (7, 5)]
    rows = [{**row, "chat_id": id, "parent_chat_id": parent} for id, parent in chats]
    found, _ = read(list(map(json.dumps, rows)))
    assert [(each.session, each.turn) for each in found] == [
        ("1", 0),
        ("1", 1),
        ("99", 0),
        ("1", 2),
        ("99", 1),
        ("99", 2),
    ]
    assert {each.block_size for each in found} == {16} and {each.kind for each in found} == {"text"}


def test_blocks_of_another_size_are_hinted_by_their_flag() -> None:
    row = json.dumps({"timestamp": 0, "input_length": 100, "output_length": 4, "hash_ids": list(range(7))})
    with pytest.raises(BadRow, match=r"100 tokens in blocks of 512 have 1 ids, not 7 \(.*--trace-block-size 16\)"):
        read([row])
    assert read([row], block_size=16)[0][0].block_size == 16


def test_requests_of_aiperf_that_failed_or_warmed_up_are_none() -> None:
    (line,) = EXAMPLES[1].lines(ROWS[:1])
    row = json.loads(line)
    failed = {**row, "metrics": {"error_isl": {"value": 5}}, "error": {"code": 499}}
    warm = {**row, "metadata": {**row["metadata"], "benchmark_phase": "warmup"}}
    found, trace = read([line, json.dumps(failed), json.dumps(warm)])
    assert (len(found), trace.rows, trace.unanswered) == (1, 3, 1)


def test_genai_perf_without_usage_counts_chunks_and_estimates_aloud() -> None:
    payload = {"messages": [{"role": "user", "content": "abcd" * 25}], "max_tokens": 3}
    request = {
        "timestamp": 5,
        "request_inputs": {"payload": json.dumps(payload)},
        "response_timestamps": [6, 7, 8],
        "response_outputs": [{"response": "data: {}"}] * 3,
    }
    found, trace = read([json.dumps({"experiments": [{"requests": [request]}]})])
    assert [(each.isl, each.osl) for each in found] == [(25, 3)]
    assert "estimated" in trace.notes[0]


def test_results_without_start_times_have_no_times_and_failed_ones_no_answer() -> None:
    result = {"input_lens": [5, 6, 7], "output_lens": [2, 0, 3], "errors": ["", "timeout", ""]}
    found, trace = read([json.dumps(result)])
    assert [(each.at, each.isl) for each in found] == [(0.0, 5), (0.0, 7)]
    assert (trace.timed, trace.unanswered) == (False, 1)
    uneven = json.dumps({"input_lens": [5, 6], "output_lens": [2]})
    with pytest.raises(BadRow, match="f line 1, field output_lens: a list of 2 is needed"):
        read([uneven])


def test_a_span_inside_a_requests_span_is_no_second_request() -> None:
    row = ROWS[0]
    later = row._replace(at=row.at + 0.001)
    agent = span(row._replace(prompt=9999), id="agent", **{"gen_ai.operation.name": "invoke_agent"})
    client = span(later, id="client", parent="agent")
    http = {"spanId": "http", "parentSpanId": "client", "startTimeUnixNano": str(ns(0.002)), "attributes": []}
    engine = span(row._replace(at=0.003), id="engine", parent="http", **{"gen_ai.operation.name": None})
    alone = span(ROWS[1], id="other")
    failed = {**span(ROWS[2], id="failed"), "status": {"code": 2}}
    failed["attributes"] = [each for each in failed["attributes"] if "output" not in each["key"]]
    spans = [engine, http, client, alone, agent, failed]  # as they are exported: children first
    found, trace = read([otlp([each]) for each in spans])
    assert [(each.isl, each.osl) for each in found] == [(row.prompt, row.answer), (ROWS[1].prompt, ROWS[1].answer)]
    assert (trace.rows, trace.unanswered) == (6, 1)


def test_spans_that_say_they_are_in_each_other_end_nothing() -> None:
    times = {"startTimeUnixNano": str(ns(0.0)), "attributes": []}
    circle = [{"spanId": one, "parentSpanId": other, **times} for one, other in ("ab", "ba", "cc")]
    inside = span(ROWS[0], id="in", parent="a")
    found, _ = read([otlp([each]) for each in (*circle, inside, span(ROWS[1], id="own", parent="own"))])
    assert [each.isl for each in found] == [ROWS[0].prompt, ROWS[1].prompt]


def test_turns_of_a_chat_share_what_was_said_before_them() -> None:
    turns = [{"from": "human", "value": "q" * 400}, {"from": "gpt", "value": "a" * 200}] * 2
    found, trace = read([json.dumps([{"id": "c", "conversations": turns}, {"id": "d", "conversations": turns}])])
    first, second, other, _ = found
    assert [(each.isl, each.osl, each.turn) for each in (first, second)] == [(100, 50, 0), (250, 50, 1)]
    assert second.hash_ids[: len(first.hash_ids)] == first.hash_ids and other.hash_ids[0] != first.hash_ids[0]
    assert not trace.timed and "estimated from the text" in trace.notes[0]
    (whole,), _ = read([json.dumps({"conversations": turns, "prompt_len": 7, "output_len": 9})])
    assert (whole.isl, whole.osl) == (7, 9)


def test_columns_can_be_named_and_unknown_times_are_not_passed_over_in_silence() -> None:
    lines = ["when,in,out", "1.5,10,3", "2.5,20,4"]
    with pytest.raises(ConfigError, match="looks like none of the formats"):
        read(lines)
    names = {"at": "when", "prompt": "in", "answer": "out"}
    found, _ = read(lines, columns=names, time_unit="s")
    assert [(each.at, each.isl, each.osl) for each in found] == [(0.0, 10, 3), (1.0, 20, 4)]
    _, trace = read(["when,prompt_tokens,output_tokens", "1,2,3"])
    assert not trace.timed and "--trace-columns at=NAME" in trace.notes[0]
    with pytest.raises(BadRow, match=r"the column nine is needed"):
        read(lines, columns={**names, "at": "nine"})


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("soon,5,5", "time"),
        ("1.5,-1,5", "prompt_tokens"),
        ("1.5,5,many", "output_tokens"),
        ("1.5,0,5", "prompt_tokens"),
        ("2026-01-01,5,5", "time"),
        ("1.5,5", "(whole row)"),
    ],
)
def test_bad_rows_of_named_columns_are_named(text: str, field: str) -> None:
    lines = ["time,prompt_tokens,output_tokens", "1.5,5,5", text, "2.5,5,5"]
    with pytest.raises(BadRow, match="f line 3") as caught:
        read(lines, time_unit="s")
    assert caught.value.field == field
    found, trace = read(lines, time_unit="s", skip_bad=True)
    assert (len(found), trace.skipped, [error.field for error in trace.errors]) == (2, 1, [field])


def test_bad_rows_of_a_document_are_named_by_their_number() -> None:
    rows = [json.loads(line) for line in EXAMPLES[0].lines(ROWS)]
    rows[3]["output_length"] = "few"
    with pytest.raises(BadRow, match="f row 4, field output_length"):
        read(json.dumps(rows, indent=1).split("\n"))


def test_files_that_are_almost_json_are_named_by_their_line() -> None:
    lines = [json.dumps({"timestamp": 1, "input_length": 5, "output_length": 5, "hash_ids": [1]})] * 2
    assert guess(["{", *lines]) == "mooncake"
    with pytest.raises(BadRow, match=r"f line 1, field \(whole row\): not JSON"):
        read(["{", *lines])


def test_the_measured_runs_of_vllm_are_read_as_they_came(traces: Path) -> None:
    """Ten requests per second, by the description of the runs; ShareGPT's lengths, with arrivals in nanoseconds."""
    for name in ("RTX4090_Llama-3.1-8B__requests.jsonl", "sharegpt-llama-3.1-8b-300-sps10.lens.jsonl"):
        with (traces / "vllm_real" / name).open("rb") as lines:
            trace = reader(None, lines)
            requests = list(trace)
        assert (trace.format, len(requests)) == ("jsonl", 300)
        assert 299 / requests[-1].at == pytest.approx(10.0, rel=0.05)
        assert (requests[0].isl, requests[0].osl) == (2358, 531)
