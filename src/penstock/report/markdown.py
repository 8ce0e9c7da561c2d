"""Markdown of measured pages: tables put in their place, and long ones folded away, so that the result comes first."""

import re
from collections.abc import Iterator

ROWS_MAX = 8
"""Rows of the longest table that a page shows unfolded."""
_TITLE = re.compile(r"^(?:#+ (.+)|\*\*(.+?)\*\*.*)$")


def folded(text: str) -> str:
    """Return Markdown whose tables of more than `ROWS_MAX` rows open by a click.

    A fold is named after the heading, or the bold line, right above its table; without one, after its columns.
    """
    return "\n".join(_folded(text.splitlines()))


def with_table(page: str, name: str, table: str) -> str:
    """Return a page with another table between ``<!-- NAME -->`` and ``<!-- end of NAME -->``.

    Raises:
        ValueError: the page has not one such place.
    """
    place = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end of {name} -->)", re.DOTALL)
    page, count = place.subn(lambda marks: f"{marks[1]}\n{table}\n\n{marks[2]}", page)
    if count != 1:
        raise ValueError(f"the page has {count} places for the table {name}, not one")
    return page


def _folded(lines: list[str]) -> Iterator[str]:
    title = ""
    start = 0
    while start < len(lines):
        end = start
        while end < len(lines) and lines[end].startswith("|"):
            end += 1
        if end == start:
            if found := _TITLE.match(lines[start]):
                title = found[1] or found[2]
            yield lines[start]
            start += 1
            continue
        rows = end - start - 2  # without head and rule
        if rows > ROWS_MAX:
            columns = ", ".join(filter(None, (cell.strip() for cell in lines[start].split("|"))))
            name = title or columns.replace("**", "")
            yield from (f"<details><summary>{name}: {rows} rows</summary>", "", *lines[start:end], "", "</details>")
        else:
            yield from lines[start:end]
        title = ""
        start = end
