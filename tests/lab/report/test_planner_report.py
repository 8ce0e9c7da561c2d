"""Does a planner's report say what its records say, number by number?"""

import csv
import json
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.kernel.errors import ConfigError
from penstock.kernel.values import Slo
from penstock.planner.plugins.proposals import Reason
from penstock.planner.tick_record import PluginResult, TickRecord
from penstock_lab.report.planner.planner_analysis import analyse, calibration
from penstock_lab.report.planner.planner_report_page import planner_page, read_ticks, write_planner_report
from penstock_lab.report.planner.scheduled_report import ScheduledReport
from tests.lab.report.planner_runs import request, tick, wave, write
from tests.lab.report.run_folders import NASTY
from tests.page.documents import charts, document_of, words


def rows(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def test_gpu_hours_are_of_all_that_is_paid_for() -> None:
    ticks = [
        tick(1, 5.0, 2, 4),
        tick(2, 10.0, 2, pool={"desired": 4, "starting": 2}),
        tick(3, 15.0, 4),
        tick(4, 20.0, 3, pool={"draining": 1}),
    ]
    numbers = analyse(ticks).numbers()
    assert numbers["gpu_hours"] == pytest.approx((2 + 4 + 4 + 4) * 5 / 3600)  # the last tick holds for one more
    assert numbers["decisions"] == 1


def test_what_was_predicted_stands_beside_what_came() -> None:
    def chose(number: int, kept: float, rate: float, **parts: Any) -> TickRecord:
        told = {"lead": 10.0, "demand": {"mean": rate}, "chosen": {"attainment": kept}, **parts}
        return tick(number, 5.0 * number, 1, evidence={"slo_propose": told})

    ticks = [chose(1, 1.0, 2.0), chose(2, 0.5, 6.0), tick(3, 15.0, 1), tick(4, 20.0, 1), chose(5, 0.0, 9.0)]
    story = analyse(ticks)
    assert [each[:2] for each in story.predicted] == [(15.0, 1.0), (20.0, 0.5), (35.0, 0.0)]
    # The last one is of a time after the run's end: nothing came that it could be held against.
    assert story.numbers()["attainment_predicted"] == (2.0 * 1.0 + 6.0 * 0.5) / 8.0
    page = words(planner_page(story, "run", {}))
    assert "62.5% were predicted" in page
    assert analyse([tick(1, 5.0, 1)]).numbers()["attainment_predicted"] is None


def test_attainment_counts_every_request_that_was_submitted() -> None:
    ticks = [tick(n, 5.0 * n, 2, model={"judged": 1, "in_slo": 1}) for n in range(1, 21)]
    requests = [
        request(1, 10.0, 0.1),
        request(2, 11.0, 0.9),  # late
        request(3, 12.0, None, "failed"),
        request(4, 13.0, None, "cancelled"),  # by the client: counted apart
        request(5, 60.0, 0.2),
    ]
    story = analyse(ticks, requests, slo=Slo(ttft=0.5, itl=0.05))
    assert (story.numbers()["attainment"], story.numbers()["judged"]) == (0.5, 4)
    assert story.attained_from.startswith("all requests")
    assert [window.share for window in story.attained] == [1 / 3, 1.0]
    assert (
        analyse(ticks, slo=Slo(ttft=0.5, itl=0.05)).numbers()["judged"] == 20
    )  # no requests.jsonl: what the planner heard of
    assert analyse(ticks, requests).numbers()["judged"] == 20  # no service level to judge by


def test_direction_changes_are_turns_not_steps() -> None:
    targets = [2, 3, 4, 5, 4, 3, 4, 4, 4, 3]
    ticks, ready = [], 2
    for n, target in enumerate(targets, 1):
        ticks.append(tick(n, 5.0 * n, ready, target))
        ready = target
    story = analyse(ticks)
    assert story.numbers()["direction_changes"] == 3  # up, down, up, down
    hours = 10 * 5 / 3600
    assert story.numbers()["direction_changes_per_hour"] == pytest.approx(3 / hours)
    ticks[4] = tick(5, 25.0, 5, 4, outcome="hold")  # wanted, but not done
    assert analyse(ticks).numbers()["direction_changes"] == 3


def test_the_perfect_bound_is_what_the_rate_needs_in_whole_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = [tick(n, 5.0 * n, 8, model={"rate": rate}) for n, rate in enumerate((0.0, 3.9, 4.0, 4.1, 12.5), 1)]
    monkeypatch.setattr("penstock_lab.report.planner.planner_analysis.SMOOTH", 1.0)
    story = analyse(ticks, mu={"m": 4.0})
    assert story.bound.values == [0, 1, 1, 2, 4]
    assert story.numbers()["perfect_gpu_hours"] == pytest.approx(8 * 5 / 3600)
    assert story.numbers()["cost_over_perfect"] == pytest.approx(40 / 8)
    wide = [tick(n, 5.0 * n, 8, model={"rate": 4.1}, pool={"gpus": 4}) for n in (1, 2)]
    assert analyse(wide, mu={"m": 4.0}).bound.values == [4, 4]


def test_mu_is_the_best_rate_that_a_gpu_bore_within_the_service_level() -> None:
    ticks = [tick(n, 5.0 * n, 2, model={"rate": 4.0, "judged": 20, "in_slo": 20}) for n in range(1, 11)]
    ticks += [tick(n, 5.0 * n, 2, model={"rate": 9.0, "judged": 20, "in_slo": 12}) for n in range(11, 21)]
    story = analyse(ticks)
    assert story.mu == {"m": pytest.approx(2.0)} and "best that was seen" in story.mu_from
    missed = [tick(n, 5.0 * n, 2, model={"rate": 9.0, "judged": 20, "in_slo": 2}) for n in range(1, 11)]
    assert analyse(missed).numbers()["perfect_gpu_hours"] is None  # nothing was within it, so nothing is known


def test_forecasts_are_held_against_what_came_at_their_time() -> None:
    story = analyse(wave(120, lambda n: 10 + 5 * math.sin(n / 20)))
    numbers = story.numbers()
    told = [forecast for forecast in story.forecasts["m"] if forecast.actual is not None]
    assert {round(forecast.at - forecast.made_at) for forecast in told} == {60}
    assert numbers["below_q90"] == 1.0 and numbers["forecast_error"] < 0.02
    assert all(f.low == pytest.approx(f.q50 * 0.8) for f in told)
    assert len(told) < len(story.forecasts["m"])  # what was forecast beyond the run's end has no actual
    assert told[-1].at <= story.ticks[-1].at


def test_idle_time_counts_neither_for_nor_against_the_forecasts_and_is_not_what_is_shown_first() -> None:
    """An hour of nothing around ten minutes of load: forecasts of nothing, which came, prove nothing."""
    busy = range(300, 420)
    load = [10 + 5 * math.sin(n / 20) if n in busy else 0.0 for n in range(720)]
    story = analyse(wave(720 - 12, lambda n: load[n]))
    alone = analyse(wave(120, lambda n: 10 + 5 * math.sin((n + 300) / 20)))
    numbers = story.numbers()
    assert numbers["idle_forecasts"] > 500
    assert numbers["below_q50"] == pytest.approx(alone.numbers()["below_q50"], abs=0.15)
    assert not any(f.idle for f in story.forecasts["m"] if f.actual or f.q50), "a load that does not come is an error"
    assert story.eventful is not None and alone.eventful is None
    low, high = story.eventful
    assert low < 5.0 * 300 and high > 5.0 * 420 and high - low < 0.4 * (story.end - story.begin)
    (run, *_) = planner_page(story, "x", {}).sections
    assert run.zoom == story.eventful and any("a double click shows all" in line for line in run.text)


def test_the_noise_of_counting_does_not_raise_the_perfect_bound() -> None:
    ticks = [tick(n, 5.0 * n, 8, model={"rate": 3.9 + (n % 2) * 0.2 - 0.1}) for n in range(1, 61)]
    assert set(analyse(ticks, mu={"m": 4.0}).bound.values) == {1}  # 3.8 and 4.0 by turns are 3.9


def test_forecasts_are_those_that_the_run_decided_by() -> None:
    ticks = wave(60, lambda n: 10 + 5 * math.sin(n / 20))
    led = [msgspec.structs.replace(each, evidence={"slo": {"lead": 118.0}}) for each in ticks]
    assert {round(f.at - f.made_at) for f in analyse(led).forecasts["m"]} == {120}


def test_a_forecast_without_quantiles_is_of_the_time_that_it_is_for() -> None:
    predicted = {"seconds": 20.0, "requests": 100.0}
    ticks = [tick(n, 5.0 * n, 2, model={"rate": float(n), "predicted": predicted}) for n in range(1, 11)]
    first = analyse(ticks).forecasts["m"][0]
    assert (first.at, first.q50, first.q90) == (15.0, 5.0, None)
    assert first.actual == pytest.approx((2 + 3 + 4 + 5) / 4)
    assert calibration([first], "q50") == 1.0 and calibration([first], "q90") is None


def test_what_could_not_be_seen_is_not_zero() -> None:
    ticks = [
        tick(1, 5.0, 2),
        tick(2, 10.0, 2, model={"rate": None, "health": "broken", "judged": 0, "in_slo": 0, "queued": None}),
        tick(3, 15.0, 2, outcome="blind"),
    ]
    story = analyse(ticks, mu={"m": 4.0})
    assert story.rates["m"].values[1] is None
    assert story.rates["m"].mean(0.0, 15.0) is None
    assert story.numbers()["ticks_without_sight"] == 1


def test_the_page_has_every_lane_and_its_numbers_beside_it(tmp_path: Path) -> None:
    ticks = wave(240, lambda n: 10 + 8 * math.sin(n / 25))
    requests = [request(n, n * 0.5, 0.1 if n % 50 else 0.9) for n in range(2400)]
    folder = write(tmp_path, ticks, requests)
    (folder / "simulate.json").write_text(json.dumps({"slo": {"ttft_s": 0.5, "itl_mean_s": 0.05}}))
    path = write_planner_report(folder, target=0.98)
    page = document_of(path)
    drawn = charts(page)
    assert [(title, chart.about) for title, chart in drawn.items()] == [
        ("Requests within the service level", "TTFT 500 ms, mean ITL 50 ms"),
        ("Demand of m", "requests/s; forecast made 60 s before"),
        ("Replicas of decode", ""),
        ("GPUs", "those of starting and draining replicas included"),
        ("GPU-hours up to then", ""),
        ("Requests that wait in the router", ""),
        ("Decisions", "click one to see why"),
        ("Sources", "fresh, stale, broken"),
        ("Plugins that had no say", "errors and timeouts"),
    ]
    assert "in SLO\n98.0%\nof 2,400 requests" in words(page)
    assert [(mark.name, mark.at) for mark in drawn["Requests within the service level"].marks] == [("target 98%", 0.98)]
    demand = drawn["Demand of m"]
    assert demand.band == (2, 3)
    low, high = (demand.series[place].values for place in demand.band)
    assert all(below < above for below, above in zip(low, high) if below is not None and above is not None)
    assert [series.name for series in drawn["GPUs"].series] == ["paid for", "perfect bound"]
    (section,) = [section for section in page.sections if section.charts]
    assert section.shared, "all charts have one axis of time"
    ids = {row.id for section in page.sections for table in section.tables for row in table.rows}
    notes = drawn["Decisions"].notes
    assert notes and all(note.link in ids for note in notes)
    stale = {series.name: (series.at, series.values) for series in drawn["Sources"].series}["stale"]
    assert stale == ([605.0, 635.0], [0.0, 0.0]), "six ticks that are alike are one stretch"
    assert [(note.at, note.until) for note in drawn["Plugins that had no say"].notes] == [(605.0, 635.0)]
    decisions = rows(folder / "planner-decisions.csv")
    assert len(decisions) == sum(each.outcome == "apply" for each in ticks)
    assert decisions[0]["why"].endswith("replicas bear 4 requests/s")
    cost = rows(folder / "planner-cost.csv")
    assert float(cost[-1]["gpu_hours"]) == pytest.approx(sum(each.gpus for each in ticks) * 5 / 3600)
    pools = rows(folder / "planner-pools.csv")
    assert [int(row["target"]) for row in pools] == [each.pools["decode"].target for each in ticks]
    forecasts = rows(folder / "planner-forecast.csv")
    assert forecasts[-1]["actual"] == "" and forecasts[0]["actual"] != ""
    there = {each.name for each in folder.glob("planner-*.csv")}
    assert {*section.files} == {chart.csv for chart in drawn.values()} == there


def test_a_decision_shows_what_it_was_chosen_from(tmp_path: Path) -> None:
    evidence = {
        "slo": {
            "candidates": [{"workers": {"decode": 1}, "attainment": 0.5}, {"workers": {"decode": 3}, "kept": 0.999}],
            "chosen": {"workers": {"decode": 2}, "attainment": 0.98},
        }
    }
    folder = write(tmp_path, [tick(1, 5.0, 1, 2, evidence=evidence), tick(2, 10.0, 2, 3, evidence={"odd": 3})])
    *_, section = document_of(write_planner_report(folder)).sections
    first, second = section.tables[0].rows
    assert first.more is None and second.more is not None, "only what is a list of candidates is a table"
    assert second.more.caption == "what slo chose from"
    assert second.more.rows[0].cells[:3] == ["chosen", "decode 2", "0.98"]


def test_what_a_plugin_says_is_in_the_page_and_the_file(tmp_path: Path) -> None:
    because = (Reason(code="x", text=NASTY),)
    said = (PluginResult(id=NASTY, stage="propose", result="error", reasons=because),)
    folder = write(tmp_path, [tick(1, 5.0, 1, 2, chosen=because, plugin_results=said), tick(2, 10.0, 2)])
    page = document_of(write_planner_report(folder))
    assert charts(page)["Plugins that had no say"].names == [NASTY] and NASTY in words(page)
    assert NASTY.replace('"', '""') in (folder / "planner-decisions.csv").read_text()


def test_a_plugin_that_fails_for_a_day_is_one_line_of_the_chart(tmp_path: Path) -> None:
    failed = (PluginResult(id="price", stage="propose", result="timeout", reasons=(Reason(code="t", text="5 s"),)),)
    ticks = [tick(n, 5.0 * n, 1, plugin_results=failed if n % 100 < 50 else ()) for n in range(1, 2001)]
    chart = charts(document_of(write_planner_report(write(tmp_path, ticks))))["Plugins that had no say"]
    (series,) = chart.series
    assert len(chart.notes) == 21 and series.values.count(None) == 20 and series.at == sorted(set(series.at))


def test_attainment_is_level_over_each_window_and_has_gaps(tmp_path: Path) -> None:
    requests = [request(n, n * 1.0) for n in range(300) if not 100 <= n < 200]
    ticks = [tick(n, 5.0 * n, 1, model={"judged": 0, "in_slo": 0}) for n in range(61)]
    page = planner_page(analyse(ticks, requests, slo=Slo(ttft=0.5)), "run", {})
    series = charts(page)["Requests within the service level"].series[0]
    assert series.drawn == "steps" and series.at == sorted(set(series.at))
    assert (100.0, None) in [*zip(series.at, series.values)] and series.values[-1] == 1.0


@pytest.mark.parametrize("ticks", [1, 2])
def test_a_run_that_has_just_begun_has_a_page(tmp_path: Path, ticks: int) -> None:
    folder = write(tmp_path, wave(ticks, lambda n: 0.0))
    assert "unknown" in words(document_of(write_planner_report(folder)))


def test_a_folder_without_records_is_an_error_with_a_next_step(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"not a folder of a run: it has no planner\.jsonl"):
        write_planner_report(tmp_path)
    write(tmp_path, [])
    with pytest.raises(ConfigError, match="has no tick yet"):
        write_planner_report(tmp_path)
    (tmp_path / "planner.jsonl").write_text('{"tick": "one"}\n')
    with pytest.raises(ConfigError, match="line 1, is not a planner's record"):
        write_planner_report(tmp_path)
    (tmp_path / "planner.jsonl").write_bytes(
        (write(tmp_path, [tick(1, 5.0, 1)]) / "planner.jsonl").read_bytes() + b'{"ti'
    )
    assert len(read_ticks(tmp_path)) == 1  # a crash cut the last line off


def test_a_run_whose_records_began_anew_is_read_with_the_part_before(tmp_path: Path) -> None:
    first, second = tick(1, 5.0, 1), tick(2, 10.0, 2)
    write(tmp_path, [first])
    (tmp_path / "planner.jsonl").rename(tmp_path / "planner.1.jsonl")
    assert [found.tick for found in read_ticks(tmp_path)] == [1]
    write(tmp_path, [second])
    assert [found.tick for found in read_ticks(tmp_path)] == [1, 2]


async def test_on_a_schedule_a_report_is_drawn_and_a_bad_folder_stops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ticks = wave(30, lambda n: 8.0)
    scheduled = ScheduledReport(write(tmp_path, ticks), interval=60.0)
    for each in ticks:  # 150 s: due at 65 and 125
        scheduled.ticked(each)
        if each.at in (65.0, 125.0):
            await scheduled.idle()
    assert scheduled.drawn == 2
    await scheduled.close()
    assert scheduled.drawn == 3 and (tmp_path / "planner-report.html").exists()
    caplog.clear()
    await ScheduledReport(tmp_path / "nowhere", interval=5.0).close()
    assert not caplog.records, "a planner that failed before its first tick has another reason to name"
    nowhere = ScheduledReport(tmp_path / "nowhere", interval=5.0)
    for each in ticks[:3]:
        nowhere.ticked(each)
    await nowhere.close()
    assert nowhere.drawn == 0
