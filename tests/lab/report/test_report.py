"""The page of a run folder: made of the folder alone, with the numbers of each chart beside it."""

import csv
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.kernel.errors import ConfigError
from penstock.kernel.request_record import RequestRecord
from penstock.kernel.values import Slo
from penstock_lab.report.__main__ import main
from penstock_lab.report.run.run_page import cdf, write_report
from penstock_lab.report.run.run_summary import summarise
from tests.lab.report.run_folders import live_folder
from tests.page.documents import charts, document_of, words


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return live_folder(tmp_path)


def test_a_live_folder_is_drawn(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run)]) == 0
    page = document_of(run / "report.html")
    assert "requests\n200\n177 answered, 23 rejected" in words(page)
    drawn = charts(page)
    assert "w<1>" in drawn["Requests per worker"].names
    assert {title: chart.csv for title, chart in drawn.items()} == {
        "Time to first token": "report-ttft.csv",
        "Mean time between tokens of a request": "report-itl.csv",
        "Hit rate": "report-hits.csv",
        "Requests per worker": "report-workers.csv",
    }
    ttft = drawn["Time to first token"]
    assert (ttft.x.label, ttft.x.unit, ttft.x.log) == ("time to first token (s, log)", "seconds", True)
    assert ttft.y.unit == "share" and drawn["Hit rate"].x.unit == "time"
    for name in ("ttft", "itl", "hits", "workers", "requests"):
        assert (run / f"report-{name}.csv").read_text().count("\n") > 2
    assert '"full, ""very"" <full>"' in (run / "report-requests.csv").read_text()


def test_charts_show_the_numbers_of_their_csv_files(run: Path) -> None:
    drawn = charts(document_of(write_report(run)))
    for title in ("Time to first token", "Hit rate"):
        (series,) = drawn[title].series
        with (run / drawn[title].csv).open() as file:
            rows = [*csv.reader(file)][1:]
        assert series.at == pytest.approx([float(row[0]) for row in rows], rel=1e-5)
        assert series.values == pytest.approx([float(row[1]) for row in rows], rel=1e-5)


def test_an_empty_run_says_so(tmp_path: Path) -> None:
    (tmp_path / "requests.jsonl").write_text("")
    page = document_of(write_report(tmp_path))
    assert not any(series.at for chart in charts(page).values() for series in chart.series)
    assert {chart.empty for chart in charts(page).values()} == {"nothing was measured"}
    assert "unknown" in words(page)


def test_what_can_not_be_drawn_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    assert main([]) == 2
    (tmp_path / "requests.jsonl").write_text("{broken}\n{}\n")
    with pytest.raises(ConfigError, match="damaged"):
        write_report(tmp_path)


@given(st.lists(st.tuples(st.floats(1e-6, 1e3), st.integers(1, 50)), min_size=1, max_size=60), st.integers(2, 20))
def test_a_thinned_distribution_lies_on_the_whole_one(values: list[tuple[float, int]], points: int) -> None:
    whole, thin = dict(cdf(values, 10**9)), cdf(values, points)
    assert all(whole[value] >= share - 1e-12 for value, share in thin)
    assert thin[-1][1] == pytest.approx(1.0)
    assert [share for _, share in thin] == sorted(share for _, share in thin)
    assert len(thin) <= 2 * points + 2


def test_summary_keeps_unknown_apart_from_nothing() -> None:
    bare = RequestRecord(id="r", arrival=1.0, model="m", outcome="ok", osl=1, ttft=0.5, e2e=0.5)
    found = summarise([bare], Slo(ttft=1.0))
    assert (found.hit_rate, found.cached_tokens, found.itl, found.tpot) == (None, None, None, None)
    assert found.in_slo == 1
    cancelled = msgspec.structs.replace(bare, outcome="cancelled")
    assert summarise([bare, cancelled], Slo(ttft=1.0)).goodput_share == 1.0
    assert summarise([], Slo()).goodput_share is None
