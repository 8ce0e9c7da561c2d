"""Text markers: finds the texts that begin and end calls or reasoning, in a text of which only a part is there."""

import re
from collections.abc import Collection


def earliest(text: str, markers: Collection[str], start: int = 0) -> tuple[int, str] | None:
    """Return the place of the first marker and which one it is, the longest of several at one place; None: none."""
    best: tuple[int, str] | None = None
    for marker in markers:
        place = text.find(marker, start)
        if place >= 0 and (best is None or (place, -len(marker)) < (best[0], -len(best[1]))):
            best = place, marker
    return best


def begun(text: str, markers: Collection[str]) -> int:
    """Return how many characters at a text's end may be the beginning of a marker."""
    longest = 0
    for marker in markers:
        for size in range(min(len(marker) - 1, len(text)), longest, -1):
            if text.endswith(marker[:size]):
                longest = size
                break
    return longest


_CLOSES = {"}": "{", "]": "[", ")": "("}


class BracketSpan:
    """Finds the end of a bracketed value in a text that grows; brackets within quotes do not count.

    Args:
        start: place of the opening bracket.
        quotes: characters that begin and end a string.
    """

    __slots__ = ("_escaped", "_inside", "_open", "_place", "_quote", "broken")

    def __init__(self, start: int, quotes: str = '"') -> None:
        self.broken = False
        """Whether a bracket closes that is not open."""
        self._place = start
        self._open: list[str] = []
        self._quote = ""
        self._escaped = False
        self._inside = re.compile(rf"[{quotes}\[\]{{}}()]")

    def end(self, text: str) -> int | None:
        """Return the place behind the value, or None while it is not whole; each character is read once."""
        place = self._place
        while place < len(text):
            if self._quote:
                if self._escaped:
                    self._escaped = False
                    place += 1
                    continue
                stop = _next_of(text, place, self._quote)
                if stop < 0:
                    place = len(text)
                    break
                if text[stop] == "\\":
                    self._escaped = True
                else:
                    self._quote = ""
                place = stop + 1
                continue
            match = self._inside.search(text, place)
            if match is None:
                place = len(text)
                break
            sign, place = match[0], match.end()
            if sign in "{[(":
                self._open.append(sign)
            elif sign in _CLOSES:
                if not self._open or self._open.pop() != _CLOSES[sign]:
                    self.broken = True
                    return None
                if not self._open:
                    self._place = place
                    return place
            else:
                self._quote = sign
        self._place = place
        return None


_STRING_ENDS = {'"': re.compile(r'["\\]'), "'": re.compile(r"['\\]")}


def _next_of(text: str, start: int, quote: str) -> int:
    match = _STRING_ENDS[quote].search(text, start)
    return -1 if match is None else match.start()
