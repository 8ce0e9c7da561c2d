"""Makes the pages of the site that follow from the code, settings, commands, admin routes: a hook of mkdocs.yml."""

import importlib.util
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_origin

import click

from penstock import __version__
from penstock.cli.main import COMMANDS, cli
from penstock.config.derived.docs import configuration_page
from penstock.frontend.admin.admin_api import ADMIN_ROUTES

COMMANDS_HEAD = """\
# Commands

This is what `penstock COMMAND --help` prints.

- **Exit status**: 0 success, 1 failure, 2 a wrong config or command line (nothing was started), 130 Ctrl-C.
- **Scripts**: `--json` prints keys in a stable order. Keys of wall-clock measurements begin with `wall`, except in
  `bench`.
- **A running cluster** is reached at `--url` or `PENSTOCK_URL` (default `http://127.0.0.1:8000`), with `--admin-key` or
  `PENSTOCK_ADMIN_KEY`; `chat` and `bench` take `--api-key` or `PENSTOCK_API_KEY`. `--cacert FILE` or `PENSTOCK_CACERT`
  trusts certificates in place of the system's, `--insecure` or `PENSTOCK_INSECURE` trusts any. `--context`,
  `--namespace` and `--cluster` name a PenstockCluster of Kubernetes instead
  ([operator](../guides/kubernetes-operator.md)).
- **Colours** are for terminals, unless `NO_COLOR` is set.
- **Completion** of commands, options, models, workers and pools:
  `penstock completion bash > ~/.penstock-complete && echo '. ~/.penstock-complete' >> ~/.bashrc` (or zsh, fish).
"""
ADMIN_HEAD = """\
# Admin routes

They need a key of `frontend.security.admin_keys`, as [the API](api.md#admin-routes) says. `GET /openapi.json` has the
types of all fields.

"""
HELP_WIDTH = 100


def commands_page() -> str:
    """Return the help of every command, subcommands included."""
    context = click.Context(cli, info_name="penstock", max_content_width=HELP_WIDTH, terminal_width=HELP_WIDTH)
    rows = [f"| [`{name}`](#{name}) | {line} |" for name, (_, line) in COMMANDS.items()]
    parts = [COMMANDS_HEAD, "\n".join(["| Command | What it does |", "|---|---|", *rows])]
    for name in COMMANDS:
        parts += [f"## {name}", *(f"```text\n{text}\n```" for text in _help_of(cli, name, context))]
    return "\n\n".join(parts) + "\n"


def _help_of(group: click.Group, name: str, above: click.Context, shown: str = "") -> Iterator[str]:
    """Yield a command's help and that of its own commands, without the examples that were ``shown`` above it."""
    command = group.get_command(above, name)
    assert command is not None, name
    context = click.Context(command, info_name=name, parent=above)
    text = command.get_help(context)
    yield text.removesuffix(shown).rstrip()
    if isinstance(command, click.Group):
        for inner in command.list_commands(context):
            yield from _help_of(command, inner, context, "".join(text.partition("\n\n  Examples:")[1:]))


def admin_page() -> str:
    """Return the table of admin routes."""

    def fields(kind: Any) -> str:
        return ", ".join(f"`{name}`" for name in (get_origin(kind) or kind).__struct_encode_fields__)

    rows = ["| Route | What it does | Body | Answer |", "| --- | --- | --- | --- |"]
    for route in ADMIN_ROUTES:
        query = "&".join(parameter.name for parameter in route.query if parameter.name != "scope")
        path = f"{route.path}?{query}" if query else route.path
        body = "" if route.body is None else fields(route.body)
        rows.append(f"| `{route.method} {path}` | {route.summary} | {body} | {fields(route.answers[0])} |")
    return ADMIN_HEAD + "\n".join(rows) + "\n"


def nightly_page() -> str:
    """Return the last nightly's results, by the module that writes them."""
    place = Path(__file__).parents[1] / "tests" / "nightly.py"
    spec = importlib.util.spec_from_file_location("nightly_results", place)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where its dataclasses look for their module
    spec.loader.exec_module(module)
    return (
        f"# Last nightly\n\nWhat `make nightly` found, [suite by suite](testing.md).\n\n{module.table(module.read())}\n"
    )


PAGES: dict[str, Callable[[], str]] = {
    "reference/admin-routes.md": admin_page,
    "reference/commands.md": commands_page,
    "reference/configuration.md": configuration_page,
    "reference/nightly.md": nightly_page,
}


def navigation(index: str) -> list[dict[str, Any]]:
    """Return the pages as the lists of docs/index.md have them: a section for each heading."""
    nav: list[dict[str, Any]] = [{"Home": "index.md"}]
    into = nav
    for line in index.splitlines():
        if heading := re.match(r"## ([^:,]+)", line):
            into = []
            nav.append({heading[1]: into})
        elif page := re.match(r"- \[([^]]+)\]\(([^)]+)\)", line):
            into.append({page[1]: page[2]})
    return nav


def on_config(config: Any) -> Any:
    """Set the navigation, and the version in the site's name: MkDocs calls this by its name."""
    config.nav = navigation((Path(config.docs_dir) / "index.md").read_text())
    config.site_name = f"Penstock {__version__}"
    return config


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Name files outside docs/ instead of linking them: the site does not have them."""
    return re.sub(r"\[([^]]+)\]\((?:\.\./)+(?:src|tests|examples|deploy|[A-Z]+\.md)[^)]*\)", r"\1", markdown)


def on_files(files: Any, config: Any) -> Any:
    """Add the pages to the site's files: MkDocs calls this by its name."""
    from mkdocs.structure.files import File

    for name, page in PAGES.items():
        files.append(File.generated(config, name, content=page()))
    return files
