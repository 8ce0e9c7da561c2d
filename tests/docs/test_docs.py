"""What the documents say is so: commands and flags exist, the config page is fresh, the examples are valid."""

import importlib.util
import re
import shlex
from datetime import date, datetime
from pathlib import Path
from typing import Any, get_origin

import click
import pytest

from penstock.cli.main import COMMANDS, HIDDEN, cli
from penstock.cli.shared.settings_flags import SettingsCommand
from penstock.config.derived.docs import configuration_page
from penstock.config.derived.knobs import RESERVED, derive
from penstock.config.reading.load import load
from penstock.config.settings.cluster_settings import ClusterSettings
from penstock.frontend.admin.admin_api import ADMIN_ROUTES
from penstock.report.markdown import folded

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
READMES = sorted(ROOT.glob("examples/**/*.md"))
NAMING = ("src", "tests", "bench", "deploy", "examples")
TEXT = {".py", ".md", ".yaml", ".json", ".js", ".html", ".proto", ".service"}
EXAMPLES = sorted(ROOT.glob("examples/*.yaml"))
FENCE = re.compile(r"^```[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`((?:\.venv/bin/)?penstock [a-z][^`]*)`")
ENV = re.compile(r"\bPENSTOCK_[A-Z0-9_]+\b")


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
    return [
        (str(path.relative_to(ROOT)), command)
        for path in [*PAGES, *EXAMPLES]
        for command in commands_of(path.read_text())
    ]


def test_the_pages_show_commands():
    assert {page for page, _ in pages()} >= {
        "README.md",
        "docs/reference/commands.md",
        "docs/reference/configuration.md",
    }


@pytest.mark.parametrize(("page", "line"), pages())
def test_a_command_that_is_shown_exists_and_takes_its_flags(page, line):
    words = shlex.split(line)[1:]
    command: click.Command = cli
    context = click.Context(cli)
    while words and isinstance(command, click.Group):
        name = words.pop(0)
        if name.startswith("-"):
            assert name in ("--help", "--version"), f"{page}: {line}"
            return
        inner = command.get_command(context, name)
        assert inner is not None, f"{page}: there is no command {name!r} in {line!r}"
        command, context = inner, click.Context(inner)
    own = {option for param in command.get_params(context) for option in (*param.opts, *param.secondary_opts)}
    for word in words:
        flag = word.partition("=")[0]
        if flag.startswith("--") and flag not in own and command.name not in ("sim", "frontend"):
            assert isinstance(command, SettingsCommand), f"{page}: {line!r} has the unknown flag {flag}"
            assert any(fits(flag, knob.flag) for knob in command.knobs()), f"{page}: {flag} is no setting"


def fits(flag: str, derived: str) -> bool:
    pattern = re.escape(derived).replace("NAME", r".+").replace("_", "[_-]")
    return re.fullmatch(pattern, flag) is not None


@pytest.mark.parametrize("path", [*PAGES, *EXAMPLES], ids=lambda path: str(path.relative_to(ROOT)))
def test_environment_names_that_are_shown_exist(path):
    known = [re.escape(knob.env).replace("NAME", "[A-Z0-9_]+") for knob in derive(ClusterSettings)]
    for name in ENV.findall(path.read_text()):
        if name in RESERVED or name in ("PENSTOCK_", "PENSTOCK_REQUIRE"):
            continue
        assert any(re.fullmatch(pattern, name) for pattern in known), name


@pytest.mark.parametrize("path", [*PAGES, *READMES], ids=lambda path: str(path.relative_to(ROOT)))
def test_links_between_pages_lead_somewhere(path):
    text = FENCE.sub("", path.read_text())
    inline = re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", text)
    for target, part in [*inline, *((source, "") for source in re.findall(r"(?:src|srcset)=\"([^\":]+)\"", text))]:
        page = path.parent / target if target else path
        assert page.exists(), f"{path.name} links to {target}"
        assert not part or part in anchors(page.read_text()), f"{path.name}: {target} has no heading for #{part}"


def anchors(text: str) -> set[str]:
    """Return what a link to a heading of this page may name, as GitHub derives it."""
    titles = re.findall(r"^#+ (.+)$", FENCE.sub("", text), re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", re.sub(r"\]\([^)]*\)", "", title)).strip().lower().replace(" ", "-") for title in titles
    }


def test_every_page_that_a_file_names_exists():
    sources = [path for folder in NAMING for path in sorted(ROOT.glob(f"{folder}/**/*")) if path.suffix in TEXT]
    for path in [*PAGES, *sources, ROOT / "Makefile", ROOT / ".ci" / "run"]:
        for name in re.findall(r"(?<![\w/.-])docs/[\w/.-]+\.(?:md|svg|png|csv)\b", path.read_text()):
            assert (ROOT / name).is_file(), f"{path.relative_to(ROOT)} names {name}"


def test_the_list_of_pages_has_every_page():
    index = ROOT / "docs" / "index.md"
    listed = re.findall(r"^- \[[^]]+\]\(([^)]+)\): \S", index.read_text(), re.MULTILINE)
    there = {str(page.relative_to(index.parent)) for page in index.parent.glob("**/*.md")} - {index.name}
    assert sorted(listed) == sorted(there)


@pytest.mark.parametrize("path", sorted(ROOT.glob("docs/bench/*.md")), ids=lambda path: path.stem)
def test_a_measured_page_begins_with_its_result_and_folds_its_long_tables(path):
    text = path.read_text()
    first = text.split("\n\n")[1].replace("\n", " ")
    result = re.match(r"\*\*Result\*\* of (\d+ \w+ 20\d\d)", first)
    assert result is not None and "ell short" in first, first
    day = datetime.strptime(result[1], "%d %B %Y").date()
    measured = [date.fromisoformat(found) for found in re.findall(r"\b20\d\d-\d\d-\d\d\b", text)]
    assert day == max(measured, default=day), "there are newer tables: write the result anew"
    shown = re.sub(r"<details>.*?</details>", "", text, flags=re.DOTALL).rstrip()
    assert folded(shown) == shown


def test_the_config_page_is_fresh():
    page = ROOT / "docs" / "reference" / "configuration.md"
    assert page.read_text() == configuration_page(), "run: penstock config docs > docs/reference/configuration.md"


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_are_valid(path):
    env = {"PENSTOCK_FRONTEND__SECURITY__API_KEYS": "a"} if path.name == "guarded.yaml" else {}
    assert load(path, (), env).settings.models


def test_the_page_of_commands_has_every_command_with_an_example():
    page = (ROOT / "docs" / "reference" / "commands.md").read_text()
    for name, (_, line) in COMMANDS.items():
        assert f"| [`{name}`](#{name}) | {line} |" in page
        section = page.split(f"\n## {name}\n")[1].split("\n## ")[0]
        assert f"penstock {name}" in section
    assert not any(f"\n## {name}\n" in page for name in HIDDEN)


def test_the_chart_of_the_readme_shows_what_the_measured_pages_say():
    spec = importlib.util.spec_from_file_location("readme_chart", ROOT / "bench" / "readme_chart.py")
    assert spec is not None and spec.loader is not None
    chart = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(chart)
    for name, content in chart.made().items():
        assert (ROOT / "docs" / "pictures" / name).read_text() == content, "run: python bench/readme_chart.py"


def admin_table() -> str:
    """Return the table of admin routes as `docs/reference/api.md` has it."""

    def fields(kind: Any) -> str:
        return ", ".join(f"`{name}`" for name in (get_origin(kind) or kind).__struct_encode_fields__)

    rows = ["| Route | What it does | Body | Answer |", "| --- | --- | --- | --- |"]
    for route in ADMIN_ROUTES:
        query = "&".join(parameter.name for parameter in route.query if parameter.name != "scope")
        path = f"{route.path}?{query}" if query else route.path
        body = "" if route.body is None else fields(route.body)
        rows.append(f"| `{route.method} {path}` | {route.summary} | {body} | {fields(route.answers[0])} |")
    return "\n".join(rows)


def test_the_table_of_admin_routes_is_fresh():
    assert admin_table() in (ROOT / "docs/reference/api.md").read_text(), admin_table()
