"""Floors: an SLO that nothing meets is told with its floor, and what would change it does change it."""

import json
import re
from pathlib import Path

import msgspec
import pytest

from penstock.kernel.values import Slo
from penstock_lab.profiler.deployment_plan.deployment_search import DeploymentSearch
from penstock_lab.profiler.deployment_plan.engine_candidates import EngineCatalog
from penstock_lab.profiler.deployment_plan.plan_request import PlanRequest
from penstock_lab.profiler.deployment_plan.plan_run import plan
from penstock_lab.profiler.deployment_plan.planned_traffic import traffic_of
from penstock_lab.profiler.deployment_plan.slo_floors import SloFloor, floor_of
from tests.lab.profiler.deployment_plan.questions import question


def floor(request: PlanRequest) -> SloFloor | None:
    traffic = traffic_of(request)
    catalog = EngineCatalog(request, traffic)
    if DeploymentSearch(request, traffic, catalog).deployments():
        return None
    return floor_of(request, traffic, catalog)


def milliseconds(text: str) -> float:
    (number,) = re.findall(r"([\d.]+) ?ms", text)
    return float(number) / 1e3


def test_an_itl_below_the_reading_of_weights() -> None:
    fields = {"model": "Llama-3.1-70B", "rate": 1.0, "ttft": 3.0}
    below = floor(question(**fields, gpus=("a100",), itl=0.012))
    assert below is not None and below.floor == "weights/bandwidth" and "one decode step" in below.reason
    (above, *others) = below.changes
    assert floor(question(**fields, gpus=("a100",), itl=milliseconds(above) * 1.3)) is None
    other = re.findall(r"--gpu (\w+):", others[0])[0]
    assert floor(question(**fields, gpus=(other,), itl=0.012)) is None


def test_a_ttft_below_the_computing_of_a_prompt() -> None:
    below = floor(question(model="Qwen3-32B", ttft=0.05))
    assert below is not None and below.floor == "prefill time" and "3,000 tokens" in below.reason
    assert floor(question(model="Qwen3-32B", ttft=milliseconds(below.changes[0]) * 1.5)) is None


def test_both_floors_at_once_are_both_told() -> None:
    below = floor(question(model="Llama-3.1-70B", gpus=("a100",), ttft=0.1, itl=0.005))
    assert below is not None and below.floor == "weights/bandwidth and prefill time"
    assert [change.split()[0] for change in below.changes[:2]] == ["--itl", "--ttft"]


def test_weights_that_no_layout_can_hold() -> None:
    below = floor(question(model="Llama-3.1-405B", gpus=("h100",), max_gpus=4))
    assert below is not None and below.floor == "memory" and "of which" in below.reason
    assert below.changes[0] == "h200 TP8 holds it"


def test_too_few_gpus_are_told_with_the_number_and_the_rate() -> None:
    below = floor(question(model="Qwen3-32B", rate=50.0, max_gpus=4))
    assert below is not None and below.floor == "compute"
    (gpus,) = re.findall(r"--max-gpus (\d+):", below.changes[0])
    assert floor(question(model="Qwen3-32B", rate=50.0, max_gpus=int(gpus))) is None
    assert floor(question(model="Qwen3-32B", rate=50.0, max_gpus=int(gpus) - 1)) is not None
    (rate,) = re.findall(r"at most ([\d.]+) requests/s", below.changes[1])
    assert floor(question(model="Qwen3-32B", rate=float(rate), max_gpus=4)) is None
    assert floor(question(model="Qwen3-32B", rate=float(rate) * 1.3, max_gpus=4)) is not None


def test_a_tail_of_long_prompts_names_a_target_that_is_met() -> None:
    request = question(
        model="Qwen3-32B", gpus=("h100",), ttft=0.8, prompt="lognormal:median=3k,sigma=1.5,most=60k", rate=2.0
    )
    below = floor(request)
    assert below is not None and below.floor == "prefill time" and "95%" in below.reason
    change = next(each for each in below.changes if each.startswith("--ttft"))
    (number, unit) = re.findall(r"([\d.]+)(ms|s)$", change)[0]
    wider = float(number) / (1e3 if unit == "ms" else 1.0)
    assert floor(msgspec.structs.replace(request, slo=Slo(ttft=wider, itl=0.02))) is None


@pytest.mark.parametrize("name", ["ttft", "itl"])
def test_every_floor_says_what_would_change_it(name: str) -> None:
    below = floor(question(**{name: 0.001}))
    assert below is not None and len(below.changes) >= 2


def test_a_model_is_not_planned_for_requests_that_it_is_too_short_for() -> None:
    request = question(model="Llama-2-7b", gpus=("h100",), prompt="7500", answer="500", ttft=5.0, itl=0.1)
    outcome = plan(request, jobs=1)
    assert outcome.floor is not None and outcome.floor.floor == "context" and not outcome.feasible
    assert "Llama-2-7b is made for 4,096 tokens" in outcome.floor.reason and "300 of 300" in outcome.floor.reason


def test_a_few_requests_that_are_too_long_are_told_and_count_as_missed(tmp_path: Path) -> None:
    lengths = [5000 if i % 50 == 0 else 500 for i in range(200)]
    rows = []
    for i, length in enumerate(lengths):
        blocks = list(range(20 * i, 20 * i - (-length // 512)))
        rows.append({"timestamp": 100 * i, "input_length": length, "output_length": 50, "hash_ids": blocks})
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    outcome = plan(question(model="Llama-2-7b", gpus=("h100",), trace=str(trace), ttft=2.0, itl=0.1, verify=1), jobs=1)
    assert outcome.feasible and outcome.best[0].attainment == pytest.approx(0.98)
    assert any("4 requests of 200 are longer than the 4,096 tokens" in note for note in outcome.notes)
    (pool,) = outcome.best[0].deployment.pools
    assert pool.sim.max_model_len == 4096
