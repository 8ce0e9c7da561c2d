"""Is a page drawn from a run folder alone, whole and without anything from elsewhere?"""

import random
import xml.etree.ElementTree as ET
from pathlib import Path

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.kernel.errors import ConfigError
from penstock.kernel.request_record import RequestLeg, RequestRecord, summarise_gaps
from penstock.kernel.values import Slo
from penstock.report.__main__ import main
from penstock.report.run.chart_svg import SvgAxis, SvgLine, SvgMark, bar_chart, line_chart
from penstock.report.run.run_page import cdf, write_report
from penstock.report.run.run_summary import summarise


def record(number: int, rng: random.Random) -> RequestRecord:
    ttft = rng.lognormvariate(-2, 1)
    itl = summarise_gaps([(0.0, 1), (0.1, 7)])
    return RequestRecord(
        id=f"r{number}",
        arrival=number / 4,
        model="sim",
        outcome="ok" if number % 9 else "rejected",
        reason="" if number % 9 else 'full, "very" <full>',
        isl=1000,
        osl=8,
        cached=number % 7 * 100,
        legs=[RequestLeg(role="aggregated", worker=f"w<{number % 3}>", dispatched=0.0)],
        ttft=ttft,
        e2e=ttft + 0.1,
        itl=itl,
    )


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A live cluster's folder: nothing of a bench in it."""
    rng = random.Random(1)
    lines = [msgspec.json.encode(record(number, rng)) for number in range(200)]
    (tmp_path / "requests.jsonl").write_bytes(b"\n".join(lines) + b"\n" + lines[0][:30])
    return tmp_path


def test_a_live_folder_is_drawn(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run)]) == 0
    text = (run / "report.html").read_text()
    assert "200 requests: 177 answered, 23 rejected" in text
    assert "w&lt;1&gt;" in text
    assert "w<1>" not in text
    for outside in ("http://", "https://", "src=", "@import"):
        assert outside not in text
    assert "prefers-color-scheme: dark" in text
    for label in ("(ms, log)", "(s after the start)", "(%)"):
        assert label in text
    for name in ("ttft", "itl", "hits", "workers", "requests"):
        assert (run / f"report-{name}.csv").read_text().count("\n") > 2
    assert '"full, ""very"" <full>"' in (run / "report-requests.csv").read_text()


def test_every_plot_is_well_formed(run: Path) -> None:
    text = write_report(run).read_text()
    drawings = text.split("<svg")[1:]
    assert len(drawings) == 4
    for drawing in drawings:
        ET.fromstring("<svg" + drawing.split("</svg>")[0] + "</svg>")


def test_an_empty_run_says_so(tmp_path: Path) -> None:
    (tmp_path / "requests.jsonl").write_text("")
    text = write_report(tmp_path).read_text()
    assert "nothing was measured" in text
    assert "unknown" in text


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


@given(
    st.lists(st.tuples(st.floats(-1e6, 1e9), st.floats(-1e3, 1e3)), max_size=20),
    st.sampled_from(["linear", "log"]),
    st.floats(1e-3, 1e6),
)
@example([(5e-324, 0.0)], "log", 1.0)
@example([(0.0, 5e-324)], "linear", 1.0)
def test_any_points_can_be_drawn(points: list[tuple[float, float]], scale: str, mark: float) -> None:
    chart = line_chart(
        "a <b> & c",
        SvgAxis("x (s)", scale),
        SvgAxis("y (%)"),
        [SvgLine("one", sorted(points))],
        [SvgMark("m", mark, "x")],
    )
    ET.fromstring(f"<p>{chart}</p>")
    assert "nan" not in chart


def test_bars_can_be_drawn_of_nothing() -> None:
    ET.fromstring(bar_chart("t", "share (%)", [("a", 0.0, "none"), ("<b>", 0.0, "&")]))
    assert "nothing" in bar_chart("t", "share (%)", [])


def test_summary_keeps_unknown_apart_from_nothing() -> None:
    bare = RequestRecord(id="r", arrival=1.0, model="m", outcome="ok", osl=1, ttft=0.5, e2e=0.5)
    found = summarise([bare], Slo(ttft=1.0))
    assert (found.hit_rate, found.cached_tokens, found.itl, found.tpot) == (None, None, None, None)
    assert found.in_slo == 1
    cancelled = msgspec.structs.replace(bare, outcome="cancelled")
    assert summarise([bare, cancelled], Slo(ttft=1.0)).goodput_share == 1.0
    assert summarise([], Slo()).goodput_share is None
