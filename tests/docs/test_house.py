"""The shape of the house: one meaning per class name, file names that can be looked up, rooms within their budget."""

import ast
import io
import re
import tokenize
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

from tests.run import ONLY_BY_NAME, STATEFUL, SUITES, WITH_PROGRAMS

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src/penstock"
KINDS = {"__init__", "__main__", "events", "journal", "settings"}
"""File names that say a file's kind within its room: each room may have one."""
COMMANDS = SRC / "cli"
"""A command has the name of what it is about, as the room's own file may have."""
PRONOUN_ENGLISH = {
    *("told", "said", "seen", "held", "kept", "found", "asked", "because"),
    *("word", "wish", "wishes", "wished", "whom", "who", "came", "gone"),
}
"""Words that say how a value came instead of what it is; the glossary has the noun."""
PRONOUN_ENGLISH_WRITTEN = {"plugin_asked"}
"""Fields of snapshots: another name would change the bytes of old journals."""
PRONOUN_ENGLISH_LEFT = {"config": 10, "kernel": 1, "router": 11}
"""Rooms that still have some, with how many there are at most: empty it when they are renamed."""
PROMPT_LENGTHS = 8
"""Classes that may have a field ``isl``; others hold a `RequestShape`, or a request that has one."""
PLAIN_DICTS = 125
"""Places that may say ``dict[str, Any]``: what is ours is a struct, JSON of others a `JsonObject`."""


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def files() -> list[Path]:
    return sorted(SRC.rglob("*.py"))


def first_line(path: Path) -> str:
    return (ast.get_docstring(tree_of(path)) or "").split("\n")[0]


def test_no_class_name_means_two_things() -> None:
    places = defaultdict(list)
    for path in files():
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(str(path.relative_to(SRC)))
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


def attributes_of(kind: ast.ClassDef) -> set[str]:
    """Return the fields of a class, and what its methods set on ``self``."""
    fields = {
        node.target.id for node in kind.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    targets = [node for node in ast.walk(kind) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)]
    return fields | {node.attr for node in targets if isinstance(node.value, ast.Name) and node.value.id == "self"}


def owners_of(*names: str) -> list[str]:
    """Return the classes that have all of these attributes."""
    kinds = [node for path in files() for node in ast.walk(tree_of(path)) if isinstance(node, ast.ClassDef)]
    return [kind.name for kind in kinds if set(names) <= attributes_of(kind)]


def test_a_pool_and_a_replica_are_described_once() -> None:
    assert len(owners_of("desired")) <= 2, "a pool has its desired replicas in `Pool`; `PoolTick` is the written record"
    assert owners_of("id", "state", "gpus") == ["Replica"]


def test_what_an_engine_has_room_for_is_described_once() -> None:
    described = {"EngineLimits", "WorkerCard"}  # a card gives its limits
    configured = {"SimSettings", "PoolSettings"}
    measured = {"Profile", "DecodeInterpolator", "MetricNamesOf"}  # a profile's own columns, and gauges of a card
    limits = ("max_num_seqs", "max_num_batched_tokens", "kv_tokens")
    owners = {owner for name in limits for owner in owners_of(name)}
    assert owners - described - configured - measured == set()


def test_few_classes_hold_the_length_of_a_prompt_themselves() -> None:
    holders = owners_of("isl")
    assert len(holders) <= PROMPT_LENGTHS, holders


def test_few_places_hold_a_dict_of_anything() -> None:
    counts = {str(path.relative_to(SRC)): path.read_text().count("dict[str, Any]") for path in files()}
    assert sum(counts.values()) <= PLAIN_DICTS, {path: count for path, count in counts.items() if count}


def defined_names(path: Path) -> list[str]:
    """Return the names of functions, parameters and attributes that a file defines."""
    names = []
    for node in ast.walk(tree_of(path)):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.arg(arg=name):
                names.append(name)
            case ast.Attribute(attr=name, ctx=ast.Store()):
                names.append(name)
            case ast.ClassDef(body=body):
                names += [
                    each.target.id
                    for each in body
                    if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
                ]
    return names


def test_names_say_what_a_value_is() -> None:
    bad = defaultdict(list)
    for path in files():
        for name in defined_names(path):
            if PRONOUN_ENGLISH & set(name.lower().split("_")) and name not in PRONOUN_ENGLISH_WRITTEN:
                bad[path.relative_to(SRC).parts[0]].append(f"{path.relative_to(SRC)}: {name}")
    assert {room: names for room, names in bad.items() if len(names) > PRONOUN_ENGLISH_LEFT.get(room, 0)} == {}


def test_no_protocol_is_named_after_what_it_is_like() -> None:
    names = [node.name for path in files() for node in ast.walk(tree_of(path)) if isinstance(node, ast.ClassDef)]
    assert [name for name in names if name.endswith("Like")] == []


def test_no_file_name_stands_in_two_folders() -> None:
    places = defaultdict(list)
    for path in files():
        if path.stem not in KINDS and path.parent != COMMANDS:
            places[path.name].append(str(path.relative_to(SRC)))
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


def imports_of(path: Path) -> set[str]:
    """Return the modules of Penstock that a file imports, anywhere in it."""
    names = set[str]()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return names


def test_no_files_import_each_other_in_a_circle() -> None:
    """Imports inside functions and under TYPE_CHECKING count: whoever reads one of the files needs them all."""
    modules = {".".join(path.relative_to(SRC.parent).with_suffix("").parts): path for path in files()}
    graph = {name: imports_of(path) & modules.keys() - {name} for name, path in modules.items()}
    while leaves := {name for name, below in graph.items() if not below & graph.keys()}:
        graph = {name: below for name, below in graph.items() if name not in leaves}
    # What imports a circle is not in it: take out what nobody that is left imports.
    while roots := graph.keys() - {name for below in graph.values() for name in below}:
        graph = {name: below for name, below in graph.items() if name not in roots}
    assert {name: sorted(below & graph.keys()) for name, below in graph.items()} == {}


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(SRC)))
def test_the_first_line_names_the_noun(path: Path) -> None:
    line = first_line(path)
    if path.read_text().strip():
        assert line.endswith(".") and "?" not in line, f"{line!r} should be one sentence that says what the file does"


def test_no_folder_has_more_files_than_a_reader_looks_through() -> None:
    counts = {folder: len(list(folder.glob("*.py"))) for folder in SRC.rglob("*/") if folder.is_dir()}
    crowded = {str(folder.relative_to(SRC)): count for folder, count in counts.items() if count > 18}
    crowded.pop("cli", None)  # a file for each command
    assert crowded == {}


def code_lines(path: Path) -> int:
    """Count lines of code proper: no blank lines, comments or docstrings."""
    text = path.read_text()
    documented = set[int]()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            documented.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    layout = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    lines = set[int]()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in layout:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - documented)


def rooms() -> dict[str, int]:
    """Return the rooms of ARCHITECTURE.md with the lines of code that each may have."""
    text = (ROOT / "ARCHITECTURE.md").read_text()
    table = text[text.index("| room | what is in it") : text.index("### Where the house is going")]
    rows = re.findall(r"^\| `([\w/]+)/` \|.*\| ([\d,]+) \|$", table, re.MULTILINE)
    return {room: int(lines.replace(",", "")) for room, lines in rows}


def room_of(path: Path, known: dict[str, int]) -> str:
    """Return the innermost room that a file lies in."""
    folder = path.relative_to(SRC).parent
    return next((str(each) for each in (folder, *folder.parents) if str(each) in known), "")


def test_every_room_is_within_its_budget() -> None:
    known = rooms()
    lines: dict[str, int] = defaultdict(int)
    for path in files():
        if path.parent != SRC:
            lines[room_of(path, known)] += code_lines(path)
    assert "" not in lines, "a folder of src/penstock has no row in ARCHITECTURE.md"
    assert {room: count for room, count in lines.items() if count > known[room]} == {}
    assert {room for room in known if room not in lines} == set(), "ARCHITECTURE.md has a row for a room that is gone"


def test_every_folder_of_tests_is_in_a_suite() -> None:
    folders = {f"tests/{path.name}" for path in (ROOT / "tests").iterdir() if any(path.glob("**/test_*.py"))}
    usual = {part for name, arguments in SUITES.items() if name not in ONLY_BY_NAME for part in arguments}
    assert folders - usual == {"tests/soak"}
    assert folders - set(SUITES["slow"]) == {*WITH_PROGRAMS, *STATEFUL, *SUITES["engines"]}
