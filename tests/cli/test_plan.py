"""`penstock plan` and `penstock render` as a person gets them: a table, a floor, JSON, configs, and clear errors."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from penstock.cli.main import cli
from penstock.config.reading.load import load
from penstock.kernel.errors import ConfigError

SMALL = ["--gpu", "h200", "--ttft", "500ms", "--itl", "20ms", "--jobs", "1"]
LOAD = ["--rate", "8", "--isl", "3000", "--osl", "200", "--requests", "80", "--verify", "1"]


def penstock(*arguments: str) -> Result:
    return CliRunner().invoke(cli, list(arguments), standalone_mode=False)


def test_the_table_has_price_percentiles_and_what_binds() -> None:
    done = penstock("plan", "--model", "Qwen3-8B", *SMALL, *LOAD, "--price", "h200=2.0")
    assert done.exception is None, done.exception
    head, columns, first, *rest = done.stdout.splitlines()
    assert head == "Qwen3-8B: 8.00 requests/s of 3,000 + 200 tokens; TTFT 500 ms and ITL 20 ms for 95% of them"
    assert columns.split()[:4] == ["DEPLOYMENT", "GPUS", "$/H", "$/M"] and first.startswith("* ")
    assert "timing of main: roofline of Qwen3-8B on 1 h200" in done.stdout and "guesses" not in done.stdout
    assert done.return_value == 0 and len(rest) > 3


def test_json_is_the_same_each_time_and_names_its_source() -> None:
    one, other = (penstock("plan", "--model", "Qwen3-8B", *SMALL, *LOAD, "--json") for _ in range(2))
    assert one.exception is None and one.stdout == other.stdout
    answer: Any = json.loads(one.stdout)
    first = answer["deployments"][0]
    assert answer["feasible"] and first["meets"] and first["simulated_attainment"] >= 0.95
    assert first["ttft_s"]["p95"] <= 0.5 and first["itl_mean_s"]["p95"] <= 0.02
    assert first["timing"][0].startswith("timing of main: roofline") and first["pools"][0]["role"] == "aggregated"
    assert first["price_per_hour"] == 3.5 * first["gpus"]


def test_a_floor_is_told_with_what_would_change_it_and_the_status_is_1() -> None:
    done = penstock("plan", "--model", "Qwen3-32B", "--gpu", "h200", "--ttft", "50ms", "--itl", "20ms", *LOAD)
    assert done.return_value == 1 and "the floor is prefill time" in done.stdout
    assert "What would change it: --ttft above" in done.stdout


def test_an_intent_is_planned_and_flags_win_over_it(tmp_path: Path) -> None:
    intent = tmp_path / "intent.yaml"
    intent.write_text(
        "model: Qwen3-8B\nengine: vllm\nhardware: {gpu: h200}\nslo: {ttft: 500ms, itl: 20ms}\n"
        f"workload: {{rate: 8, isl: 3000, osl: 200, requests: 200}}\noutput: {tmp_path}/plan\n"
    )
    done = penstock("plan", str(intent), "--engine", "sim", "--itl", "30ms", "--verify", "1", "--jobs", "1")
    assert done.exception is None, done.exception
    settings = load(tmp_path / "plan" / "penstock.yaml").settings
    assert settings.slo.itl == 0.03 and {pool.engine for pool in settings.models["Qwen3-8B"].pools.values()} == {"sim"}
    assert json.loads((tmp_path / "plan" / "plan.json").read_text())["config"] == f"{tmp_path}/plan/penstock.yaml"
    rendered = penstock("render", "compose", str(tmp_path / "plan" / "penstock.yaml"))
    assert rendered.exception is None and "main-0" in yaml.safe_load(rendered.stdout)["services"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--gpu", "h200"], "no model"),
        (["--model", "Qwen3-8B", *SMALL], "traffic is not known"),
        (["--model", "Nothing-8B", *SMALL, *LOAD], "neither a file nor a model"),
        (["--model", "Qwen3-8B", *SMALL, *LOAD, "--gpu", "mi300"], "mi300"),
        (["--model", "Qwen3-8B", *SMALL, *LOAD, "--price", "h200"], "NAME=NUMBER"),
    ],
)
def test_a_mistake_is_named(arguments: list[str], words: str) -> None:
    done = penstock("plan", *arguments)
    assert isinstance(done.exception, ConfigError) and words in str(done.exception)
