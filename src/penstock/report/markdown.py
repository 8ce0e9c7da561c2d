"""Markdown of measured pages: long tables folded away, so that a page shows its result first."""

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
