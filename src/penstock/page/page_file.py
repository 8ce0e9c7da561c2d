"""Page files: one HTML file with data, scripts and style in it, which needs nothing from anywhere, and CSV beside it.

In CSV, unknown is an empty cell, never 0.
"""

import csv
import html
import re
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path

import msgspec

from penstock.kernel.errors import ConfigError
from penstock.page.page_schema import Page

SCRIPTS = ("uplot.js", "dom.js", "chart.js", "report.js")
"""Scripts of a page that is a file, each after those that it imports."""
BROWSER = files("penstock.page") / "browser"


def write_page(path: Path, page: Page) -> None:
    """Write a page, whole or not at all: the earlier one may be open in a browser.

    Raises:
        ConfigError: it can't be written.
    """
    fresh = path.with_suffix(".new")
    try:
        fresh.write_text(html_of(page), encoding="utf-8")
        fresh.replace(path)
    except OSError as error:
        raise ConfigError(f"{path} can't be written: {error.strerror}") from error


def html_of(page: Page) -> str:
    """Return the page as HTML."""
    # In a script "<" could end it; as an escape of JSON it can't, and means the same.
    document = msgspec.json.encode(page).decode().replace("<", "\\u003c")
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src 'unsafe-inline'; style-src \
'unsafe-inline'">
<title>{html.escape(page.title)}</title>
<style>{(BROWSER / "page.css").read_text()}</style></head>
<body><header><h1><span class="brand">Penstock</span> <span id="name"></span></h1><p id="about" class="soft"></p>
<button id="theme" type="button">Theme: system</button></header><main></main>
<noscript><p class="note error">It draws with JavaScript. The CSV files beside it have its numbers.</p></noscript>
<script type="application/json" id="document">{document}</script>
<script type="module">{_joined_scripts()}</script></body></html>
"""


@cache
def _joined_scripts() -> str:
    """Return all scripts as one: what they import of each other is there already, for no name is used twice."""
    text = "\n".join((BROWSER / name).read_text() for name in SCRIPTS)
    return re.sub(r"^(import .*|export default .*|export )", "", text, flags=re.MULTILINE)


def write_csv(path: Path, head: Sequence[str], rows: Iterable[Sequence[object]], digits: int = 6) -> None:
    """Write rows below a head; ``digits``: significant ones of a number that is not whole.

    Raises:
        ConfigError: the file can't be written.
    """
    try:
        with path.open("w", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(head)
            writer.writerows([_csv_cell(cell, digits) for cell in row] for row in rows)
    except OSError as error:
        raise ConfigError(f"{path} can't be written: {error.strerror}") from error


def _csv_cell(cell: object, digits: int) -> object:
    if isinstance(cell, float):
        return f"{cell:.{digits}g}"
    return cell.replace("\n", " ") if isinstance(cell, str) else cell
