"""Are the tokens of a stream counted right, however its bytes are cut?"""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_lab.report.bench.load_generator import AnswerStream, BadStream


def event(**fields: object) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\r\n\r\n"


def text(value: str = "x", **more: object) -> dict[str, object]:
    return {"index": 0, "text": value, **more}


RUNNING = [
    event(choices=[text()], usage={"prompt_tokens": 9, "completion_tokens": 1}),
    event(choices=[text("")], usage={"prompt_tokens": 9, "completion_tokens": 3}),
    event(choices=[text()], usage={"prompt_tokens": 9, "completion_tokens": 7}),
    b": a comment\n\n",
    event(choices=[], usage={"completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 4}}),
    b"data: [DONE]\n\n",
]


def test_running_usage_counts_each_chunk() -> None:
    stream = AnswerStream()
    for at, part in enumerate(RUNNING):
        stream.feed(part, float(at))
    assert stream.chunks == [(0.0, 1), (1.0, 2), (2.0, 4)]
    assert (stream.counting, stream.total, stream.prompt_tokens, stream.cached) == ("usage", 7, 9, 4)
    assert stream.done
    assert stream.exact


@given(st.lists(st.integers(1, 400), max_size=30))
def test_any_cut_of_the_bytes_counts_the_same_tokens(cuts: list[int]) -> None:
    whole, stream = b"".join(RUNNING), AnswerStream()
    at = 0
    for cut in [*cuts, len(whole)]:
        stream.feed(whole[at : at + cut], float(at))
        at += cut
    assert stream.tokens == 7
    assert stream.done
    assert sum(count for _, count in stream.chunks) == 7


def test_bytes_read_together_are_one_chunk() -> None:
    stream = AnswerStream()
    stream.feed(b"".join(RUNNING), 5.0)
    assert stream.chunks == [(5.0, 7)]


@pytest.mark.parametrize(
    ("choice", "counting", "tokens"),
    [
        (text(token_ids=[1, 2, 3]), "token_ids", 3),
        (text(logprobs={"tokens": ["a", "b"]}), "logprobs", 2),
        ({"delta": {"content": "x"}, "logprobs": {"content": [{"token": "x"}]}}, "logprobs", 1),
        (text("several words"), "chunks", 1),
        ({"delta": {"reasoning_content": "hm"}}, "chunks", 1),
        ({"delta": {"tool_calls": [{"index": 0}]}}, "chunks", 1),
        ({"delta": {"role": "assistant", "content": ""}}, None, 0),
    ],
)
def test_without_running_usage_the_chunk_itself_tells(choice: dict, counting: str | None, tokens: int) -> None:
    stream = AnswerStream()
    stream.feed(event(choices=[choice]), 1.0)
    assert (stream.counting, stream.tokens) == (counting, tokens)


def test_chunks_that_do_not_add_up_are_seen() -> None:
    stream = AnswerStream()
    stream.feed(event(choices=[text()]) + event(choices=[], usage={"completion_tokens": 5}), 0.0)
    assert (stream.tokens, stream.total, stream.exact) == (1, 5, False)


@pytest.mark.parametrize(
    "broken", [b"data: {nope\n", b"data: [1]\n", b'data: {"choices": 3}\n', b'data: {"error": {"message": "full"}}\n']
)
def test_a_broken_event_is_said(broken: bytes) -> None:
    with pytest.raises(BadStream):
        AnswerStream().feed(broken, 0.0)


def test_a_line_without_end_is_refused() -> None:
    stream = AnswerStream()
    with pytest.raises(BadStream, match="longer"):
        stream.feed(b"data: " + b"x" * (2 << 20), 0.0)
