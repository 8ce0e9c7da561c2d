"""Problems of a config: each with its position, its message and a hint at the right value."""

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from penstock.kernel.errors import ConfigError

Complaint = tuple[tuple[str, ...], str, str | None]
"""What a check says of settings: path, message, hint."""


@dataclass(frozen=True, slots=True)
class ValueOrigin:
    """Where a value came from: ``text`` is what an operator reads, such as ``cluster.yaml:3:5``."""

    kind: str
    """default, file, environment or flag."""
    text: str

    def __str__(self) -> str:
        return self.text


DEFAULT = ValueOrigin("default", "default")


@dataclass(frozen=True, slots=True)
class ConfigProblem:
    """One problem to correct. ``path`` is the setting's dotted name, empty where the text itself is at fault."""

    origin: ValueOrigin
    path: str
    message: str
    hint: str | None = None

    def __str__(self) -> str:
        subject = f"{self.path}: " if self.path not in ("", self.origin.text) else ""
        hint = f" ({self.hint})" if self.hint else ""
        return f"{self.origin}: {subject}{self.message}{hint}"


class ConfigProblems(ConfigError):
    """Every problem of a config at once; nothing starts."""

    def __init__(self, problems: Sequence[ConfigProblem]) -> None:
        self.problems = list(problems)
        count = len(self.problems)
        head = "1 problem in the config" if count == 1 else f"{count} problems in the config"
        super().__init__("\n".join([f"{head}:", *(f"  {problem}" for problem in self.problems)]))


def did_you_mean(word: str, known: Iterable[str], *, after: str = "", otherwise: str | None = None) -> str | None:
    """Return ``did you mean X?`` for the nearest known word, else ``otherwise``.

    Args:
        after: beginning that all share, such as ``PENSTOCK_``; it is not compared, or all would look alike.
    """
    by_plain = {_normalized_key(name.removeprefix(after)): name for name in known}
    near = difflib.get_close_matches(_normalized_key(word.removeprefix(after)), by_plain, n=1, cutoff=0.6)
    return f"did you mean {by_plain[near[0]]}?" if near else otherwise


def listed(words: Iterable[str], *, most: int = 12) -> str:
    """Return ``a, b, c`` and how many more there are."""
    names = list(words)
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def _normalized_key(word: str) -> str:
    return word.lower().replace("-", "_")
