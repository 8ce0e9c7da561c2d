"""Rules that translate one Dynamo option: its value and the other options in, our settings or a reason out."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

Generation = Literal["load-classic", "sla-classic", "planner-config", "frontend"]
AS_HERE = "as here"


@dataclass(frozen=True, slots=True)
class OptionSource:
    """All options beside the translated one, defaults of that generation included."""

    generation: Generation
    options: Mapping[str, Any]

    @property
    def virtual(self) -> bool:
        return self.options.get("environment") == "virtual"


class Translated(NamedTuple):
    """Settings by their paths, and what an operator should know of them."""

    settings: Mapping[str, Any]
    note: str = ""


Rule = Callable[[Any, OptionSource], Translated | str]
"""Returns the settings, or the reason why there are none."""


# --- how rules are written --------------------------------------------------------------------------------------------


def to(path: str, convert: Callable[[Any], Any], note: str = "") -> Rule:
    """Return a rule that gives one setting. A path that begins with / is not below the section of the options."""
    return lambda value, _: Translated({path: convert(value)}, note)


def optional(path: str, convert: Callable[[Any], Any]) -> Rule:
    """Return a rule that gives one setting where the option is set."""
    return lambda value, _: "unset, as here" if value is None else Translated({path: convert(value)})


def same_names(section: str, convert: Callable[[Any], Any], *names: str) -> dict[str, Rule]:
    """Return rules for options that are named as our settings in a section are."""
    return {name: to(f"{section}/{name}", convert) for name in names}


def fixed(constant: float) -> Rule:
    """Return a rule that gives no setting: it is a constant here, of the same value or of another."""
    other = f"it is fixed at {constant:g} here"
    return lambda value, _: AS_HERE if value is None or number(value) == constant else other


def switch(on: Translated | str, off: Translated | str) -> Rule:
    """Return a rule of an option that is true or false."""
    return lambda value, _: on if truth(value) else off


def choice(takes: str, results: Mapping[str, Translated | str]) -> Rule:
    """Return a rule that maps each word of an option to its result; ``takes`` lists them for whoever gives another."""

    def rule(value: Any, _: OptionSource) -> Translated | str:
        if str(value) not in results:
            raise ValueError(f"it takes {takes}")
        return results[str(value)]

    return rule


def words(path: str, known: Iterable[str], others: Mapping[str, str] | None = None) -> Rule:
    """Return a rule that maps words to ours, which differ at most in the dash.

    Args:
        known: the words, or each with ours where it is another one.
        others: words without a counterpart, with the reason.
    """
    ours = known if isinstance(known, Mapping) else {word: word.replace("-", "_") for word in known}
    results: dict[str, Translated | str] = {word: Translated({path: our}) for word, our in ours.items()}
    results |= others or {}
    return choice(f"one of {', '.join(results)}", results)


# --- values -----------------------------------------------------------------------------------------------------------


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
    return None if value is None or whole(value) < 0 else whole(value)
