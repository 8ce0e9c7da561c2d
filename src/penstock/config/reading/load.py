"""Loads a config: file, then environment, then flags; returns checked settings or every problem at once."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import msgspec

from penstock.config.checks import cross_checks, file_problems
from penstock.config.derived.knobs import PREFIX, derive, dotted, entry_type, fields_by_name
from penstock.config.derived.yaml_writer import resolved_yaml
from penstock.config.presets import PRESETS
from penstock.config.reading.problems import DEFAULT, ConfigProblem, ConfigProblems, ValueOrigin
from penstock.config.reading.sources import put_environment, put_overrides
from penstock.config.reading.text_tree import TreeNode, TreeScalar
from penstock.config.reading.tree_check import build, check_tree
from penstock.config.reading.yaml_source import read_yaml
from penstock.config.settings.cluster_settings import HELD_ADAPTERS, ClusterSettings
from penstock.kernel.settings import Settings, is_group

__all__ = ["Loaded", "cluster_env", "fill_empty_groups", "load", "load_group", "load_resolved", "resolved_yaml"]

S = TypeVar("S", bound=Settings)
_INPUTS: WeakKeyDictionary[object, bytes] = WeakKeyDictionary()
"""What was read of each standard input."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """Checked settings, with the origin of each given value."""

    settings: ClusterSettings
    root: TreeNode
    """The tree of the given values."""
    origins: Mapping[str, ValueOrigin]
    """Dotted name -> origin; an absent name has its default."""

    def origin(self, name: str) -> ValueOrigin:
        return self.origins.get(name, DEFAULT)


def load(
    path: str | Path | None,
    overrides: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    *,
    files: bool = False,
) -> Loaded:
    """Read, merge and check a config.

    Args:
        path: YAML file; ``-`` is standard input, None is the embedded default.
        overrides: ``name=value`` texts, such as ``router.cost.overlap_credit=2``; they win over all others.
        env: environment; its ``PENSTOCK_*`` names win over the file. None is an empty one.
        files: check also the files and programs that it names.
    Raises:
        ConfigProblems: something is wrong; it lists every problem.
    """
    root = _empty()
    problems: list[ConfigProblem] = []
    if path is not None:
        read, problems = _read_settings_file(path)
        root = read if read is not None else root
    fill_empty_groups(ClusterSettings, root)
    problems += put_environment(root, ClusterSettings, env or {})
    problems += put_overrides(root, ClusterSettings, overrides)
    problems += _put_preset(root)
    given, wrong = check_tree(ClusterSettings, root)
    problems += wrong
    settings = _started(build(ClusterSettings, given), root)
    problems += cross_checks(settings, root, {problem.path for problem in problems})
    if files:
        problems += file_problems(settings, root)
    if problems:
        raise ConfigProblems(_sorted(problems))
    return Loaded(settings, root, dict(_origins(root, ())))


def load_group(group: type[S], overrides: Sequence[str]) -> S:
    """Read ``name=value`` texts into one settings struct, such as a pool's; names start at that struct.

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

    It holds the result of file, environment and flags, so of the environment only the secrets count: they are not in
    the file. Any other name would win over a flag a second time.

    Raises:
        ConfigProblems: the file can't be read.
    """
    secret = {knob.env for knob in derive(ClusterSettings) if knob.knob.secret}
    return load(path, (), {name: env[name] for name in env if name in secret}).settings


def cluster_env(env: Mapping[str, str]) -> dict[str, str]:
    """Return only those environment names that concern a config."""
    return {name: value for name, value in env.items() if name.startswith(PREFIX)}


def _read_settings_file(path: str | Path) -> tuple[TreeNode | None, list[ConfigProblem]]:
    name = "standard input" if str(path) == "-" else str(path)
    whole = ValueOrigin("file", name)
    try:
        data = _standard_input() if str(path) == "-" else Path(path).read_bytes()
        text = data.decode("utf-8-sig")
    except FileNotFoundError:
        return None, [ConfigProblem(whole, "", "is not there", "'penstock config init' prints one to start from")]
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        return None, [ConfigProblem(ValueOrigin("file", f"{name}:{line}:1"), "", "is not UTF-8 text")]
    except OSError as error:
        return None, [ConfigProblem(whole, "", f"can't be read: {error.strerror}")]
    tree, problems = read_yaml(text, lambda line, column: ValueOrigin("file", f"{name}:{line}:{column}"))
    if tree is not None and tree.mapping is None:
        at = tree.at
        return None, [
            *problems,
            ConfigProblem(at, "", "is not a mapping of settings", "start with a line such as 'router:'"),
        ]
    return tree, problems


def _standard_input() -> bytes:
    """Return what came on standard input. It can be read once, and a comparison loads its config for each variant."""
    if sys.stdin not in _INPUTS:
        _INPUTS[sys.stdin] = sys.stdin.buffer.read()
    return _INPUTS[sys.stdin]


def _empty() -> TreeNode:
    return TreeNode({}, DEFAULT)


def fill_empty_groups(group: type[Settings], node: TreeNode) -> None:
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


def _started(settings: ClusterSettings, root: TreeNode) -> ClusterSettings:
    """Turn on what the config has a section of, be it empty: the planner; and adapters in engines started here."""
    settings = _with_adapters(settings)
    said = (root.mapping or {}).get("planner")
    if said is None or said.mapping is None or "enabled" in said.mapping:
        return settings
    planner = msgspec.structs.replace(settings.planner, enabled=True)
    return msgspec.structs.replace(settings, planner=planner)


def _with_adapters(settings: ClusterSettings) -> ClusterSettings:
    """Let engines that are started here for a model with adapters hold some, unless the config sets how many."""
    models = {
        name: msgspec.structs.replace(
            model,
            pools={
                key: msgspec.structs.replace(pool, max_cpu_loras=HELD_ADAPTERS)
                if pool.max_cpu_loras is None and pool.engine in ("sim", "vllm", "sglang") and not pool.attached
                else pool
                for key, pool in model.pools.items()
            },
        )
        for name, model in settings.models.items()
        if model.adapters or model.adapter_folder is not None
    }
    return msgspec.structs.replace(settings, models={**settings.models, **models}) if models else settings


def _put_preset(root: TreeNode) -> list[ConfigProblem]:
    """Fill in what the preset sets and nothing else does; an unknown preset is found where values are checked."""
    chosen = _given_node(root, ("router", "preset"))
    name = chosen.value.text if chosen is not None and isinstance(chosen.value, TreeScalar) else ""
    origin = ValueOrigin("default", f"preset {name}")
    absent = [
        f"{key}={text}" for key, text in PRESETS.get(name, {}).items() if _given_node(root, key.split(".")) is None
    ]
    return put_overrides(root, ClusterSettings, absent, origin)


def _given_node(node: TreeNode, path: Sequence[str]) -> TreeNode | None:
    """Return what is given at a path."""
    found: TreeNode | None = node
    for name in path:
        found = (found.mapping or {}).get(name) if found is not None else None
    return found


def _origins(node: TreeNode, path: tuple[str, ...]) -> list[tuple[str, ValueOrigin]]:
    own = [(dotted(path), node.at)] if path and node.at is not DEFAULT else []
    return own + [pair for key, child in (node.mapping or {}).items() for pair in _origins(child, (*path, key))]


def _sorted(problems: Sequence[ConfigProblem]) -> list[ConfigProblem]:
    """Order problems for a reader: by file position, then environment, then flags."""

    def place(problem: ConfigProblem) -> tuple[int, list[Any]]:
        kinds = ("file", "environment", "flag", "default")
        parts = [int(p) if p.isdigit() else 0 for p in problem.origin.text.split(":")[1:]]
        return kinds.index(problem.origin.kind), parts

    return sorted(dict.fromkeys(problems), key=place)
