"""Tree of typed texts, each with the place that it came from, before any check."""

from dataclasses import dataclass, field
from typing import Any

import msgspec

from penstock.config.reading.problems import DEFAULT, ValueOrigin

NULLS = ("", "~", "null", "Null", "NULL")


@dataclass(frozen=True, slots=True)
class TreeScalar:
    """A text as typed; ``quoted`` ones are never null."""

    text: str
    quoted: bool = False

    @property
    def is_null(self) -> bool:
        return not self.quoted and self.text in NULLS

    def __str__(self) -> str:
        return "null" if self.is_null else self.text


@dataclass(slots=True)
class TreeNode:
    """One place of the tree: a text, a list or a mapping. ``key_at`` is where its key stands."""

    value: "TreeScalar | list[TreeNode] | dict[str, TreeNode]"
    at: ValueOrigin
    key_at: ValueOrigin = field(default=DEFAULT)

    @property
    def mapping(self) -> "dict[str, TreeNode] | None":
        return self.value if isinstance(self.value, dict) else None

    def plain(self) -> Any:
        """Return nested dicts and lists of `TreeScalar`, without the places."""
        if isinstance(self.value, dict):
            return {key: child.plain() for key, child in self.value.items()}
        if isinstance(self.value, list):
            return [child.plain() for child in self.value]
        return self.value


def node_at(root: TreeNode, path: tuple[str | int, ...]) -> TreeNode:
    """Return the node at a path, or the deepest one on the way that exists."""
    here = root
    for part in path:
        if isinstance(here.value, dict) and part in here.value:
            here = here.value[str(part)]
        elif isinstance(here.value, list) and isinstance(part, int) and part < len(here.value):
            here = here.value[part]
        else:
            break
    return here


def shown(node: TreeNode) -> str:
    """Return a value for display: its text, or what kind of thing it is."""
    if isinstance(node.value, dict):
        return "a mapping"
    if isinstance(node.value, list):
        return f"a list of {len(node.value)}"
    text = str(node.value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def tree_of(value: Any, at: ValueOrigin = DEFAULT) -> TreeNode:
    """Turn a settings value into a tree, so that single values below it can be set."""
    return _grow(msgspec.to_builtins(value, order=None), at)


def _grow(value: Any, at: ValueOrigin) -> TreeNode:
    if isinstance(value, dict):
        return TreeNode({str(key): _grow(child, at) for key, child in value.items()}, at, at)
    if isinstance(value, list | tuple):
        return TreeNode([_grow(child, at) for child in value], at, at)
    if value is None:
        return TreeNode(TreeScalar("null"), at, at)
    if isinstance(value, bool):
        return TreeNode(TreeScalar("true" if value else "false"), at, at)
    return TreeNode(TreeScalar(str(value), quoted=isinstance(value, str)), at, at)
