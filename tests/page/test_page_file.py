"""Pages that are one file: whole, without anything from elsewhere, and in Chromium as they should look."""

import itertools
import json
import random
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.planner_study import tables as study_tables
from penstock.page.page_file import BROWSER, SCRIPTS, html_of, write_page
from penstock.page.page_schema import (
    Axis,
    Chart,
    ChartNote,
    Mark,
    Page,
    PageNote,
    Row,
    Section,
    Series,
    series_of,
    text_table,
    thin,
)
from penstock.planner.plugins.proposals import Reason
from penstock.planner.tick_record import PluginResult
from penstock_lab.report.planner.planner_report_page import write_planner_report
from penstock_lab.report.run.run_page import write_report
from tests.lab.report.planner_runs import request, tick, wave, write
from tests.lab.report.run_folders import NASTY, live_folder
from tests.lab.report.study_rows import studied
from tests.live.browser import CONTRAST, browsed
from tests.page.documents import charts, document_of

KINDS = ("report", "planner", "study")
PAINTED = """(figure => {
  const canvas = figure.element.querySelector('canvas'), {ctx} = figure.plot;
  const found = new Set();
  const pixels = ctx.getImageData(0, 0, canvas.width, canvas.height).data;
  for (let i = 0; i < pixels.length; i += 4) if (pixels[i + 3] > 200) found.add(pixels.slice(i, i + 3).join());
  return [...found];
})"""
"""The colours that a chart's canvas has."""


@pytest.fixture(params=KINDS)
def page(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return made(request.param, tmp_path)


def made(kind: str, folder: Path) -> Path:
    """Write a page of each kind; names in it would like to be HTML."""
    if kind == "report":
        return write_report(live_folder(folder))
    if kind == "planner":
        because = (Reason(code="x", text=NASTY),)
        ticks = wave(120, lambda n: 10.0 + n % 7)
        said = (PluginResult(id=NASTY, stage="propose", result="error", reasons=because),)
        ticks[40] = tick(41, 205.0, 1, 2, chosen=because, plugin_results=said)
        return write_planner_report(write(folder, ticks, [request(n, n * 0.25) for n in range(2400)]))
    path = folder / "study.html"
    rows = studied()
    write_page(path, study_tables.study_page(rows, study_tables.sections_of(rows), missing=3))
    return path


def test_what_others_named_is_text_and_nothing_else(page: Path) -> None:
    text = page.read_text()
    assert "<script>alert" not in text and "<b>&" not in text and text.count("</script>") == 2
    for outside in ("http://", "https://", " src=", "@import", "url("):
        assert outside not in text.replace("https://github.com/leeoniya/uPlot", ""), outside
    assert "default-src 'none'" in text


async def test_it_draws_fits_and_can_be_read(page: Path, tmp_path: Path) -> None:
    wanted = charts(document_of(page))
    empty = {title for title, chart in wanted.items() if not any(series.at for series in chart.series)}
    figures = "[...document.querySelectorAll('.chart')].map(one => one.figure)"
    async with browsed(tmp_path, page.as_uri()) as tab:
        for width, scheme in itertools.product((400, 1600), ("light", "dark")):
            await tab.look(width, 1000, scheme)
            await tab.until(f"{figures}.length === {len(wanted)} && {figures}.every(figure => figure.plot)")
            shown = await tab.ask(f"{figures}.map(figure => [figure.chart.title, figure.over.none.textContent])")
            assert {title for title, none in shown if none} == empty
            for number, (title, _) in enumerate(shown):
                colours = await tab.ask(f"{PAINTED}({figures}[{number}])")
                assert len(colours) > 2 or title in empty, f"{title} is blank at {width} in {scheme}"
            assert await tab.ask("document.documentElement.scrollWidth <= innerWidth"), f"it is wider than {width}"
            back = await tab.ask("getComputedStyle(document.body).backgroundColor.match(/[0-9]+/g).map(Number)")
            assert (sum(back) < 150) is (scheme == "dark")
            assert await tab.ask(CONTRAST) == [], f"text that is hard to read at {width} in {scheme}"
        assert tab.complaints == []
        assert all(url.startswith(("file:", "about:")) for url in tab.asked), tab.asked


async def test_lines_take_the_colours_of_the_theme_that_is_chosen(tmp_path: Path) -> None:
    page = made("report", tmp_path)
    async with browsed(tmp_path, page.as_uri()) as tab:
        await tab.look(1000, 800, "light")
        first = f"{PAINTED}(document.querySelector('.chart').figure).includes"
        await tab.until(f"{first}('28,103,150')")
        await tab.ask("document.querySelector('#theme').click()")
        await tab.ask("document.querySelector('#theme').click()")
        assert await tab.text("#theme") == "Theme: dark"
        await tab.until(f"{first}('108,182,224') && !{first}('28,103,150')")


async def test_charts_of_one_time_share_the_pointer_and_the_zoom_and_a_decision_leads_to_its_reason(
    tmp_path: Path,
) -> None:
    page = made("planner", tmp_path)
    told = charts(document_of(page))
    async with browsed(tmp_path, page.as_uri()) as tab:
        await tab.look(1600, 1000, "light")
        lanes = "[...document.querySelectorAll('.lanes .chart')].map(one => one.figure)"
        await tab.until(f"{lanes}.length > 6 && {lanes}.every(figure => figure.plot)")
        lefts = await tab.ask(f"{lanes}.map(figure => figure.plot.bbox.left)")
        assert len(set(lefts)) == 1, "what happened at one time stands above and below each other"
        decision = told["Decisions"].notes[3]
        over = "document.querySelectorAll('.lanes .chart')[{}].querySelector('.u-over')"
        number = [*told].index("Decisions")
        await tab.ask(f"{over.format(number)}.scrollIntoView({{block: 'center'}})")
        box = await tab.ask(
            f"(() => {{ const box = {over.format(number)}.getBoundingClientRect();"
            f" return [box.x + {lanes}[{number}].plot.valToPos({decision.at}, 'x') + 2, box.y + box.height / 2]; }})()"
        )
        await tab.mouse("mouseMoved", *box)
        marked = f"{lanes}.map(figure => figure.plot.cursor.left)"
        await tab.until(f"{marked}.every(left => Math.abs(left - {marked}[0]) < 1 && left > 0)")
        await tab.until(f"{lanes}[{number}].element.innerText.includes({json.dumps(decision.text)})")
        assert f"wanted {decision.text.split(' -> ')[1].split(',')[0]}" in await tab.text(".lanes")
        await tab.click(*box)
        await tab.until(f"location.hash === '#{decision.link}'")
        assert await tab.ask(f"!!document.getElementById('{decision.link}')")
        await tab.ask(f"{lanes}[0].view.zoomed([100, 200])")
        spans = f"{lanes}.map(figure => [figure.plot.scales.x.min, figure.plot.scales.x.max].join())"
        await tab.until(f"new Set({spans}).size === 1 && {spans}[0] === '100,200'")
        assert tab.complaints == []


def some(chart: Chart) -> Page:
    return Page("t", "a", [Section("s", charts=[chart])])


@given(
    st.lists(st.tuples(st.floats(allow_nan=True), st.none() | st.floats()), max_size=20),
    st.booleans(),
    st.text(max_size=30),
)
def test_any_points_and_names_make_a_document(points: list[tuple[float, Any]], log: bool, name: str) -> None:
    page = some(Chart(name, [series_of(name, points)], x=Axis(name, log=log), marks=[Mark(name, 1.0, "x")]))
    text = html_of(page)
    assert text.count("</script>") == 2
    document = text.split('id="document">')[1].split("</script>")[0]
    assert json.loads(document)["title"] == "t"


async def test_odd_numbers_are_drawn_without_a_complaint(tmp_path: Path) -> None:
    odd: list[list[tuple[float, float | None]]] = [
        [],
        [(0.0, 5e-324)],
        [(5e-324, 0.0)],
        [(1.0, 1.0)],
        [(-1e6, -1e3), (1e9, 1e3)],
        [(0.0, None), (1.0, 2.0), (2.0, None)],
        [(1e-3, 0.5), (1e6, 0.5)],
    ]
    pages = [
        Chart(
            f"{number} {x} {y}",
            [series_of("one", points)],
            x=Axis("x", log=x),
            y=Axis(log=y),
            marks=[Mark("m", 3.0, "x")],
        )
        for number, points in enumerate(odd)
        for x in (False, True)
        for y in (False, True)
    ]
    pages.append(Chart("bars", [Series("b", [0.0, 1.0], [0.0, 0.0])], kind="bars", names=["a", "<b>"]))
    pages.append(Chart("no bars", [], kind="bars"))
    pages.append(Chart("no lanes", [], kind="lanes", notes=[ChartNote(1.0, "n")]))
    path = tmp_path / "odd.html"
    write_page(path, Page("odd", "", [Section("s", charts=pages)], notes=[PageNote("error", "e", "h")]))
    async with browsed(tmp_path, path.as_uri()) as tab:
        await tab.until(f"document.querySelectorAll('.chart canvas').length === {len(pages)}")
        empty = (
            "[...document.querySelectorAll('.none')].filter(one => one.textContent === 'nothing was measured').length"
        )
        assert await tab.ask(empty) >= 6, "what has no point says so"
        assert tab.complaints == []


@pytest.mark.parametrize("most", [50, 400])
def test_thinning_keeps_the_extremes_and_the_gaps(most: int) -> None:
    rng = random.Random(1)
    points: Any = [(float(n), rng.random() + (9.0 if n == 4321 else 0.0)) for n in range(10_000)]
    kept = thin(points, most)
    assert len(kept) <= 2 * most + 2 and kept[0] == points[0] and kept[-1] == points[-1]
    assert max(kept, key=lambda p: p[1] or 0.0) == points[4321]
    assert kept == sorted(kept)
    level = thin([(float(n), 3.0) for n in range(1000)], most)
    assert level == [(0.0, 3.0), (999.0, 3.0)]
    assert thin([(0.0, 1.0), (1.0, None), (2.0, 1.0)], most) == [(0.0, 1.0), (1.0, None), (2.0, 1.0)]


def test_words_stand_to_the_left_and_numbers_to_the_right() -> None:
    table = text_table("t", ("who", "how many", "share"), [("a", "1", "unknown"), ("b", "-2", "50%")])
    assert [column.kind for column in table.head] == ["text", "number", "number"]
    assert table.rows[0] == Row(["a", "1", "unknown"])


PACKAGES = ("penstock", "penstock_lab", "penstock_kv", "penstock_kubernetes", "penstock_dynamo", "penstock_extras")


def test_the_library_is_there_with_its_licence_and_every_script_is_joined() -> None:
    text = (BROWSER / "uplot.js").read_text()
    assert "The MIT License" in text and "Leon Sorokin" in text and "v1.6.32" in text
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert project["project"]["license"] == "Apache-2.0 AND MIT"
    assert project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"] == [f"src/{each}" for each in PACKAGES], (
        "and all files in them"
    )
    for name in SCRIPTS:
        assert (BROWSER / name).is_file(), name
    assert not any(line.startswith(("import ", "export ")) for line in html_of(Page("t", "a", [])).splitlines())
