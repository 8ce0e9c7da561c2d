"""What the documents say is so: commands and flags exist, links lead somewhere, the examples are valid."""

import importlib.util
import re
import shlex
from collections.abc import Iterator
from datetime import date, datetime
from pathlib import Path

import click

from penstock.cli.main import COMMANDS, HIDDEN, cli
from penstock.cli.shared.settings_flags import SettingsCommand
from penstock.config.derived.knobs import ANY_KEY, PREFIX, RESERVED, derive, env_part
from penstock.config.reading.load import load
from penstock.config.settings.cluster_settings import ClusterSettings
from penstock.config.settings.parser_names import FAMILIES, REASONING_PARSERS, TOOL_PARSERS
from penstock.kernel.errors import ConfigError
from penstock_kv.inside.weights.weight_protocol import WEIGHTS_ENV
from penstock_lab.report.markdown import ROWS_MAX
from tests.docs.pages import GENERATED, ROOT
from tests.llamacpp.setup.install import VERSION as LLAMACPP
from tests.sglang.setup.install import SGLANG
from tests.vllm.setup.install import VLLM

WORDS_MAX = 60_000
"""Words of all committed pages below docs/: a reader's two hours. A page that grows takes them from another one."""
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
READMES = sorted(ROOT.glob("examples/**/*.md"))
NAMING = ("src", "tests", "bench", "deploy", "examples")
TEXT = {".py", ".md", ".yaml", ".json", ".js", ".html", ".proto", ".service"}
EXAMPLES = sorted([*ROOT.glob("examples/*.yaml"), *ROOT.glob("examples/recipes/*.yaml")])
FENCE = re.compile(r"^```[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`((?:\.venv/bin/)?penstock [a-z][^`]*)`")
ENV = re.compile(r"\bPENSTOCK_[A-Z0-9_]+\b")
NAMES = {*RESERVED, "PENSTOCK_", WEIGHTS_ENV, "PENSTOCK_MODEL"}
"""Not of a cluster's settings; the last is one that the workflow in examples/agents reads."""
KNOBS = re.compile(
    "|".join(
        PREFIX + "__".join("[A-Z0-9_]+" if part == ANY_KEY else env_part(part) for part in knob.path)
        for knob in derive(ClusterSettings)
    )
)


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def commands_of(text: str) -> list[str]:
    """Return every command line that a page (or a comment of an example) shows."""
    found = []
    for block in FENCE.findall(text):
        joined = block.replace("\\\n", " ")
        for line in joined.splitlines():
            found.extend(re.findall(r"(?:^|[|;&]\s*|\s)((?:\.venv/bin/)?penstock [a-z].*)$", line.strip()))
    found.extend(INLINE.findall(text))
    found.extend(re.findall(r"^#\s+(?:\S+=\S+ )*(penstock [a-z].*)$", text, re.MULTILINE))
    return [re.sub(r"\s+#.*$", "", command).split(" | ")[0].split(" > ")[0] for command in found]


def pages() -> list[tuple[str, str]]:
    return [(name_of(path), command) for path in [*PAGES, *EXAMPLES] for command in commands_of(path.read_text())]


def test_the_pages_show_commands():
    assert {page for page, _ in pages()} >= {
        "README.md",
        "docs/start.md",
        "docs/guides/operating.md",
    }


def test_the_pages_have_few_words() -> None:
    words = {name_of(path): len(path.read_text().split()) for path in ROOT.glob("docs/**/*.md")}
    heaviest = ", ".join(f"{name} {words[name]:,}" for name in sorted(words, key=words.__getitem__, reverse=True)[:12])
    assert sum(words.values()) <= WORDS_MAX, f"docs/ has {sum(words.values()):,} words; the heaviest: {heaviest}"


def test_commands_that_are_shown_exist_and_take_their_flags():
    faults = [f"{page}: {line!r}: {fault}" for page, line in pages() for fault in command_faults(line)]
    assert not faults, "\n".join(faults)


def command_faults(line: str) -> Iterator[str]:
    """Yield what is wrong with a command line: a command or a flag that doesn't exist."""
    words = shlex.split(line)[1:]
    command: click.Command = cli
    context = click.Context(cli)
    while words and isinstance(command, click.Group):
        name = words.pop(0)
        if name.startswith("-"):
            if name not in ("--help", "--version"):
                yield f"unknown flag {name}"
            return
        inner = command.get_command(context, name)
        if inner is None:
            yield f"unknown command {name}"
            return
        command, context = inner, click.Context(inner)
    own = {option for param in command.get_params(context) for option in (*param.opts, *param.secondary_opts)}
    for word in words:
        flag = word.partition("=")[0]
        if flag.startswith("--") and flag not in own and command.name not in ("sim", "frontend"):
            if not isinstance(command, SettingsCommand):
                yield f"unknown flag {flag}"
            elif not any(fits(flag, knob.flag) for knob in command.knobs()):
                yield f"{flag} is not a setting"


def fits(flag: str, derived: str) -> bool:
    pattern = re.escape(derived).replace("NAME", r".+").replace("_", "[_-]")
    return re.fullmatch(pattern, flag) is not None


def test_environment_names_that_are_shown_exist():
    faults = [
        f"{name_of(path)}: unknown variable {name}"
        for path in [*PAGES, *EXAMPLES]
        for name in sorted({*ENV.findall(path.read_text())} - NAMES)
        if not KNOBS.fullmatch(name)
    ]
    assert not faults, "\n".join(faults)


def test_links_between_pages_lead_somewhere():
    faults = [f"{name_of(path)}: {fault}" for path in [*PAGES, *READMES] for fault in link_faults(path)]
    assert not faults, "\n".join(faults)


def link_faults(path: Path) -> Iterator[str]:
    """Yield the links of a page to files that are not there, or to headings that their page doesn't have."""
    text = FENCE.sub("", path.read_text())
    inline = re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", text)
    for target, part in [*inline, *((source, "") for source in re.findall(r"(?:src|srcset)=\"([^\":]+)\"", text))]:
        page = (path.parent / target if target else path).resolve()
        generated = GENERATED.get(str(page.relative_to(ROOT / "docs"))) if page.is_relative_to(ROOT / "docs") else None
        if generated is not None and path.name == "README.md":
            yield f"{target} is a page of the site alone"
        elif generated is None and not page.exists():
            yield f"{target} does not exist"
        elif part and part not in anchors(generated or page.read_text()):
            yield f"{target} has no heading for #{part}"


def anchors(text: str) -> set[str]:
    """Return what a link to a heading of this page may name, as GitHub derives it."""
    titles = re.findall(r"^#+ (.+)$", FENCE.sub("", text), re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", re.sub(r"\]\([^)]*\)", "", title)).strip().lower().replace(" ", "-") for title in titles
    }


def test_every_page_that_a_file_names_exists():
    sources = [path for folder in NAMING for path in sorted(ROOT.glob(f"{folder}/**/*")) if path.suffix in TEXT]
    faults = [
        f"{name_of(path)}: {name} does not exist"
        for path in [*PAGES, *sources, ROOT / "Makefile", ROOT / ".ci" / "run"]
        for name in re.findall(r"(?<![\w/.-])docs/[\w/.-]+\.(?:md|svg|png|csv)\b", path.read_text())
        if not (ROOT / name).is_file()
    ]
    assert not faults, "\n".join(faults)


def test_the_list_of_pages_has_every_page():
    index = ROOT / "docs" / "index.md"
    listed = re.findall(r"^- \[[^]]+\]\(([^)]+)\): \S", index.read_text(), re.MULTILINE)
    there = {str(page.relative_to(index.parent)) for page in index.parent.glob("**/*.md")} - {index.name}
    assert sorted(listed) == sorted(there | GENERATED.keys())


def test_measured_pages_begin_with_their_result_and_have_their_long_tables_beside_them():
    measured = sorted(ROOT.glob("docs/bench/*.md"))
    faults = [f"{name_of(path)}: {fault}" for path in measured for fault in result_faults(path.read_text())]
    assert measured and not faults, "\n".join(faults)


def result_faults(text: str) -> Iterator[str]:
    """Yield what a measured page lacks: a result of its newest table's day, where it fell short, long tables as CSV."""
    first = text.split("\n\n")[1].replace("\n", " ")
    result = re.match(r"\*\*Result\*\* of (\d+ \w+ 20\d\d)", first)
    if result is None or "ell short" not in first:
        yield f"begins with {first!r}, not with its result and where it fell short"
    else:
        day = datetime.strptime(result[1], "%d %B %Y").date()
        measured = [date.fromisoformat(found) for found in re.findall(r"\b20\d\d-\d\d-\d\d\b", text)]
        if day != max(measured, default=day):
            yield "has newer tables than its result: write that anew"
    if re.search(rf"(?:^\|.*\n){{{ROWS_MAX + 3}}}", text, re.MULTILINE):
        yield f"shows a table of more than {ROWS_MAX} rows: write_part makes CSV of it"


def test_the_page_of_support_has_the_versions_that_tests_install() -> None:
    page = (ROOT / "docs/reference/support.md").read_text()
    installed = {"vLLM": VLLM, "SGLang": SGLANG, "llama.cpp": f"llama-cpp-python {LLAMACPP}"}
    installed |= dict(re.findall(r"\b(nixl)==([\d.]+)", (ROOT / "Makefile").read_text()))
    faults = [f"no row of {name} {version}" for name, version in installed.items()
              if f"| {name.lower()} | {version} |" not in page.lower()]  # fmt: skip
    assert not faults, "\n".join(faults)


def test_the_page_of_settings_has_every_knob() -> None:
    page = GENERATED["reference/configuration.md"]
    assert [knob.path for knob in derive(ClusterSettings) if f"\n| `{knob.path[-1]}` | " not in page] == []


def test_examples_are_valid():
    faults = []
    for path in EXAMPLES:
        env = {"PENSTOCK_FRONTEND__SECURITY__API_KEYS": "a"} if path.name == "guarded.yaml" else {}
        try:
            if not load(path, (), env).settings.models:
                faults.append(f"{path.name} serves no model")
        except ConfigError as error:
            faults.append(f"{path.name}: {error}")
    assert EXAMPLES and not faults, "\n".join(faults)


def test_the_page_of_commands_has_every_command_with_an_example() -> None:
    page = GENERATED["reference/commands.md"]
    faults = [
        f"no row of {name}" for name, (_, line) in COMMANDS.items() if f"| [`{name}`](#{name}) | {line} |" not in page
    ]
    for name in COMMANDS:
        section = page.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
        if f"\n    penstock {name}" not in section:
            faults.append(f"no section with an example of {name}")
    faults += [f"a section of the hidden {name}" for name in HIDDEN if f"\n## {name}\n" in page]
    assert not faults, "\n".join(faults)


def test_the_chart_of_the_readme_shows_what_the_measured_pages_say():
    spec = importlib.util.spec_from_file_location("readme_chart", ROOT / "bench" / "readme_chart.py")
    assert spec is not None and spec.loader is not None
    chart = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(chart)
    for name, content in chart.made().items():
        assert (ROOT / "docs" / "pictures" / name).read_text() == content, "run: python bench/readme_chart.py"


def test_the_table_of_parsers_has_the_flags_that_errors_name():
    rows = (ROOT / "docs/guides/agents.md").read_text().splitlines()
    for family, engine in FAMILIES.items():
        (row,) = (row for row in rows if row.startswith(f"| {family}") and row.rstrip(" |").endswith("none"))
        for tools, reasoning in (engine.vllm, engine.sglang):
            assert f"`--tool-call-parser {tools}`" in row and f"`--reasoning-parser {reasoning}`" in row, row
    for name in (*TOOL_PARSERS, *REASONING_PARSERS):
        assert any(f"`{name}`" in row.split("|")[-2] for row in rows if row.startswith("| ")) or name == "think", name
