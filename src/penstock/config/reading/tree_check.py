"""Tree check: reads a whole tree of texts against a settings struct, and lists every problem at once."""

import json
from collections.abc import Iterator
from typing import Any, TypeVar, get_args, get_origin

import msgspec

from penstock.config.derived.knobs import derive, dotted, entry_type, fields_by_name, range_text, type_text
from penstock.config.reading.problems import ConfigProblem, ConfigProblems, ValueOrigin, did_you_mean, listed
from penstock.config.reading.text_tree import TreeNode, TreeScalar, shown, tree_of
from penstock.config.reading.typed_value import UnreadableValue, read_value
from penstock.kernel.settings import Field, Knob, Settings, is_group, without_none

Path = tuple[str, ...]
S = TypeVar("S", bound=Settings)


def check_tree(group: type[Settings], root: TreeNode) -> tuple[dict[str, Any], list[ConfigProblem]]:
    """Check a tree against a settings struct.

    Returns: the given values that are valid, as plain values by name (nested); and every problem.
    """
    check = _TreeCheck(group)
    return check.group(group, root, ()), check.problems


def build(group: type[Settings], given: dict[str, Any], base: Settings | None = None) -> Any:
    """Return a settings struct: ``base`` (or the defaults) with the given values put in."""
    start = group() if base is None else base
    changes: dict[str, Any] = {}
    for name, value in given.items():
        field = fields_by_name(group)[name]
        entry = entry_type(field.type)
        if is_group(field.type):
            changes[name] = build(field.type, value, getattr(start, name))
        elif entry is not None:
            changes[name] = {key: build(entry, child) for key, child in value.items()}
        else:
            changes[name] = value
    return msgspec.structs.replace(start, **changes)


def settings_of_json(group: type[S], text: str, source: str) -> S:
    """Read one settings struct from JSON, as a supervisor writes it for its children.

    Args:
        source: where the text is from, for messages.
    Raises:
        ConfigProblems: something is wrong.
    """
    at = ValueOrigin("flag", source)
    try:
        plain = json.loads(text)
    except ValueError as error:
        raise ConfigProblems([ConfigProblem(at, "", f"is not JSON: {error}")]) from error
    given, problems = check_tree(group, tree_of(plain, at))
    if problems:
        raise ConfigProblems(problems)
    settings: S = build(group, given)
    return settings


class _TreeCheck:
    def __init__(self, root: type[Settings]) -> None:
        self.problems: list[ConfigProblem] = []
        self._root = root

    def group(self, group: type[Settings], node: TreeNode, path: Path) -> dict[str, Any]:
        """Return the valid values below a node that stands for a settings struct."""
        fields, valid = fields_by_name(group), dict[str, Any]()
        for name, child in self._mapping(node, path):
            here, field = (*path, name), fields.get(name)
            entry = None if field is None else entry_type(field.type)
            if field is None:
                self._unknown(child, here, list(fields))
            elif is_group(field.type):
                valid[name] = self.group(field.type, child, here)
            elif entry is not None:
                entries = self._mapping(child, here)
                valid[name] = {key: self.group(entry, below, (*here, key)) for key, below in entries}
            else:
                self._value(field, child, here, valid)
        return valid

    def _mapping(self, node: TreeNode, path: Path) -> Iterator[tuple[str, TreeNode]]:
        if node.mapping is None:
            self.problems.append(ConfigProblem(node.at, dotted(path), f"takes a mapping of keys, not {shown(node)}"))
        yield from (node.mapping or {}).items()

    def _unknown(self, node: TreeNode, path: Path, known: list[str]) -> None:
        here = f"known: {listed(known)}" if known else "the settings of this group come with a package that is missing"
        otherwise = self._known_elsewhere(path[-1]) or here
        hint = did_you_mean(path[-1], known, otherwise=otherwise)
        self.problems.append(ConfigProblem(node.key_at, dotted(path), "unknown key", hint))

    def _known_elsewhere(self, name: str) -> str | None:
        """Return where a key of that exact name would be right: a knob under the wrong group is a common slip."""
        places = [knob.dotted for knob in derive(self._root) if knob.path[-1] == name]
        return f"it belongs at {places[0].replace('*', 'NAME')}" if len(places) == 1 else None

    def _value(self, field: Field, node: TreeNode, path: Path, valid: dict[str, Any]) -> None:
        knob = field.knob
        assert knob is not None, field.name
        try:
            value = read_value(node.plain(), field.type, knob)
        except UnreadableValue as error:
            self._wrong(knob, node, path, str(error), error.hint)
            return
        parts = get_args(without_none(field.type))
        if isinstance(value, tuple) and ... not in parts and len(value) != len(parts):
            self._wrong(knob, node, path, f"does not fit: takes {type_text(field.type)}")
            return
        outside = [place for place, number in enumerate(_ranged_numbers(value)) if not _within_range(knob, number)]
        unit = f" {knob.unit}" if knob.unit not in (None, "count", "ratio") else ""
        for place in outside:
            item = node.value[place] if isinstance(node.value, list) else node
            if isinstance(value, dict):
                item = (node.mapping or {})[list(value)[place]]
            at = (*path, str(place)) if get_origin(without_none(field.type)) is tuple else path
            self._wrong(knob, item, at, f"is out of range: {range_text(knob)}{unit}")
        if not outside:
            valid[field.name] = value

    def _wrong(self, knob: Knob, node: TreeNode, path: Path, reason: str, hint: str | None = None) -> None:
        unshown = not isinstance(node.value, TreeScalar) or node.value.is_null or knob.secret
        if not unshown:
            reason = f"{shown(node)!r} {reason}"
        elif not reason.startswith(("takes", "has")):
            reason = f"the value {reason}"
        self.problems.append(ConfigProblem(node.at, dotted(path), reason, hint))


def _ranged_numbers(value: Any) -> list[int | float]:
    """Return the numbers of a value that a knob's range applies to: its own, or those of a list or a mapping."""
    items = value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else (value,)
    return [item for item in items if isinstance(item, int | float) and not isinstance(item, bool)]


def _within_range(knob: Knob, number: int | float) -> bool:
    return (
        (knob.ge is None or number >= knob.ge)
        and (knob.gt is None or number > knob.gt)
        and (knob.le is None or number <= knob.le)
        and (knob.lt is None or number < knob.lt)
    )
