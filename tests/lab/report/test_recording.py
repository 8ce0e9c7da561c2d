"""A run folder as the page reads it: windows, workers and records at any moment, from simulated and other runs."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from penstock.cli.main import cli
from penstock.kernel.errors import ConfigError
from penstock.kernel.request_record import RequestRecord, decode_records
from penstock_lab.report.run.recording import WINDOWS_MAX, Recording


def wire(answer: Any) -> Any:
    """Return an answer as the page reads it."""
    return msgspec.json.decode(msgspec.json.encode(answer))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A simulated run of three workers, one of which is gone for half a minute."""
    folder = tmp_path_factory.mktemp("runs")
    words = ["simulate", "--workload", "chat", "--rate", "4", "--duration", "120", "--workers", "3", "--json"]
    words += ["--fault", "at=40,kind=fail,worker=main-1,restart=30", "--slo-ttft", "0.1", "--out", str(folder)]
    done = CliRunner().invoke(cli, words, catch_exceptions=False, standalone_mode=False)
    assert done.exit_code == 0
    (found,) = folder.iterdir()
    return found


def records(run: Path) -> list[RequestRecord]:
    with (run / "requests.jsonl").open("rb") as lines:
        return decode_records(lines)


def test_the_windows_hold_every_request_of_the_run(run: Path) -> None:
    told = wire(Recording(run).whole_run())
    every, columns = records(run), told["columns"]
    assert told["kind"] == "recorded" and told["zero"] is None and told["notes"] == []
    assert sum(columns["arrived"]) == len(every) and sum(columns["ok"]) == sum(one.outcome == "ok" for one in every)
    assert sum(columns["output_tokens"]) == sum(one.osl for one in every)
    simulated = json.loads((run / "simulate.json").read_text())
    assert sum(columns["in_slo"]) / sum(columns["judged"]) == pytest.approx(simulated["slo_attainment"])
    assert sum(columns["cached_tokens"]) / sum(columns["cache_reported_tokens"]) == pytest.approx(simulated["hit_rate"])
    assert set(columns["slo_ttft"]) == {0.1} and set(columns["slo_itl"]) == {0.025}
    assert None not in columns["running"][10:110] and max(columns["running"][10:110]) > 0
    assert len(columns["arrived"]) * told["width"] >= told["now"]


def test_a_fault_is_seen_in_the_replicas(run: Path) -> None:
    told = wire(Recording(run).whole_run())
    ready = told["pools"]["main"]["ready"]
    assert ready[int(30 // told["width"])] == 3 and ready[int(55 // told["width"])] == 2
    assert ready[int(100 // told["width"])] == 3


def test_workers_at_a_moment_and_over_the_run(run: Path) -> None:
    recording = Recording(run)
    assert set(wire(recording.workers(30.0))["workers"]) == {"main-0", "main-1", "main-2"}
    then = wire(recording.workers(55.0))["workers"]
    assert "main-1" not in then or not then["main-1"]["ready"]
    one = wire(recording.worker("main-1"))
    assert one is not None and one["card"]["kv_blocks"] > 0 and one["card"]["decisions_for_it"] > 5
    assert any(one["columns"]["requests"]) and wire(recording.worker("main-9")) is None


def test_records_until_a_moment_come_newest_first(run: Path) -> None:
    recording = Recording(run)
    decisions = wire(recording.decisions(5, 60.0, None))
    times = [one["at"] / 1e9 for one in decisions]
    assert len(times) == 5 and times == sorted(times, reverse=True) and 55 < times[-1] <= times[0] <= 60
    assert decisions[0]["reason"] and decisions[0]["candidates"]
    assert {one["chosen"][0] for one in wire(recording.decisions(9, None, "main-2"))} == {"main-2"}
    assert wire(recording.decisions(9, None, "nobody")) == []
    ended = wire(recording.requests(5, 60.0))
    closed = [one["closed"] / 1e9 for one in ended]
    assert len(closed) == 5 and closed == sorted(closed, reverse=True) and closed[0] <= 60
    later = [one for one in records(run) if one.e2e is not None and closed[0] + 1e-6 < one.arrival + one.e2e <= 60]
    assert later == []
    assert wire(recording.explain(ended[0]["id"]))["decisions"]


def test_the_service_level_can_be_another_one(run: Path) -> None:
    columns = wire(Recording(run, slo_ttft=1e-6).whole_run())["columns"]
    assert sum(columns["in_slo"]) == 0 and set(columns["slo_ttft"]) == {1e-6} and set(columns["slo_itl"]) == {0.025}


def line(at: float, **more: Any) -> str:
    record = {
        "id": f"r{at}",
        "arrival": at,
        "model": "m",
        "outcome": "ok",
        "isl": 10,
        "osl": 5,
        "ttft": 0.1,
        "e2e": 0.5,
    }
    return json.dumps({**record, **more}) + "\n"


def test_a_long_run_has_wider_windows(tmp_path: Path) -> None:
    (tmp_path / "requests.jsonl").write_text("".join(line(minute * 60.0) for minute in range(24 * 60)))
    told = wire(Recording(tmp_path).whole_run())
    assert told["width"] == 120 and len(told["columns"]["arrived"]) <= WINDOWS_MAX + 1
    assert set(told["columns"]["arrived"][:-1]) == {2}


def test_what_a_run_does_not_tell_is_unknown(tmp_path: Path) -> None:
    (tmp_path / "requests.jsonl").write_text(line(1.0) + line(3.0) + '{"id": "cut')
    recording = Recording(tmp_path)
    told = wire(recording.whole_run())
    assert told["columns"]["arrived"] == [0, 1, 0, 1] and told["columns"]["ttft_p50"][0] is None
    assert set(told["columns"]["running"]) == {None} and set(told["columns"]["kv_use"]) == {None}
    assert told["pools"] == {} and told["decisions"] is False and "no decisions.jsonl" in told["notes"][0]
    assert wire(recording.workers(1.0))["workers"] is None and wire(recording.decisions(5, None, None)) == []


def test_a_run_without_a_request_is_a_run(tmp_path: Path) -> None:
    (tmp_path / "requests.jsonl").write_text("")
    told = wire(Recording(tmp_path).whole_run())
    assert told["columns"]["arrived"] == [0] and told["now"] == 0.0


def test_a_folder_that_is_none_or_damaged_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a folder of a run"):
        Recording(tmp_path)
    (tmp_path / "requests.jsonl").write_text("{}\n" + line(1.0))
    with pytest.raises(ConfigError, match=r"requests.jsonl is damaged"):
        Recording(tmp_path)


def test_looks_of_several_processes_add_up(tmp_path: Path) -> None:
    (tmp_path / "requests.jsonl").write_text(line(1.0) + line(19.0))
    for name, running in (("metrics.csv", 3), ("metrics-1.csv", 4)):
        rows = "".join(f"{at},{running + 1},1\n" for at in (0, 5, 10, 15))
        (tmp_path / name).write_text("seconds,inflight,queued\n" + rows)
    columns = wire(Recording(tmp_path).whole_run())["columns"]
    assert set(columns["running"]) == {7} and set(columns["queued"]) == {2}
