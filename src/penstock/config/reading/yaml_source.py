"""Reads YAML into a tree with positions; texts stay texts, since the knob, not YAML, decides what ``off`` means."""

from collections.abc import Callable

import yaml

from penstock.config.reading.problems import ConfigProblem, ValueOrigin
from penstock.config.reading.text_tree import TreeNode, TreeScalar

BYTES_MAX = 1024 * 1024
NODES_MAX = 20_000
"""Most nodes after aliases were followed; a config has hundreds, an alias bomb has billions."""
DEPTH_MAX = 32

_MERGE_TAG = "tag:yaml.org,2002:merge"
_PLAIN_TAGS = {f"tag:yaml.org,2002:{name}" for name in ("null", "bool", "int", "float", "str", "timestamp", "value")}


def read_yaml(text: str, where: Callable[[int, int], ValueOrigin]) -> tuple[TreeNode | None, list[ConfigProblem]]:
    """Read one YAML document.

    Args:
        where: makes the origin of a line and a column, both from 1.
    Returns: the tree, or None where the text is not valid YAML or empty; and every problem found in it.
    """
    start = where(1, 1)
    if len(text.encode("utf-8", "surrogatepass")) > BYTES_MAX:
        return None, [ConfigProblem(start, "", f"is larger than {BYTES_MAX} bytes, so it is not a config")]
    try:
        document = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        return None, [_syntax(error, text, where)]
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        return None, [
            ConfigProblem(
                where(line, 1), "", f"has a character that YAML does not allow: {_code_point(error.character)}"
            )
        ]
    except RecursionError:
        return None, [ConfigProblem(start, "", f"is nested more than {DEPTH_MAX} levels deep")]
    if document is None:
        return None, []
    reader = _Reader(where)
    tree = reader.read(document, 0)
    return tree, reader.problems


class _Reader:
    def __init__(self, where: Callable[[int, int], ValueOrigin]) -> None:
        self.problems: list[ConfigProblem] = []
        self._where = where
        self._nodes = 0

    def read(self, node: yaml.Node, depth: int) -> TreeNode | None:
        """Copy a YAML node; None after a problem that makes the rest of it meaningless."""
        at = self._origin_of(node)
        self._nodes += 1
        if self._nodes > NODES_MAX:
            if self._nodes == NODES_MAX + 1:
                self._problem(at, f"has more than {NODES_MAX} values once its aliases are followed")
            return None
        if depth > DEPTH_MAX:
            self._problem(at, f"is nested more than {DEPTH_MAX} levels deep")
            self._nodes = NODES_MAX + 1  # an alias to its own parent: one problem is enough
            return None
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, at)
        if isinstance(node, yaml.SequenceNode):
            items = [self.read(item, depth + 1) for item in node.value]
            return TreeNode([item for item in items if item is not None], at, at)
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, at, depth)
        raise AssertionError(f"YAML has no node like {node!r}")

    def _scalar(self, node: yaml.ScalarNode, at: ValueOrigin) -> TreeNode | None:
        if node.style is None and node.tag not in _PLAIN_TAGS and node.tag != _MERGE_TAG:
            self._problem(at, f"has the tag {node.tag}, which a config does not know", "write the value without it")
            return None
        return TreeNode(TreeScalar(node.value, quoted=node.style is not None), at, at)

    def _mapping(self, node: yaml.MappingNode, at: ValueOrigin, depth: int) -> TreeNode:
        found: dict[str, TreeNode] = {}
        merged: dict[str, TreeNode] = {}
        for key_node, value_node in node.value:
            key_at = self._origin_of(key_node)
            if not isinstance(key_node, yaml.ScalarNode):
                self._problem(key_at, "a key must be one word, not a list or a mapping")
                continue
            if key_node.tag == _MERGE_TAG:
                self._merge(merged, value_node, depth)
                continue
            key = key_node.value
            value = self.read(value_node, depth + 1)
            if key in found:
                self._problem(key_at, f"{key!r} stands here a second time; the first is at {found[key].key_at}")
                continue
            if value is not None:
                value.key_at = key_at
                found[key] = value
        return TreeNode({**merged, **found}, at, at)

    def _merge(self, into: dict[str, TreeNode], node: yaml.Node, depth: int) -> None:
        """Take the keys of ``<<: *name``; earlier ones win, as YAML's merge key says."""
        sources = node.value if isinstance(node, yaml.SequenceNode) else [node]
        for source in sources:
            tree = self.read(source, depth + 1)
            if tree is None:
                continue
            if tree.mapping is None:
                self._problem(self._origin_of(source), "'<<' takes a mapping or a list of mappings")
                continue
            for key, value in tree.mapping.items():
                into.setdefault(key, value)

    def _origin_of(self, node: yaml.Node) -> ValueOrigin:
        return self._where(node.start_mark.line + 1, node.start_mark.column + 1)

    def _problem(self, at: ValueOrigin, message: str, hint: str | None = None) -> None:
        self.problems.append(ConfigProblem(at, "", message, hint))


def _code_point(character: object) -> str:
    return f"U+{character:04X}" if isinstance(character, int) else repr(character)


def _syntax(error: yaml.MarkedYAMLError, text: str, where: Callable[[int, int], ValueOrigin]) -> ConfigProblem:
    mark = error.problem_mark or error.context_mark
    line, column = (mark.line, mark.column) if mark is not None else (0, 0)
    lines = text.splitlines()
    row = lines[line] if line < len(lines) else ""
    indent = row[: len(row) - len(row.lstrip())]
    if "\t" in indent or (column < len(row) and row[column] == "\t"):
        tab = row.index("\t")
        return ConfigProblem(where(line + 1, tab + 1), "", "a tab indents this line; YAML allows only spaces")
    parts = [part for part in (error.context, error.problem) if part]
    hint = None
    if "found duplicate anchor" in (error.problem or ""):
        hint = "give each anchor its own name"
    elif "mapping values are not allowed" in (error.problem or ""):
        hint = "quote a value that has a colon and a space in it, or check the indentation"
    elif "expected a single document" in (error.context or "") + (error.problem or ""):
        hint = "a config is one document: take the line '---' out"
    return ConfigProblem(where(line + 1, column + 1), "", f"is not valid YAML: {' '.join(parts)}", hint)
