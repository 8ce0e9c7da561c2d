"""Translates Dynamo's options, those of its planners (today's and earlier) and of its frontend and router.

Takes command lines, options as YAML, today's PlannerConfig as YAML or JSON, and manifests of both API versions. Every
given option is reported: its settings here, or why it has none. The table is
`penstock_dynamo.importing.option_table`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import yaml

from penstock.config.reading.problems import DEFAULT, did_you_mean
from penstock.config.reading.tree_check import check_tree
from penstock.config.reading.yaml_source import read_yaml
from penstock.config.settings.cluster_settings import ClusterSettings
from penstock.kernel.errors import ConfigError
from penstock_dynamo.importing.dynamo_manifests import Program
from penstock_dynamo.importing.option_reader import GivenOptions, read_options
from penstock_dynamo.importing.option_rules import Generation, OptionSource
from penstock_dynamo.importing.option_table import RULES, implied, renewed


@dataclass(frozen=True, slots=True)
class ImportNote:
    """Result for one option. ``became``: settings and their values; empty where the option has no counterpart.

    ``why``: the reason where it has none, otherwise what an operator should know.
    """

    option: str
    value: Any
    became: Mapping[str, Any] = field(default_factory=dict)
    why: str = ""
    implied: bool = False
    """Whether it was not given: Dynamo's planner then takes this default, and ours another."""

    def __str__(self) -> str:
        shown = "its default" if self.implied else f"{self.value}"
        if not self.became:
            return f"{self.option} ({shown}) became nothing: {self.why}"
        settings = ", ".join(f"{path} = {_setting_text(value)}" for path, value in self.became.items())
        return f"{self.option} ({shown}) became {settings}" + (f"; {self.why}" if self.why else "")


@dataclass(frozen=True, slots=True)
class Imported:
    """The settings, as a config has them, and a note on each option."""

    generation: str
    """Which planner or frontend; of a manifest with both, both."""
    settings: dict[str, Any]
    notes: list[ImportNote]

    @property
    def planner(self) -> dict[str, Any]:
        """The section ``planner``."""
        planner: dict[str, Any] = self.settings.get("planner", {})
        return planner

    @property
    def left(self) -> list[ImportNote]:
        """Options without a counterpart."""
        return [each for each in self.notes if not each.became]

    def yaml(self) -> str:
        """Return the settings as YAML for a config."""
        return yaml.safe_dump(self.settings, sort_keys=False, width=120, allow_unicode=True)


def import_options(text: str, generation: Generation | None = None) -> Imported:
    """Translate options.

    Args:
        text: a command line, YAML, JSON or manifests.
        generation: which planner or frontend they belong to; None infers it from the options.
    Raises:
        ConfigError: the text is none of these, or has no option in it that any of them knows.
    """
    settings: dict[str, Any] = {}
    notes: list[ImportNote] = []
    generations: list[Generation] = []
    unknown: list[str] = []
    for given in read_options(text):
        if generation is not None and given.program not in (None, _program_of_generation(generation)):
            continue
        which = generation or _generation(given)
        spelled, options = given.spelled, given.options
        if which == "frontend":
            spelled, options = renewed(spelled), renewed(options)
        if not RULES[which].keys() & options.keys() and (options or given.program is None):
            unknown += [each for each in spelled.values() if each not in unknown]
            continue
        generations.append(which)
        if which != "frontend":
            settings.setdefault("planner", {"enabled": True})
            if which != "planner-config":  # there its optimization_target says the policy
                settings["planner"]["policy"] = which
        assumed = implied(which, options)
        source = OptionSource(which, {**assumed, **options})
        notes += [
            _translate(spelled.get(name, name), name, value, source, settings, implied=name in assumed)
            for name, value in source.options.items()
        ]
        notes += [ImportNote(name, value, why=why) for name, value, why in given.ignored]
    if not generations:
        raise ConfigError(
            f"none of these is an option of Dynamo's planners or frontend: {', '.join(unknown)}",
            hint=_nearest_option(unknown) or "name the program with --generation, or give its whole command line",
        )
    return Imported(" and ".join(dict.fromkeys(generations)), settings, _checked(settings, notes))


def _program_of_generation(which: Generation) -> Program:
    return "frontend" if which == "frontend" else "planner"


def _nearest_option(names: Sequence[str]) -> str | None:
    known = [name for rules in RULES.values() for name in rules]
    nearest = (did_you_mean(name.lstrip("-").replace("-", "_"), known) for name in names)
    return next((each for each in nearest if each), None)


def _translate(
    spelled: str, name: str, value: Any, source: OptionSource, settings: dict[str, Any], *, implied: bool
) -> ImportNote:
    note = partial(ImportNote, spelled, _without_secrets(name, value), implied=implied)
    rows = RULES[source.generation]
    if name not in rows:
        nearest = did_you_mean(name, rows)
        hint = f"; {nearest}" if nearest else ""
        return note(why=f"there is no such option of {source.generation}{hint}")
    row = rows[name]
    try:
        result = row if isinstance(row, str) else row(value, source)
    except KeyError as error:
        return note(why=f"its value can't be read: it lacks {error}")
    except (ValueError, TypeError, AttributeError) as error:
        return note(why=f"its value can't be read: {error}")
    if isinstance(result, str):
        return note(why=result)
    below = "" if source.generation == "frontend" else "planner/"
    became: dict[str, Any] = {}
    for path, setting in result.settings.items():
        parts = (path[1:] if path.startswith("/") else below + path).split("/")
        _set_at(settings, parts, setting)
        became[".".join(parts)] = setting
    return note(became=became, why=result.note)


def _checked(settings: dict[str, Any], notes: list[ImportNote]) -> list[ImportNote]:
    """Remove what our settings do not accept, such as a number out of range, and note it at its option."""
    root, _ = read_yaml(yaml.safe_dump(settings, sort_keys=False), lambda line, column: DEFAULT)
    if root is None:
        return notes
    _, problems = check_tree(ClusterSettings, root)
    for problem in problems:
        path = problem.path
        _remove_at(settings, path.split("."))
        notes = [
            replace(each, became={}, why=f"{path}: {problem.message}")
            if any(path == one or path.startswith(f"{one}.") or one.startswith(f"{path}.") for one in each.became)
            else each
            for each in notes
        ]
    return notes


def _generation(given: GivenOptions) -> Generation:
    """Infer the generation from options that only one of them has, among those of the program that a manifest names."""
    options = {**given.options, **renewed(given.options)}
    own: dict[Generation, set[str]] = {
        which: set(rules) for which, rules in RULES.items() if given.program in (None, _program_of_generation(which))
    }
    scores: dict[Generation, int] = {}
    for which, names in own.items():
        others = set().union(*(rest for other, rest in own.items() if other != which))
        scores[which] = 100 * len((names - others) & set(options)) + len(names & set(options))
    best = max(scores.values())
    order: tuple[Generation, ...] = ("planner-config", "load-classic", "sla-classic", "frontend")
    return next(which for which in order if scores.get(which) == best)


def _set_at(into: dict[str, Any], path: list[str], value: Any) -> None:
    for part in path[:-1]:
        into = into.setdefault(part, {})
    into[path[-1]] = value


def _remove_at(settings: dict[str, Any], path: list[str]) -> None:
    here: Any = settings
    for part in path[:-1]:
        here = here.get(part) if isinstance(here, dict) else None
    if isinstance(here, dict):
        here.pop(path[-1], None)


def _without_secrets(name: str, value: Any) -> Any:
    if any(word in name for word in ("token", "secret")) and not name.endswith(("_file", "tokens")):
        return "***"
    if isinstance(value, Mapping):
        return {key: _without_secrets(str(key), one) for key, one in value.items()}
    return [_without_secrets("", one) for one in value] if isinstance(value, list) else value


def _setting_text(value: Any) -> str:
    return "unset" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


__all__ = ["GivenOptions", "ImportNote", "Imported", "import_options"]
