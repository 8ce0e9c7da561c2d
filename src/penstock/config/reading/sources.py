"""Puts environment names and flags into the tree; each names one place and the text for it."""

import re
from collections.abc import Iterable, Mapping
from typing import get_origin

from penstock.config.derived.knobs import (
    ANY_KEY,
    PREFIX,
    RESERVED,
    derive,
    dotted,
    entry_type,
    env_name,
    env_part,
    fields_by_name,
)
from penstock.config.reading.problems import ConfigProblem, ValueOrigin, did_you_mean, listed
from penstock.config.reading.text_tree import TreeNode, TreeScalar, tree_of
from penstock.config.reading.yaml_source import read_yaml
from penstock.kernel.settings import Settings, is_group, without_none

_PART = re.compile(r'"([^"]*)"|([^."]+)')


def put_environment(root: TreeNode, group: type[Settings], env: Mapping[str, str]) -> list[ConfigProblem]:
    """Put every ``PENSTOCK_*`` name into the tree; unknown names are problems."""
    problems: list[ConfigProblem] = []
    for name in sorted(env):
        if name.startswith(PREFIX) and name not in RESERVED:
            origin = ValueOrigin("environment", f"environment {name}")
            place = _Place(root, group)
            problem = _follow_env(place, name, origin)
            problems.extend(place.put(env[name], origin) if problem is None else [problem])
    return problems


def put_overrides(
    root: TreeNode,
    group: type[Settings],
    overrides: Iterable[str],
    at: ValueOrigin | None = None,
    *,
    unknown: str | None = None,
) -> list[ConfigProblem]:
    """Put ``path=value`` texts, as ``--set`` and the derived flags give them, into the tree; the last one wins.

    Args:
        at: where they come from; None is the flag of each.
        unknown: the hint at a name that resembles no setting; None lists those of its group.
    """
    problems: list[ConfigProblem] = []
    for override in overrides:
        name, equals, text = (part.strip() for part in _split_override(override))
        origin = ValueOrigin("flag", f"flag {name}") if at is None else at
        if not equals or not name:
            problems.append(ConfigProblem(origin, "", "is not name=value", "write it as --set router.mode=kv"))
            continue
        place = _Place(root, group)
        problem = _follow_flag(place, name, origin, unknown)
        problems.extend(place.put(text, origin) if problem is None else [problem])
    return problems


class _Place:
    """Walks down the settings structs and the tree together; places that are not given yet are filled in."""

    def __init__(self, root: TreeNode, group: type[Settings]) -> None:
        self.path: tuple[str, ...] = ()
        self.group: type[Settings] | None = group
        self.entries: type[Settings] | None = None
        """Set where this place is a mapping of such groups."""
        self.structured = False
        self._mapping = root.mapping if root.mapping is not None else {}
        self._slot: tuple[dict[str, TreeNode], str] | None = None

    @property
    def names(self) -> list[str]:
        """The fields below this place."""
        return list(fields_by_name(self.group)) if self.group is not None else []

    @property
    def keys(self) -> list[str]:
        """The entries of the mapping at this place."""
        return list(self._mapping)

    def field(self, name: str) -> None:
        assert self.group is not None
        field = fields_by_name(self.group)[name]
        entries = entry_type(field.type)
        self._slot = (self._mapping, name)
        self.path = (*self.path, name)
        self.structured = get_origin(without_none(field.type)) is dict or is_group(field.type)
        if field.is_group or entries is not None:
            child = self._mapping.setdefault(name, tree_of({} if entries is None else field.default))
            # A file may hold a single value here: it is reported as it is, and a text put below it is dropped.
            self._mapping = child.mapping if child.mapping is not None else {}
        self.group = field.type if field.is_group else None
        self.entries = entries

    def entry(self, key: str) -> None:
        self._slot = (self._mapping, key)
        self.path = (*self.path, key)
        child = self._mapping.get(key)
        self._mapping = child.mapping if child is not None and child.mapping is not None else {}
        self.group, self.entries = self.entries, None

    def put(self, text: str, origin: ValueOrigin) -> list[ConfigProblem]:
        """Put a text here; groups and mappings are YAML, such as ``{replicas: 2}``."""
        assert self._slot is not None
        mapping, key = self._slot
        if self.group is None and self.entries is None and not self.structured:
            mapping[key] = TreeNode(TreeScalar(text), origin, origin)
            return []
        tree, problems = read_yaml(text, lambda line, column: origin)
        if tree is None or tree.mapping is None:
            return problems or [ConfigProblem(origin, dotted(self.path), "takes a mapping, such as {key: value}")]
        if self.group is not None and key in mapping:
            self._mapping.update(tree.mapping)
        else:
            tree.key_at = origin
            mapping[key] = tree
        return problems


def _follow_env(place: _Place, name: str, origin: ValueOrigin) -> ConfigProblem | None:
    start = place.group
    assert start is not None
    parts = name.removeprefix(PREFIX).split("__")
    for part in parts:
        if place.entries is not None:
            matches = [key for key in place.keys if env_part(key) == part]
            if len(matches) != 1:
                where = dotted(place.path)
                said = f"{part} may be any of {listed(matches)}" if matches else f"{where} has no entry {part}"
                hint = "set it in the config file" if matches else f"there is {listed(place.keys) or 'none'}"
                return ConfigProblem(origin, "", said, hint)
            place.entry(matches[0])
            continue
        names = {env_part(field): field for field in place.names}
        if part not in names:
            candidates = [env_name((*place.path, field)) for field in place.names]
            if not place.path:
                candidates += [*RESERVED, *(knob.env for knob in derive(start) if ANY_KEY not in knob.path)]
            nearest = did_you_mean(name, candidates, after=f"{env_name(place.path)}__" if place.path else PREFIX)
            return ConfigProblem(origin, "", "is not a known name", nearest or "`penstock config docs` lists all names")
        place.field(names[part])
    return None


def _follow_flag(place: _Place, name: str, origin: ValueOrigin, unknown: str | None) -> ConfigProblem | None:
    start, rest = place.group, name
    assert start is not None
    while rest:
        if place.entries is not None:
            key, rest = _split_known_key(rest, place.keys)
            if key not in place.keys and rest:
                adding = f"to add it: --set '{dotted((*place.path, key))}={{...}}'"
                near = did_you_mean(key, place.keys, otherwise=f"there is {listed(place.keys) or 'none'}")
                return ConfigProblem(origin, "", f"{dotted(place.path)} has no entry {key!r}", f"{near}; {adding}")
            place.entry(key)
            continue
        word, rest = _split_first_name(rest)
        field = word.replace("-", "_")
        if field not in place.names:
            candidates = [dotted((*place.path, other)) for other in place.names]
            if not place.path:
                candidates += [knob.dotted for knob in derive(start) if ANY_KEY not in knob.path]
            hint = did_you_mean(name, candidates, after=f"{dotted(place.path)}.")
            known = f"known: {listed(place.names)}"
            if not place.names:
                lacking = "has the settings of a package that is not installed"
                known = f"{dotted(place.path)} {lacking if place.group is not None else 'is a single value'}"
            return ConfigProblem(origin, "", "is not a setting", hint or unknown or known)
        place.field(field)
    return None


def _split_override(override: str) -> tuple[str, str, str]:
    """Split ``path=value`` at the first ``=`` outside quotes."""
    quoted = False
    for index, letter in enumerate(override):
        if letter == '"':
            quoted = not quoted
        elif letter == "=" and not quoted:
            return override[:index], "=", override[index + 1 :]
    return override, "", ""


def _split_known_key(rest: str, keys: list[str]) -> tuple[str, str]:
    """Split a mapping's key off; model names contain dots, so a matching known key goes first."""
    for key in sorted(keys, key=len, reverse=True):
        for written in (key, f'"{key}"'):
            if rest == written or rest.startswith(f"{written}."):
                return key, rest[len(written) + 1 :]
    return _split_first_name(rest)


def _split_first_name(rest: str) -> tuple[str, str]:
    found = _PART.match(rest)
    if found is None:
        word, _, after = rest.partition(".")
        return word, after
    word = found.group(1) if found.group(1) is not None else found.group(2)
    return word, rest[found.end() :].removeprefix(".")
