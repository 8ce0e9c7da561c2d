"""Reads Dynamo's options from a text, a command line, YAML, JSON or manifests, as names and values."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Any

import yaml

from penstock.kernel.errors import ConfigError
from penstock_dynamo.importing.dynamo_manifests import (
    DynamoProgram,
    Program,
    files_of,
    is_manifest,
    programs_of,
)
from penstock_dynamo.importing.option_table import ALIASES, FRONTEND, NEGATABLE

ENVIRONMENT: Mapping[Program, Mapping[str, str]] = {
    "frontend": {
        **{f"DYN_{name.upper()}": name for name in (*FRONTEND, *ALIASES)},
        "DYN_ROUTER_USE_KV_EVENTS": "router_kv_events",
    },
    "planner": {
        "DYN_NAMESPACE": "namespace",
        "DYN_PARENT_DGD_K8S_NAME": "parent_dgd_k8s_name",
        "PROMETHEUS_ENDPOINT": "metric_pulling_prometheus_endpoint",
        "PLANNER_PROMETHEUS_PORT": "metric_reporting_prometheus_port",
    },
}
"""Names in a program's environment -> the options that they set where the command line does not."""
FLAGS = {"no_operation", "no_correction", "advisory", "load_predictor_log1p"}
"""Options that take no value on a command line."""
SECTIONS = ("Planner", "planner")
"""Keys under which the file of a whole deployment holds the planner's options."""
NESTED = ("scheduling", "plugin_registration", "gateway", "auth", "transport", "admin")
"""Groups of PlannerConfig, whose keys are named with dots."""


@dataclass(slots=True)
class GivenOptions:
    """``options``: plain names with underscores, nested ones with dots; ``spelled``: as they were written.

    ``ignored``: (name, value, why) of words that are no options. ``program``: where a manifest names it.
    """

    program: Program | None = None
    options: dict[str, Any] = field(default_factory=dict)
    spelled: dict[str, str] = field(default_factory=dict)
    ignored: list[tuple[str, Any, str]] = field(default_factory=list)

    def put(self, option: str, value: Any, *, spelled: str | None = None) -> None:
        """Set an option, in whatever spelling; ``spelled``: how it was written where that is no spelling of it."""
        name = option.lstrip("-").removeprefix("Planner.").replace("-", "_")
        self.options[name] = value
        self.spelled[name] = spelled or option


def read_options(text: str) -> list[GivenOptions]:
    """Return the options of a text, those of each program in it apart: only manifests have several.

    Raises:
        ConfigError: it is no command line, YAML or JSON with options.
    """
    try:
        documents = list(yaml.safe_load_all(text))  # JSON is YAML
        if any(map(is_manifest, documents)):
            return _manifest_options(documents)
        document = documents[0] if len(documents) == 1 else None
    except yaml.YAMLError as error:
        if "--" not in text:
            raise ConfigError(f"this is neither YAML nor a command line: {str(error).splitlines()[0]}") from error
        document = text
    given = GivenOptions()
    if isinstance(document, str) or (" --" in f" {text}" and _has_other_words(document)):
        _read_command_line(text, given)
    elif isinstance(document, Mapping):
        _read_mapping(_planner_section(document), "", given)
    else:
        kind = "nothing" if document is None else f"a {type(document).__name__}"
        raise ConfigError(
            f"this holds {kind}, not options", hint="give a mapping such as 'ttft: 200', or a command line"
        )
    if not given.options:
        raise ConfigError("there is no option in this", hint="a command line has options such as --max-gpu-budget 8")
    return [given]


def _manifest_options(documents: list[Any]) -> list[GivenOptions]:
    programs, files = programs_of(documents), files_of(documents)
    read = [_program_options(each, files) for each in programs if each.program is not None]
    if not read:
        names = ", ".join(each.component for each in programs) or "nothing"
        raise ConfigError(
            f"these manifests have no frontend and no planner, but {names}",
            hint="engines are said by pools: models.NAME.pools.POOL, which penstock plan writes",
        )
    for each in programs:
        if each.program is None:
            read[0].ignored.append((each.component, each.command, "engines are said by the pools: models.NAME.pools"))
    return read


def _program_options(each: DynamoProgram, files: Mapping[str, str]) -> GivenOptions:
    assert each.program is not None
    given = GivenOptions(each.program)
    for name, option in ENVIRONMENT[each.program].items():
        if name in each.environment:
            given.put(option, _yaml_scalar(each.environment[name]), spelled=name)
    if each.command:
        _read_command_line(each.command, given, files)
    _read_mapping(each.options, "", given)
    if each.program == "planner":
        if "environment" not in given.options:
            given.put("environment", "kubernetes", spelled="environment (of a manifest)")
        if each.graph is not None and "parent_dgd_k8s_name" not in given.options:
            given.put("parent_dgd_k8s_name", each.graph.partition("/")[2], spelled="metadata.name")
    return given


def _has_other_words(document: Any) -> bool:
    """Tell whether keys of a mapping are no names of options."""
    return isinstance(document, Mapping) and not all(isinstance(key, str) and " " not in key for key in document)


def _planner_section(document: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """Return the planner's part of a deployment's file, or the whole where the file holds nothing else."""
    for path in (("spec", "features", "planner"), ("features", "planner"), *((name,) for name in SECTIONS)):
        here: Any = document
        for part in path:
            here = here.get(part) if isinstance(here, Mapping) else None
        if isinstance(here, Mapping):
            return here
    return document


def _read_mapping(options: Mapping[Any, Any], prefix: str, given: GivenOptions) -> None:
    for key, value in options.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and str(key).replace("-", "_") in NESTED:
            _read_mapping(value, f"{name}.", given)
        else:
            given.put(name, value)


def _read_command_line(text: str, given: GivenOptions, files: Mapping[str, str] = MappingProxyType({})) -> None:
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
            _read_config(value, given, files)
        else:
            given.put(name, _yaml_scalar(value))


def _read_config(value: str, given: GivenOptions, files: Mapping[str, str]) -> None:
    """Today's planner takes its config as a file, which a ConfigMap may hold, or as JSON on the command line."""
    try:
        config = yaml.safe_load(files.get(PurePosixPath(value).name, value))
    except yaml.YAMLError:
        config = None
    if not isinstance(config, Mapping):
        given.ignored.append(("--config", value, "it names a file; import that file itself"))
        return
    _read_mapping(config, "", given)


def _yaml_scalar(text: str) -> Any:
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    return text if isinstance(value, Mapping) else value
