"""Is gpt-oss's own text recognised however it is cut, and is nothing else taken for it or held back?"""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.frontend.exchange.sse import SseTap
from penstock.frontend.parsers.harmony_text import PASSED_ON, passed_on

RAW = "<|channel|>analysis<|message|>They want a city.<|end|><|start|>assistant<|channel|>final<|message|>Paris."
MINE = (
    "Paris.",
    "<b>bold</b>",
    "<",
    "<|",
    "<|chan",
    "<|start|>assistant",
    "<|start|>user",
    "see <|channel|>",
    "{}",
    "",
)
MORE = ("<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}", "<|start|>assistant" + RAW, "\n " + RAW)


def chunk(index: int, text: str, reason: str | None = None) -> bytes:
    choice = {"index": index, "delta": {"content": text}, "finish_reason": reason}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


def events(texts: list[str], size: int) -> list[bytes]:
    """Cut each choice's text into pieces; those of the choices follow one another in turns."""
    pieces = [[text[at : at + size] for at in range(0, len(text), size)] or [""] for text in texts]
    sent = [
        chunk(index, mine[turn]) for turn in range(max(map(len, pieces))) for index, mine in enumerate(pieces)
        if turn < len(mine)
    ]  # fmt: skip
    return [*sent, *(chunk(index, "", "stop") for index in range(len(texts))), b"data: [DONE]\n\n"]


@given(st.lists(st.sampled_from((RAW, *MORE)), min_size=1, max_size=3), st.integers(1, 20))
def test_it_never_passes_however_it_is_cut(texts: list[str], size: int) -> None:
    tap = SseTap(strip_usage=False, choices=len(texts))
    out = b"".join(tap.feed(event) for event in events(texts, size))
    assert tap.error == PASSED_ON and not tap.started and not tap.done
    assert b"want" not in out and b"analysis" not in out and b"commentary" not in out


@given(st.sampled_from(MINE), st.integers(1, 20))
def test_what_only_begins_like_it_passes_whole(text: str, size: int) -> None:
    tap = SseTap(strip_usage=False)
    sent = events([text], size)
    assert b"".join(tap.feed(event) for event in sent) == b"".join(sent)
    assert tap.error is None and tap.done and tap.started


def test_reasoning_beside_an_empty_content_is_not_held_back() -> None:
    tap = SseTap(strip_usage=False)
    choice = {"index": 0, "delta": {"content": "", "reasoning_content": "hm"}}
    event = b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"
    assert tap.feed(event) == event and tap.started


@pytest.mark.parametrize("text", [*MINE, RAW, *MORE])
def test_a_whole_answer_is_read_as_a_stream_is(text: str) -> None:
    def body(**message: Any) -> bytes:
        return json.dumps({"choices": [{"message": message}]}).encode()

    assert passed_on(body(content=text)) is (text not in MINE)
    assert passed_on(body(content=text).replace(b"<", b"\\u003c")) is (text not in MINE), "as servers in Go write it"
    assert not passed_on(body(content=None, reasoning_content=text)) and not passed_on(b"no JSON <|channel|>")
