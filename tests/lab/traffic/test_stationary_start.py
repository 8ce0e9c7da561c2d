"""A workload begins amid sessions that run already, as if each session from long before had been drawn turn by turn.

The naive twin draws all of them, one length at a time, and leaves out what is before the start.
"""

import dataclasses
import random
import statistics
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pytest

from penstock.config.reading.units import parse_number
from penstock_lab.traffic.arrival_patterns import parse_arrivals
from penstock_lab.traffic.lengths import Empirical, Fixed, Lengths, Lognormal
from penstock_lab.traffic.planned_sessions import UNIT, PromptWriter, blocks_of, zipf
from penstock_lab.traffic.workloads import (
    CODING_UNIT,
    SETTLE,
    Agent,
    Chat,
    Coding,
    Name,
    _agent_program,
    _mean_length,
    _ProgramDraws,
    workload,
)

RATE = {"chat": 6.0, "agent": 12.0, "coding": 0.6}
WINDOW = {"chat": 20.0, "agent": 10.0, "coding": 120.0}
"""Seconds from the start in which requests are compared: less than a session's mean length."""
SEEDS = {"chat": 50, "agent": 50, "coding": 20}
BOUND = 4.0
"""Deviations by which means of equal distributions differ once in 16,000 comparisons."""


class Row(NamedTuple):
    at: float
    session: str
    turn: int
    isl: int
    osl: int
    think: float | None


def naive_talks(kind: str, starts: Iterator[float], rng: random.Random) -> Iterator[Row]:
    """Draw every session that begins before the window's end; in order of sessions."""
    if kind == "chat":
        chat = Chat()
        systems = [blocks_of(chat.system_length.sample(rng), UNIT) for _ in range(chat.systems)]
        opening, later, answer, turns, pause = chat.question, chat.question, chat.answer, chat.turns, chat.think
        token_time = chat.token_time
    else:
        agent = Agent()
        systems = [blocks_of(agent.tools_length.sample(rng), UNIT) for _ in range(agent.agents)]
        opening, later, answer, turns, pause = agent.task, agent.result, agent.call, agent.steps, agent.tool_time
        token_time = agent.token_time
    popular = zipf(len(systems))
    for number, start in enumerate(starts):
        blocks, at, think = systems[popular.sample(rng)], start, None
        for turn in range(turns.sample(rng)):
            blocks += blocks_of((later if turn else opening).sample(rng), UNIT)
            osl = answer.sample(rng)
            yield Row(at, str(number), turn, blocks * UNIT, osl, think)
            blocks += blocks_of(osl, UNIT)
            think = pause.sample(rng) * 1.0
            at += osl * token_time + think
        if start > SETTLE[kind] + WINDOW[kind]:
            return


class OneByOne:
    """A distribution of which many are drawn as one is, with a generator of its own."""

    def __init__(self, lengths: Lengths, rng: random.Random) -> None:
        self.lengths, self.rng = lengths, rng

    def sample(self, rng: random.Random) -> int:
        return self.lengths.sample(rng)

    def samples(self, rng: np.random.Generator, count: int) -> npt.NDArray[np.int64]:
        return np.array([self.lengths.sample(self.rng) for _ in range(count)])


def naive_programs(starts: Iterator[float], rng: random.Random) -> Iterator[Row]:
    shape, writer = Coding(), PromptWriter(rng, "tokens", CODING_UNIT)
    fields = {field.name: getattr(shape, field.name) for field in dataclasses.fields(shape)}
    single = {name: OneByOne(value, rng) for name, value in fields.items() if hasattr(value, "samples")}
    draws = _ProgramDraws(dataclasses.replace(shape, **single), rng)
    products = [writer.piece("system", shape.system_length.sample(rng)) for _ in range(shape.products)]
    popular = zipf(shape.products)
    for number, start in enumerate(starts):
        for turn in _agent_program(shape, writer, draws, products[popular.sample(rng)], start):
            isl = sum(piece.blocks for piece in turn.history.pieces[: turn.pieces]) * CODING_UNIT
            yield Row(turn.at, f"{number}/{turn.branch}", turn.number, isl, turn.osl, turn.think)
        if start > SETTLE["coding"] + WINDOW["coding"]:
            return


def starts_of(pattern: str, rng: random.Random) -> Callable[[float], Iterator[float]]:
    text = "gamma:cv=3" if pattern == "gamma" else pattern
    return lambda rate: parse_arrivals(text, parse_number).stream(rate, rng)


def naive(kind: Name, pattern: str, seed: int, *, since: float) -> list[Row]:
    """Return what is in the window; sessions that begin before ``since`` are left out."""
    rng = random.Random(seed)
    begins = (at for at in starts_of(pattern, rng)(RATE[kind] / TURNS[kind]) if at >= since)
    rows = naive_programs(begins, rng) if kind == "coding" else naive_talks(kind, begins, rng)
    shifted = (row._replace(at=row.at - SETTLE[kind]) for row in rows)
    return [row for row in shifted if 0.0 <= row.at < WINDOW[kind]]


def drawn(kind: Name, pattern: str, seed: int) -> list[Row]:
    rows = []
    rng = random.Random(seed)
    for each in workload(kind, RATE[kind], rng, starts=starts_of(pattern, random.Random(seed + 1))):
        if each.at >= WINDOW[kind]:
            break
        assert each.session is not None
        rows.append(Row(each.at, each.session, each.turn, each.isl, each.osl, each.think))
    return rows


def turns_of_a_program() -> float:
    """Return the mean number of requests of a coding program, over many."""
    rng = random.Random(7)
    rows = list(naive_programs(iter([0.0] * 4000), rng))
    return len(rows) / 4000


TURNS = {
    "chat": _mean_length(Chat().turns, random.Random(1)),
    "agent": _mean_length(Agent().steps, random.Random(1)),
    "coding": turns_of_a_program(),
}


def mean(values: Iterable[float]) -> float:
    return statistics.fmean(found) if (found := list(values)) else 0.0


def features(rows: list[Row], window: float) -> dict[str, float]:
    """Return numbers of one seed's window, whose means over seeds are compared."""
    first: dict[str, Row] = {}
    for row in sorted(rows):
        first.setdefault(row.session, row)
    thinks = [row.think for row in rows if row.think is not None]
    return {
        "requests": len(rows),
        "requests of the first tenth": sum(row.at < window / 10 for row in rows),
        "sessions": len(first),
        "sessions from before": sum(row.turn > 0 for row in first.values()),
        "turns that they have behind them": mean(row.turn for row in first.values()),
        "their square": mean(row.turn**2 for row in first.values()),
        "prompt": mean(row.isl for row in rows),
        "prompt's square": mean(row.isl**2 for row in rows),
        "answer": mean(row.osl for row in rows),
        "think": mean(thinks),
        "think of the first": mean([row.think for row in first.values() if row.think is not None]),
        "long pauses": sum(think > 30.0 for think in thinks),
    }


def apart(one: list[dict[str, float]], other: list[dict[str, float]]) -> dict[str, float]:
    """Return by how many deviations the means of two samples differ, for each number."""
    found = {}
    for name in one[0]:
        here, there = [each[name] for each in one], [each[name] for each in other]
        spread = (statistics.variance(here) / len(here) + statistics.variance(there) / len(there)) ** 0.5
        found[name] = abs(statistics.fmean(here) - statistics.fmean(there)) / spread if spread else 0.0
    return found


@pytest.mark.parametrize(
    ("kind", "pattern"),
    [("chat", "poisson"), ("chat", "gamma"), ("agent", "poisson"), ("agent", "constant"), ("coding", "poisson")],
)
def test_it_is_the_start_that_drawing_every_session_gives(kind: Name, pattern: str) -> None:
    window = WINDOW[kind]
    mine = [features(drawn(kind, pattern, seed), window) for seed in range(SEEDS[kind])]
    twin = [features(naive(kind, pattern, 1000 + seed, since=0.0), window) for seed in range(SEEDS[kind])]
    assert {name: found for name, found in apart(mine, twin).items() if found > BOUND} == {}
    late = SETTLE[kind] - window  # the bound sees a start that knows only the last sessions
    cold = [features(naive(kind, pattern, 3000 + seed, since=late), window) for seed in range(SEEDS[kind])]
    assert max(apart(mine, cold).values()) > 2 * BOUND


@pytest.mark.parametrize("lengths", [Fixed(9), Lognormal(100, 1.0, 10, 500), Empirical((1, 5, 30), (2, 1, 1))])
def test_many_lengths_at_once_are_drawn_as_one_by_one(lengths: Lengths) -> None:
    count = 20_000
    rng = random.Random(3)
    single = np.array([lengths.sample(rng) for _ in range(count)])
    many = lengths.samples(np.random.default_rng(3), count)
    assert many.shape == (count,) and many.dtype == np.int64
    values = np.union1d(single, many)
    gap = np.abs(np.searchsorted(np.sort(single), values, "right") - np.searchsorted(np.sort(many), values, "right"))
    assert gap.max() / count < 1.95 * (2 / count) ** 0.5  # Kolmogorov and Smirnov's bound, once in 1,000
    again = lengths.samples(np.random.default_rng(3), count)
    assert np.array_equal(many, again)
