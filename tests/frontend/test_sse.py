"""Does the tap see what it must, however the bytes are cut, and change nothing but the usage chunk?"""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.adapters.engines.dialects.engine_failure import EngineFailure
from penstock.adapters.engines.http.event_stream import chunks_of, payload_of, split_events
from penstock.frontend.exchange.sse import TAIL_MAX, SseTap, cached_tokens, output_tokens, prompt_tokens

USAGE = {"prompt_tokens": 9, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 8}}


def event(data: Any, separator: bytes = b"\n\n") -> bytes:
    return b"data: " + (data if isinstance(data, bytes) else json.dumps(data).encode()) + separator


def delta(**fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields}]}


events = st.lists(
    st.sampled_from(
        [
            event(delta(content="a")),
            event(delta(content='say "usage" and [DONE]')),
            event(delta(tool_calls=[{"id": 1}])),
            event(delta(content="x") | {"usage": None}),
            event(delta(content="y") | {"usage": USAGE}),
            b": ping\n\n",
            b"event: x\ndata: {}\n\n",
            b"id: 7\nretry: 5\n" + event(delta(content="z")),
            b": a comment before its\n" + event(delta(content="c", finish_reason=None)),
        ]
    ),
    max_size=12,
)


@given(events, st.lists(st.integers(1, 40), max_size=60), st.booleans(), st.sampled_from([b"\n\n", b"\r\n\r\n"]))
def test_bytes_pass_whole_and_in_order(parts: list[bytes], cuts: list[int], strip: bool, separator: bytes) -> None:
    usage = event({"choices": [], "usage": USAGE})
    sent = [event(delta(role="assistant", content="")), *parts, usage, event(b"[DONE]")]
    data = b"".join(sent).replace(b"\n\n", separator)
    tap = SseTap(strip_usage=strip)
    out = b""
    position = 0
    for cut in cuts:
        if piece := data[position : position + cut]:
            out += tap.feed(piece)
        position += cut
    if piece := data[position:]:
        out += tap.feed(piece)
    expected = b"".join(part for part in sent if not (strip and part == usage)).replace(b"\n\n", separator)
    assert out == expected
    assert tap.done and not tap.torn and tap.usage == USAGE


def test_role_chunk_is_no_output() -> None:
    tap = SseTap(strip_usage=True)
    tap.feed(event(delta(role="assistant", content="")))
    assert not tap.started
    tap.feed(event(delta(content="a")) + event(delta(content="b")))
    assert tap.started and tap.tokens == 2


def test_every_kind_of_output_counts() -> None:
    for chunk in (
        delta(reasoning_content="hm"),
        delta(tool_calls=[{}]),
        {"choices": [{"text": "a"}]},
        {"choices": [{"text": "", "finish_reason": "length"}]},
        {"choices": [{"delta": {}, "token_ids": [5]}]},
    ):
        tap = SseTap(strip_usage=False)
        tap.feed(event(chunk))
        assert tap.started, chunk


def test_error_event_is_seen() -> None:
    tap = SseTap(strip_usage=False)
    tap.feed(event({"error": {"message": "x"}}))
    assert tap.error == EngineFailure("x") and not tap.started
    other = SseTap(strip_usage=False)
    other.feed(event({"error": "plain"}))
    assert other.error == EngineFailure("plain")
    told = SseTap(strip_usage=False)
    told.feed(event(delta(content='"error" in a text')))
    assert told.error is None and told.started


def test_endless_event_is_not_kept_for_ever() -> None:
    tap = SseTap(strip_usage=False)
    out = tap.feed(b"data: " + b"x" * (TAIL_MAX + 1))
    assert len(out) > TAIL_MAX and tap.started


def naive_payloads(stream: bytes) -> list[str]:
    """Read a stream as the standard says, line by line."""
    lines = stream.decode().removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n").split("\n")
    found: list[str] = []
    data: list[str] = []
    for line in lines[:-1]:
        field, _, value = line.partition(":")
        if not line and data:
            found.append("\n".join(data))
        data = data if line else []
        if field == "data" and line:
            data.append(value.removeprefix(" "))
    return found


@given(st.lists(st.tuples(st.sampled_from(["a", "data: b", "data:c", ": d", "", "id: 1", "event: e"]),
                          st.sampled_from(["\n", "\r\n", "\r"])), max_size=14))  # fmt: skip
def test_events_are_split_and_read_as_the_standard_says(lines: list[tuple[str, str]]) -> None:
    stream = "".join(text + end for text, end in lines).encode() + b"\n\n"
    events = split_events(stream)
    assert b"".join(events) == stream
    named = [payload.decode() for payload in map(payload_of, events) if payload]
    assert named == [payload for payload in naive_payloads(stream) if payload]


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize("comment", [b": keep-alive\n\n", b":\r\n\r\n", b"event: x\n\n", b""])
@pytest.mark.parametrize("size", [1, 5, 1000])
def test_a_proxys_keep_alive_between_events_of_other_line_ends(end: bytes, comment: bytes, size: int) -> None:
    events = [event(delta(content=text)) for text in "abc"]
    events.append(event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "usage": USAGE}))
    stream = b"".join(comment + part.replace(b"\n", end) for part in events)
    tap = SseTap(strip_usage=True)
    out = b"".join(tap.feed(stream[at : at + size]) for at in range(0, len(stream), size)) + tap.feed(end)
    assert [chunk["choices"][0].get("delta", {}).get("content") for chunk in chunks_of(out)] == ["a", "b", "c", None]
    assert tap.tokens == 4 and tap.finished and not tap.done and tap.usage == USAGE and tap.error is None


def test_data_of_several_lines_is_passed_on_as_one() -> None:
    tap = SseTap(strip_usage=True)
    out = tap.feed(b'id: 1\ndata: {"choices": [{"index": 0,\ndata:  "delta": {"content": "a"}}]}\n\n')
    assert tap.started and out.count(b"\n") == 2 and chunks_of(out)[0]["choices"][0]["delta"] == {"content": "a"}


def test_all_choices_have_to_finish() -> None:
    tap = SseTap(strip_usage=True, choices=3)
    for index in (1, "2", None):
        assert not tap.finished
        tap.feed(event({"choices": [{"index": index, "delta": {"content": "x"}, "finish_reason": "length"}]}))
    assert tap.finished


def test_chunks_with_an_empty_usage_are_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang sends one with every chunk."""
    for separators in ((",", ":"), (", ", ": ")):
        tap = SseTap(strip_usage=True)
        for number, finish in enumerate((None, None, None, "stop")):
            choice = {"index": 0, "delta": {"content": "a"}, "finish_reason": finish}
            data = event(json.dumps({"choices": [choice], "usage": None}, separators=separators).encode())
            with monkeypatch.context() as patched:
                if number in (1, 2):
                    patched.setattr("penstock.frontend.exchange.sse.object_in", None)
                assert tap.feed(data) == data
        assert tap.tokens == 4 and tap.finished


def test_usage_fields() -> None:
    assert (prompt_tokens(USAGE), output_tokens(USAGE), cached_tokens(USAGE)) == (9, 4, 8)
    for odd in (None, {}, {"prompt_tokens_details": None}, {"completion_tokens": "5"}, {"completion_tokens": -1}):
        assert cached_tokens(odd) is None and output_tokens(odd) is None
