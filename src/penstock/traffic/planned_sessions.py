"""Sessions of made-up traffic whose times are known: drawn in columns over many, and merged in order of time."""

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np

from penstock.traffic.arrivals import Arrivals
from penstock.traffic.lengths import Empirical, Lengths
from penstock.traffic.prompt_pieces import History, Piece, PromptWriter, Turn

BATCH = 512
"""Sessions whose times are made at once: enough that a session costs little more than its share of the arrays."""


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
            yield _pop(waiting)
        heapq.heappush(waiting, (session.at, number, session))
    while waiting:
        yield _pop(waiting)


def _pop(waiting: list[tuple[float, int, Session]]) -> tuple[int, Turn]:
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
