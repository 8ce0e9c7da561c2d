"""Workloads of typical services: chat, retrieval (rag), agents, coding agents and plain requests, with shared prefixes.

Each is an endless stream of `TrafficRequest`s in order of arrival, drawn from one generator that is handed in. The
same draw can be had as tokens (hash ids of `UNIT`-token blocks, for `PromptMaker` and for simulation) or as text
messages. Turns of a session come at planned times: answers are not waited for (open loop), so the history holds
made-up answers of the planned length, and a cache can hit the prompt's part of the history only.
"""

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from msgspec.structs import replace

from penstock.kernel.errors import ConfigError
from penstock_lab.traffic.arrivals import Arrivals, poisson
from penstock_lab.traffic.lengths import Empirical, Fixed, Lengths, Lognormal
from penstock_lab.traffic.planned_sessions import (
    BATCH,
    UNIT,
    Form,
    History,
    Piece,
    PromptWriter,
    Session,
    TalkShape,
    Turn,
    blocks_of,
    interleave,
    talks,
    zipf,
)
from penstock_lab.traffic.traffic_request import TrafficMedia, TrafficRequest

CODING_UNIT = 128
"""The same of the workload coding, whose prompts are so long that smaller ids would only cost memory."""

Name = Literal["chat", "rag", "agent", "coding", "fixed", "tenants", "images"]
SETTLE = {"chat": 300.0, "agent": 120.0, "coding": 2400.0}
"""Seconds that are left out at the start of a workload of sessions: several times a session's mean length, so that the
stream begins amid sessions that run already and has its full rate from the first second on. ``starts`` give times that
count from before them (see ``lead`` of `arrival_patterns.ArrivalPattern.stream`). Of the sessions that begin in them
only the times are made, and the rest of those that go on after them (see `planned_sessions.talks`)."""
Starts = Callable[[float], Arrivals]
"""rate per second -> times"""


@dataclass(frozen=True, slots=True)
class Chat:
    """Conversations of several turns, each under one of a few system prompts of uneven popularity."""

    systems: int = 8
    system_length: Lengths = Lognormal(800, 0.5, 64, 4096)
    question: Lengths = Lognormal(120, 0.9, 4, 4096)
    answer: Lengths = Lognormal(250, 0.7, 8, 1024)
    turns: Lengths = Empirical((1, 2, 3, 4, 6, 8, 12), (20, 20, 18, 15, 12, 10, 5))
    think: Lengths = Lognormal(12, 0.8, 1, 120)
    token_time: float = 0.015


@dataclass(frozen=True, slots=True)
class Rag:
    """Questions about a few of many documents; popular documents come up again, in any order."""

    documents: int = 200
    per_prompt: Lengths = Empirical((2, 3, 4))
    document_length: Lengths = Lognormal(1500, 0.5, 128, 8192)
    system: int = 256
    question: Lengths = Lognormal(40, 0.6, 4, 512)
    answer: Lengths = Lognormal(180, 0.6, 8, 1024)


@dataclass(frozen=True, slots=True)
class Agent:
    """Loops of many short steps under a long tool prompt; each step appends a call and its result to the history."""

    agents: int = 4
    tools_length: Lengths = Lognormal(6000, 0.3, 1024, 16_384)
    task: Lengths = Lognormal(200, 0.7, 16, 2048)
    call: Lengths = Lognormal(60, 0.5, 8, 400)
    result: Lengths = Lognormal(400, 1.0, 8, 8192)
    steps: Lengths = Empirical((4, 6, 8, 12, 16, 24), (15, 20, 20, 20, 15, 10))
    tool_time: Lengths = Lognormal(2, 0.8, 1, 30)
    token_time: float = 0.015


@dataclass(frozen=True, slots=True)
class Coding:
    """Programs of coding agents: a main session of many turns that starts sub-agents, and tools between the turns.

    All programs of a product share its system prompt and tool definitions; all sessions of a program share its project
    (instructions, list of files) as well. The main session waits for the sub-agents that it starts.

    The lengths are set so that most sessions grow towards ``context_max`` and answers are some 1,000 tokens: NVIDIA's
    published AgentX runs (ai-dynamo/aisimulate, 2026) have prompts of 126k and answers of 984 tokens on average.
    Tool times are a choice of ours: reading a file takes a second, a test suite minutes.

    Args:
        forks: how often the main session starts sub-agents; ``sub_agents`` each time, all at once.
        context_max: tokens of prompt and answer at which a session ends.
    """

    products: int = 3
    system_length: Lengths = Lognormal(14_000, 0.25, 6000, 32_000)
    project: Lengths = Lognormal(4000, 0.6, 256, 16_000)
    task: Lengths = Lognormal(300, 1.0, 16, 8192)
    answer: Lengths = Lognormal(600, 1.0, 16, 8192)
    result: Lengths = Lognormal(1200, 1.2, 16, 24_000)
    turns: Lengths = Empirical((10, 20, 30, 40, 60), (15, 25, 30, 20, 10))
    forks: Lengths = Empirical((0, 1, 2), (40, 35, 25))
    sub_agents: Lengths = Empirical((1, 2, 3), (40, 30, 30))
    sub_turns: Lengths = Empirical((4, 8, 12), (40, 40, 20))
    tool_time: Lengths = Lognormal(3, 1.4, 1, 300)
    token_time: float = 0.015
    context_max: int = 127_000


@dataclass(frozen=True, slots=True)
class Plain:
    """Independent requests of given lengths, each behind the system prompt of one of its tenants, if there are any.

    Args:
        prompt: tokens of a request's own; with a system prompt before them where there are ``tenants``, of uneven
            popularity.
    """

    prompt: Lengths = Fixed(1024)
    answer: Lengths = Fixed(128)
    tenants: int = 0
    system_length: Lengths = Lognormal(2000, 0.5, 128, 16_384)


@dataclass(frozen=True, slots=True)
class Images:
    """Independent questions about images, some of which come again.

    Args:
        count: images of a request. sides: pixels of an image's sides, one after the other.
        repeats: share of the images that were asked about before: of `popular` ones, by uneven popularity.
        prompt: tokens of the question; before it stands a system prompt that all share.
    """

    count: Lengths = Fixed(1)
    sides: tuple[Lengths, Lengths] = (Empirical((640, 1024, 1920)), Empirical((480, 768, 1080)))
    repeats: float = 0.3
    popular: int = 200
    system: int = 256
    prompt: Lengths = Lognormal(60, 0.7, 4, 1024)
    answer: Lengths = Lognormal(120, 0.7, 8, 1024)


TENANTS = Plain(prompt=Lognormal(200, 0.9, 4, 4096), answer=Lognormal(200, 0.7, 8, 1024), tenants=32)
"""Many tenants, each with a long system prompt, and short questions."""


def workload(
    name: Name, rate: float, rng: random.Random, *, form: Form = "tokens", starts: Starts | None = None
) -> Iterator[TrafficRequest]:
    """Return the endless stream of that name with its default make-up, ``rate`` requests per second on average.

    Args:
        starts: how sessions (requests, where there are none) begin at a given rate per second; Poisson where None.
    """
    if name == "chat":
        return chat(rate, rng, form=form, starts=starts)
    if name == "rag":
        return rag(rate, rng, form=form, starts=starts)
    if name == "agent":
        return agent(rate, rng, form=form, starts=starts)
    if name == "images":
        return images(rate, rng, form=form, starts=starts)
    if name == "coding":
        return coding(rate, rng, form=form, starts=starts)
    return plain(rate, rng, form=form, shape=Plain() if name == "fixed" else TENANTS, starts=starts, kind=name)


def chat(
    rate: float, rng: random.Random, *, form: Form = "tokens", shape: Chat = Chat(), starts: Starts | None = None
) -> Iterator[TrafficRequest]:
    """Multi-turn conversations with shared system prompts; they begin at ``rate`` over their mean number of turns."""
    made_of = TalkShape(shape.question, shape.question, shape.answer, shape.turns, shape.think, shape.token_time)
    return _talking_session("chat", rate, rng, form, made_of, (shape.systems, shape.system_length), starts)


def rag(
    rate: float, rng: random.Random, *, form: Form = "tokens", shape: Rag = Rag(), starts: Starts | None = None
) -> Iterator[TrafficRequest]:
    """Independent questions, each behind some shared documents."""
    writer = PromptWriter(rng, form)
    system = writer.piece("system", shape.system)
    documents = [writer.piece("user", shape.document_length.sample(rng)) for _ in range(shape.documents)]
    popular = zipf(shape.documents)
    for at in _starts_or_poisson(starts, rate, rng):
        wanted = min(shape.per_prompt.sample(rng), shape.documents)
        picked: list[int] = []
        while len(picked) < wanted:
            number = popular.sample(rng)
            if number not in picked:
                picked.append(number)
        question = writer.piece("user", shape.question.sample(rng))
        parts = [system, *(documents[number] for number in picked), question]
        yield writer.request(Turn(at, History(parts), shape.answer.sample(rng)), None, "rag")


def agent(
    rate: float, rng: random.Random, *, form: Form = "tokens", shape: Agent = Agent(), starts: Starts | None = None
) -> Iterator[TrafficRequest]:
    """Tool-calling loops: long shared prompt, growing history, short outputs."""
    made_of = TalkShape(shape.task, shape.result, shape.call, shape.steps, shape.tool_time, shape.token_time)
    return _talking_session("agent", rate, rng, form, made_of, (shape.agents, shape.tools_length), starts)


def coding(
    rate: float, rng: random.Random, *, form: Form = "tokens", shape: Coding = Coding(), starts: Starts | None = None
) -> Iterator[TrafficRequest]:
    """Coding agents with sub-agents; programs begin at ``rate`` over their mean number of requests.

    Times are planned, as everywhere: in a closed loop (`Sessions`) each session follows its own answers, and sub-agents
    begin when the plan says so.
    """
    writer = PromptWriter(rng, form, CODING_UNIT)
    products = [writer.piece("system", shape.system_length.sample(rng)) for _ in range(shape.products)]
    popular = zipf(shape.products)
    draws = _ProgramDraws(shape, rng)
    scratch = PromptWriter(rng, form, CODING_UNIT)
    sizes = [len(_agent_program(shape, scratch, draws, scratch.piece("system", 1), 0.0)) for _ in range(1000)]
    begin = _starts_or_poisson(starts, rate * len(sizes) / sum(sizes), rng)

    def programs() -> Iterator[tuple[float, int, Session]]:
        for number, start in enumerate(begin):
            turns = _agent_program(shape, writer, draws, products[popular.sample(rng)], start, SETTLE["coding"])
            if turns:
                yield start, number, _Program(turns)

    return _written_requests(interleave(programs()), writer, "coding")


class _Drawing:
    """Hands out one length at a time of those that are drawn many at once."""

    __slots__ = ("_drawn", "_lengths", "_rng")

    def __init__(self, lengths: Lengths, rng: np.random.Generator) -> None:
        self._lengths = lengths
        self._rng = rng
        self._drawn: list[int] = []

    def next(self) -> int:
        """Return a length."""
        if not self._drawn:
            self._drawn = self._lengths.samples(self._rng, 8 * BATCH).tolist()
        return self._drawn.pop()


class _ProgramDraws:
    """The lengths that programs are made of."""

    def __init__(self, shape: Coding, rng: random.Random) -> None:
        self.rng = rng
        own = np.random.default_rng(rng.getrandbits(64))
        self.project, self.task = _Drawing(shape.project, own), _Drawing(shape.task, own)
        self.answer, self.result = _Drawing(shape.answer, own), _Drawing(shape.result, own)
        self.turns, self.forks = _Drawing(shape.turns, own), _Drawing(shape.forks, own)
        self.sub_agents, self.sub_turns = _Drawing(shape.sub_agents, own), _Drawing(shape.sub_turns, own)
        self.tool_time = _Drawing(shape.tool_time, own)


class _Program(Session):
    """The turns of a program's sessions, in order of time."""

    __slots__ = ("_next", "_turns")

    def __init__(self, turns: list[Turn]) -> None:
        super().__init__(turns[0].at)
        self._turns = turns
        self._next = 0

    def take(self) -> Turn:
        """Return the next turn."""
        turn = self._turns[self._next]
        self._next += 1
        self.at = self._turns[self._next].at if self._next < len(self._turns) else math.inf
        return turn


def _agent_program(
    shape: Coding, writer: PromptWriter, draws: _ProgramDraws, system: Piece, start: float, since: float = 0.0
) -> list[Turn]:
    """Return the turns of one program's sessions from ``since`` on, in order of time."""
    project = writer.piece("user", draws.project.next())
    turns = draws.turns.next()
    forks = {draws.rng.randrange(turns) for _ in range(draws.forks.next())}
    branches = 0
    planned: list[Turn] = []
    said: list[tuple[History, list[tuple[str, int]]]] = []

    def run(branch: int, begins: float, count: int, forks: set[int]) -> float:
        nonlocal branches
        history, own = History([system, project]), list[tuple[str, int]]()
        said.append((history, own))
        blocks = system.blocks + project.blocks

        def add(role: str, tokens: int) -> None:
            nonlocal blocks
            own.append((role, tokens))
            blocks += blocks_of(tokens, writer.unit)

        add("user", draws.task.next())
        at, think = begins, None
        for number in range(count):
            osl = draws.answer.next()
            if blocks * writer.unit + osl > shape.context_max:
                break
            if at >= since:
                planned.append(Turn(at, history, osl, number, think, branch, len(own)))
            answered = at + osl * shape.token_time
            think = draws.tool_time.next() * 1.0
            add("assistant", osl)
            if number in forks:
                ends = []
                for _ in range(draws.sub_agents.next()):
                    branches += 1
                    ends.append(run(branches, answered, draws.sub_turns.next(), set()))
                    add("user", draws.answer.next())  # its report
                think = max(think, max(ends) - answered)
            else:
                add("user", draws.result.next())
            at = answered + think
        return at

    run(0, start, turns, forks)
    if planned:  # the prompts of a program that is over before ``since`` are never asked for
        for history, own in said:
            history.pieces += [writer.piece(role, tokens) for role, tokens in own]
    return sorted(planned, key=lambda turn: turn.at)


def plain(
    rate: float,
    rng: random.Random,
    *,
    form: Form = "tokens",
    shape: Plain = Plain(),
    starts: Starts | None = None,
    kind: str = "fixed",
) -> Iterator[TrafficRequest]:
    """Independent requests; a system prompt is whole blocks, and what follows it is exactly as long as drawn."""
    writer = PromptWriter(rng, form)
    systems = [writer.piece("system", shape.system_length.sample(rng)) for _ in range(shape.tenants)]
    popular = zipf(shape.tenants) if systems else None
    for at in _starts_or_poisson(starts, rate, rng):
        system = [systems[popular.sample(rng)]] if popular is not None else []
        tokens = shape.prompt.sample(rng)
        own = writer.piece("user", tokens)
        made = writer.request(Turn(at, History([*system, own]), shape.answer.sample(rng)), None, kind)
        yield replace(made, isl=made.isl - own.blocks * UNIT + tokens)


def images(
    rate: float, rng: random.Random, *, form: Form = "tokens", shape: Images = Images(), starts: Starts | None = None
) -> Iterator[TrafficRequest]:
    """Questions about images; the images come first, as most clients send them.

    Raises:
        ConfigError: prompts are wanted as text, which has no images.
    """
    if form != "tokens":
        raise ConfigError("the workload images has no form of text", hint="leave the form out")
    writer = PromptWriter(rng, form)
    system = writer.piece("system", shape.system)
    popular = zipf(shape.popular)
    known: dict[int, tuple[Piece, TrafficMedia]] = {}
    made = 0
    for at in _starts_or_poisson(starts, rate, rng):
        parts, media, start = [system], list[TrafficMedia](), system.blocks * UNIT
        for _ in range(shape.count.sample(rng)):
            rank = popular.sample(rng) if rng.random() < shape.repeats else None
            found = None if rank is None else known.get(rank)
            if found is None:
                width, height = (side.sample(rng) for side in shape.sides)
                picture = TrafficMedia(f"image-{made}", width, height, 0)
                found = writer.piece("user", picture.tokens), picture
                made += 1
                if rank is not None:
                    known[rank] = found
            piece, picture = found
            parts.append(piece)
            media.append(TrafficMedia(picture.id, picture.width, picture.height, start))
            start += piece.blocks * UNIT
        parts.append(writer.piece("user", shape.prompt.sample(rng)))
        asked = writer.request(Turn(at, History(parts), shape.answer.sample(rng)), None, "images")
        yield replace(asked, media=media)


def _talking_session(
    kind: str,
    rate: float,
    rng: random.Random,
    form: Form,
    shape: TalkShape,
    systems: tuple[int, Lengths],
    starts: Starts | None,
) -> Iterator[TrafficRequest]:
    """Return the stream of such sessions, each under one of so many system prompts of uneven popularity."""
    writer = PromptWriter(rng, form)
    shared = [writer.piece("system", systems[1].sample(rng)) for _ in range(systems[0])]
    begin = _starts_or_poisson(starts, rate / _mean_length(shape.turns, rng), rng)
    sessions = talks(begin, shape, writer, shared, np.random.default_rng(rng.getrandbits(64)), SETTLE[kind])
    return _written_requests(interleave(sessions), writer, kind)


def _written_requests(turns: Iterator[tuple[int, Turn]], writer: PromptWriter, kind: str) -> Iterator[TrafficRequest]:
    """Write out the prompts of turns, whose times count from `SETTLE` before the stream's."""
    for number, turn in turns:
        yield writer.request(turn, f"{kind}-{number}", kind, shift=SETTLE[kind])


def _starts_or_poisson(starts: Starts | None, rate: float, rng: random.Random) -> Arrivals:
    return poisson(rate, rng) if starts is None else starts(rate)


def _mean_length(lengths: Lengths, rng: random.Random, draws: int = 100_000) -> float:
    own = np.random.default_rng(rng.getrandbits(64))  # the stream of the workload itself stays independent of ``draws``
    return float(lengths.samples(own, draws).mean())
