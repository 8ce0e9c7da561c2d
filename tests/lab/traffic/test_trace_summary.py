"""Does the summary of a trace count what is there, and leave out what is not known?"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_lab.traffic.trace_summary import WINDOWS, mean_rate, summarise
from penstock_lab.traffic.traffic_request import TrafficRequest


def request(at: float, isl: int = 100, **fields: object) -> TrafficRequest:
    return TrafficRequest(at=at, isl=isl, osl=10, **fields)  # type: ignore[arg-type]


def test_an_empty_trace_has_nothing_known() -> None:
    found = summarise([], block_size=16)
    assert (found.requests, found.windows, found.sessions) == (0, [], 0)
    unknown = (found.span_s, found.requests_per_s, found.peak_per_s, found.prompts, found.bound, found.named_share)
    assert unknown == (None,) * 6


def test_what_is_there_is_counted() -> None:
    requests = [
        request(10.0, 128, hash_ids=[1, 2], block_size=64, session="a", kind="chat"),
        request(20.0, 192, hash_ids=[1, 2], block_size=64, session="a", think=4.0, kind="chat"),
        request(50.0, 80, kind="rag"),
    ]
    found = summarise(requests, block_size=64)
    assert (found.requests, found.start_s, found.span_s, found.requests_per_s) == (3, 10.0, 40.0, 0.05)
    assert found.prompts is not None
    assert (found.prompts.total, found.prompts.p50, found.prompts.max) == (400.0, 128.0, 192.0)
    assert (found.sessions, found.turns_per_session, found.kinds) == (1, 2.0, {"chat": 2, "rag": 1})
    assert found.think_s is not None
    assert found.think_s.mean == 4.0
    assert found.named_share == 256 / 400
    assert found.bound == 128 / 400  # the second prompt's ids end before its tokens do
    (first, *_) = found.windows
    assert (found.window_s, first.start_s, first.requests, first.requests_per_s) == (5.0, 10.0, 1, 0.2)
    assert first.prompt_tokens_per_s == 128 / 5


def test_a_trace_without_ids_has_no_bound() -> None:
    found = summarise([request(0.0), request(1.0)], block_size=16)
    assert (found.named_share, found.bound) == (0.0, None)


def test_requests_that_come_at_once_have_no_rate() -> None:
    assert summarise([request(5.0), request(5.0)], block_size=16).requests_per_s is None
    assert mean_rate(1, 0.0) is None
    assert mean_rate(0, None) is None
    assert mean_rate(3, 4.0) == 0.5


@given(st.lists(st.floats(0, 10**7), min_size=1, max_size=30))
def test_windows_hold_every_request_and_are_few(times: list[float]) -> None:
    found = summarise([request(at) for at in sorted(times)], block_size=16)
    assert sum(window.requests for window in found.windows) == len(times)
    assert len(found.windows) <= max(WINDOWS, 10**7 / 604_800 + 1)
    assert found.windows[0].start_s <= min(times) < found.windows[0].start_s + found.window_s
    assert found.windows[-1].start_s <= max(times) < found.windows[-1].start_s + found.window_s
    assert found.peak_per_s == max(window.requests_per_s for window in found.windows)
    total = sum(window.prompt_tokens_per_s for window in found.windows) * found.window_s
    assert total == pytest.approx(100 * len(times))
