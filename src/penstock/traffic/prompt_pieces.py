"""Prompts of made-up traffic: pieces, each of which stands for the same tokens wherever it is used."""

from collections.abc import Sequence
from random import Random
from typing import Literal

from penstock.traffic.pseudo_words import words
from penstock.traffic.traffic_request import ChatMessage, TrafficRequest

UNIT = 16
"""Tokens per hash id of a workload: the smallest block size in common use, so that any engine's blocks can share."""
Form = Literal["tokens", "text"]


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
            messages = _messages(parts, self.unit, self._text_seed)
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


def _messages(parts: Sequence[Piece], unit: int, seed: int) -> list[ChatMessage]:
    """Write pieces as messages; neighbours of one role become one message, as retrieval prompts do."""
    out: list[ChatMessage] = []
    for part in parts:
        text = words(part.blocks * unit, seed ^ part.first_id)
        if out and out[-1].role == part.role:
            out[-1] = ChatMessage(part.role, f"{out[-1].content}\n\n{text}")
        else:
            out.append(ChatMessage(part.role, text))
    return out
