"""explain scale, the planner's part of status, and dry runs: what a person reads."""

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from penstock.cli.explain_scale import decision_text, planner_text, scale_text
from penstock.cli.main import cli
from penstock.config.reading.load import load
from penstock.config.reading.units import parse_number
from penstock.config.settings.planning_settings import PlanningSettings
from penstock.kernel.errors import ConfigError
from penstock.planner.tick_record import TickRecord
from penstock.runtime.planning.planner_assembly import build_connector, build_source, pools_of
from penstock.runtime.planning.planner_report import PlannerDecisions, PlannerReport
from penstock.runtime.supervision.supervisor import policy_of
from penstock_dynamo.virtual.virtual_keys_access import only_model
from penstock_lab.config.described_speeds import inputs_of
from penstock_lab.report.journal_replay import replay
from penstock_lab.report.planner.planner_dry_run import dry_run
from penstock_lab.report.planner.planner_report_page import read_ticks
from penstock_lab.report.simulation.simulation_options import SimulateOptions
from penstock_lab.report.simulation.simulation_run import traffic_of

ROOT = Path(__file__).resolve().parents[2]
STATES = {"ready": 2, "starting": 1, "draining": 0, "failed": 0, "given_up": 1}
POOL = {**STATES, "gpus": 1, "desired": 3, "proposed": 5, "target": 4}


def because(text: str, code: str = "test") -> dict[str, Any]:
    return {"code": code, "text": text, "facts": {}}


def tick(**more: Any) -> dict[str, Any]:
    model = {"health": "fresh", "rate": 7.25, "shape": {"isl": 1024.0, "osl": 100.0}, "ttft": 0.2, "itl": None}
    found = {
        "tick": 7,
        "at": 35.0,
        "policy": "slo",
        "outcome": "apply",
        "models": {"m": {**model, "judged": 8, "in_slo": 6, "queued": 3, "predicted": {}}},
        "pools": {"main": POOL},
        "plugin_results": [
            {"id": "slo", "stage": "propose", "result": "override", "targets": {"main": 5}, "reasons": []}
        ],
        "chosen": [because("demand is to be 12 requests/s")],
        "bound": [because("8 GPUs are the ceiling")],
        "alternatives": [because("other wanted 9; slo is stronger")],
        "evidence": {"slo": {"lead": 60.0, "candidates": [{"workers": n, "attainment": 0.9} for n in range(20)]}},
        "flips": [{"model": "m", "frm": "decode", "to": "prefill", "count": 1}],
        "gpus": 3,
        "late": 0.0,
    }
    return {**found, **more}


def record(**more: Any) -> TickRecord:
    return msgspec.convert(tick(**more), TickRecord)


def test_a_decision_says_what_why_and_against_what():
    text = decision_text(record())
    for line in (
        "Second 35, tick 7, apply: main 3 -> 4 (policy slo)",
        "because demand is to be 12 requests/s",
        "limit: 8 GPUs are the ceiling",
        "role: 1 of m from decode to prefill",
        "m: 7.25 requests/s, 1,024 tokens in, 100 tokens out, TTFT 200 ms, 75.0 % in SLO, 3 wait in the router",
        "slo (propose): override main=5",
        "slo reckoned with: lead 60",
        "candidates of slo (the first 12 of 20):",
        "rejected: other wanted 9; slo is stronger",
    ):
        assert line in text


def test_each_pool_is_shown_with_its_own_reason():
    why = "decode 1 -> 2: an engine is full"
    pools = {"prefill": POOL, "decode": {**POOL, "why": why}, "other": {**POOL, "why": "wanted"}}
    chosen = [because("prefill is down to its last replica"), because(why)]
    text = decision_text(record(pools=pools, chosen=chosen))
    lines = [line for line in text.splitlines() if "because" in line]
    assert lines == [
        "  because decode 1 -> 2: an engine is full",
        "  because other: wanted",
        "  because prefill is down to its last replica",
    ]


def test_a_forecast_says_how_high_how_sure_and_who_was_believed():
    predicted = {
        "horizons": [0.0, 30.0, 60.0, 300.0],
        "quantiles": {"0.5": [2.0, 3.0, 4.0, 5.0], "0.9": [2.5, 3.5, 4.5, 7.25], "0.98": [9.0, 9.0, 9.0, 9.0]},
        "source": "ensemble",
        "weights": {"level-2": 0.004, "curve-30": 0.25, "trend-0.3": 0.746},
    }
    model = {**tick()["models"]["m"], "predicted": predicted}
    assert (
        "  forecast: m: 2.00 requests/s now (P90 2.50), 4.00 requests/s in 60 s (P90 4.50), 5.00 requests/s in 300 s "
        "(P90 7.25); ensemble of trend-0.3 74.6 %, curve-30 25.0 %\n"
    ) in decision_text(record(models={"m": model}))
    assert "forecast:" not in decision_text(record())
    model["predicted"] = {**predicted, "horizons": [7.0, 8.0, 9.0, 10.0]}
    assert "forecast:" not in decision_text(record(models={"m": model}))


def test_traffic_that_is_not_known_is_said_so():
    text = decision_text(record(models={"m": {"health": "broken", "rate": None}}))
    assert "the traffic of m is broken, so it is not known" in text


def test_nothing_decided_has_a_next_step():
    assert "No planner has decided anything" in scale_text(PlannerDecisions(None, None, []))
    shown = scale_text(PlannerDecisions(None, record(outcome="keep"), []))
    assert shown.startswith("Nothing has been changed so far. The last tick:\nSecond 35, tick 7, keep")


def test_status_says_how_the_planner_is():
    report = {
        "policy": "slo",
        "advisory": False,
        "source": "frontends",
        "connector": "penstock up",
        "pid": 1,
        "at": 40.0,
        "wall": 0.0,
        "every": 5.0,
        "tick": 8,
        "outcome": "keep",
        "pools": {"main": POOL},
        "health": {"m": "stale"},
        "why": "main 3 -> 4, because demand is to be 12 requests/s",
        "changed": 35.0,
        "bound": [],
        "alarms": [{"at": 12.0, "reason": because("a plugin is silent")}],
        "restarts": 2,
    }
    text = planner_text(msgspec.convert(report, PlannerReport))
    for part in (
        "Planner: policy slo, every 5 s; it scales by penstock up",
        "m stale",
        "restarted 2 times",
        "main: 4 wanted, 2 ready, 1 starting, 1 given up",
        "last change 5.0 s before that: main 3 -> 4, because demand is to be 12 requests/s",
        "alarm at second 12: a plugin is silent",
    ):
        assert part in text


# --- commands ---------------------------------------------------------------------------------------------------------


def run(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(cli, words)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.output


def test_explain_scale_of_a_run_that_is_over(tmp_path):
    (tmp_path / "planner.jsonl").write_text(json.dumps(tick()) + "\n")
    status, text = run("explain", "scale", "--run", str(tmp_path))
    assert (status, "main 3 -> 4" in text) == (0, True)
    status, text = run("explain", "scale", "--run", str(tmp_path), "--json")
    assert json.loads(text)["decisions"][0]["tick"] == 7


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Two minutes: 1 request per second, 12 per second in between."""
    rows = []
    at = 0.0
    while at < 120:
        at += 1.0 if at < 30 or at > 80 else 1 / 12
        rows.append(
            {
                "timestamp": round(at * 1000),
                "input_length": 2000,
                "output_length": 100,
                "hash_ids": [4 * len(rows) + n for n in range(4)],
            }
        )
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("policy", ["slo", "thresholds", "static"])
def test_a_dry_run_says_what_a_planner_would_do_and_what_it_costs(tmp_path, trace, policy, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["--models.sim.pools.main.replicas", "1", "--models.sim.pools.main.sim.max_num_seqs", "8"]
    words += ["--planner.policy", policy, "--planner.budget.max_gpus", "6", "--start-up", "5"]
    status, text = run("planner", "--dry-run", str(trace), *words)
    assert status == 0
    assert "GPU-hours" in text
    folder = Path(text.rpartition("--run ")[2].split()[0])
    lines = (folder / "planner.jsonl").read_text().splitlines()
    assert len(lines) > 20
    assert all(json.loads(line)["pools"]["main"]["target"] <= 6 for line in lines)
    if policy == "slo":
        assert "main 1 -> " in text
    replayed = replay(folder, [])
    assert replayed.mismatch is None and replayed.problems == [] and replayed.decisions >= len(lines)


def test_two_things_at_once_are_refused(trace):
    status, text = run("planner", "--dry-run", str(trace), "--advisory")
    assert (status, "touches nothing by itself" in text) == (2, True)


# --- what is built of settings ----------------------------------------------------------------------------------------


def test_without_a_cluster_it_must_be_said_where_to_look_and_whom_to_tell():
    settings = load(None, ["planner.enabled=true"]).settings
    with pytest.raises(ConfigError, match=r"planner\.source is streams, but no cluster is named.*--url"):
        build_source(settings, None, None)
    with pytest.raises(ConfigError, match=r"planner\.connector is process, but no cluster is named"):
        build_connector(settings, None)


@pytest.mark.parametrize("seed", range(3))
def test_the_example_goes_up_and_down_within_three_minutes_and_keeps_its_slo(tmp_path, seed):
    """The load that its header names, as the bench makes it, on the pools and the planner of the file."""
    file = ROOT / "examples" / "planner.yaml"
    (line,) = re.findall(r"# +penstock bench (--workload.*)", file.read_text())
    words = dict(zip(line.split()[::2], line.split()[1::2], strict=True))
    seconds = float(parse_number(words["--duration"], "s"))
    assert seconds <= 180.0 and words["--workload"] == "fixed"
    assert {words["--slo-ttft"], words["--slo-itl"]} == {"2s", "60ms"}
    options = SimulateOptions(
        workload="fixed",
        rate=float(words["--rate"]),
        arrivals=words["--arrivals"],
        prompt=words["--prompt"],
        answer=words["--answer"],
        duration=seconds,
        seed=seed,
    )
    trace = tmp_path / "trace.jsonl"
    with trace.open("w") as rows:
        for number, one in enumerate(traffic_of(options)[0]()):
            blocks = [8 * number + place for place in range(8)]
            row = {"timestamp": 1e3 * one.at, "input_length": one.isl, "output_length": one.osl, "hash_ids": blocks}
            rows.write(json.dumps(row) + "\n")
    text = dry_run(str(file), (), trace, start_up=4.0, out=tmp_path)
    (run,) = tmp_path.glob("*dry-run*")
    ticks = list(read_ticks(run))
    targets = [tick.pools["main"].target for tick in ticks]
    assert targets[0] == 1 and max(targets) >= 5 and targets[-1] <= 4
    scaled = next(tick.at for tick in ticks if tick.pools["main"].target > 1)
    assert scaled < 33.0, "one worker bears two requests/s, which come from second 33 on"
    assert 95.0 <= float(re.findall(r"requests: ([0-9.]+) % within", text)[0]) <= 100.0


def test_one_model_is_scaled_by_somebody_else():
    several = load(ROOT / "examples" / "two-models.yaml").settings
    with pytest.raises(ConfigError, match=r"say with planner\.virtual\.model"):
        only_model(several)
    assert only_model(load(ROOT / "examples" / "planner-virtual.yaml").settings) == "my-model"
    assert set(pools_of(several)) == {"large-main", "large-spare", "small-main"}


def test_a_section_of_its_own_turns_the_planner_on():
    assert not load(None).settings.planner.enabled
    assert load(None, ["planner.load_interval=2s"]).settings.planner.enabled
    assert not load(None, ["planner.load_interval=2s", "planner.enabled=false"]).settings.planner.enabled
    assert load(ROOT / "examples" / "planner.yaml").settings.planner.enabled


def test_the_planner_keeps_the_slo_of_the_cluster_and_half_a_second_without_one():
    settings = load(None, ["slo.ttft=300ms", "slo.itl=20ms", "slo.classes={batch: {weight: 0}}"]).settings
    inputs = inputs_of(settings)
    assert (inputs.ttft, inputs.itl, inputs.slo.classes["batch"].weight) == (0.3, 0.02, 0.0)
    nothing = inputs_of(load(None).settings)
    assert (nothing.ttft, nothing.itl) == (0.5, 0.05)


def test_what_decides_has_a_name():
    assert policy_of(PlanningSettings()) == "policy slo"
    assert policy_of(PlanningSettings(optimization_target="latency")) == "thresholds for latency"
