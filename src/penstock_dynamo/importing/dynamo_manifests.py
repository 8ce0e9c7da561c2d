"""Finds Dynamo's programs in Kubernetes manifests, with the words of their command lines and their environment.

Read are a DynamoGraphDeployment, as v1alpha1 (a map of services) and v1beta1 (a list of components), a
DynamoGraphDeploymentRequest of both versions, and the ConfigMap beside them that a planner's ``--config`` names.
"""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from penstock.kernel.values import JsonObject

GRAPH, REQUEST = "DynamoGraphDeployment", "DynamoGraphDeploymentRequest"
Program = Literal["frontend", "planner"]
WORDS: Mapping[Program, tuple[str, ...]] = {
    "frontend": ("dynamo.frontend",),
    "planner": ("dynamo.planner", "planner_sla", "planner.planner"),
}
"""Modules on a command line by which a program is known where its component has no type."""


class DynamoProgram(NamedTuple):
    """One program of a manifest.

    Args:
        component: its name in the manifest.
        program: None is another program, such as a worker.
        command: its command line; empty where the image's own runs.
        environment: names and values, without those that come from secrets.
        options: options that the manifest itself has, by their names.
        graph: KIND/NAME of the graph that it belongs to.
    """

    component: str
    program: Program | None
    command: str
    environment: Mapping[str, str]
    options: JsonObject
    graph: str | None


def is_manifest(document: Any) -> bool:
    """Tell whether a YAML document is one of Dynamo's resources."""
    return isinstance(document, Mapping) and document.get("kind") in (GRAPH, REQUEST)


def programs_of(documents: Sequence[Any]) -> list[DynamoProgram]:
    """Return the programs of all resources of a file."""
    programs = []
    for document in documents:
        if not is_manifest(document):
            continue
        spec = _mapping_in(document.get("spec"))
        if document["kind"] == REQUEST:
            programs.append(_requested(spec))
            continue
        name = _mapping_in(document.get("metadata")).get("name")
        graph = f"{GRAPH}/{name}" if isinstance(name, str) else None
        shared = _environment(spec.get("envs"), spec.get("env"))
        programs += [_component(*each, shared, graph) for each in _components(spec)]
    return programs


def files_of(documents: Sequence[Any]) -> dict[str, str]:
    """Return the files that the ConfigMaps of a file hold, by the names that they are mounted with."""
    files: dict[str, str] = {}
    for document in documents:
        if isinstance(document, Mapping) and document.get("kind") == "ConfigMap":
            files |= {str(name): str(text) for name, text in _mapping_in(document.get("data")).items()}
    return files


def _requested(spec: Mapping[str, Any]) -> DynamoProgram:
    """Return the planner that a deployment request asks for."""
    profiled = _mapping_in(_mapping_in(spec.get("profilingConfig")).get("config"))
    features = _mapping_in(spec.get("features"))
    planner = _mapping_in(features.get("planner") or profiled.get("planner"))
    options: JsonObject = {str(name).removeprefix("planner_"): value for name, value in planner.items()}
    targets = _mapping_in(spec.get("sla") or profiled.get("sla"))
    options |= {name: targets[name] for name in ("ttft", "itl") if name in targets and name not in options}
    return DynamoProgram("planner", "planner", "", {}, options, None)


def _components(spec: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for listed in (spec.get("components"), spec.get("services")):
        if isinstance(listed, Mapping):
            yield from ((str(name), _mapping_in(fields)) for name, fields in listed.items())
        elif isinstance(listed, list):
            yield from ((str(_mapping_in(fields).get("name")), _mapping_in(fields)) for fields in listed)


def _component(name: str, fields: Mapping[str, Any], shared: Mapping[str, str], graph: str | None) -> DynamoProgram:
    pod = _mapping_in(fields.get("extraPodSpec"))
    listed = (
        _mapping_in(_mapping_in(fields.get("podTemplate")).get("spec")).get("containers") or pod.get("containers") or []
    )
    containers = [pod.get("mainContainer"), *listed]
    container = next(
        (each for each in map(_mapping_in, containers) if each.get("name") in (None, "main") and each), None
    )
    main = container or next((each for each in map(_mapping_in, containers) if each), fields)
    words = [*_words_in(main.get("command")), *_words_in(main.get("args"))]
    # A shell's -c takes one word, which is the command line itself.
    command = " ".join(words[words.index("-c") + 1 :]) if "-c" in words else shlex.join(words)
    environment = {**shared, **_environment(fields.get("envs"), fields.get("env"), main.get("env"))}
    return DynamoProgram(name, _program_of_component(fields, command), command, environment, {}, graph)


def _program_of_component(fields: Mapping[str, Any], command: str) -> Program | None:
    for program, modules in WORDS.items():
        if any(module in command for module in modules):
            return program
    kind = str(fields.get("type") or fields.get("componentType") or "")
    return next((program for program in WORDS if program == kind), None)


def _environment(*lists: Any) -> dict[str, str]:
    return {
        str(entry["name"]): str(entry["value"])
        for entries in lists
        if isinstance(entries, list)
        for entry in map(_mapping_in, entries)
        if "name" in entry and entry.get("value") is not None
    }


def _words_in(value: Any) -> list[str]:
    return [str(word) for word in value] if isinstance(value, list) else [value] if isinstance(value, str) else []


def _mapping_in(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
