"""Split pattern: a tokenizer's regular expression, and which characters its matches may hold side by side.

A text may be cut between two characters if no match holds both: the matches before the cut and those after it are then
the same for the halves as for the whole. `SplitPattern` answers that from the expression's positions and which of them
may follow each other (Glushkov's construction), for every text at once. It reads the part of Oniguruma's Ruby syntax
that tokenizers use; whatever else stands in an expression is an `UnknownRule`.

What is not certain is answered so that nobody cuts: repeats are without limit, possessive ones may give back, and a
look-ahead always holds.
"""

import re
import unicodedata
from collections.abc import Callable
from typing import NamedTuple

Class = Callable[[str], bool]
"""Whether a character belongs to a class."""

_SCRIPTS = {"Han": (0x4E00, 0x9FFF), "Hiragana": (0x3041, 0x309F), "Katakana": (0x30A1, 0x30FF)}
"""Letters of scripts, for the characters that `token_boundaries` asks about; their punctuation is of no script."""
_CATEGORY = re.compile("L[ultmo]?|M[nce]?|N[dlo]?|P[cdseifo]?|S[mcko]?|Z[slp]?")
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t"}
_COUNT = re.compile(r"\{(\d*)(,?)(\d*)\}")
_PROPERTY = re.compile(r"\{(\^?)(\w+)\}")
_MEANT = "\\^$.[]|()?*+{}"
"""Characters that stand for themselves only behind a backslash."""


class UnknownRule(Exception):
    """A tokenizer's rule that is not understood here, so that nothing is known of its matches."""


class Fragment(NamedTuple):
    """A part of an expression: what its matches may be, by positions of its classes."""

    first: frozenset[int] = frozenset()
    last: frozenset[int] = frozenset()
    empty: bool = True
    """It may match nothing."""
    skips: bool = True
    """It certainly may: without a look-ahead, and giving back what it took."""
    alone: frozenset[int] = frozenset()
    """Positions that are certainly matched by one character of their class."""


class SplitPattern:
    """Matches of an expression, one after the other from the left, as a tokenizer finds them in a text.

    Args:
        source: the expression.
    Raises:
        UnknownRule: it holds something that is not understood, or matches nothing.
    """

    def __init__(self, source: str) -> None:
        self._source = source
        self._at = 0
        self._folds = False
        self._classes: list[Class] = []
        self._follow: list[set[int]] = []
        self._looks: set[int] = set()
        whole = self._either()
        if self._at < len(source) or whole.empty:
            raise UnknownRule(source)
        self._alone = whole.alone

    def splits(self, before: str, after: str) -> bool:
        """Return whether no match holds these two side by side, or depends on what follows the first."""
        for position in self._places(before):
            follow = self._follow[position]
            if follow & self._looks or any(self._classes[place](after) for place in follow):
                return False
        return True

    def touches(self, character: str) -> bool:
        """Return whether a match may hold a character."""
        return bool(self._places(character))

    def takes(self, character: str) -> bool:
        """Return whether a character is certainly part of a match, whatever stands around it."""
        return not self._alone.isdisjoint(self._places(character))

    def _places(self, character: str) -> set[int]:
        return {place for place, holds in enumerate(self._classes) if place not in self._looks and holds(character)}

    # The expression, from the left.

    def _next(self, text: str) -> bool:
        """Step over some text if it comes next."""
        if not self._source.startswith(text, self._at):
            return False
        self._at += len(text)
        return True

    def _take_character(self) -> str:
        if self._at >= len(self._source):
            raise UnknownRule(self._source)
        self._at += 1
        return self._source[self._at - 1]

    def _either(self) -> Fragment:
        found = self._sequence()
        while self._next("|"):
            other = self._sequence()
            found = Fragment(
                found.first | other.first,
                found.last | other.last,
                found.empty or other.empty,
                found.skips or other.skips,
                found.alone | other.alone,
            )
        return found

    def _sequence(self) -> Fragment:
        found = Fragment()
        while self._at < len(self._source) and self._source[self._at] not in "|)":
            part = self._repeated(self._atom())
            self._join(found.last, part.first)
            found = Fragment(
                found.first | part.first if found.empty else found.first,
                found.last | part.last if part.empty else part.last,
                found.empty and part.empty,
                found.skips and part.skips,
                (found.alone if part.skips else frozenset()) | (part.alone if found.skips else frozenset()),
            )
        return found

    def _join(self, before: frozenset[int], after: frozenset[int]) -> None:
        for place in before:
            self._follow[place] |= after

    def _repeated(self, part: Fragment) -> Fragment:
        while True:
            if self._next("?"):
                least, most = 0, 1
            elif self._next("*"):
                least, most = 0, 2
            elif self._next("+"):
                least, most = 1, 2
            elif self._source.startswith("{", self._at):
                least, most = self._count()
            else:
                return part
            if most > 1:
                self._join(part.last, part.first)
            once = part.alone if least < 2 or part.skips else frozenset()
            part = part._replace(empty=part.empty or not least, skips=part.skips or not least, alone=once)
            # A second sign makes it lazy, possessive or one more repeat, by the kind of the first: all of them, here.
            if self._source.startswith(("?", "+"), self._at):
                lazy = self._take_character() == "?"
                self._join(part.last, part.first)
                part = part._replace(empty=part.empty or lazy, skips=False, alone=frozenset())

    def _count(self) -> tuple[int, int]:
        match = _COUNT.match(self._source, self._at)
        if match is None or not match[1] + match[3]:
            raise UnknownRule(self._source)
        self._at = match.end()
        return int(match[1] or 0), int(match[3] or 2) if match[2] else int(match[1])

    def _atom(self) -> Fragment:
        sign = self._take_character()
        if sign == "(":
            return self._group()
        return self._position(self._class_of(sign))

    def _position(self, holds: Class) -> Fragment:
        place = len(self._classes)
        self._classes.append(holds)
        self._follow.append(set())
        only = frozenset((place,))
        return Fragment(only, only, empty=False, skips=False, alone=only)

    def _group(self) -> Fragment:
        folds = self._folds
        if self._next("?!") or self._next("?="):
            return self._look_ahead()
        if self._next("?i:"):
            self._folds = True
        elif not self._next("?:") and self._source.startswith(("?", "*"), self._at):
            raise UnknownRule(self._source)
        found = self._either()
        self._folds = folds
        if not self._next(")"):
            raise UnknownRule(self._source)
        return found

    def _look_ahead(self) -> Fragment:
        """Read a look-ahead of one character; one that sees farther depends on more than a cut's neighbours."""
        place = len(self._classes)
        seen = self._repeated(self._atom())
        if not self._next(")") or seen.empty or len(self._classes) != place + 1 or self._follow[place]:
            raise UnknownRule(self._source)
        self._looks.add(place)
        return Fragment(frozenset((place,)), frozenset((place,)), empty=True, skips=False)

    # Classes of characters.

    def _class_of(self, sign: str) -> Class:
        if sign == "[":
            return self._set()
        if sign == ".":
            return lambda c: c != "\n"
        if sign == "\\":
            return self._escaped()
        if sign in _MEANT:
            raise UnknownRule(self._source)
        return self._one_of(sign, sign)

    def _one_of(self, low: str, high: str) -> Class:
        if not self._folds:
            return lambda c: low <= c <= high
        if not (low + high).isascii():
            raise UnknownRule(self._source)  # two characters may fold to one
        return lambda c: any(low <= form <= high for form in (c, c.lower(), c.upper(), c.casefold()))

    def _escaped(self) -> Class:
        sign = self._take_character()
        if sign in "pP":
            return self._property(sign == "P")
        kind = _KINDS.get(sign.lower())
        if kind is not None:
            return kind if sign.islower() else _not(kind)
        literal = self._literal(sign)
        return self._one_of(literal, literal)

    def _literal(self, sign: str) -> str:
        """Return the character that a sign behind a backslash stands for."""
        if sign.isalnum() and sign not in _CONTROLS:
            raise UnknownRule(self._source)
        return _CONTROLS.get(sign, sign)

    def _property(self, negated: bool) -> Class:
        match = _PROPERTY.match(self._source, self._at)
        if match is None or not (_CATEGORY.fullmatch(match[2]) or match[2] in _SCRIPTS):
            raise UnknownRule(self._source)
        self._at = match.end()
        holds = _script_class(*_SCRIPTS[match[2]]) if match[2] in _SCRIPTS else _category(match[2])
        return _not(holds) if negated != bool(match[1]) else holds

    def _set(self) -> Class:
        negated = self._next("^")
        holds = self._union()
        while self._next("&&"):
            holds = _both(holds, self._union())
        self._take_character()
        return _not(holds) if negated else holds

    def _union(self) -> Class:
        found: list[Class] = []
        while not self._source.startswith(("]", "&&"), self._at):
            sign = self._take_character()
            if sign == "[":
                if self._source.startswith(":", self._at):
                    raise UnknownRule(self._source)
                found.append(self._set())
                continue
            if sign == "\\":
                if self._source[self._at : self._at + 1].lower() in ("p", *_KINDS):
                    found.append(self._escaped())
                    continue
                sign = self._literal(self._take_character())
            found.append(self._one_of(sign, self._end_of_range(sign)))
        if not found:
            raise UnknownRule(self._source)
        return lambda c: any(holds(c) for holds in found)

    def _end_of_range(self, start: str) -> str:
        if not self._source.startswith("-", self._at) or self._source.startswith("-]", self._at):
            return start
        self._take_character()
        end = self._take_character()
        if end == "\\":
            end = self._literal(self._take_character())
        elif end == "[":
            raise UnknownRule(self._source)
        return end


def _category(name: str) -> Class:
    return lambda c: unicodedata.category(c).startswith(name)


def _script_class(low: int, high: int) -> Class:
    return lambda c: low <= ord(c) <= high


def _not(holds: Class) -> Class:
    return lambda c: not holds(c)


def _both(one: Class, other: Class) -> Class:
    return lambda c: one(c) and other(c)


_KINDS: dict[str, Class] = {
    "s": str.isspace,
    "d": _category("Nd"),
    "w": lambda c: c == "_" or unicodedata.category(c)[0] in "LM" or unicodedata.category(c) in ("Nd", "Pc"),
}
"""Classes of one letter; the capital is everything else."""
