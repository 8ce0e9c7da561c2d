"""Long tables are folded, and nothing else is touched."""

from penstock.report.markdown import ROWS_MAX, folded


def table(rows: int) -> list[str]:
    return ["| who | GPU-h |", "|---|---:|", *(f"| {row} | 1 |" for row in range(rows))]


def test_a_long_table_is_folded_under_its_heading_and_a_short_one_is_shown() -> None:
    short, long = table(ROWS_MAX), table(ROWS_MAX + 1)
    text = ["### Waves", "", *long, "", "Words.", "", *short, "", "**CPU**, ms", "", *long, "", *long]
    rows = ROWS_MAX + 1
    assert folded("\n".join(text)).splitlines() == [
        *("### Waves", "", f"<details><summary>Waves: {rows} rows</summary>", "", *long, "", "</details>"),
        *("", "Words.", "", *short, ""),
        *("**CPU**, ms", "", f"<details><summary>CPU: {rows} rows</summary>", "", *long, "", "</details>", ""),
        *(f"<details><summary>who, GPU-h: {rows} rows</summary>", "", *long, "", "</details>"),
    ]
