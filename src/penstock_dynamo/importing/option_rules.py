"""Rules that translate one Dynamo option: its value and the other options in, our settings out."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Generation = Literal["load-classic", "sla-classic", "planner-config", "frontend"]


class LeftOut(Exception):
    """The option has no counterpart here; the text gives the reason."""


@dataclass(frozen=True, slots=True)
class OptionSource:
    """All options beside the translated one, defaults of that generation included."""

    generation: Generation
    options: Mapping[str, Any]

    @property
    def virtual(self) -> bool:
        return self.options.get("environment") == "virtual"


@dataclass(frozen=True, slots=True)
class Translated:
    settings: dict[str, Any] = field(default_factory=dict)
    note: str = ""


Rule = Callable[[Any, OptionSource], Translated]


# --- how rules are written --------------------------------------------------------------------------------------------


def to(path: str, convert: Callable[[Any], Any] = lambda value: value, note: str = "") -> Rule:
    """Return a rule that gives one setting. A path that begins with / is not below the section of the options."""
    return lambda value, _: Translated({path: convert(value)}, note)


def left(why: str) -> Rule:
    """Return a rule that gives no setting."""

    def rule(_: Any, __: OptionSource) -> Translated:
        raise LeftOut(why)

    return rule


def all_left(why: str, *names: str) -> dict[str, Rule]:
    """Return one rule for several options that give no setting."""
    return dict.fromkeys(names, left(why))


def fixed(constant: float) -> Rule:
    """Becomes nothing: it is a constant here, of the same value or of another."""

    def rule(value: Any, _: OptionSource) -> Translated:
        raise LeftOut("as here" if value is None or number(value) == constant else f"it is fixed at {constant:g} here")

    return rule


def optional(path: str, convert: Callable[[Any], Any]) -> Rule:
    """Return a rule that gives one setting where the option is set."""

    def rule(value: Any, _: OptionSource) -> Translated:
        if value is None:
            raise LeftOut("unset, as here")
        return Translated({path: convert(value)})

    return rule


def words(path: str, known: Iterable[str], others: Mapping[str, str] | None = None) -> Rule:
    """Return a rule that maps words to ours, which differ at most in the dash.

    Args:
        known: the words, or each with ours where it is another one.
        others: words without a counterpart, with the reason.
    """
    ours = known if isinstance(known, Mapping) else {word: word.replace("-", "_") for word in known}

    def rule(value: Any, _: OptionSource) -> Translated:
        word = str(value)
        if others and word in others:
            raise LeftOut(others[word])
        if word not in ours:
            raise ValueError(f"it takes one of {', '.join((*ours, *(others or ())))}")
        return Translated({path: ours[word]})

    return rule


def whole(value: Any) -> int:
    number = float(value)
    if not number.is_integer() or isinstance(value, bool):
        raise ValueError(f"{value!r} is not a whole number")
    return int(number)


def number(value: Any) -> float:
    if isinstance(value, bool):
        raise ValueError(f"{value} is not a number")
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
    """Return None for -1, which means unbounded."""
    found = None if value is None else whole(value)
    return None if found is None or found < 0 else found


def text(value: Any) -> str:
    return str(value)
