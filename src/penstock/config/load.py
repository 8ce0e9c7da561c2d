"""How does a config become settings? File, then environment, then flags; every problem at once, or a checked struct."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from penstock.config.checks import cross_checks
from penstock.config.cluster import ClusterSettings
from penstock.config.derive import PREFIX, derive, dotted, entry_type, fields_by_name
from penstock.config.model import build, check_tree
from penstock.config.problems import DEFAULT, ConfigProblems, Origin, Problem
from penstock.config.sources import put_environment, put_overrides
from penstock.config.tree import Node
from penstock.config.write import resolved_yaml
from penstock.config.yaml_source import read_yaml
from penstock.kernel.settings import Settings, is_group

__all__ = ["Loaded", "cluster_env", "fill_empty_groups", "load", "load_group", "load_resolved", "resolved_yaml"]

S = TypeVar("S", bound=Settings)


@dataclass(frozen=True, slots=True)
class Loaded:
    """Checked settings, and where each given value came from."""

    settings: ClusterSettings
    origins: Mapping[str, Origin]
    """Dotted name -> origin; a name that is absent has its default."""

    def origin(self, name: str) -> Origin:
        return self.origins.get(name, DEFAULT)


def load(path: str | Path | None, overrides: Sequence[str] = (), env: Mapping[str, str] | None = None) -> Loaded:
    """Read, merge and check a config.

    Args:
        path: YAML file; ``-`` is standard input, None is the embedded default.
        overrides: ``name=value`` texts, such as ``router.cost.overlap_credit=2``; they win over everything.
        env: environment; its ``PENSTOCK_*`` names win over the file. None is an empty one.
    Raises:
        ConfigProblems: something is wrong; it lists every problem.
    """
    root = _empty()
    problems: list[Problem] = []
    if path is not None:
        read, problems = _file(path)
        root = read if read is not None else root
    fill_empty_groups(ClusterSettings, root)
    problems += put_environment(root, ClusterSettings, env or {})
    problems += put_overrides(root, ClusterSettings, overrides)
    given, wrong = check_tree(ClusterSettings, root)
    problems += wrong
    settings = _started(build(ClusterSettings, given), root)
    problems += cross_checks(settings, root, {problem.path for problem in problems})
    if problems:
        raise ConfigProblems(_sorted(problems))
    return Loaded(settings, dict(_origins(root, ())))


def load_group(group: type[S], overrides: Sequence[str]) -> S:
    """Read ``name=value`` texts into one settings struct, such as a pool's; names count from that struct.

    Raises:
        ConfigProblems: something is wrong.
    """
    root = _empty()
    problems = put_overrides(root, group, overrides)
    given, wrong = check_tree(group, root)
    if problems or wrong:
        raise ConfigProblems(_sorted([*problems, *wrong]))
    found: S = build(group, given)
    return found


def load_resolved(path: str | Path, env: Mapping[str, str]) -> ClusterSettings:
    """Read the config.yaml of a run folder, as a child process does.

    It holds what file, environment and flags came to, so of the environment only the secrets count: they are not in
    the file. Any other name would win over a flag a second time.

    Raises:
        ConfigProblems: the file can't be read.
    """
    secret = {knob.env for knob in derive(ClusterSettings) if knob.knob.secret}
    return load(path, (), {name: env[name] for name in env if name in secret}).settings


def cluster_env(env: Mapping[str, str]) -> dict[str, str]:
    """Return only what of an environment concerns a config."""
    return {name: value for name, value in env.items() if name.startswith(PREFIX)}


def _file(path: str | Path) -> tuple[Node | None, list[Problem]]:
    name = "standard input" if str(path) == "-" else str(path)
    whole = Origin("file", name)
    try:
        data = sys.stdin.buffer.read() if str(path) == "-" else Path(path).read_bytes()
        text = data.decode("utf-8-sig")
    except FileNotFoundError:
        return None, [Problem(whole, "", "is not there", "'penstock config init' prints one to start from")]
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        return None, [Problem(Origin("file", f"{name}:{line}:1"), "", "is not UTF-8 text")]
    except OSError as error:
        return None, [Problem(whole, "", f"can't be read: {error.strerror}")]
    tree, problems = read_yaml(text, lambda line, column: Origin("file", f"{name}:{line}:{column}"))
    if tree is not None and tree.mapping is None:
        at = tree.at
        return None, [*problems, Problem(at, "", "is no mapping of settings", "start with a line such as 'router:'")]
    return tree, problems


def _empty() -> Node:
    return Node({}, DEFAULT)


def fill_empty_groups(group: type[Settings], node: Node) -> None:
    """Read a group whose keys are all commented out as one in which nothing is given."""
    for name, child in (node.mapping or {}).items():
        field = fields_by_name(group).get(name)
        if field is None:
            continue
        entry = entry_type(field.type)
        if not is_group(field.type) and entry is None:
            continue
        if not isinstance(child.value, dict | list) and child.value.is_null:
            child.value = {}
        if entry is None:
            fill_empty_groups(field.type, child)
            continue
        for below in (child.mapping or {}).values():
            if not isinstance(below.value, dict | list) and below.value.is_null:
                below.value = {}
            fill_empty_groups(entry, below)


def _started(settings: ClusterSettings, root: Node) -> ClusterSettings:
    """Turn the planner on where anything is said of it, but for whether it runs."""
    said = (root.mapping or {}).get("planner")
    if said is None or not said.mapping or "enabled" in said.mapping:
        return settings
    planner = msgspec.structs.replace(settings.planner, enabled=True)
    return msgspec.structs.replace(settings, planner=planner)


def _origins(node: Node, path: tuple[str, ...]) -> list[tuple[str, Origin]]:
    if isinstance(node.value, dict) and node.value:
        return [pair for key, child in node.value.items() for pair in _origins(child, (*path, key))]
    return [(dotted(path), node.at)] if path and node.at is not DEFAULT else []


def _sorted(problems: Sequence[Problem]) -> list[Problem]:
    """Order problems as a person reads them: by file position, then environment, then flags."""

    def place(problem: Problem) -> tuple[int, list[Any]]:
        kinds = ("file", "environment", "flag", "default")
        parts = [int(p) if p.isdigit() else 0 for p in problem.origin.text.split(":")[1:]]
        return kinds.index(problem.origin.kind), parts

    return sorted(dict.fromkeys(problems), key=place)
