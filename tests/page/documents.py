"""What stands in a page that is one file: its document, as the browser reads it."""

import re
from pathlib import Path

import msgspec

from penstock.page.page_schema import Chart, Page


def document_of(path: Path) -> Page:
    """Return what a page shows."""
    found = re.findall(r'<script type="application/json" id="document">(.*?)</script>', path.read_text(), re.DOTALL)
    assert len(found) == 1
    return msgspec.json.decode(found[0], type=Page)


def charts(page: Page) -> dict[str, Chart]:
    """Return the charts by their titles."""
    return {chart.title: chart for section in page.sections for chart in section.charts}


def words(page: Page) -> str:
    """Return all that can be read on a page."""
    parts = [page.title, page.about]
    parts += [part for note in page.notes for part in (note.text, note.hint)]
    parts += [part for one in page.figures for part in (one.name, one.value, one.note)]
    for section in page.sections:
        parts += [section.heading, *section.text]
        parts += [part for chart in section.charts for part in (chart.title, chart.about)]
        parts += [part for chart in section.charts for one in (*chart.marks, *chart.series) for part in (one.name,)]
        parts += [cell for table in section.tables for row in table.rows for cell in row.cells]
    return "\n".join(parts)
