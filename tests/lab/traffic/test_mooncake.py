"""Is a Mooncake trace read as it says, and is a bad row named by line, field and value?"""

import json
from pathlib import Path

import pytest

from penstock_lab.traffic.formats.mooncake import MooncakeTrace
from penstock_lab.traffic.formats.trace_rows import BadRow
from penstock_lab.traffic.hit_rate_bound import infinite_cache_bound

GOOD = {"timestamp": 1500, "input_length": 1030, "output_length": 7, "hash_ids": [4, 5, 6]}


def row(**changes: object) -> str:
    return json.dumps({**GOOD, **changes})


def test_a_row_becomes_a_request() -> None:
    (only,) = MooncakeTrace([row(), "\n"])
    assert (only.at, only.isl, only.osl, only.hash_ids, only.block_size) == (1.5, 1030, 7, [4, 5, 6], 512)


def test_sessions_count_their_turns_and_pauses() -> None:
    lines = [row(session_id="a"), row(session_id=9), row(session_id="a", delay=2500)]
    first, other, second = MooncakeTrace(lines)
    assert (first.turn, other.session, second.turn, second.think) == (0, "9", 1, 2.5)


def test_names_of_other_tools_are_taken() -> None:
    text = '{"created_time": 10, "input_tokens": 3, "output_tokens": 1.0, "hash_ids": [0]}'
    (only,) = MooncakeTrace([text.encode()])
    assert (only.at, only.isl, only.osl) == (0.01, 3, 1)


@pytest.mark.parametrize(
    ("text", "field", "value"),
    [
        (row(timestamp=-1), "timestamp", -1),
        (row(timestamp=True), "timestamp", True),
        (row(timestamp=None), "timestamp", None),
        (row(input_length=0), "input_length", 0),
        (row(output_length="7"), "output_length", "7"),
        (row(output_length=1.5), "output_length", 1.5),
        (row(hash_ids=None), "hash_ids", None),
        (row(hash_ids=[1, -2, 3]), "hash_ids", -2),
        (row(hash_ids=[1, 2, 1 << 64]), "hash_ids", 1 << 64),
        (row(hash_ids=[1, 2]), "hash_ids", [1, 2]),
        (row(session_id=[]), "session_id", []),
        (row(delay="soon"), "delay", "soon"),
        ("[1]", "(whole row)", [1]),
        ("{", "(whole row)", "{"),
    ],
)
def test_a_bad_row_is_named(text: str, field: str, value: object) -> None:
    lines = [row(), "", text, row()]
    with pytest.raises(BadRow, match="trace line 3") as caught:
        list(MooncakeTrace(lines))
    assert (caught.value.line, caught.value.field, caught.value.value) == (3, field, value)
    skipping = MooncakeTrace(lines, skip_bad=True)
    assert len(list(skipping)) == 2
    assert (skipping.rows, skipping.skipped, [error.line for error in skipping.errors]) == (3, 1, [3])


def test_bytes_that_are_no_text_are_a_bad_row() -> None:
    skipping = MooncakeTrace([b'{"timestamp": "\xff"}', row().encode()], skip_bad=True)
    assert len(list(skipping)) == 1
    assert skipping.skipped == 1


@pytest.mark.parametrize(
    ("name", "rows", "bound"),
    [("mooncake_conversation_first6000.jsonl", 6000, 0.3527), ("mooncake_synthetic_trace.jsonl", 3993, 0.6511)],
)
def test_the_public_traces_are_read_whole(traces: Path, name: str, rows: int, bound: float) -> None:
    """The bounds were counted by a separate script of a few lines over the raw JSON."""
    with (traces / name).open("rb") as lines:
        requests = list(MooncakeTrace(lines))
    assert len(requests) == rows
    assert infinite_cache_bound(requests, 64) == pytest.approx(bound, abs=5e-5)
