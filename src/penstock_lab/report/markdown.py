"""Measured parts of Markdown pages: each shows one short table, and has its other tables as CSV beside the page.

A part stands between ``<!-- begin NAME -->`` and ``<!-- end NAME -->``. What stands around it is written by hand.
"""

import csv
import io
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from penstock.kernel.errors import ConfigError
from penstock.page.page_schema import Section

ROWS_MAX = 8
"""Rows of the longest table that a page shows."""
_TITLE = re.compile(r"^(?:#+ (.+)|\*\*(.+?)\*\*.*)$")
_SLUG_MAX = 70


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table as Markdown."""
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows))


def as_markdown(parts: Sequence[str], sections: Sequence[Section]) -> str:
    """Return sections as Markdown below what stands before them."""
    parts = list(parts)
    for section in sections:
        tables = [
            markdown_table([one.name for one in each.head], [row.cells for row in each.rows]) for each in section.tables
        ]
        parts.append("\n\n".join([f"## {section.heading}", *section.text, *tables]))
    return "\n\n".join(parts) + "\n"


def write_part(page: Path, text: str, name: str = "measured", *, title: str | None = None) -> None:
    """Write a part of a page anew, its long tables as CSV files into the folder that is named like the page.

    CSV files there that the page does not link any more are removed.

    Args:
        page: a Markdown file.
        text: Markdown that becomes the part.
        name: the part's.
        title: of a new page; without it, the page must be there.
    Raises:
        ConfigError: the page lacks the part.
    """
    if title is not None and not page.exists():
        page.write_text("\n".join([f"# {title}", "", *marks(name), ""]))
    shown, files = with_data_beside(text, page.stem, "" if name == "measured" else f"{name}-")
    page.write_text(with_part(page.read_text(), shown, name))
    folder = page.with_suffix("")
    if files:
        folder.mkdir(exist_ok=True)
    for file, content in files.items():
        (folder / file).write_text(content)
    for path in folder.glob("*.csv"):
        if f"({page.stem}/{path.name})" not in page.read_text():
            path.unlink()


def with_part(page: str, text: str, name: str = "measured") -> str:
    """Return a page with another text between its part's marks.

    Raises:
        ConfigError: the page does not have both marks once.
    """
    begin, end = marks(name)
    if page.count(begin) != 1 or page.count(end) != 1:
        raise ConfigError(
            f"the page must have {begin} and {end} once each", hint="put both lines where the tables are to go"
        )
    head, rest = page.split(begin)
    return f"{head}{begin}\n{text.strip()}\n{end}{rest.split(end)[1]}"


def marks(name: str) -> tuple[str, str]:
    """Return the lines between which a part stands."""
    return f"<!-- begin {name} -->", f"<!-- end {name} -->"


def with_data_beside(text: str, folder: str, prefix: str = "") -> tuple[str, dict[str, str]]:
    """Return Markdown with its first short table alone, a link in place of every other one, and those as CSV by name.

    A file is named after the last heading above its table and the bold line between the two. ``prefix``: of the names.
    """
    lines = text.splitlines()
    shown: list[str] = []
    files: dict[str, str] = {}
    heading, bold, one_shown, start = "", "", False, 0
    while start < len(lines):
        end = start
        while end < len(lines) and lines[end].startswith("|"):
            end += 1
        if end == start:
            if found := _TITLE.match(lines[start]):
                heading, bold = (found[1], "") if found[1] else (heading, found[2])
            shown.append(lines[start])
            start += 1
            continue
        table = [_row_cells(line) for line in lines[start:end]]
        del table[1]  # the rule below the head
        if len(table) - 1 <= ROWS_MAX and not one_shown:
            one_shown = True
            shown += lines[start:end]
        else:
            name = _file_name(f"{prefix}{heading} {bold}", files)
            files[name] = _csv_text(table)
            rows = f"{len(table) - 1} row{'s' if len(table) > 2 else ''}"
            if shown[-2:] == [f"**{bold}**" if bold else f"### {heading}", ""]:  # the link says it
                del shown[-2:]
            shown.append(f"[{(bold or heading or 'Table').strip(' :.')}: {rows}]({folder}/{name})")
        bold, start = "", end
    return "\n".join(shown), files


def _row_cells(line: str) -> list[str]:
    inner = line.strip().removeprefix("|").removesuffix("|")
    return [re.sub(r"\*\*|`", "", cell).strip() for cell in re.split(r"(?<!\\)\|", inner)]


def _file_name(title: str, taken: dict[str, str]) -> str:
    slug = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")[:_SLUG_MAX].rstrip("-") or "table"
    number = 1
    name = f"{slug}.csv"
    while name in taken:
        number += 1
        name = f"{slug}-{number}.csv"
    return name


def _csv_text(table: list[list[str]]) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(table)
    return out.getvalue()
