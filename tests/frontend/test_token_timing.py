"""Gaps between tokens: a chunk of k tokens is k gaps of a k-th each, also where only usage tells k."""

import pytest

from penstock.frontend.exchange.client_answer import TokenTiming


class Gaps:
    """Stands in for a histogram."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, int]] = []

    def observe_all(self, values: list[tuple[float, int]]) -> None:
        self.seen += values


def streamed(times: list[float], output: int) -> tuple[TokenTiming, Gaps]:
    timing, gaps = TokenTiming(arrived=0.0), Gaps()
    timing.first = times[0]
    timing.counted, timing.last = len(times), times[-1]
    timing.chunks = [(at, 1) for at in times]
    timing.output = output
    timing.settle(gaps)  # type: ignore[arg-type]
    return timing, gaps


def test_one_token_per_chunk_is_one_gap_per_chunk() -> None:
    timing, gaps = streamed([1.0, 1.25, 1.75], 3)
    assert gaps.seen == [(0.25, 1), (0.5, 1)]
    assert timing.itl == pytest.approx(0.375) and timing.ttft == 1.0


def test_chunks_of_many_tokens_are_told_by_usage() -> None:
    timing, gaps = streamed([1.0, 2.0, 3.0], 48)
    assert gaps.seen == [(0.0, 15), (1 / 16, 16), (1 / 16, 16)]
    assert timing.itl == pytest.approx(2.0 / 47)
    summary = timing.summary()
    assert summary is not None and summary.gaps == 47


def test_an_empty_last_chunk_is_no_token() -> None:
    _, gaps = streamed([1.0, 2.0, 3.0, 3.1], 3)
    assert sum(times for _, times in gaps.seen) == 2


def test_a_single_token_has_no_gap() -> None:
    timing, gaps = streamed([1.0], 1)
    assert gaps.seen == [] and timing.itl is None
