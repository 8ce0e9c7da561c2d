"""Fronts by hand, the list of runs, a study that goes on where it was cut off, and a tiny one from end to end."""

import csv
import json
from collections import Counter
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.planner_study import autoscaler_baselines, contenders
from bench.planner_study import cells as study_cells
from bench.planner_study import run as study_run
from bench.planner_study import tables as study_tables
from bench.planner_study.clairvoyant import Schedule
from bench.planner_study.metric_faults import FAULTS
from bench.planner_study.scenario import GPUS_MAX, RecordedPolicy, _turns, fleet, priced, tables
from bench.planner_study.tables import FrontPoint, cost_at, front, fronts, missed_at
from bench.planner_study.traffic import ALL, OWN, StudyTraffic, rate_over_time
from penstock.kernel.errors import ConfigError
from penstock.kernel.values import UNKNOWN_LIMITS, Traffic
from penstock.planner.observation import EngineState, ModelState, Observation
from penstock_lab.report.markdown import marks, with_data_beside, with_part
from penstock_lab.traffic.traffic_request import TrafficRequest
from tests.lab.report.study_rows import done, result, studied
from tests.page.documents import charts, document_of, words
from tests.planner.pool_states import pool_state

FRONT = [FrontPoint(2.0, 0.5), FrontPoint(4.0, 0.1), FrontPoint(8.0, 0.0)]


# --- fronts -----------------------------------------------------------------------------------------------------------


def test_a_front_has_what_nobody_beats_in_both():
    points = [
        FrontPoint(4.0, 0.3),
        FrontPoint(2.0, 0.5),
        FrontPoint(4.0, 0.1),
        FrontPoint(5.0, 0.1),
        FrontPoint(8.0, 0.0),
        FrontPoint(9.0, 0.2),
    ]
    assert front(points) == FRONT
    assert front([]) == []


@given(
    st.lists(
        st.builds(FrontPoint, st.integers(0, 9).map(float), st.integers(0, 9).map(lambda tenth: tenth / 10)),
        max_size=12,
    )
)
def test_every_point_is_beaten_or_on_the_front_and_none_on_it_is_beaten(points):
    found = front(points)
    for one in points:
        assert any(other.gpu_hours <= one.gpu_hours and other.missed <= one.missed for other in found)
    for one in found:
        assert not any(
            other != one and other.gpu_hours <= one.gpu_hours and other.missed <= one.missed for other in points
        )


@pytest.mark.parametrize(
    ("missed", "expected"), [(0.9, 2.0), (0.5, 2.0), (0.3, 3.0), (0.1, 4.0), (0.05, 6.0), (0.0, 8.0)]
)
def test_the_cost_at_a_share_lies_on_the_line_between_points(missed, expected):
    assert cost_at(FRONT, missed) == pytest.approx(expected)


def test_a_share_that_is_never_reached_has_no_cost():
    assert cost_at(FRONT[:2], 0.05) is None and cost_at([], 0.5) is None


@pytest.mark.parametrize(
    ("hours", "expected"), [(1.0, None), (2.0, 0.5), (3.0, 0.3), (4.0, 0.1), (6.0, 0.05), (8.0, 0.0), (20.0, 0.0)]
)
def test_the_share_at_a_cost_lies_on_the_line_and_ends_with_the_last_point(hours, expected):
    found = missed_at(FRONT, hours)
    assert found is None if expected is None else found == pytest.approx(expected)


def test_fronts_are_per_seed_of_one_policy_in_one_place():
    told = [
        done("slo", result(2.0, 0.5)),
        done("slo", result(3.0, 0.4), knob=5.0),
        done("slo", result(1.0, 0.9), seed=2),
        done("slo", result(1.0, 1.0), layout="disaggregated"),
        done("static", result(1.0, 1.0)),
    ]
    found = fronts(told, ("ramps", "aggregated", 120.0), "slo")
    assert found == {1: [FrontPoint(2.0, 0.5)], 2: [FrontPoint(1.0, pytest.approx(0.1))]}


def test_the_page_says_what_ours_costs_beside_the_clairvoyant_and_the_field():
    text = study_tables.write(study_tables.sections_of(studied()), missing=3)
    assert "3 runs of it were not done" in text
    assert "| ramps | aggregated | 120 |  | 99.00% | 1.33 |  | 1.50 |" in text
    assert "| ramps | aggregated | 120 | HPA-like | 80.0% | 95% |  |" in text
    assert "Faults of the metrics" in text and "| gap | slo | 90.00% | 4.00 | none |" in text


def test_a_page_shows_the_front_of_every_policy_in_a_place(tmp_path):
    page = study_tables.study_page(studied(), study_tables.sections_of(studied()), missing=3)
    chart = charts(page)["ramps, aggregated, start-up 120 s"]
    assert {series.name: (series.at, series.values) for series in chart.series} == {
        "slo": ([2.0, 4.0], [0.5, pytest.approx(0.99)]),
        "HPA-like": ([4.0], [pytest.approx(0.8)]),
        "static": ([6.0], [pytest.approx(0.99)]),
        "clairvoyant": ([3.0], [pytest.approx(0.99)]),
    }
    text = words(page)
    assert "3 runs of it were not done" in text and "Faults of the metrics" in text and "`" not in text


def test_on_the_grid_a_seed_is_held_against_the_same_seed():
    """A study that is not done yet has seeds of one that the other lacks."""
    ours, other = contenders.BY_NAME["slo"].default, contenders.BY_NAME[study_cells.BESIDE[0]].default
    told = [
        done("slo", result(2.0, 0.9), knob=ours, seed=1),
        done("slo", result(9.0, 0.9), knob=ours, seed=2),
        done(study_cells.BESIDE[0], result(10.0, 0.8), knob=other, seed=2),
    ]
    assert "at fewer GPU-hours in 1 comparisons" in study_tables.write(study_tables.sections_of(told), missing=0)
    told[1] = done("slo", result(11.0, 0.7), knob=ours, seed=2)
    text = study_tables.write(study_tables.sections_of(told), missing=0)
    assert "at fewer GPU-hours in 0 comparisons, the other does in 1" in text


def test_a_page_of_nothing_is_still_a_page():
    assert "354 runs of it were not done" in study_tables.write(study_tables.sections_of([]), missing=354)


# --- which runs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("full", [False, True])
def test_no_run_is_there_twice_and_everybody_takes_part(full):
    wanted = study_cells.cells(full=full, traces=None)
    assert max(Counter(cell.key for cell in wanted).values()) == 1
    assert {cell.contender for cell in wanted} == {*contenders.BY_NAME, study_cells.STATIC, study_cells.CLAIRVOYANT}
    assert {cell.layout for cell in wanted} == {"aggregated", "disaggregated"}
    assert {cell.start_up for cell in wanted} == {0.0, 60.0, 120.0, 300.0}
    assert {cell.fault for cell in wanted} == {"", *FAULTS}
    beside = [cell.seed for cell in wanted if cell.contender in study_cells.BESIDE and not cell.fault]
    assert set(beside) == ({1, 2, 3} if full else {1})
    fronts = {(cell.contender, cell.traffic) for cell in wanted if cell.seed == 3}
    untuned = {traffic.name for traffic in OWN if not traffic.tuning}
    for who in ("slo", study_cells.STATIC):
        assert {name for other, name in fronts if other == who} >= untuned, "claims come with the range over seeds"
    assert {cell.traffic for cell in wanted} == {traffic.name for traffic in OWN}, "without files no public trace"


def test_ours_and_the_two_beside_it_run_on_the_whole_grid():
    wanted = study_cells.cells(full=True, traces=None)
    for who in ("slo", *study_cells.BESIDE):
        knob = contenders.BY_NAME[who].default
        mine = {(c.traffic, c.layout, c.start_up, c.seed) for c in wanted if c.contender == who and c.knob == knob}
        assert len(mine) == len(OWN) * 2 * 4 * 3


def test_traffic_is_the_same_for_a_seed_and_another_for_another():
    traffic = ALL["six-fold spike"]
    once, again, other = traffic.requests(1), traffic.requests(1), traffic.requests(2)
    assert once == again and once != other
    assert [one.at for one in once] == sorted(one.at for one in once) and once[-1].at < traffic.seconds
    rates = rate_over_time(once, traffic.seconds, 90.0)
    assert max(range(len(rates)), key=rates.__getitem__) in (13, 14), "the spike is at 1200 s"


def test_public_traffic_without_its_file_says_what_is_missing(tmp_path):
    with pytest.raises(ConfigError, match="mooncake_conversation"):
        ALL["conversation"].requests(1, tmp_path)


# --- who takes part ---------------------------------------------------------------------------------------------------


def seen(at: float, ready: int, *, running: int = 0, waiting: int = 0, queued: int = 0, kv: float = 0.0) -> Observation:
    limits = msgspec.structs.replace(UNKNOWN_LIMITS, kv_tokens=1000)
    engines = tuple(
        EngineState(worker=f"main-{n}", running=running, waiting=waiting, decode_kv=round(kv * 1000), limits=limits)  # type: ignore[arg-type]
        for n in range(ready)
    )
    pool = pool_state(role="aggregated", desired=ready, ready=ready, engines=engines)
    traffic = Traffic(seconds=15.0, arrived=1, prompt_tokens=1)
    model = ModelState(traffic=traffic, pools={"main": pool}, queued=queued)
    return Observation(at=at, window=15.0, models={"m": model})


def test_hpa_goes_up_at_once_by_the_ratio_and_down_to_the_highest_of_five_minutes():
    hpa = autoscaler_baselines.hpa(0.7, GPUS_MAX)
    assert hpa.decide(seen(0.0, 4, kv=1.0)) == {"main": 6}  # 4 x 1.0 / 0.7 = 5.7
    assert hpa.decide(seen(15.0, 6, kv=0.72)) == {"main": 6}, "within a tenth of the target nothing happens"
    assert hpa.decide(seen(30.0, 6, kv=0.1)) == {"main": 6}
    assert hpa.decide(seen(314.0, 6, kv=0.1)) == {"main": 6}
    assert hpa.decide(seen(330.0, 6, kv=0.1)) == {"main": 1}


def test_keda_counts_who_waits_and_is_bounded_in_its_growth():
    keda = autoscaler_baselines.keda(5.0, GPUS_MAX)
    assert keda.decide(seen(0.0, 4, waiting=5, queued=10)) == {"main": 6}
    assert keda.decide(seen(15.0, 4, waiting=100)) == {"main": 8}
    assert autoscaler_baselines.keda(5.0, 7).decide(seen(0.0, 4, waiting=100)) == {"main": 7}


def test_ray_serve_waits_half_a_minute_before_it_goes_up_and_ten_before_it_goes_down():
    ray = autoscaler_baselines.RayServe(16.0, GPUS_MAX)
    said = {at: ray.decide(seen(float(at), 2, running=32)) for at in range(0, 50, 10)}
    assert [at for at, found in said.items() if found] == [30] and said[30] == {"main": 4}
    ray = autoscaler_baselines.RayServe(16.0, GPUS_MAX)
    said = {at: ray.decide(seen(float(at), 4, running=1)) for at in range(0, 650, 10)}
    assert [at for at, found in said.items() if found] == [600] and said[600] == {"main": 1}


def test_a_schedule_orders_a_start_up_ahead_and_lets_nobody_go_who_is_needed_until_then():
    schedule = Schedule({"aggregated": [2, 2, 6, 6, 1, 1, 1, 1]}, 30.0)
    assert schedule.first() == {"aggregated": 2}
    told = {at: schedule.decide(seen(float(at), 2))["main"] for at in (0, 15, 45, 60, 90, 900)}
    assert told == {0: 6, 15: 6, 45: 6, 60: 1, 90: 1, 900: 1}


def test_what_a_policy_wants_is_noted_and_its_turns_are_counted():
    noted = RecordedPolicy(Schedule({"aggregated": [2, 4, 4, 1, 3]}, 0.0))
    for slot in range(5):
        noted.decide(seen(15.0 * slot, 2))
    assert noted.targets == {"main": [2, 4, 4, 1, 3]}
    assert _turns(noted.targets) == (2, 3)

    class Silent:
        def decide(self, seen):
            return None

    silent = RecordedPolicy(Silent())
    silent.decide(seen(0.0, 3))
    assert silent.targets == {"main": [3]}, "who says nothing wants what there is"


def test_the_fleet_for_a_rate_grows_with_it_and_with_the_price_of_a_miss():
    sizes = [sum(fleet("disaggregated", rate).values()) for rate in (0.5, 2.0, 5.0)]
    assert sizes == sorted(sizes) and sizes[0] >= 2 and max(sizes) <= GPUS_MAX
    lean, eager = (priced(tables("aggregated"), price) for price in (2.0, 500.0))
    assert sum(fleet("aggregated", 2.0, lean).values()) <= sum(fleet("aggregated", 2.0, eager).values())


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_begins_after_a_third_of_the_run_and_changes_no_count_of_replicas(fault):
    distort = FAULTS[fault](900.0)
    for at in (15.0, 150.0, 305.0, 315.0, 600.0):
        before = seen(at, 3, running=2)
        after = distort(before)
        if at < 300.0 and fault != "NaN":
            assert after == before
        pools = [(state.ready, state.pool.desired, len(state.engines)) for _, _, state in after.pools()]
        assert pools == [(3, 3, 3)]
    if fault == "gap":
        gone, back = distort(seen(305.0, 3, running=2)).models["m"], distort(seen(500.0, 3, running=2)).models["m"]
        assert gone.traffic is None and back.traffic is not None
        assert [engine.running for engine in gone.pools["main"].engines] == [None] * 3
        assert [engine.running for engine in back.pools["main"].engines] == [2] * 3


def test_while_sources_are_stale_they_repeat_what_they_said_last():
    distort = FAULTS["stale"](900.0)
    distort(seen(290.0, 3, running=2, queued=1))
    model = distort(seen(305.0, 4, running=9, queued=7)).models["m"]
    assert (model.health, model.queued, model.pools["main"].ready) == ("stale", 1, 4)
    assert [engine.running for engine in model.pools["main"].engines] == [2] * 3


def test_fleets_for_a_public_trace_are_those_of_its_own_lengths(tmp_path, monkeypatch):
    lines = [{"timestamp": 100 * n, "input_length": 64, "output_length": 4, "hash_ids": [n]} for n in range(300)]
    (tmp_path / "short.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setitem(ALL, "short", StudyTraffic("short", 30.0, file="short.jsonl"))
    cell = study_cells.StudyCell(
        traffic="short", layout="aggregated", start_up=0.0, seed=1, contender=study_cells.STATIC, knob=1.0
    )
    (result,) = study_cells.carry_out(cell, str(tmp_path)).results
    assert result.requests == 300 and result.attainment == 1.0
    assert result.gpu_hours < 1.5 * 30.0 / 3600.0, "one worker; ours at that rate would be ten or more"
    assert sum(fleet("aggregated", 10.0).values()) >= 10


# --- cut off, and from end to end -----------------------------------------------------------------------------------


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> list[study_cells.StudyCell]:
    """A study of six runs, each of five minutes at one request per second."""
    monkeypatch.setitem(ALL, "tiny", StudyTraffic("tiny", 300.0, lambda at: 1.0))
    made = [
        study_cells.StudyCell(traffic="tiny", layout=layout, start_up=30.0, seed=1, contender=who, knob=knob)
        for layout, who, knob in (
            ("aggregated", "static", 1.0),
            ("aggregated", "static", 2.0),
            ("disaggregated", "static", 1.0),
            ("aggregated", "slo", contenders.BY_NAME["slo"].default),
            ("disaggregated", "slo", contenders.BY_NAME["slo"].default),
            ("aggregated", "KEDA-like", contenders.BY_NAME["KEDA-like"].default),
        )
    ]
    monkeypatch.setattr(study_run, "cells", lambda **_: made)
    return made


NO_PART = "\n".join([*marks("measured"), ""])


def arguments(folder: Path, *more: str) -> list[str]:
    return ["--out", str(folder / "study"), "--processes", "1", *more]


def test_a_study_writes_its_rows_its_tables_and_its_page(tiny, tmp_path, capsys):
    assert study_run.main(arguments(tmp_path, "--docs", str(tmp_path / "page.md"))) == 0
    told = capsys.readouterr()
    page = (tmp_path / "study" / "study.md").read_text()
    assert told.out in page
    assert with_part((tmp_path / "page.md").read_text(), "") == with_part("# Planner study\n\n" + NO_PART, "")
    assert with_data_beside(told.out, "page")[0].strip() in (tmp_path / "page.md").read_text()
    assert "Everybody at the default knob" in page and "not done" not in page
    with (tmp_path / "study" / "cells.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(tiny) and {row["traffic"] for row in rows} == {"tiny"}
    for row in rows:
        assert 0.0 < float(row["attainment"]) <= 1.0 and float(row["gpu_hours"]) > 0.0
        assert int(row["harmed"]) == 0 and int(row["requests"]) > 200
    assert told.err.count(" in SLO at ") == len(tiny)
    drawn = document_of(tmp_path / "study" / "study.html")
    assert "tiny, aggregated, start-up 30 s" in charts(drawn) and "Everybody at the default knob" in words(drawn)


def test_only_some_take_part_where_that_is_asked_for_and_an_unknown_name_is_an_error(tiny, tmp_path, capsys):
    study_run.main(arguments(tmp_path, "--only", "static"))
    assert {each.cell.contender for each in study_cells.read(tmp_path / "study" / "cells.jsonl").values()} == {"static"}
    with pytest.raises(SystemExit):
        study_run.main(arguments(tmp_path, "--only", "HAL"))
    text = capsys.readouterr().err
    assert "HAL" in text and "KEDA-like" in text


def test_nothing_is_begun_when_the_time_is_over_and_the_page_says_what_is_missing(tiny, tmp_path):
    study_run.main(arguments(tmp_path, "--seconds", "0"))
    assert f"{len(tiny)} runs of it were not done" in (tmp_path / "study" / "study.md").read_text()


def test_a_study_that_was_cut_off_goes_on_where_it_was(tiny, tmp_path, monkeypatch):
    path = tmp_path / "study" / "cells.jsonl"
    path.parent.mkdir()
    whole, torn = (study_cells.StudyRow(cell=cell, results=(result(1.0, 0.5),)) for cell in tiny[:2])
    path.write_bytes(msgspec.json.encode(whole) + b"\n" + msgspec.json.encode(torn)[:40])
    carried: list[str] = []

    def carry_out(wanted, path, **more):
        found = list(
            study_cells.do_all(
                wanted, path, **{**more, "on_done": lambda number, of, one: carried.append(one.cell.key)}
            )
        )
        return found

    monkeypatch.setattr(study_run, "do_all", carry_out)
    study_run.main(arguments(tmp_path, "--only", "static"))
    wanted = [cell.key for cell in tiny if cell.contender == "static"]
    assert carried == wanted[1:], "what is whole is not done again"
    found = study_cells.read(path)
    assert sorted(found) == sorted(wanted), "and nothing that was done now was lost with the line that was cut off"
    assert found[wanted[0]] == whole and np.isfinite(found[wanted[1]].results[0].gpu_hours)


def test_requests_of_a_run_come_in_order_and_a_rate_counts_those_within():
    made = [TrafficRequest(at=at, isl=1, osl=1) for at in (0.0, 1.0, 6.0, 14.0, 99.0)]
    assert rate_over_time(made, 15.0, 5.0) == [0.4, 0.2, 0.2]
