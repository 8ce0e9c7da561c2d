"""Reads Dynamo's options from a text, a command line, YAML or JSON, as names and values."""

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from penstock.config.importing.frontend_options import NEGATABLE
from penstock.kernel.errors import ConfigError

FLAGS = {"no_operation", "no_correction", "advisory", "load_predictor_log1p"}
"""Options that take no value on a command line."""
SECTIONS = ("Planner", "planner")
"""Keys under which the file of a whole deployment holds the planner's options."""
NESTED = ("scheduling", "plugin_registration", "gateway", "auth", "transport", "admin")
"""Groups of PlannerConfig, whose keys are named with dots."""


@dataclass(slots=True)
class GivenOptions:
    """``options``: plain names with underscores, nested ones with dots; ``spelled``: as they were written.

    ``ignored``: (name, value, why) of words that are no options.
    """

    options: dict[str, Any] = field(default_factory=dict)
    spelled: dict[str, str] = field(default_factory=dict)
    ignored: list[tuple[str, Any, str]] = field(default_factory=list)

    def put(self, spelled: str, value: Any) -> None:
        name = spelled.lstrip("-").removeprefix("Planner.").replace("-", "_")
        self.options[name] = value
        self.spelled[name] = spelled


def read_options(text: str) -> GivenOptions:
    """Return the options of a text.

    Raises:
        ConfigError: it is no command line, YAML or JSON with options.
    """
    try:
        found = yaml.safe_load(text)  # JSON is YAML
    except yaml.YAMLError as error:
        if "--" not in text:
            raise ConfigError(f"this is neither YAML nor a command line: {str(error).splitlines()[0]}") from error
        found = text
    given = GivenOptions()
    if isinstance(found, str) or (isinstance(found, Mapping) and " --" in f" {text}" and not _is_options(found)):
        _command_line(text, given)
    elif isinstance(found, Mapping):
        _mapping(_section(found), "", given)
    else:
        kind = "nothing" if found is None else f"a {type(found).__name__}"
        raise ConfigError(
            f"this holds {kind}, not options", hint="give a mapping such as 'ttft: 200', or a command line"
        )
    if not given.options:
        raise ConfigError("there is no option in this", hint="a command line has options such as --max-gpu-budget 8")
    return given


def _is_options(found: Mapping[Any, Any]) -> bool:
    return all(isinstance(key, str) and " " not in key for key in found)


def _section(found: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """Return the planner's part of a deployment's file, or the whole where the file holds nothing else."""
    for path in (("spec", "features", "planner"), ("features", "planner"), *((name,) for name in SECTIONS)):
        here: Any = found
        for part in path:
            here = here.get(part) if isinstance(here, Mapping) else None
        if isinstance(here, Mapping):
            return here
    return found


def _mapping(found: Mapping[Any, Any], prefix: str, given: GivenOptions) -> None:
    for key, value in found.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and str(key).replace("-", "_") in NESTED:
            _mapping(value, f"{name}.", given)
        else:
            given.put(name, value)


def _command_line(text: str, given: GivenOptions) -> None:
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise ConfigError(f"this command line has no end: {error}") from error
    place = 0
    while place < len(words):
        word = words[place]
        place += 1
        if not word.startswith("--") or word == "--":
            continue  # the program and its interpreter
        name, equals, value = word.partition("=")
        plain = name.lstrip("-").removeprefix("Planner.").replace("-", "_")
        if not equals:
            follows = words[place] if place < len(words) else None
            if plain.removeprefix("no_") in NEGATABLE:
                given.put(name.replace("--no-", "--", 1), not plain.startswith("no_"))
                continue
            if follows is None or follows.startswith("--") or (plain in FLAGS and follows not in ("true", "false")):
                value = "true"
            else:
                value, place = follows, place + 1
        if plain == "config":
            _config_option(value, given)
        else:
            given.put(name, _scalar(value))


def _config_option(value: str, given: GivenOptions) -> None:
    """Today's planner takes its config as a file, or as JSON on the command line."""
    try:
        found = json.loads(value)
    except ValueError:
        given.ignored.append(("--config", value, "it names a file; import that file itself"))
        return
    if isinstance(found, Mapping):
        _mapping(found, "", given)


def _scalar(text: str) -> Any:
    try:
        found = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    return text if isinstance(found, Mapping) else found
