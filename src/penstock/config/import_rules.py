"""How is one option of somebody else's planner translated? Rules: a value and its neighbours in, our settings out."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Generation = Literal["load-classic", "sla-classic", "planner-config"]


class Left(Exception):
    """An option becomes nothing; the text says why."""


@dataclass(frozen=True, slots=True)
class Source:
    """All options beside the one that is translated, defaults of that generation included."""

    generation: Generation
    options: Mapping[str, Any]

    @property
    def virtual(self) -> bool:
        return self.options.get("environment") == "virtual"


@dataclass(frozen=True, slots=True)
class Became:
    settings: dict[str, Any] = field(default_factory=dict)
    note: str = ""


Rule = Callable[[Any, Source], Became]


# --- how rules are written --------------------------------------------------------------------------------------------


def to(path: str, convert: Callable[[Any], Any] = lambda value: value, note: str = "") -> Rule:
    """Becomes one setting."""
    return lambda value, _: Became({path: convert(value)}, note)


def left(why: str) -> Rule:
    """Becomes nothing."""

    def rule(_: Any, __: Source) -> Became:
        raise Left(why)

    return rule


def optional(path: str, convert: Callable[[Any], Any]) -> Rule:
    """Becomes one setting, where it is set."""

    def rule(value: Any, _: Source) -> Became:
        if value is None:
            raise Left("unset, as here")
        return Became({path: convert(value)})

    return rule


def words(path: str, known: Mapping[str, str], others: Mapping[str, str] | None = None) -> Rule:
    """Becomes one of our words; ``others``: words that become nothing, with the reason."""

    def rule(value: Any, _: Source) -> Became:
        word = str(value)
        if others and word in others:
            raise Left(others[word])
        if word not in known:
            raise ValueError(f"it takes one of {', '.join((*known, *(others or ())))}")
        return Became({path: known[word]})

    return rule


def whole(value: Any) -> int:
    number = float(value)
    if not number.is_integer() or isinstance(value, bool):
        raise ValueError(f"{value!r} is no whole number")
    return int(number)


def number(value: Any) -> float:
    if isinstance(value, bool):
        raise ValueError(f"{value} is no number")
    return float(value)


def truth(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if str(value).lower() in ("true", "1", "yes"):
        return True
    if str(value).lower() in ("false", "0", "no"):
        return False
    raise ValueError(f"{value!r} is neither true nor false")


def seconds_of_ms(value: Any) -> float:
    return round(number(value) / 1000, 9)


def share_of_percent(value: Any) -> float:
    return round(number(value) / 100, 9)


def bound(value: Any) -> int | None:
    """-1 is no bound."""
    found = None if value is None else whole(value)
    return None if found is None or found < 0 else found


def text(value: Any) -> str:
    return str(value)
