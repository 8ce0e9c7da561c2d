"""Which bodies does the simulated engine take, and which field does it name where it takes none?"""

from typing import Any

import pytest

from penstock.kernel.errors import ClientError
from penstock_lab.sim.request_reader import RequestReader, options_of
from penstock_lab.sim.sim_text import SimText

READER = RequestReader(SimText(), "sim", (), 1000)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"n": 0}, "n"),
        ({"n": "x"}, "n"),
        ({"seed": True}, "seed"),
        ({"stop": [5]}, "stop"),
        ({"logprobs": 1000}, "logprobs"),
        ({"stream_options": {"include_usage": "q"}}, "stream_options"),
        ({"response_format": "x"}, "response_format"),
        ({"cache_salt": 3}, "cache_salt"),
    ],
)
def test_the_field_at_fault_is_named(body: dict[str, Any], param: str) -> None:
    with pytest.raises(ClientError, match=f"^{param}: Expected ") as raised:
        options_of(body)
    assert raised.value.param == param


def test_null_counts_as_absent() -> None:
    ask = READER.read("completion", {"prompt": "x", "n": None, "stop": None, "stream_options": {"include_usage": None}})
    assert (ask.n, ask.stops, ask.output_max) == (1, [], 16)
    assert not ask.stream_options.usage


def test_a_chat_and_a_completion_ask_for_log_probabilities_in_their_own_ways() -> None:
    messages = [{"role": "user", "content": "x"}]
    assert READER.read("chat", {"messages": messages, "logprobs": True, "top_logprobs": 3}).logprobs == 3
    assert READER.read("chat", {"messages": messages, "logprobs": False, "top_logprobs": 3}).logprobs is None
    assert READER.read("completion", {"prompt": "x", "logprobs": 1}).logprobs == 1
    with pytest.raises(ClientError, match="logprobs"):
        READER.read("completion", {"prompt": "x", "logprobs": True})


def test_fields_of_ours_are_not_taken_from_a_body() -> None:
    ask = READER.read("completion", {"prompt": "x", "tool": "t", "forced": "f", "lora": "l", "output_max": 900})
    assert (ask.tool, ask.forced, ask.lora, ask.output_max) == (None, None, None, 16)
