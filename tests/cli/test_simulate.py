"""What does a person get of ``penstock simulate``: a table, a run folder like a live one, and errors with a name?"""

import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from penstock.kernel.errors import ConfigError, PenstockError
from penstock.kernel.request_record import decode_records
from penstock_lab.cli.simulate import command
from penstock_lab.report.journal_replay import replay
from penstock_lab.report.simulation.simulation_outcome import times_of
from penstock_lab.report.simulation.variant_processes import in_processes
from tests.page.documents import charts, document_of, words
from tests.servers import children_of

SHORT = ["--workload", "chat", "--rate", "6", "--duration", "15", "--no-html"]


def simulate(tmp_path: Path, *arguments: str) -> Any:
    return CliRunner().invoke(command, [*arguments, "--out", str(tmp_path)], standalone_mode=False)


def variants(tmp_path: Path, *arguments: str) -> list[dict[str, Any]]:
    done = simulate(tmp_path, *arguments, "--json")
    assert done.exception is None, done.exception
    found: list[dict[str, Any]] = json.loads(done.stdout)["variants"]
    return found


def test_a_table_has_a_column_for_each_combination(tmp_path: Path) -> None:
    shown = [argument for argument in SHORT if argument != "--no-html"]
    done = simulate(
        tmp_path, *shown, "--compare", "router.mode=kv,round_robin", "--compare", "router.queue.policy=fcfs,lcfs"
    )
    assert done.exception is None, done.exception
    (side_by_side,) = tmp_path.rglob("compare.html")
    assert str(side_by_side) in done.stdout
    document = document_of(side_by_side)
    drawn = charts(document)
    assert {len(chart.names) for chart in drawn.values()} == {4}
    assert all(": " in name and "GPU-hours" not in name for chart in drawn.values() for name in chart.names)
    (table,) = document.sections[0].tables
    assert [column.name for column in table.head][-1] == "best"
    (ttft,) = (row.cells for row in table.rows if row.cells[0] == "TTFT p95 (ms)")
    shown = [float(cell.partition(" ")[0].replace(",", "")) for cell in ttft[1:-1]]
    for cell, value in zip(ttft[2:-1], shown[1:], strict=True):
        assert float(cell.partition("(x")[2].rstrip(")")) == pytest.approx(value / shown[0], abs=0.011)
    best = min(shown)
    names = [column.name for column in table.head][1:-1]
    assert ttft[-1] == (names[shown.index(best)] if shown.count(best) == 1 else "-")
    for word in ("TTFT p95", "ITL p99", "end to end mean", "in SLO, of all submitted", "GPU-hours", "preemptions"):
        assert word in done.stdout
    assert len(list(tmp_path.iterdir())) == 4


def test_a_run_without_a_page_names_none_and_a_slow_one_says_how_slow(tmp_path: Path) -> None:
    said = simulate(tmp_path, *SHORT).stdout
    assert "run folder" in said and "report.html" not in said
    assert re.search(r"s of computing \([\d,.]+ times real time\)", said)
    assert [times_of(speed) for speed in (0.0123, 0.5, 1.26, 1.04, 9.94, 9.96, 1234.5)] == [
        *("0.012 times", "0.50 times", "1.3 times", "1.0 times", "9.9 times", "10 times", "1,234 times")
    ]


def test_json_has_every_figure_and_only_the_clock_differs_from_run_to_run(tmp_path: Path) -> None:
    one, other = variants(tmp_path, *SHORT)[0], variants(tmp_path, *SHORT)[0]
    assert {k: v for k, v in one.items() if not k.startswith("wall")} == {
        k: v for k, v in other.items() if not k.startswith("wall")
    }
    assert one["requests"]["ok"] == one["requests"]["submitted"] > 0
    assert 0 < one["ttft_p50_s"] <= one["ttft_p95_s"] <= one["ttft_p99_s"] <= one["e2e_max_s"]
    assert one["slo_attainment"] == 1.0 and one["gpu_hours"] == pytest.approx(4 * one["simulated_s"] / 3600)


def test_the_run_folder_has_the_files_of_a_live_run(tmp_path: Path) -> None:
    found = variants(tmp_path, *[a for a in SHORT if a != "--no-html"])[0]
    folder = Path(found["wall_run"])
    names = {path.name for path in folder.iterdir()}
    assert names >= {
        "run.json",
        "config.yaml",
        "requests.jsonl",
        "decisions.jsonl",
        "itl.csv",
        "report.html",
        "metrics.csv",
    }
    records = decode_records((folder / "requests.jsonl").read_bytes().splitlines())
    assert len(records) == found["requests"]["submitted"]
    assert all(len(record.block_names) == (record.isl or 0) // 64 > 0 for record in records)
    decisions = [json.loads(line) for line in (folder / "decisions.jsonl").read_text().splitlines()]
    assert len(decisions) == len(records) and all(one["reason"] and one["candidates"] for one in decisions)
    page = words(document_of(folder / "report.html"))
    head, *rows = (folder / "metrics.csv").read_text().splitlines()
    looks = [str(10 * number) for number in range(1, int(found["simulated_s"] / 10) + 1)]
    assert head.startswith("seconds,inflight,queued,") and [row.split(",")[0] for row in rows] == looks != []
    assert "Time to first token" in page and "SLO 2000 ms" in page and "goodput\n100.0%" in page


def test_the_page_shows_load_and_workers_over_time(tmp_path: Path) -> None:
    longer = ("--workload", "chat", "--rate", "6", "--duration", "60", "--fault", "at=30,kind=drain,worker=main-0")
    found = variants(tmp_path, *longer)[0]
    drawn = charts(document_of(Path(found["wall_run"]) / "report.html"))
    assert drawn["Requests under way"].csv == drawn["Workers"].csv == "metrics.csv"
    rows = [line.split(",") for line in (Path(found["wall_run"]) / "metrics.csv").read_text().splitlines()]
    workers = [int(row[rows[0].index("workers")]) for row in rows[1:]]
    assert workers[0] == 4 and workers[-1] == 3
    (series,) = drawn["Workers"].series
    assert (series.values[0], series.values[-1]) == (4, 3)


def test_workers_settings_faults_and_policies_reach_the_run(tmp_path: Path) -> None:
    found = variants(
        tmp_path,
        *SHORT,
        *("--workers", "2", "--fault", "at=5,kind=fail,worker=main-1,restart=never", "--fault", "at=6,kind=add"),
    )[0]
    assert set(found["workers"]) == {"main-0", "main-1"}, "a new worker gets the lowest free number, as a live one does"
    assert found["migrations"] + found["retries"] > 0
    assert found["gpu_hours"] == pytest.approx((found["simulated_s"] * 2 - 1) / 3600, rel=1e-3)
    scaled = variants(tmp_path, *SHORT, "--policy", "tests.cli.test_simulate:One", "--policy-interval", "2")[0]
    assert scaled["gpu_hours"] < found["gpu_hours"]


class One:
    """A policy that wants one worker."""

    def decide(self, seen: object) -> dict[str, int]:
        return {"main": 1}


@pytest.mark.parametrize("knob", ["gpus", "sim.timing.tensor_parallel_size"])
def test_a_replica_of_several_gpus_costs_as_many(tmp_path: Path, knob: str) -> None:
    found = variants(tmp_path, *SHORT, "--set", f"models.sim.pools.main.{knob}=2")[0]
    assert found["gpu_hours"] == pytest.approx(2 * 4 * found["simulated_s"] / 3600)


def test_tiers_show_what_each_gave_and_are_in_the_records(tmp_path: Path) -> None:
    cache = ("--set", "models.sim.pools.main.sim.kv_blocks=600", "--set", "models.sim.pools.main.cache.order=lru")
    arguments = ("--workload", "agent", "--rate", "4", "--requests", "120", "--workers", "1", "--no-html", *cache)
    found = variants(tmp_path, *arguments, "--host-cache", "8GiB", "--disk-cache", "64GiB")
    (one,) = found
    folder = Path(one["wall_run"])
    by_tier = one["tokens"]["cached_by_tier"]
    assert by_tier["host"] > 0 and sum(by_tier.values()) < one["tokens"]["cached"]
    records = decode_records((folder / "requests.jsonl").read_bytes().splitlines())
    assert sum((record.cached_by_tier or {}).get("host", 0) for record in records) == by_tier["host"]
    assert "host: 8589934592" in (folder / "config.yaml").read_text()


def test_a_trace_is_cut_and_scaled(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 1000 * n, "input_length": 600, "output_length": 5, "hash_ids": [n % 3, 10 + n % 3]}
        for n in range(20)
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    runs = tmp_path / "runs"
    cut = ("--trace-start", "5s", "--trace-end", "15s", "--speed-up", "2", "--no-html")
    found = variants(runs, "--trace", str(trace), *cut)[0]
    assert found["requests"]["ok"] == 10 and found["hit_rate"] > 0.3
    assert 4.5 < found["simulated_s"] < 5.5


AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,374,44
2023-11-16 18:17:04.0319569,396,109
2023-11-16 18:17:04.0781490,879,55
"""


def test_a_service_level_refuses_none_of_a_trace(tmp_path: Path, traces: Path) -> None:
    rows = str(traces / "mooncake_conversation_first6000.jsonl")
    slo = ["--set", "slo.ttft=500ms", "--set", "slo.itl=50ms"]
    found = variants(tmp_path, "--trace", rows, "--workers", "8", "--speed-up", "4", "--no-html", *slo)[0]["requests"]
    assert found["rejected"] == 0 and found["ok"] == found["submitted"] == 6000


def test_other_formats_are_told_by_their_first_lines(tmp_path: Path) -> None:
    trace = tmp_path / "azure.csv"
    trace.write_text(AZURE)
    found = variants(tmp_path / "runs", "--trace", str(trace), "--no-html")[0]
    assert found["tokens"] == {"prompt": 374 + 396 + 879, "output": 44 + 109 + 55, "cached": 0, "cached_by_tier": {}}
    again = variants(tmp_path / "again", "--trace", found["wall_run"] + "/requests.jsonl", "--no-html")[0]
    assert again["tokens"] == found["tokens"] and again["e2e_mean_s"] == pytest.approx(found["e2e_mean_s"])


def test_bad_rows_are_named_by_file_and_line_or_counted(tmp_path: Path) -> None:
    trace = tmp_path / "azure.csv"
    trace.write_text(AZURE + "2023-11-16 18:17:05.0,many,5\n")
    done = simulate(tmp_path / "runs", "--trace", str(trace))
    assert isinstance(done.exception, ConfigError) and f"{trace} line 5" in str(done.exception)
    found = variants(tmp_path / "runs", "--trace", str(trace), "--skip-bad", "--no-html")[0]
    assert found["requests"]["ok"] == 3 and "1 bad row of the trace" in found["notes"][0]


def test_what_was_taken_for_granted_of_a_trace_is_said(tmp_path: Path) -> None:
    result = {"input_lens": [50] * 30, "output_lens": [5] * 29 + [0], "errors": [""] * 29 + ["timeout"]}
    (tmp_path / "vllm.json").write_text(json.dumps(result))
    found = variants(tmp_path / "runs", "--trace", str(tmp_path / "vllm.json"), "--rate", "3", "--no-html")[0]
    assert found["requests"]["ok"] == 29 and 4 < found["simulated_s"] < 25
    assert "at 3 per second, as --rate says" in found["notes"][0]
    assert found["notes"][1] == "left out: 1 request of the trace without an answer"
    rows = "".join(f"{n * 0.4:.1f},50,5\n" for n in range(30))
    (tmp_path / "t.csv").write_text(f"timestamp,prompt_tokens,output_tokens\n{rows}")
    found = variants(tmp_path / "runs", "--trace", str(tmp_path / "t.csv"), "--no-html")[0]
    assert "times are read as seconds" in found["notes"][0] and 11 < found["simulated_s"] < 14
    forced = ("--trace-time-unit", "ms", "--no-html")
    found = variants(tmp_path / "runs", "--trace", str(tmp_path / "t.csv"), *forced)[0]
    assert "times are" not in str(found["notes"]) and found["simulated_s"] < 2


def test_arrivals_and_lengths_are_those_that_were_asked_for(tmp_path: Path) -> None:
    asked = ("--workload", "fixed", "--prompt", "100", "--answer", "10", "--rate", "5", "--duration", "40", "--no-html")
    steady = variants(tmp_path, *asked)[0]
    assert steady["tokens"]["prompt"] in (steady["requests"]["ok"] * 112, steady["requests"]["ok"] * 100)
    assert steady["tokens"]["output"] == steady["requests"]["ok"] * 10
    stepped = variants(tmp_path, *asked, "--arrivals", "step:at=10,to=4")[0]
    assert stepped["requests"]["ok"] > 2 * steady["requests"]["ok"]


def test_a_shape_begins_with_the_run_for_sessions_too(tmp_path: Path) -> None:
    asked = ("--workload", "agent", "--rate", "5", "--duration", "40", "--no-html", "--arrivals", "step:at=20,to=0")
    records = (Path(variants(tmp_path, *asked)[0]["wall_run"]) / "requests.jsonl").read_text().splitlines()
    begun = [record["arrival"] for record in map(json.loads, records) if record["turn"] == 0]
    assert begun and max(begun) < 20, "no session begins once the rate is 0"


def test_a_closed_loop_waits_for_answers(tmp_path: Path) -> None:
    timing = "models.sim.pools.main.sim.timing"
    slow = ("--set", f"{timing}.prefill=[0, 0.02, 5]", "--set", f"{timing}.decode=[0, 0, 500]")
    slower = ("--workload", "chat", "--rate", "6", "--requests", "60", "--no-html", *slow)
    open_loop, closed = variants(tmp_path, *slower)[0], variants(tmp_path, *slower, "--closed-loop")[0]
    assert closed["requests"]["ok"] == open_loop["requests"]["ok"] == 60
    assert early_turns(closed) == 0 < early_turns(open_loop)


def early_turns(found: dict[str, Any]) -> int:
    """Count the turns that came before the answer to the one before them was there."""
    ends: dict[str, float] = {}
    early = 0
    lines = (Path(found["wall_run"]) / "requests.jsonl").read_bytes().splitlines()
    for record in sorted(decode_records(lines), key=lambda record: record.arrival):
        assert record.session is not None and record.e2e is not None
        early += record.arrival < ends.get(record.session, 0.0)
        ends[record.session] = record.arrival + record.e2e
    return early


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--compare", "router.mode"], "names nothing to compare"),
        (["--compare", "router.mode=kv,turbo"], "turbo"),
        (["--model", "nope"], "no model 'nope'"),
        (["--arrivals", "wavy"], "no kind 'wavy'"),
        (["--prompt", "100"], "are of the workload fixed"),
        (["--fault", "at=1,kind=explode,worker=main-0"], "explode"),
        (["--fault", "at=1,kind=fail"], "worker is missing"),
        (["--policy", "nothing"], "not MODULE:NAME"),
        (["--policy", "no_such_module:X"], "can't be imported"),
        (["--policy", "json:JSONDecoder"], "no method decide"),
        (["--set", "models.sim.pools.main.role=prefill"], "is prefill"),
    ],
)
def test_what_can_not_be_is_told_by_name(tmp_path: Path, arguments: list[str], told: str) -> None:
    done = simulate(tmp_path, *SHORT, *arguments)
    assert isinstance(done.exception, ConfigError), done.exception
    assert told in str(done.exception)
    assert not list(tmp_path.iterdir()), "nothing was begun"


def test_a_bad_list_of_faults_is_told_by_its_place(tmp_path: Path) -> None:
    script = tmp_path / "faults.json"
    script.write_text('[{"at": 1, "kind": "add"}, {"at": 2, "kind": "fail", "who": "main-0"}]')
    done = simulate(tmp_path / "runs", *SHORT, "--faults", str(script))
    assert isinstance(done.exception, ConfigError) and f"{script}[1]" in str(done.exception)


def test_either_a_trace_or_a_workload_is_needed(tmp_path: Path) -> None:
    done = simulate(tmp_path)
    assert done.exception is not None and "either --trace FILE or --workload" in str(done.exception)


def test_one_pool_is_split_into_prefill_and_decode(tmp_path: Path) -> None:
    split = ["--set", "router.handoff.conditional=off", "--prefill", "1", "--decode", "3"]
    found = variants(tmp_path, *SHORT, *split)[0]
    assert found["handoffs"]["done"] == found["requests"]["ok"] == found["requests"]["submitted"] > 0
    assert found["bytes_handed"] > 0 and found["retries"] == 0
    assert set(found["workers"]) == {"decode-0", "decode-1", "decode-2"}, "those who answer"
    table = simulate(tmp_path, *SHORT, *split).stdout
    assert "handed over, prefilled locally" in table and "KV handed over (GB)" in table
    flip = "at=5,kind=flip,worker=decode-2,role=prefill"
    assert simulate(tmp_path, *SHORT, *split, "--fault", flip).exception is None
    wrong = simulate(tmp_path, *SHORT, "--prefill", "1")
    assert isinstance(wrong.exception, ConfigError) and "belong together" in str(wrong.exception)


def test_a_model_on_a_gpu_needs_no_config(tmp_path: Path) -> None:
    """A well-known name, a GPU and clients: blocks are those of the GPU, and the run says where its timing is from."""
    flags = ["--model", "meta-llama/Llama-3.1-8B", "--gpu", "rtx4090", "--concurrency", "8", "--workload", "fixed"]
    (variant,) = variants(tmp_path, *flags, "--prompt", "500", "--answer", "100")
    (note,) = [note for note in variant["notes"] if note.startswith("timing of main")]
    assert "roofline of meta-llama/Llama-3.1-8B on 1 rtx4090" in note and "not fitted to" in note
    assert re.search(r"2,\d{3} KV blocks", note)
    assert variant["requests"]["ok"] == 80


COMPARED = [*SHORT, "--compare", "router.mode=kv,random"]


def without_clock(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in one.items() if not key.startswith("wall")} for one in found]


def test_variants_side_by_side_come_to_the_same_in_the_same_order(tmp_path: Path) -> None:
    one_by_one = variants(tmp_path / "1", *COMPARED, "--jobs", "1")
    at_once = variants(tmp_path / "2", *COMPARED, "--jobs", "2")
    assert [one["variant"] for one in at_once] == [f"router.mode={mode}" for mode in ("kv", "random")]
    assert without_clock(at_once) == without_clock(one_by_one)
    for name in ("requests.jsonl", "decisions.jsonl", "metrics.csv", "simulate.json"):
        texts = [[Path(one["wall_run"], name).read_text() for one in found] for found in (one_by_one, at_once)]
        if name == "simulate.json":
            texts = [[json.dumps(without_clock([json.loads(text)])) for text in several] for several in texts]
        assert texts[0] == texts[1]


def test_an_error_of_one_process_is_the_commands_and_ends_the_others(tmp_path: Path) -> None:
    arguments = [*COMPARED, "--jobs", "2", "--policy", "no_such_module:Policy"]
    with pytest.raises(ConfigError, match="no_such_module"):
        raise simulate(tmp_path, *arguments).exception
    assert not multiprocessing.active_children()


def die(task: int) -> int:
    if task == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return task


def test_a_process_that_is_killed_is_an_error_with_a_next_step() -> None:
    with pytest.raises(PenstockError, match="--jobs 1"):
        in_processes(die, [0, 1, 2], 2, quiet=True)
    assert not multiprocessing.active_children()


def runs(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="children are looked up in /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_process_outlives_the_command(tmp_path: Path, number: int) -> None:
    hours = ["--workload", "chat", "--rate", "50", "--hours", "50", "--no-html"]
    command = [sys.executable, "-m", "penstock", "simulate", *hours, "--compare", "router.mode=kv,random"]
    process = subprocess.Popen([*command, "--jobs", "2", "--out", str(tmp_path)], stderr=subprocess.PIPE)
    try:
        eventually(lambda: len(list(tmp_path.glob("*/requests.jsonl"))) == 2)
        children = children_of(process.pid)
        process.send_signal(number)
        assert process.wait(30) == (130 if number == signal.SIGINT else -number)
        eventually(lambda: not any(map(runs, children)))
    finally:
        process.kill()
        process.wait()


def eventually(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.05)


def test_a_planner_of_the_config_plans_in_the_simulation(tmp_path: Path) -> None:
    config = tmp_path / "planned.yaml"
    config.write_text("planner: {budget: {max_gpus: 3}}\nslo: {ttft: 1s, itl: 30ms}\n")
    planned = variants(tmp_path, str(config), "--workload", "chat", "--rate", "4", "--duration", "120", "--no-html")[0]
    fixed = variants(tmp_path, str(config), *SHORT, "--set", "planner.enabled=false")[0]
    assert planned["gpu_hours"] < 3.5 * planned["simulated_s"] / 3600, "four were configured, three are allowed"
    ticks = [json.loads(line) for line in (Path(planned["wall_run"]) / "planner.jsonl").read_text().splitlines()]
    assert any(tick["outcome"] == "apply" for tick in ticks)
    replayed = replay(Path(planned["wall_run"]) / "journal" / "planner", [])
    assert replayed.mismatch is None and replayed.decisions >= len(ticks)
    assert not (Path(fixed["wall_run"]) / "planner.jsonl").exists()


def test_every_variant_has_the_config_that_came_on_standard_input(tmp_path: Path) -> None:
    given = ["-", *SHORT, "--compare", "router.mode=kv,random", "--jobs", "1", "--json", "--out", str(tmp_path)]
    done = CliRunner().invoke(
        command, given, standalone_mode=False, input="models: {m: {pools: {one: {replicas: 1}}}}\n"
    )
    assert done.exception is None, done.exception
    assert [list(each["workers"]) for each in json.loads(done.stdout)["variants"]] == [["one-0"], ["one-0"]]


def test_adapters_are_named_by_the_workload_and_their_loads_predicted(tmp_path: Path) -> None:
    slots = "models.sim.pools.main.max_cpu_loras=2,40"
    few, many = variants(tmp_path, *SHORT, "--adapters", "count=40,skew=0.5", "--compare", slots)
    for one in (few, many):
        counts = one["adapters"]
        assert counts["hit"] + counts["wait"] + counts["load"] == one["requests"]["submitted"]
    assert few["adapters"]["load"] > many["adapters"]["load"] and many["adapters"]["unload"] == 0
    assert few["ttft_p95_s"] > many["ttft_p50_s"]
    done = simulate(tmp_path, *SHORT, "--adapters", "count=0")
    assert isinstance(done.exception, ConfigError) and "count=0 is out of range" in str(done.exception)
