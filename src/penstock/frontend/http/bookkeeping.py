"""Bookkeeping of requests: counts, history and records, entered in batches that no answer waits for."""

import logging
from collections.abc import Callable
from typing import Any

log = logging.getLogger("penstock.frontend")

NOTES_MAX = 64
"""Notes that are held: those of some 12 requests, which take about 1 ms to enter. The loop's budget is 5 ms."""


class Bookkeeping:
    """Holds what is to be entered: each note is a function and its arguments, called later, in order.

    Whoever reads what is kept calls `enter` first, so nobody reads an old count.
    """

    def __init__(self) -> None:
        self._notes: list[tuple[Callable[..., object], tuple[Any, ...]]] = []
        self.add = self._notes.append
        """Take a note: the list's own method, so that none of ours runs for it."""

    @property
    def full(self) -> bool:
        """Whether so many notes are held that they are to be entered now."""
        return len(self._notes) >= NOTES_MAX

    def enter(self) -> None:
        """Enter all that is held."""
        notes = self._notes[:]
        del self._notes[: len(notes)]  # and no more: a thread that tokenises may have added one just now
        for function, arguments in notes:
            try:
                function(*arguments)
            except Exception:  # supervision boundary: the bug of one entry must not lose the others
                log.exception("%s failed by a bug of ours", function)
