"""Does the tap see what it must, however the bytes are cut, and change nothing but the usage chunk?"""

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

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
            event(b"not json"),
            event([1]),
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
    out += tap.rest()
    expected = b"".join(part for part in sent if not (strip and part == usage)).replace(b"\n\n", separator)
    assert out == expected
    assert tap.done and tap.at_boundary and tap.usage == USAGE


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
    assert tap.error == {"message": "x"} and not tap.started
    other = SseTap(strip_usage=False)
    other.feed(event({"error": "plain"}))
    assert other.error == {"message": "plain"}
    told = SseTap(strip_usage=False)
    told.feed(event(delta(content='"error" in a text')))
    assert told.error is None and told.started


def test_endless_event_is_not_kept_for_ever() -> None:
    tap = SseTap(strip_usage=False)
    out = tap.feed(b"data: " + b"x" * (TAIL_MAX + 1))
    assert len(out) > TAIL_MAX and tap.started


def test_usage_fields() -> None:
    assert (prompt_tokens(USAGE), output_tokens(USAGE), cached_tokens(USAGE)) == (9, 4, 8)
    for odd in (None, {}, {"prompt_tokens_details": None}, {"completion_tokens": "5"}, {"completion_tokens": -1}):
        assert cached_tokens(odd) is None and output_tokens(odd) is None
