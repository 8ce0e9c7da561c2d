"""Do the Grafana board and the alert rules ask only for what is exported?"""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.adapters.telemetry.exposition import Family, Histogram
from penstock.adapters.telemetry.names import Names
from penstock.adapters.telemetry.planner_metrics import PlannerMetrics
from tests.conftest import skip_or_fail

ROOT = Path(__file__).resolve().parents[2]
BOARD = ROOT / "deploy" / "grafana" / "planner.json"
RULES = ROOT / "deploy" / "prometheus" / "planner-alerts.yaml"
METRIC = re.compile(r"\b((?:dynamo|penstock)_[a-z0-9_]+)(?:\{([^}]*)\})?")
GROUPED = re.compile(r"\b(?:by|on) \(([^)]*)\)")


def families() -> dict[str, Family]:
    """Everything that a planner and a frontend export, by the name of a sample."""
    registries = (PlannerMetrics(slo_ttft=0.5, slo_itl=0.05).registry, Names().registry)
    found: dict[str, Family] = {}
    for family in [family for registry in registries for family in registry.families.values()]:
        found[family.name] = family
        if isinstance(family, Histogram):
            found |= {f"{family.name}_{end}": family for end in ("bucket", "sum", "count")}
    return found


def board() -> dict[str, Any]:
    return dict(json.loads(BOARD.read_text()))


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def expressions() -> Iterator[tuple[str, str]]:
    for panel in board()["panels"]:
        for target in panel["targets"]:
            yield panel["title"], target["expr"]
    for variable in board()["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["name"], variable["query"]["query"]
    for rule in rules():
        yield rule["alert"], rule["expr"]


@pytest.mark.parametrize(("where", "expression"), list(expressions()))
def test_every_name_and_label_is_exported(where: str, expression: str) -> None:
    known = families()
    asked = METRIC.findall(expression)
    assert asked, f"{where} asks for no metric of ours"
    labels: set[str] = {"le"}
    for name, selector in asked:
        assert name in known, f"{where}: nobody exports {name}"
        labels |= set(known[name].labels)
        for label in re.findall(r"([a-z_]+)\s*(?:=|!|~)", selector):
            assert label in (*known[name].labels, "le"), f"{where}: {name} has no label {label}"
    for names in GROUPED.findall(expression):
        assert {name.strip() for name in names.split(",")} <= labels, f"{where}: {names}"


def test_what_the_texts_name_is_there() -> None:
    known = families()
    for panel in board()["panels"]:
        for target in panel["targets"]:
            labels = {label for name, _ in METRIC.findall(target["expr"]) for label in known[name].labels}
            assert set(re.findall(r"{{\s*([a-z_]+)\s*}}", target["legendFormat"])) <= labels, panel["title"]
    for rule in rules():
        labels = {label for name, _ in METRIC.findall(rule["expr"]) for label in known[name].labels}
        told = " ".join(rule["annotations"].values())
        assert set(re.findall(r"\$labels\.([a-z_]+)", told)) <= labels, rule["alert"]
        assert rule["annotations"]["description"].endswith((".", "?")) and rule["labels"]["severity"]


def test_no_two_panels_lie_on_each_other() -> None:
    taken: set[tuple[int, int]] = set()
    ids = [panel["id"] for panel in board()["panels"]]
    assert len(ids) == len(set(ids))
    for panel in board()["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken and max(x for x, _ in cells) < 24, panel["title"]
        taken |= cells


def promtool(*words: str | Path) -> None:
    program = shutil.which("promtool") or shutil.which("promtool", path="/usr/bin")
    if program is None:
        skip_or_fail("promtool", "there is no promtool in PATH; Debian's package prometheus has it")
        raise AssertionError("skipped")
    done = subprocess.run([program, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_prometheus_takes_the_rules() -> None:
    promtool("check", "rules", RULES)


def test_the_rules_alarm_when_they_should_and_only_then(tmp_path: Path) -> None:
    cases = tmp_path / "cases.yaml"
    cases.write_text((ROOT / "tests" / "docs" / "planner-alerts-test.yaml").read_text().replace("RULES", str(RULES)))
    promtool("test", "rules", cases)
