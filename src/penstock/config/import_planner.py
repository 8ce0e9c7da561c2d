"""What does a planner's config of the field's come to here? Options of both generations as a ``planner:`` section.

Takes the classic planners' command line, their options as YAML, and today's PlannerConfig as YAML or JSON. Every
option that was given is named: what it became, or why it became nothing. The tables are in
`penstock.config.import_tables`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from penstock.config.import_read import Given, read_options
from penstock.config.import_rules import Generation, Left, Source
from penstock.config.import_tables import POLICIES, RULES, implied
from penstock.config.model import check_tree
from penstock.config.planner import PlanningSettings
from penstock.config.problems import DEFAULT, did_you_mean
from penstock.config.yaml_source import read_yaml


@dataclass(frozen=True, slots=True)
class Told:
    """What became of one option. ``became``: settings and their values; empty where it became nothing.

    ``why``: the reason where it became nothing, or what is to be known where it became something.
    """

    option: str
    value: Any
    became: Mapping[str, Any] = field(default_factory=dict)
    why: str = ""
    implied: bool = False
    """Whether it was not given: where nobody says otherwise, the field's planner takes this value, and ours another."""

    def __str__(self) -> str:
        shown = "its default" if self.implied else f"{self.value}"
        if not self.became:
            return f"{self.option} ({shown}) became nothing: {self.why}"
        settings = ", ".join(f"{path} = {_shown(value)}" for path, value in self.became.items())
        return f"{self.option} ({shown}) became {settings}" + (f"; {self.why}" if self.why else "")


@dataclass(frozen=True, slots=True)
class Imported:
    """The section, and what became of each option."""

    generation: Generation
    planner: dict[str, Any]
    told: list[Told]

    @property
    def left(self) -> list[Told]:
        """What became nothing."""
        return [each for each in self.told if not each.became]

    def yaml(self) -> str:
        """Return the section as YAML that a config takes."""
        return yaml.safe_dump({"planner": self.planner}, sort_keys=False, width=120, allow_unicode=True)


def import_planner(text: str, generation: Generation | None = None) -> Imported:
    """Translate options.

    Args:
        text: a command line, YAML or JSON.
        generation: which planner they are of; None tells by the options themselves.
    Raises:
        ConfigError: the text is none of these, or has no option in it.
    """
    given = read_options(text)
    which = generation or _generation(given.options)
    assumed = implied(which, given.options)
    source = Source(which, {**assumed, **given.options})
    policy = POLICIES[which]
    planner: dict[str, Any] = {"enabled": True} | ({} if policy is None else {"policy": policy})
    told = [
        _translate(given.spelled.get(name, name), name, value, source, planner, implied=name in assumed)
        for name, value in source.options.items()
    ]
    told += [Told(name, value, why=why) for name, value, why in given.ignored]
    return Imported(which, planner, _checked(planner, told))


def _translate(spelled: str, name: str, value: Any, source: Source, planner: dict[str, Any], *, implied: bool) -> Told:
    rule = RULES[source.generation].get(name)
    if rule is None:
        near = did_you_mean(name, RULES[source.generation])
        hint = f"; {near}" if near else ""
        return Told(spelled, _secretless(name, value), why=f"no planner of that generation has such an option{hint}")
    try:
        became = rule(value, source)
    except Left as left:
        return Told(spelled, _secretless(name, value), why=str(left), implied=implied)
    except KeyError as error:
        return Told(spelled, _secretless(name, value), why=f"its value can't be read: it lacks {error}")
    except (ValueError, TypeError, AttributeError) as error:
        return Told(spelled, _secretless(name, value), why=f"its value can't be read: {error}", implied=implied)
    for path, one in became.settings.items():
        _put(planner, path.split("/"), one)
    shown = {"planner." + path.replace("/", "."): one for path, one in became.settings.items()}
    return Told(spelled, _secretless(name, value), shown, became.note, implied=implied)


def _checked(planner: dict[str, Any], told: list[Told]) -> list[Told]:
    """Take out what our settings do not take, such as a number out of range, and say so where it came from."""
    root, _ = read_yaml(yaml.safe_dump(planner, sort_keys=False), lambda line, column: DEFAULT)
    if root is None:
        return told
    _, problems = check_tree(PlanningSettings, root)
    for problem in problems:
        path = f"planner.{problem.path}"
        _drop(planner, problem.path.split("."))
        told = [
            Told(each.option, each.value, why=f"{path}: {problem.message}", implied=each.implied)
            if any(path == one or path.startswith(f"{one}.") or one.startswith(f"{path}.") for one in each.became)
            else each
            for each in told
        ]
    return told


def _generation(options: Mapping[str, Any]) -> Generation:
    """Tell the generations apart by options that only one of them has."""
    own: dict[Generation, set[str]] = {which: set(rules) for which, rules in RULES.items()}
    scores: dict[Generation, int] = {}
    for which, names in own.items():
        others = set().union(*(rest for other, rest in own.items() if other != which))
        scores[which] = 100 * len((names - others) & set(options)) + len(names & set(options))
    best = max(scores.values())
    order: tuple[Generation, ...] = ("planner-config", "load-classic", "sla-classic")
    return next(which for which in order if scores[which] == best)


def _put(into: dict[str, Any], path: list[str], value: Any) -> None:
    for part in path[:-1]:
        into = into.setdefault(part, {})
    into[path[-1]] = value


def _drop(planner: dict[str, Any], path: list[str]) -> None:
    here: Any = planner
    for part in path[:-1]:
        here = here.get(part) if isinstance(here, dict) else None
    if isinstance(here, dict):
        here.pop(path[-1], None)


def _secretless(name: str, value: Any) -> Any:
    if any(word in name for word in ("token", "secret")) and not name.endswith(("_file", "tokens")):
        return "***"
    if isinstance(value, Mapping):
        return {key: _secretless(str(key), one) for key, one in value.items()}
    return [_secretless("", one) for one in value] if isinstance(value, list) else value


def _shown(value: Any) -> str:
    return "unset" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


__all__ = ["Given", "Imported", "Told", "import_planner"]
