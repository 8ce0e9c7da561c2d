"""Do the Grafana boards and the alert rules ask only for what is exported? Are scrape config and systemd unit fit?"""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from configparser import ConfigParser
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.adapters.telemetry.metric_names import MetricNamesOf
from penstock.adapters.telemetry.planner_metrics import PlannerMetrics
from penstock.adapters.telemetry.prometheus_text import Histogram, MetricFamily
from penstock.cli.main import COMMANDS
from penstock.config.reading.units import parse_number
from penstock.config.settings.cluster_settings import ClusterSettings
from penstock.kernel.values import Slo
from tests.conftest import skip_or_fail

ROOT = Path(__file__).resolve().parents[2]
FILES = ROOT / "deploy" / "helm" / "penstock" / "files"
BOARDS = sorted((FILES / "grafana").glob("*.json"))
RULES = sorted((FILES / "prometheus").glob("*-alerts.yaml"))
SCRAPE = FILES / "prometheus" / "scrape.yaml"
UNIT = ROOT / "deploy" / "systemd" / "penstock.service"
METRIC = re.compile(r"\b((?:dynamo|penstock)_[a-z0-9_]+)(?:\{([^}]*)\})?")
GROUPED = re.compile(r"\b(?:by|on) \(([^)]*)\)")


def families() -> dict[str, MetricFamily]:
    """Everything that a planner and a frontend export, by the name of a sample."""
    registries = (PlannerMetrics(slo=Slo(ttft=0.5, itl=0.05)).registry, MetricNamesOf().registry)
    found: dict[str, MetricFamily] = {}
    for family in [family for registry in registries for family in registry.families.values()]:
        found[family.name] = family
        if isinstance(family, Histogram):
            found |= {f"{family.name}_{end}": family for end in ("bucket", "sum", "count")}
    return found


def boards() -> list[dict[str, Any]]:
    return [json.loads(board.read_text()) for board in BOARDS]


def panels() -> list[dict[str, Any]]:
    return [panel for board in boards() for panel in board["panels"]]


def rules() -> list[dict[str, Any]]:
    return [rule for file in RULES for group in yaml.safe_load(file.read_text())["groups"] for rule in group["rules"]]


def expressions() -> Iterator[tuple[str, str]]:
    for panel in panels():
        for target in panel["targets"]:
            yield panel["title"], target["expr"]
    for variable in [variable for board in boards() for variable in board["templating"]["list"]]:
        if variable["type"] == "query":
            yield variable["name"], variable["query"]["query"]
    for rule in rules():
        yield rule["alert"], rule["expr"]


def test_every_name_and_label_is_exported() -> None:
    known = families()
    faults = [f"{where}: {fault}" for where, expression in expressions() for fault in query_faults(expression, known)]
    assert not faults, "\n".join(faults)


def query_faults(expression: str, known: dict[str, MetricFamily]) -> Iterator[str]:
    """Yield what a query asks for that nobody exports."""
    asked = METRIC.findall(expression)
    if not asked:
        yield "asks for no metric of ours"
    labels: set[str] = {"le"}
    for name, selector in asked:
        if name not in known:
            yield f"nobody exports {name}"
            continue
        labels |= set(known[name].labels)
        for label in re.findall(r"([a-z_]+)\s*(?:=|!|~)", selector):
            if label not in (*known[name].labels, "le"):
                yield f"{name} has no label {label}"
    for names in GROUPED.findall(expression):
        if absent := {name.strip() for name in names.split(",")} - labels:
            yield f"groups by {sorted(absent)}"


def test_what_the_texts_name_is_there() -> None:
    known = families()
    shown = [
        *((panel["title"], target["expr"], re.findall(r"{{\s*([a-z_]+)\s*}}", target["legendFormat"]))
          for panel in panels() for target in panel["targets"]),
        *((rule["alert"], rule["expr"], re.findall(r"\$labels\.([a-z_]+)", " ".join(rule["annotations"].values())))
          for rule in rules()),
    ]  # fmt: skip
    faults = [
        f"{where}: {label} is not a label of its metrics"
        for where, expression, named in shown
        for label in sorted(
            {*named} - {label for name, _ in METRIC.findall(expression) for label in known[name].labels}
        )
    ]
    for rule in rules():
        if not rule["annotations"]["description"].endswith((".", "?")) or not rule["labels"]["severity"]:
            faults.append(f"{rule['alert']} lacks a sentence or a severity")
    assert not faults, "\n".join(faults)


def test_no_two_panels_lie_on_each_other() -> None:
    faults = [f"{board['uid']}: {fault}" for board in boards() for fault in layout_faults(board["panels"])]
    assert not faults, "\n".join(faults)


def layout_faults(panels: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the panels of a board that share an id or a cell with another, or lie outside the 24 columns."""
    taken: set[tuple[int, int]] = set()
    ids = [panel["id"] for panel in panels]
    if len(ids) != len(set(ids)):
        yield "two panels have the same id"
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        if cells & taken or max(x for x, _ in cells) >= 24:
            yield f"{panel['title']} lies on another panel or outside the board"
        taken |= cells


def promtool(*words: str | Path) -> None:
    program = shutil.which("promtool") or shutil.which("promtool", path="/usr/bin")
    if program is None:
        skip_or_fail("promtool", "there is no promtool in PATH; Debian's package prometheus has it")
        raise AssertionError("skipped")
    done = subprocess.run([program, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_prometheus_takes_the_rules() -> None:
    assert len(RULES) == len(BOARDS) == 2
    promtool("check", "rules", *RULES)


def test_prometheus_takes_the_scrape_config(tmp_path: Path) -> None:
    config = tmp_path / "prometheus.yml"
    found = {"scrape_configs": yaml.safe_load(SCRAPE.read_text()), "rule_files": [str(file) for file in RULES]}
    config.write_text(yaml.safe_dump(found))
    promtool("check", "config", config)
    assert {job["job_name"] for job in found["scrape_configs"]} == {"penstock", "penstock-planner"}


@pytest.mark.parametrize("rules", RULES, ids=lambda path: path.stem)
def test_the_rules_alarm_when_they_should_and_only_then(tmp_path: Path, rules: Path) -> None:
    cases = tmp_path / "cases.yaml"
    text = (ROOT / "tests" / "docs" / f"{rules.stem}-test.yaml").read_text()
    cases.write_text(text.replace("RULES", str(rules)))
    promtool("test", "rules", cases)


def test_the_systemd_unit_runs_commands_that_exist_and_lets_requests_finish(tmp_path: Path) -> None:
    unit = ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(UNIT.read_text())
    service = unit["Service"]
    for name in ("ExecStart", "ExecStartPre"):
        program, command, *_ = service[name].split()
        assert program == "/opt/penstock/bin/penstock" and command in COMMANDS
    assert parse_number(service["TimeoutStopSec"], "s") > 2 * ClusterSettings().supervise.drain_timeout
    assert service["KillMode"] == "mixed" and service["User"] != "root"
    analyze = shutil.which("systemd-analyze")
    if analyze is not None:
        there = tmp_path / UNIT.name
        there.write_text(UNIT.read_text().replace("/opt/penstock/bin/penstock", "/bin/true"))
        done = subprocess.run([analyze, "verify", str(there)], capture_output=True, text=True, check=False)
        assert "penstock.service" not in done.stderr, done.stderr
