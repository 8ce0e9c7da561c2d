"""Is each format told by its first lines, read as it says, and is a bad row named by file, line, field and value?"""

import json
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.kernel.errors import ConfigError
from penstock.kernel.request_record import RequestRecord
from penstock_lab.traffic.formats.mooncake import mooncake_lines
from penstock_lab.traffic.formats.trace_format import Format, Written, guess, reader, written
from penstock_lab.traffic.formats.trace_rows import BadRow, TraceRequests, numbered
from penstock_lab.traffic.traffic_request import TrafficRequest
from tests.lab.traffic.trace_examples import EXAMPLES, ROWS

AZURE_HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens"
BURST_HEAD = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type"
BURST_1_HEAD = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"


def mooncake_row(**changes: Any) -> str:
    return json.dumps({"timestamp": 5, "input_length": 600, "output_length": 7, "hash_ids": [1, 2], **changes})


def azure_row(at: str = "2023-11-16 18:15:46.6805900", isl: object = 374, osl: object = 44) -> str:
    return f"{at},{isl},{osl}"


def burst_row(
    at: object = 10.0, session: str = "s", elapsed: object = 2, isl: object = 9, osl: object = 4, log: str = "API log"
) -> str:
    return f"{at},{session},{elapsed},GPT-4,{isl},{osl},13,{log}"


def dynamo_row(
    received: object = 1_777_312_800_000, session: str | None = None, total: object = 250, **changes: Any
) -> dict[str, Any]:
    row: dict[str, Any] = {
        "schema": "dynamo.request.trace.v1",
        "event_type": "request_end",
        "event_time_unix_ms": 1_777_312_801_000,
        "request": {
            "request_id": "r",
            "request_received_ms": received,
            "total_time_ms": total,
            "output_tokens": 16,
            "replay": {"trace_block_size": 64, "input_length": 100, "input_sequence_hashes": [(1 << 64) - 1, 7]},
        },
        **changes,
    }
    if session is not None:
        row["agent_context"] = {"session_id": session}
    return row


def record(arrival: float = 1.0, **changes: Any) -> str:
    fields: dict[str, Any] = {"id": "r", "model": "m", "outcome": "ok", "isl": 150, "osl": 5, "blocks": [11, 12]}
    return msgspec.json.encode(RequestRecord(arrival=arrival, **{**fields, **changes})).decode()


HEADS: dict[str, list[str]] = {"azure": [AZURE_HEAD], "burstgpt": [BURST_HEAD]}
GOOD: dict[Format, list[str]] = {
    "mooncake": [mooncake_row()],
    "azure": [AZURE_HEAD, azure_row()],
    "burstgpt": [BURST_HEAD, burst_row()],
    "dynamo": [json.dumps(dynamo_row())],
    "records": [record()],
    **{example.format: example.lines(ROWS[:1]) for example in EXAMPLES},
}


def test_every_format_has_an_example_here() -> None:
    assert set(GOOD) == set(get_args(Format))


@pytest.mark.parametrize("format_name", get_args(Format))
@pytest.mark.parametrize("as_bytes", [False, True])
def test_a_format_is_told_by_its_first_lines(format_name: Format, as_bytes: bool) -> None:
    lines: list[Any] = ["", *GOOD[format_name]]
    if as_bytes:
        lines = [line.encode() for line in lines]
    assert guess(lines) == format_name
    trace = reader(None, iter(lines))
    assert (trace.format, len(list(trace))) == (format_name, 1)


def test_a_bad_first_row_hides_a_format_only_if_all_are_bad() -> None:
    assert guess(["{", mooncake_row()]) == "mooncake"
    assert guess(["\ufeff" + AZURE_HEAD]) == "azure"
    assert guess([BURST_1_HEAD]) == "burstgpt"
    with pytest.raises(
        ConfigError, match=r"x\.txt looks like none of the formats mooncake, azure, burstgpt, dynamo, r"
    ):
        guess(["Some text", "a,b,c", "[1]", '{"a": 1}', '"', b"\xff"], "x.txt")
    with pytest.raises(ConfigError, match="the trace looks like none"):
        reader(None, [])


def only(trace: TraceRequests) -> TrafficRequest:
    (found,) = trace
    return found


def test_azure_times_keep_their_seven_decimals_and_their_zones() -> None:
    rows = [azure_row("2023-11-16 18:15:46.6805900"), azure_row("2023-11-16 18:15:50.9951691", 1, 2)]
    first, second = reader("azure", [AZURE_HEAD, *rows])
    assert (first.at, first.isl, first.osl, first.hash_ids) == (0.0, 374, 44, [])
    assert second.at == 4.3145791
    zoned = [azure_row("2024-05-10 00:00:00+00:00"), azure_row("2024-05-10 02:00:00.009930+01:00")]
    assert [each.at for each in reader("azure", [AZURE_HEAD, *zoned])] == [0.0, 3600.00993]


def test_azure_columns_are_found_by_name() -> None:
    head = "GeneratedTokens,NumImages,TIMESTAMP,ContextTokens\r\n"
    found = only(reader("azure", [head.encode(), b'7,2,"2023-11-16 18:15:46",900\r\n']))
    assert (found.isl, found.osl) == (900, 7)


def test_burstgpt_has_sessions_pauses_and_kinds() -> None:
    rows = [
        burst_row(10, "a", 2, log="Conversation log"),
        burst_row(11, "", "", log="API log"),
        burst_row(15.5, "a", 1, log="Conversation log"),
        burst_row(16.0, "a", 1, log="Conversation log"),
    ]
    first, api, second, third = reader("burstgpt", [BURST_HEAD, *rows])
    assert (first.at, first.session, first.turn, first.think, first.kind) == (0.0, "a", 0, None, "conversation")
    assert (api.at, api.session, api.turn, api.think, api.kind) == (1.0, None, 0, None, "api")
    assert (second.turn, second.think) == (1, 3.5)
    assert (third.turn, third.think) == (2, 0.0)  # it came before the answer was there


def test_burstgpt_of_the_first_release_has_no_sessions() -> None:
    found = only(reader("burstgpt", [BURST_1_HEAD, "5,ChatGPT,472,18,490,Conversation log"]))
    assert (found.at, found.isl, found.osl, found.session, found.hash_ids) == (0.0, 472, 18, None, [])


@pytest.mark.parametrize(
    ("format_name", "row"),
    [
        ("azure", azure_row(osl=0)),
        ("burstgpt", burst_row(osl=0)),
        ("burstgpt", burst_row(isl=0, osl=0)),
        ("dynamo", json.dumps(dynamo_row()).replace('"output_tokens": 16', '"output_tokens": 0')),
        ("records", record(outcome="rejected", osl=0)),
        ("records", record(outcome="rejected", osl=0, isl=None)),
    ],
)
def test_requests_without_an_answer_are_counted_apart(format_name: Format, row: str) -> None:
    trace = reader(format_name, [*HEADS.get(format_name, []), row])
    assert not list(trace)
    assert (trace.rows, trace.unanswered, trace.skipped) == (1, 1, 0)


def test_dynamo_rows_come_in_order_of_arrival_with_sessions_and_pauses() -> None:
    start = 1_777_312_800_000
    rows = [
        {"event_type": "request_payload", "request_id": "r"},
        dynamo_row(start + 5_000, "a", total=None),  # ends by its event's time, before it arrived: unusable
        {"timestamp": 3, "event": dynamo_row(start + 1, "a", total=249.5)},
        dynamo_row(start + 2),
        dynamo_row(start + 1_000, "a"),
        {"schema": "dynamo.request.trace.v1", "event_type": "tool_end", "tool": {}},
    ]
    trace = reader("dynamo", map(json.dumps, rows))
    first, alone, second, third = trace
    assert [each.at for each in (first, alone, second, third)] == pytest.approx([0.0, 0.001, 0.999, 4.999], abs=1e-12)
    assert (first.isl, first.osl, first.block_size) == (100, 16, 64)
    assert first.hash_ids == [(1 << 64) - 1, 7]
    assert [(each.session, each.turn) for each in (first, alone, second, third)] == [
        ("a", 0),
        (None, 0),
        ("a", 1),
        ("a", 2),
    ]
    assert (first.think, second.think, third.think) == (None, 0.7495, 3.75)
    assert (trace.rows, trace.unanswered, trace.skipped) == (6, 0, 0)


def test_records_come_in_order_of_arrival_with_sessions_and_pauses() -> None:
    rows = [
        record(5.0, session="a", e2e=1.0),
        record(1.0, session="a", e2e=3.0, service_class="chat", osl_requested=9),
        record(7.5, session="a", outcome="failed", osl=2),
        record(2.0, isl=63, blocks=[]),
        record(3.0, blocks=None),
    ]
    first, short, unknown, second, third = reader("records", rows)
    assert (first.at, first.isl, first.osl, first.kind) == (1.0, 150, 9, "chat")
    assert (first.hash_ids, first.block_size) == ([11, 12], 64)
    assert (short.hash_ids, unknown.hash_ids) == ([], [])
    assert [(each.turn, each.think) for each in (first, second, third)] == [(0, None), (1, 1.0), (2, 1.5)]
    assert third.osl == 2  # an answer that was cut off: as much as was seen of it


@given(isl=st.integers(1, 5000), size=st.sampled_from([1, 16, 32, 64, 128, 512]))
def test_a_power_of_two_that_cuts_a_prompt_into_its_blocks_is_found(isl: int, size: int) -> None:
    blocks = list(range(isl // size))
    found = only(reader("records", [record(isl=isl, blocks=blocks)]))
    assert found.hash_ids == blocks
    if blocks:
        assert found.block_size == size


def test_ranges_of_a_simulations_record_are_spelled_out() -> None:
    found = only(reader("records", [record(isl=48, blocks=[7, (100, 2)])]))
    assert (found.hash_ids, found.block_size) == ([7, 100, 101], 16)


def test_records_with_another_block_size_say_so() -> None:
    rows = [record(isl=480, blocks=list(range(10)))]
    assert only(reader("records", rows, block_size=48)).block_size == 48
    with pytest.raises(BadRow, match="line 1, field blocks: no power of two"):
        list(reader("records", rows))


BAD: list[tuple[Format, str, str]] = [
    ("mooncake", mooncake_row(block_size=0), "block_size"),
    ("mooncake", mooncake_row(kind=3), "kind"),
    (
        "mooncake",
        '{"session_id": "new", "delay": 5, "input_length": 1, "output_length": 1, "hash_ids": [1]}',
        "timestamp",
    ),
    ("azure", azure_row(at="soon"), "TIMESTAMP"),
    ("azure", azure_row(at="0001-01-01 00:00:00+99:00"), "TIMESTAMP"),
    ("azure", azure_row(isl=-1), "ContextTokens"),
    ("azure", azure_row(isl=0), "ContextTokens"),
    ("azure", azure_row(isl="nan"), "ContextTokens"),
    ("azure", azure_row(osl="many"), "GeneratedTokens"),
    ("azure", azure_row(osl=1.5), "GeneratedTokens"),
    ("azure", "2023-11-16 18:15:46,374", "(whole row)"),
    ("azure", '"', "(whole row)"),
    ("burstgpt", burst_row(at=-1), "Timestamp"),
    ("burstgpt", burst_row(at="inf"), "Timestamp"),
    ("burstgpt", burst_row(elapsed="long"), "Elapsed time"),
    ("burstgpt", burst_row(isl="x"), "Request tokens"),
    ("burstgpt", burst_row(isl=0), "Request tokens"),
    ("burstgpt", burst_row(osl=-4), "Response tokens"),
    ("burstgpt", burst_row(log="Other log"), "Log Type"),
    ("dynamo", "[]", "(whole row)"),
    ("dynamo", json.dumps(dynamo_row(schema="v0")), "schema"),
    ("dynamo", json.dumps(dynamo_row(event_type="?")), "event_type"),
    ("dynamo", json.dumps(dynamo_row(request=None)), "request"),
    ("dynamo", json.dumps(dynamo_row(received="now")), "request_received_ms"),
    ("dynamo", json.dumps(dynamo_row(total=-1)), "total_time_ms"),
    ("dynamo", json.dumps(dynamo_row(total=None, event_time_unix_ms="late")), "event_time_unix_ms"),
    ("dynamo", json.dumps(dynamo_row()).replace('"input_length": 100', '"input_length": 0'), "input_length"),
    ("dynamo", json.dumps(dynamo_row()).replace('"input_length": 100', '"input_length": 64'), "input_sequence_hashes"),
    ("dynamo", json.dumps(dynamo_row()).replace('size": 64', 'size": 0'), "trace_block_size"),
    ("dynamo", json.dumps(dynamo_row()).replace('"output_tokens": 16, ', ""), "output_tokens"),
    ("dynamo", json.dumps(dynamo_row(agent_context={})), "session_id"),
    ("records", '{"id": "r"}', "(whole row)"),
    ("records", record().replace('"arrival":1.0', '"arrival":"now"'), "arrival"),
    ("records", record(arrival=-1.0), "arrival"),
    ("records", record(isl=None), "isl"),
    ("records", record(isl=0, blocks=None), "isl"),
    ("records", record(osl=-1), "osl"),
    ("records", record(blocks=list(range(151))), "blocks"),
    ("records", record()[:-9], "(whole row)"),
]


@pytest.mark.parametrize(("format_name", "text", "field"), BAD)
def test_a_bad_row_is_named_by_file_line_and_field(format_name: Format, text: str, field: str) -> None:
    head = HEADS.get(format_name, [])
    good = GOOD[format_name][-1]
    lines = [*head, "", good, text, good]
    with pytest.raises(BadRow, match=rf"^day\.log line {len(head) + 3}, field ") as caught:
        list(reader(format_name, lines, name="day.log"))
    assert caught.value.field == field
    assert "skip bad rows" in str(caught.value)
    skipping = reader(format_name, lines, name="day.log", skip_bad=True)
    assert len(list(skipping)) == 2
    assert (skipping.rows, skipping.skipped, [error.field for error in skipping.errors]) == (3, 1, [field])


@pytest.mark.parametrize("head", ["TIMESTAMP,ContextTokens", '"', "a,b"])
def test_a_header_without_its_columns_is_never_skipped(head: str) -> None:
    with pytest.raises(BadRow, match=r"^t\.csv line 2, field \((header|whole row)\)"):
        list(reader("azure", ["", head, azure_row()], name="t.csv", skip_bad=True))


def test_an_empty_file_has_no_requests() -> None:
    for format_name in get_args(Format):
        assert not list(reader(format_name, ["", "\n"]))


def test_a_session_of_delays_may_leave_its_later_timestamps_out() -> None:
    later = {"session_id": "a", "delay_ms": 50, "input_length": 600, "output_length": 1, "hash_ids": [1, 2]}
    rows = [mooncake_row(session_id="a", timestamp=1000), json.dumps(later), json.dumps({**later, "delay_ms": 25})]
    found = list(reader("mooncake", rows))
    assert [(each.at, each.turn, each.think) for each in found] == [(1.0, 0, None), (1.05, 1, 0.05), (1.075, 2, 0.025)]


sizes = st.sampled_from([16, 512])


@st.composite
def traffic(draw: st.DrawFn) -> list[TrafficRequest]:
    """Requests in order of arrival, to the millisecond; sessions count their turns from 0."""
    times = sorted(draw(st.lists(st.integers(0, 10**7), max_size=12)))
    turns: dict[str, int] = {}
    found: list[TrafficRequest] = []
    for time in times:
        isl = draw(st.integers(1, 3000))
        size = draw(sizes)
        session = draw(st.sampled_from([None, "a", "b"]))
        turn = 0
        if session is not None:
            turn = turns.get(session, 0)
            turns[session] = turn + 1
        covered = draw(st.integers(0, -(-isl // size)))
        found.append(
            TrafficRequest(
                at=time / 1000,
                isl=isl,
                osl=draw(st.integers(1, 500)),
                hash_ids=draw(st.lists(st.integers(0, 5), min_size=covered, max_size=covered)),
                block_size=size,
                session=session,
                turn=turn,
                think=draw(st.none() | st.integers(0, 10**6).map(lambda ms: ms / 1000)) if turn else None,
                kind=draw(st.sampled_from([None, "chat"])),
            )
        )
    return found


@given(requests=traffic())
def test_what_is_written_as_mooncake_reads_back_the_same(requests: list[TrafficRequest]) -> None:
    lines = list(mooncake_lines(requests))
    assert list(reader("mooncake", lines)) == list(numbered(requests))
    assert list(written("mooncake", reader("mooncake", lines))) == lines


def test_the_first_row_of_a_session_has_no_delay() -> None:
    amid = [TrafficRequest(at=at, isl=1, osl=1, session="a", turn=turn, think=2.0) for at, turn in ((0.0, 3), (5.0, 4))]
    assert [each.think for each in reader("mooncake", mooncake_lines(amid))] == [None, 2.0]


@given(requests=traffic())
def test_what_is_written_as_records_reads_back_with_the_same_sharing(requests: list[TrafficRequest]) -> None:
    """Blocks are compared where a record has them: full ones, and as far as two prompts agree from the start."""
    back = list(reader("records", written("records", requests)))
    keep = ("at", "isl", "osl", "session", "turn", "kind")
    order = sorted(requests, key=lambda each: each.at)
    assert [[getattr(each, name) for name in keep] for each in back] == [
        [getattr(each, name) for name in keep] for each in order
    ]

    def agree(one: TrafficRequest, other: TrafficRequest) -> int:
        mine, theirs = (each.hash_ids[: each.isl // each.block_size] for each in (one, other))
        if one.block_size != other.block_size:
            return 0
        return next(
            (i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), min(len(mine), len(theirs))
        )

    for i, one in enumerate(order):
        for j, other in enumerate(order):
            if i != j:
                assert agree(back[i], back[j]) == agree(one, other)


@pytest.mark.parametrize("format_name", get_args(Written))
def test_text_and_tokens_are_not_written(format_name: Written) -> None:
    for given_as in ({"messages": []}, {"token_ids": [1]}):
        with pytest.raises(ValueError, match="text or tokens"):
            list(written(format_name, [TrafficRequest(at=0, isl=1, osl=1, **given_as)]))


def test_numbers_follow_first_appearance_and_missing_blocks_have_their_own() -> None:
    requests = [
        TrafficRequest(at=0, isl=1030, osl=1, hash_ids=[90, 7]),
        TrafficRequest(at=1, isl=40, osl=1),
        TrafficRequest(at=2, isl=1030, osl=1, hash_ids=[90, 8, 7]),
        TrafficRequest(at=3, isl=32, osl=1, hash_ids=[90, 90], block_size=16),
    ]
    assert [each.hash_ids for each in numbered(requests)] == [[0, 1, 2], [3], [0, 4, 1], [5, 5]]


def test_the_public_azure_trace_is_read_whole(traces: Path) -> None:
    with (traces / "azure_llm_2023_conv.csv").open("rb") as lines:
        trace = reader(None, lines)
        requests = list(trace)
    assert (trace.format, len(requests), trace.unanswered) == ("azure", 19_366, 0)
    assert requests[-1].at == pytest.approx(3501.7, abs=0.1)
    assert [each.at for each in requests] == sorted(each.at for each in requests)


@pytest.mark.parametrize("name", ["mooncake_conversation_first6000.jsonl", "mooncake_synthetic_trace.jsonl"])
def test_the_public_mooncake_traces_number_their_blocks_as_we_do(traces: Path, name: str) -> None:
    with (traces / name).open("rb") as lines:
        requests = list(reader("mooncake", lines))
    assert list(numbered(requests)) == requests
