"""Checks the shape of src: one meaning per class name, file names that can be looked up, lines of code that only fall.

usage: python -m tests.house [--write]      lists all faults; --write puts today's lines of code into ARCHITECTURE.md,
                                            and those of each room into docs/why/lines/rooms.csv

`make lint` runs it: one pass over the files, and no test.
"""

import ast
import csv
import io
import re
import subprocess
import sys
import tokenize
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src"
PAGE = ROOT / "ARCHITECTURE.md"
LEDGER = ROOT / "docs/why/lines.md"
SLACK = 40
"""Lines of code that a package may lose before ARCHITECTURE.md must say so."""
FILES_PER_FOLDER = 18
KINDS = {"__init__", "__main__", "events", "extension", "journal", "settings"}
"""File names that say a file's kind within its room: each room may have one."""
COMMANDS = "cli"
"""Folders of commands: one has the name of what it is about, as the room's own file may have."""
PRONOUN_ENGLISH = {
    *("told", "said", "seen", "held", "kept", "found", "asked", "because"),
    *("word", "wish", "wishes", "wished", "whom", "who", "came", "gone"),
}
"""Words that say how a value came instead of what it is; the glossary has the noun."""
PRONOUN_ENGLISH_WRITTEN = {"plugin_asked"}
"""Fields of snapshots: another name would change the bytes of old journals."""
PRONOUN_ENGLISH_LEFT = {"penstock": 14}
"""Packages that still have some, with how many there are at most: empty it when they are renamed."""
PHRASES = {
    r"(?<!here )\bis no (?!longer|such|one\b|use\b|good\b|need\b)": "is not a ..., is not valid ...",
    r"\b(is|are) none of\b": "is not one of ...",
    r"\bin vain\b": "what nobody uses, without effect",
    r"\bnonsense\b": "invalid data",
    r"\bhas no say\b": "is left out",
    r"\bstopped to \w+": "stopped ...ing",
    r"\bsent what\b": "sent something that ...",
    r"\bas last heard\b": "the last known state",
}
"""Translated English, with what is said instead: no text that a user reads has it."""
FILES_NAMED = {"csv", "json", "jsonl", "md", "py", "yaml"}
PROMPT_LENGTHS = 8
"""Classes that may have a field ``isl``; others hold a `RequestShape`, or a request that has one."""
PLAIN_DICTS = 125
"""Places that may say ``dict[str, Any]``: what is ours is a struct, JSON of others a `JsonObject`."""


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def files() -> list[Path]:
    return sorted(SRC.rglob("*.py"))


@cache
def classes() -> list[tuple[Path, ast.ClassDef]]:
    return [(path, node) for path in files() for node in ast.walk(tree_of(path)) if isinstance(node, ast.ClassDef)]


def first_line(path: Path) -> str:
    return (ast.get_docstring(tree_of(path)) or "").split("\n")[0]


def class_names() -> Iterator[str]:
    """A class name means one thing, and none says what something is like."""
    places = defaultdict(list)
    for path, kind in classes():
        places[kind.name].append(str(path.relative_to(SRC)))
    for name, where in places.items():
        if len(where) > 1:
            yield f"the class name {name} stands in {', '.join(where)}"
        if name.endswith("Like"):
            yield f"the class name {name} in {where[0]} says what it is like, not what it is"


def phrases() -> Iterator[str]:
    """Texts that users read are English as it is spoken."""
    for path in files():
        described = {id(each.value) for node in ast.walk(tree_of(path)) for each in _statements(node)}
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in described:
                for phrase, better in PHRASES.items():
                    if found := re.search(phrase, node.value):
                        yield f"{path.relative_to(SRC)}:{node.lineno}: {found[0]!r}: say {better}"


def _statements(node: ast.AST) -> list[ast.Expr]:
    """Return the expressions that stand by themselves in a body: docstrings among them."""
    return [each for each in getattr(node, "body", None) or [] if isinstance(each, ast.Expr)] if _has_body(node) else []


def _has_body(node: ast.AST) -> bool:
    return isinstance(getattr(node, "body", None), list)


@cache
def attributes_of(kind: ast.ClassDef) -> set[str]:
    """Return the fields of a class, and what its methods set on ``self``."""
    fields = {
        node.target.id for node in kind.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    targets = [node for node in ast.walk(kind) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)]
    return fields | {node.attr for node in targets if isinstance(node.value, ast.Name) and node.value.id == "self"}


def owners_of(*names: str) -> list[str]:
    """Return the classes that have all of these attributes."""
    return [kind.name for _, kind in classes() if set(names) <= attributes_of(kind)]


def descriptions() -> Iterator[str]:
    """What rooms share is described once."""
    if len(pools := owners_of("desired")) > 2:
        yield f"a pool has its desired replicas in `Pool` (`PoolTick` is the written record), not in {', '.join(pools)}"
    if (replicas := owners_of("id", "state", "gpus")) != ["Replica"]:
        yield f"a replica is described in `Replica` alone, not in {', '.join(replicas)}"
    described = {"EngineLimits", "WorkerCard"}  # a card gives its limits
    configured = {"SimSettings", "PoolSettings"}
    measured = {"Profile", "DecodeInterpolator", "MetricNamesOf"}  # a profile's own columns, and gauges of a card
    for limit in ("max_num_seqs", "max_num_batched_tokens", "kv_tokens"):
        for owner in sorted(set(owners_of(limit)) - described - configured - measured):
            yield f"{owner}.{limit}: what an engine has room for is described in `EngineLimits`"
    if len(holders := owners_of("isl")) > PROMPT_LENGTHS:
        yield f"{len(holders)} classes hold the length of a prompt, {PROMPT_LENGTHS} may: {', '.join(holders)}"
    counts = {str(path.relative_to(SRC)): path.read_text().count("dict[str, Any]") for path in files()}
    if sum(counts.values()) > PLAIN_DICTS:
        places = ", ".join(f"{path} {count}" for path, count in counts.items() if count)
        yield f"dict[str, Any] stands in {sum(counts.values())} places, {PLAIN_DICTS} may have it: {places}"


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


def value_names() -> Iterator[str]:
    """Names of functions, parameters and attributes say what a value is."""
    bad = defaultdict(list)
    for path in files():
        for name in defined_names(path):
            if PRONOUN_ENGLISH & set(name.lower().split("_")) and name not in PRONOUN_ENGLISH_WRITTEN:
                bad[path.relative_to(SRC).parts[0]].append(f"{path.relative_to(SRC)}: {name}")
    for room, names in bad.items():
        if len(names) > PRONOUN_ENGLISH_LEFT.get(room, 0):
            yield f"names that say how a value came instead of what it is: {', '.join(names)}"


def helper_names() -> Iterator[str]:
    """A private helper whose name is one word, which says little in a stack trace, stands in one file."""
    places = defaultdict(set)
    for path in files():
        for node in tree_of(path).body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and re.fullmatch(r"_[^_]+", node.name):
                places[node.name].add(str(path.relative_to(SRC)))
    for name, where in places.items():
        if len(where) > 1:
            yield f"the helper {name} stands in {', '.join(sorted(where))}: let its name say what it does to what"


def file_names() -> Iterator[str]:
    """A file name stands in one folder, and a folder has no more files than a reader looks through."""
    places = defaultdict(list)
    for path in files():
        if path.stem not in KINDS and path.parent.name != COMMANDS:
            places[path.name].append(str(path.relative_to(SRC)))
    for where in places.values():
        if len(where) > 1:
            yield f"the file name of {where[0]} stands in another folder, too: {', '.join(where[1:])}"
    for folder in sorted({path.parent for path in files() if path.parent.name != COMMANDS}):
        if (count := len(list(folder.glob("*.py")))) > FILES_PER_FOLDER:
            yield f"{folder.relative_to(SRC)} has {count} files, more than {FILES_PER_FOLDER}"


def imports_of(path: Path) -> set[str]:
    """Return the modules of Penstock that a file imports, anywhere in it."""
    names = set[str]()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return names


def circles() -> Iterator[str]:
    """Imports inside functions and under TYPE_CHECKING count: whoever reads one of the files needs them all."""
    modules = {".".join(path.relative_to(SRC).with_suffix("").parts): path for path in files()}
    graph = {name: imports_of(path) & modules.keys() - {name} for name, path in modules.items()}
    while leaves := {name for name, below in graph.items() if not below & graph.keys()}:
        graph = {name: below for name, below in graph.items() if name not in leaves}
    # What imports a circle is not in it: take out what nobody that is left imports.
    while roots := graph.keys() - {name for below in graph.values() for name in below}:
        graph = {name: below for name, below in graph.items() if name not in roots}
    for name, below in graph.items():
        yield f"{name} is in a circle of imports with {', '.join(sorted(below & graph.keys()))}"


@cache
def names_at_top(path: Path) -> set[str]:
    """Return the names that a module has for those who import it, below ``if`` and ``try`` as well."""
    names = set[str]()
    left: list[ast.AST] = list(tree_of(path).body)
    while left:
        match left.pop():
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                names |= {alias.asname or alias.name.partition(".")[0] for alias in aliases}
            case ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.stmt() | ast.Tuple() | ast.List() | ast.ExceptHandler() as node:
                left += ast.iter_child_nodes(node)
    return names


def module_file(name: str) -> Path | None:
    """Return the file of a module of ours; None where it belongs to others or does not exist."""
    top, *rest = name.split(".")
    home = ROOT / top if top == "tests" else SRC / top
    module = home.joinpath(*rest)
    files = (module / "__init__.py", module.with_suffix(".py")) if (home / "__init__.py").exists() else ()
    return next((file for file in files if file.exists()), None)


def lost_names() -> Iterator[str]:
    """What tests, benches and examples import of ours exists: suites of engines are not even read on most machines."""
    for folder in ("tests", "bench", "deploy", "examples"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            modules: dict[str, Path] = {}
            for node in ast.walk(tree_of(path)):
                fault = ""
                match node:
                    case ast.ImportFrom(module=str(home), names=aliases, level=0):
                        below = {each: module_file(f"{home}.{each.name}") for each in aliases}
                        modules |= {each.asname or each.name: file for each, file in below.items() if file}
                        apart = [each.name for each, file in below.items() if not file and each.name != "*"]
                        fault = lost_name(home, module_file(home), apart)
                    case ast.Attribute(value=ast.Name(id=name), attr=attribute) if name in modules:
                        fault = lost_name(name, modules[name], [attribute])
                if fault:
                    yield f"{path.relative_to(ROOT)}:{node.lineno}: {fault}"


def lost_name(module: str, file: Path | None, names: list[str]) -> str:
    """Return what is said of the names that a module does not have, if there are any."""
    if file is None:
        ours = module.partition(".")[0] in {"tests", *(path.name for path in SRC.iterdir())}
        return f"there is no {module} to import {', '.join(names)} of" if ours and names else ""
    known = names_at_top(file)
    lost = [name for name in names if name not in known and not name.startswith("__")]
    return f"{module} has no {', '.join(lost)}" if lost and "__getattr__" not in known else ""


def first_lines() -> Iterator[str]:
    """A file's first line is one sentence that says what the file does."""
    for path in files():
        line = first_line(path)
        if path.read_text().strip() and (not line.endswith(".") or "?" in line):
            yield f"{path.relative_to(SRC)}: {line!r} should be one sentence that says what the file does"


@cache
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


def lines_of_packages() -> dict[str, int]:
    """Return the lines of code of each package."""
    lines: dict[str, int] = defaultdict(int)
    for path in files():
        lines[path.relative_to(SRC).parts[0]] += code_lines(path)
    return dict(lines)


def written_lines(text: str) -> dict[str, int]:
    """Return the lines of code of each package as a text of ARCHITECTURE.md has them."""
    rows = re.findall(r"^\| `(\w+)/` \| ([\d,]+) \|$", text, re.MULTILINE)
    return {folder: int(lines.replace(",", "")) for folder, lines in rows}


def budget() -> Iterator[str]:
    """Each package has the lines of code that ARCHITECTURE.md says, which grow for a written reason only."""
    written = written_lines(PAGE.read_text())
    for folder, count in lines_of_packages().items():
        if folder not in written:
            yield f"{folder} has no row among the lines of code in ARCHITECTURE.md"
        elif count > written[folder]:
            yield (
                f"{folder} has {count} lines of code, {written[folder]} in ARCHITECTURE.md: take as many away, or write"
                f" what they buy into {LEDGER.relative_to(ROOT)} and run `python -m tests.house --write`"
            )
        elif count < written[folder] - SLACK:
            yield f"{folder} has only {count} lines of code left: `python -m tests.house --write` puts that down"
    for folder in written.keys() - lines_of_packages().keys():
        yield f"{folder}, a row among the lines of code in ARCHITECTURE.md, does not exist"
    yield from growth(versions())


def growth(history: list[tuple[str, str, str]]) -> Iterator[str]:
    """Name the packages whose written lines grew from one version to the next, without a smaller total or a reason.

    Args:
        history: of ARCHITECTURE.md and of the ledger, oldest first: (name of the version, text, text).
    """
    for (_, page_before, ledger_before), (name, page, ledger) in pairwise(history):
        before, after = written_lines(page_before), written_lines(page)
        grown = [folder for folder, count in after.items() if before and count > before.get(folder, 0)]
        if sum(after.values()) < sum(before.values()):
            continue
        reasons = set(bought(ledger)) - set(bought(ledger_before))
        for folder in grown:
            if not any(f"`{folder}/`" in row for row in reasons):
                yield f"{name}: {folder} grew, the total did not fall, and {LEDGER.name} does not say what that bought"


def bought(ledger: str) -> list[str]:
    return [line for line in ledger.splitlines() if line.startswith("| 2")]


def versions() -> list[tuple[str, str, str]]:
    """Return the last committed versions of both pages and the present one; outside a repository that alone."""
    names = git("log", "-n", "20", "--first-parent", "--format=%h", "--", str(PAGE)).split()[::-1]
    history = [(name, shown(name, PAGE), shown(name, LEDGER)) for name in names]
    return [*history, ("now", PAGE.read_text(), LEDGER.read_text())]


def shown(commit: str, path: Path) -> str:
    return git("show", f"{commit}:{path.relative_to(ROOT)}")


def git(*arguments: str) -> str:
    """Return what git prints, or nothing: a source archive has no history, and a file may be younger than a commit."""
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout


def room_rows() -> Iterator[str]:
    """Each folder with code has a row in ARCHITECTURE.md that says what is in it, itself or by a folder around it."""
    known = set(re.findall(r"^\| `([\w/]+)/` \| .*[a-z].* \|$", PAGE.read_text(), re.MULTILINE))
    folders = {folder for path in files() if len((folder := path.relative_to(SRC).parent).parts) > 1}
    for folder in sorted(folders):
        if not any(str(each) in known for each in (folder, *folder.parents)):
            yield f"{folder} has no row in ARCHITECTURE.md"
    for room in sorted(known - {str(folder) for folder in folders}):
        yield f"ARCHITECTURE.md has a row for {room}, which does not exist"


def page_names() -> Iterator[str]:
    """A dotted name in ARCHITECTURE.md is a module's or what stands in one; without a package it is the server's."""
    for name in sorted(set(re.findall(r"`([a-z_]+(?:\.\w+)+)`", PAGE.read_text()))):
        whole = name if (SRC / name.partition(".")[0]).is_dir() else f"penstock.{name}"
        parts = whole.split(".")
        around = [(module_file(".".join(parts[:-cut])), parts[-cut]) for cut in (1, 2)]
        inside = any(
            file and file.name != "__init__.py" and attribute in names_at_top(file) for file, attribute in around
        )
        known = module_file(whole) or inside
        if not known and name.rpartition(".")[2] not in FILES_NAMED:
            yield f"ARCHITECTURE.md names {name}, which does not exist"


CHECKS: tuple[Callable[[], Iterator[str]], ...] = (
    *(phrases, class_names, descriptions, value_names, helper_names, file_names),
    *(circles, lost_names, first_lines, room_rows, page_names, budget),
)


def write(lines: Mapping[str, int]) -> None:
    """Put the lines of code of each package into ARCHITECTURE.md."""
    text = PAGE.read_text()
    for folder, count in lines.items():
        text = re.sub(rf"^(\| `{folder}/` \|) [\d,]+ \|$", rf"\1 {count:,} |", text, flags=re.MULTILINE)
    total = sum(lines.values())
    PAGE.write_text(re.sub(r"^(\| \*\*all\*\* \|) [\d,]+ \|$", rf"\1 {total:,} |", text, flags=re.MULTILINE))


def rooms() -> list[tuple[str, int, int, str]]:
    """Return each folder with code, its files and lines of code, and what ARCHITECTURE.md says is in it."""
    texts = dict(re.findall(r"^\| `([\w/]+)/` \| (.*[a-z].*) \|$", PAGE.read_text(), re.MULTILINE))
    counts: dict[str, list[int]] = defaultdict(list)
    for path in files():
        counts[str(path.relative_to(SRC).parent)].append(code_lines(path))
    return [(name, len(each), sum(each), texts.get(name, "")) for name, each in sorted(counts.items())]


def main(arguments: list[str]) -> int:
    if arguments == ["--write"]:
        write(lines_of_packages())
        with (LEDGER.parent / "lines" / "rooms.csv").open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([("folder", "files", "lines", "what is in it"), *rooms()])
    faults = [fault for check in CHECKS for fault in check()]
    for fault in faults:
        print(fault)
    print(f"{len(files())} files of src, {len(faults)} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
