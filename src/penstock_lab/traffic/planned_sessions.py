"""Sessions and prompts of made-up traffic: prompts in pieces, sessions drawn in columns and merged in order of time.

A piece stands for the same tokens wherever it is used; a session's times are known before its prompts are written.
"""

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from random import Random
from typing import Literal

import numpy as np

from penstock_lab.traffic.arrivals import Arrivals
from penstock_lab.traffic.lengths import Empirical, Lengths
from penstock_lab.traffic.prompt_maker import words
from penstock_lab.traffic.traffic_request import ChatMessage, TrafficRequest

UNIT = 16
"""Tokens per hash id of a workload: the smallest block size in common use, so that any engine's blocks can share."""
Form = Literal["tokens", "text"]
BATCH = 512
"""Sessions whose times are made at once: enough that a session costs little more than its share of the arrays."""


class Piece:
    """Part of a prompt: a run of ids that stands for the same tokens wherever it is used."""

    __slots__ = ("blocks", "first_id", "role")

    def __init__(self, role: str, first_id: int, blocks: int) -> None:
        self.role = role
        self.first_id = first_id
        self.blocks = blocks


class History:
    """The pieces of a session, of which each of its prompts has the first so many."""

    __slots__ = ("_ends", "_ids", "pieces")

    def __init__(self, pieces: list[Piece]) -> None:
        self.pieces = pieces
        self._ids: list[int] = []
        self._ends: list[int] = []
        """How many ids there are with each piece: written when they are asked for, which most turns of `SETTLE` never
        are."""

    def ids(self, pieces: int) -> list[int]:
        """Return the ids of its first pieces."""
        for piece in self.pieces[len(self._ends) : pieces]:
            self._ids += range(piece.first_id, piece.first_id + piece.blocks)
            self._ends.append(len(self._ids))
        return self._ids[: self._ends[pieces - 1]]


class Turn:
    """One turn of a session before its prompt is written out.

    Args:
        history: the prompt and, of a session that goes on, what its later prompts have behind it.
        pieces: how many of those are the prompt; ``more`` beside those that the history has when the turn is made.
        branch: which session of its program it is of, 0 the main one; None where there are no programs.
    """

    __slots__ = ("at", "branch", "history", "number", "osl", "pieces", "think")

    def __init__(
        self,
        at: float,
        history: History,
        osl: int,
        number: int = 0,
        think: float | None = None,
        branch: int | None = None,
        more: int = 0,
    ) -> None:
        self.at = at
        self.history = history
        self.pieces = len(history.pieces) + more
        self.osl = osl
        self.number = number
        self.think = think
        self.branch = branch


def blocks_of(tokens: int, unit: int) -> int:
    """Return the whole blocks of ``unit`` tokens that hold so many, at least one."""
    return -(-tokens // unit) or 1


class PromptWriter:
    """Hand out pieces with ids of their own, and put requests together from them."""

    def __init__(self, rng: Random, form: Form, unit: int = UNIT) -> None:
        self.unit = unit
        self._next = 0
        self._form = form
        self._text_seed = rng.getrandbits(64)

    def piece(self, role: str, tokens: int) -> Piece:
        """Return a new piece of at least so many tokens, rounded up to whole blocks."""
        blocks = blocks_of(tokens, self.unit)
        made = Piece(role, self._next, blocks)
        self._next += blocks
        return made

    def request(self, turn: Turn, session: str | None, kind: str, shift: float = 0.0) -> TrafficRequest:
        """Return the request whose prompt is these pieces, in the requested form.

        Args:
            session: its session, or its program where the turn names one of several sessions.
        """
        program = None if turn.branch is None else session
        ids: list[int] = []
        messages: list[ChatMessage] | None = None
        if self._form == "tokens":
            ids = turn.history.ids(turn.pieces)
            blocks = len(ids)
        else:
            parts = turn.history.pieces[: turn.pieces]
            messages = _chat_messages(parts, self.unit, self._text_seed)
            blocks = sum(part.blocks for part in parts)
        return TrafficRequest(
            at=turn.at - shift,
            isl=blocks * self.unit,
            osl=turn.osl,
            hash_ids=ids,
            block_size=self.unit,
            messages=messages,
            session=session if program is None else f"{program}/{turn.branch}",
            program=program,
            turn=turn.number,
            think=turn.think,
            kind=kind,
        )


def _chat_messages(parts: Sequence[Piece], unit: int, seed: int) -> list[ChatMessage]:
    """Write pieces as messages; neighbours of one role become one message, as retrieval prompts do."""
    out: list[ChatMessage] = []
    for part in parts:
        text = words(part.blocks * unit, seed ^ part.first_id)
        if out and out[-1].role == part.role:
            out[-1] = ChatMessage(part.role, f"{out[-1].content}\n\n{text}")
        else:
            out.append(ChatMessage(part.role, text))
    return out


class Session:
    """A session, or a program of several, whose times are known. ``at``: of its next turn; infinite after the last."""

    __slots__ = ("at",)

    def __init__(self, at: float) -> None:
        self.at = at

    def take(self) -> Turn:
        """Return the next turn."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class TalkShape:
    """What sessions are made of in which one side asks and the other answers: ``opening`` and ``later`` questions, the
    answers, how many of both, and the pause between an answer and the next question."""

    opening: Lengths
    later: Lengths
    answer: Lengths
    turns: Lengths
    pause: Lengths
    token_time: float


class TalkColumns:
    """The turns of many sessions, one session after the other."""

    __slots__ = ("answers", "ats", "pauses", "questions")

    def __init__(self, ats: list[float], questions: list[int], answers: list[int], pauses: list[int]) -> None:
        self.ats = ats
        self.questions = questions
        self.answers = answers
        self.pauses = pauses


class Talk(Session):
    """A session of questions and answers; its prompts are written when their turns come.

    Args:
        first, count: where in the columns its turns are, ``next`` of which comes next.
    """

    __slots__ = ("_columns", "_count", "_first", "_history", "_next", "_writer")

    def __init__(
        self, writer: PromptWriter, system: Piece, columns: TalkColumns, first: int, count: int, next: int
    ) -> None:
        super().__init__(columns.ats[first + next])
        self._writer = writer
        self._history = History([system])
        self._columns = columns
        self._first = first
        self._count = count
        self._next = next

    def take(self) -> Turn:
        """Return the next turn."""
        number, first, columns = self._next, self._first, self._columns
        pieces, piece = self._history.pieces, self._writer.piece
        for turn in range(first + len(pieces) // 2, first + number + 1):
            if turn > first:
                pieces.append(piece("assistant", columns.answers[turn - 1]))
            pieces.append(piece("user", columns.questions[turn]))
        self._next += 1
        self.at = columns.ats[first + self._next] if self._next < self._count else math.inf
        think = float(columns.pauses[first + number - 1]) if number else None
        return Turn(columns.ats[first + number], self._history, columns.answers[first + number], number, think)


def talks(
    starts: Arrivals,
    shape: TalkShape,
    writer: PromptWriter,
    systems: list[Piece],
    rng: np.random.Generator,
    since: float,
) -> Iterator[tuple[float, int, Session]]:
    """Yield the sessions that have a turn at ``since`` or later, each from its first such turn on.

    What was before ``since`` is drawn as all is, in columns over many sessions: that a stream begins amid sessions that
    run already costs little more than those that still run.
    """
    popular, counted = zipf(len(systems)), 0
    while begins := list(islice(starts, BATCH)):
        turns = shape.turns.samples(rng, len(begins))
        ends = np.cumsum(turns)
        firsts = ends - turns
        answers, pauses = shape.answer.samples(rng, ends[-1]), shape.pause.samples(rng, ends[-1])
        steps = answers * shape.token_time + pauses
        ats = np.cumsum(steps) - steps
        ats += np.repeat(np.asarray(begins) - ats[firsts], turns)
        past = np.add.reduceat((ats < since).astype(np.int64), firsts)
        runs = past < turns
        kept, mine = np.flatnonzero(runs), np.repeat(runs, turns)
        firsts = np.cumsum(turns[kept]) - turns[kept]
        questions = shape.later.samples(rng, int(mine.sum()))
        questions[firsts] = shape.opening.samples(rng, len(kept))
        columns = TalkColumns(ats[mine].tolist(), questions.tolist(), answers[mine].tolist(), pauses[mine].tolist())
        chosen = popular.samples(rng, len(kept))
        for each, system, first, count, done in zip(
            *(column.tolist() for column in (kept, chosen, firsts, turns[kept], past[kept])), strict=True
        ):
            yield begins[each], counted + each, Talk(writer, systems[system], columns, first, count, done)
        counted += len(begins)


def interleave(sessions: Iterator[tuple[float, int, Session]]) -> Iterator[tuple[int, Turn]]:
    """Merge sessions, each with its start and number, into one stream of (number, turn) in order of time."""
    waiting: list[tuple[float, int, Session]] = []
    for start, number, session in sessions:
        while waiting and waiting[0][0] <= start:
            yield _pop_earliest(waiting)
        heapq.heappush(waiting, (session.at, number, session))
    while waiting:
        yield _pop_earliest(waiting)


def _pop_earliest(waiting: list[tuple[float, int, Session]]) -> tuple[int, Turn]:
    _, number, session = waiting[0]
    turn = session.take()
    if math.isinf(session.at):
        heapq.heappop(waiting)
    else:
        heapq.heapreplace(waiting, (session.at, number, session))
    return number, turn


def zipf(count: int) -> Empirical:
    """Popularity of ``count`` things: the n-th is wanted 1/n as often as the first."""
    return Empirical(range(count), [1.0 / (rank + 1) for rank in range(count)])
