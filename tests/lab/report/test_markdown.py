"""A measured part shows one short table, has its others as CSV beside the page, and touches nothing else."""

import csv
from pathlib import Path

import pytest

from penstock.kernel.errors import ConfigError
from penstock_lab.report.markdown import ROWS_MAX, with_data_beside, with_part, write_part


def table(rows: int) -> list[str]:
    return ["| **who** | GPU-h |", "|---|---:|", *(f"| `{row}` | 1,000 |" for row in range(rows))]


def test_the_first_short_table_is_shown_and_every_other_one_is_a_link_named_after_its_heading() -> None:
    short, long = table(ROWS_MAX), table(ROWS_MAX + 1)
    begin = ["", *long, "", "### Waves, up: 1 s", "", *long, "", "Words.", "", *short]
    text = [*begin, "", "**CPU**, ms", "", *long, "", "**Bare**", "", *short]
    shown, files = with_data_beside("\n".join([*text, "", "### Rest", "", *table(1)]), "page")
    rows = ROWS_MAX + 1
    assert shown.splitlines() == [
        *("", f"[Table: {rows} rows](page/table.csv)", ""),
        *(f"[Waves, up: 1 s: {rows} rows](page/waves-up-1-s.csv)",),
        *("", "Words.", "", *short, ""),
        *("**CPU**, ms", "", f"[CPU: {rows} rows](page/waves-up-1-s-cpu.csv)", ""),
        *(f"[Bare: {ROWS_MAX} rows](page/waves-up-1-s-bare.csv)", ""),
        *("[Rest: 1 row](page/rest.csv)",),
    ]
    assert list(csv.reader(files["table.csv"].splitlines()))[:2] == [["who", "GPU-h"], ["0", "1,000"]]
    lengths = {name: len(content.splitlines()) - 1 for name, content in files.items()}
    assert list(lengths.values()) == [rows, rows, rows, ROWS_MAX, 1]


def test_a_part_is_written_with_its_data_and_data_that_nothing_links_goes(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("by hand\n<!-- begin live -->\nold\n<!-- end live -->\n[others](page/others.csv)\n")
    (tmp_path / "page").mkdir()
    for name in ("others.csv", "old.csv"):
        (tmp_path / "page" / name).write_text("a\n")
    write_part(page, "\n".join(["### New", "", *table(ROWS_MAX + 1)]), "live")
    assert page.read_text() == (
        f"by hand\n<!-- begin live -->\n[New: {ROWS_MAX + 1} rows](page/live-new.csv)\n<!-- end live -->\n"
        "[others](page/others.csv)\n"
    )
    assert sorted(path.name for path in (tmp_path / "page").iterdir()) == ["live-new.csv", "others.csv"]


def test_a_new_page_has_its_title_and_one_without_the_part_is_an_error(tmp_path: Path) -> None:
    page = tmp_path / "study.md"
    write_part(page, "Words.", title="A study")
    assert page.read_text() == "# A study\n\n<!-- begin measured -->\nWords.\n<!-- end measured -->\n"
    assert not page.with_suffix("").exists()
    with pytest.raises(ConfigError, match="must have <!-- begin passes -->"):
        with_part(page.read_text(), "new", "passes")
