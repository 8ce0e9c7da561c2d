"""Intent files: eight lines of our own, or Dynamo's request with its defaults; errors name field and fix."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.kernel.errors import ConfigError
from penstock_lab.profiler.deployment_plan.intent_file import Intent, gpu_of_sku, read_intent
from penstock_lab.profiler.deployment_plan.plan_request import checked_request

EIGHT = """\
model: Qwen/Qwen3-8B
engine: vllm
hardware: {gpu: [h200, h100], max_gpus: 16, prices: {h200: 3.1}}
slo: {ttft: 500ms, itl: 20ms, attainment: 99%}
workload: {rate: 600/min, isl: 3000, osl: "lognormal:median=300"}
profile: {h200:2: profiles/qwen}
output: plans/qwen
auto_apply: true
"""
DGDR: dict[str, Any] = {
    "apiVersion": "nvidia.com/v1beta1",
    "kind": "DynamoGraphDeploymentRequest",
    "metadata": {"name": "qwen"},
    "spec": {"model": "Qwen/Qwen3-32B", "hardware": {"gpuSku": "h200_sxm"}},
}


def read(tmp_path: Path, document: Any) -> Intent:
    path = tmp_path / "intent.yaml"
    path.write_text(document if isinstance(document, str) else yaml.safe_dump(document))
    return read_intent(path)


def dgdr(**spec: Any) -> dict[str, Any]:
    return {**DGDR, "spec": {**DGDR["spec"], **spec}}


def test_eight_lines_say_everything(tmp_path: Path) -> None:
    intent = read(tmp_path, EIGHT)
    request = checked_request(intent.request)
    assert (request.model, request.engine, request.gpus, request.max_gpus) == (
        "Qwen/Qwen3-8B", "vllm", ("h200", "h100"), 16,
    )  # fmt: skip
    assert (request.slo.ttft, request.slo.itl, request.attainment, request.rate) == (0.5, 0.02, 0.99, 10.0)
    assert (request.prompt, request.answer) == ("3000", "lognormal:median=300")
    assert request.prices == {"h200": 3.1} and request.profiles == {"h200:2": "profiles/qwen"}
    assert intent.output == Path("plans/qwen") and intent.apply


def test_a_trace_in_place_of_lengths(tmp_path: Path) -> None:
    text = EIGHT.replace('{rate: 600/min, isl: 3000, osl: "lognormal:median=300"}', "{trace: t.jsonl, requests: 100}")
    request = read(tmp_path, text).request
    assert request.trace == "t.jsonl" and request.rate is None and request.requests == 100
    assert checked_request(request)


def test_a_request_of_dynamo_has_dynamos_defaults(tmp_path: Path) -> None:
    intent = read(tmp_path, dgdr(workload={"requestRate": 5}))
    request = intent.request
    assert (request.prompt, request.answer, request.rate) == ("4000", "1000", 5.0)
    assert (request.slo.ttft, request.slo.itl) == (2.0, 0.03)
    assert request.engine == "vllm" and request.gpus == ("h200",) and request.max_gpus == 32
    assert intent.apply and intent.output == Path("qwen") and request.notes == ()
    assert checked_request(request)


def test_the_request_without_hardware_leaves_it_to_the_machine(tmp_path: Path) -> None:
    """As NVIDIA's overview of Dynamo 1.0 shows it; `plan` asks the machine, or says what to add."""
    text = """\
apiVersion: nvidia.com/v1beta1
kind: DynamoGraphDeploymentRequest
spec:
  model: Qwen/Qwen3-0.6B
  backend: vllm
  sla: { ttft: 200.0, itl: 20.0 }
  autoApply: true
"""
    intent = read(tmp_path, text)
    request = intent.request
    assert request.gpus == () and intent.apply and (request.slo.ttft, request.slo.itl) == (0.2, 0.02)
    with pytest.raises(ConfigError, match="gpuSku: h200_sxm"):
        checked_request(request)
    ours = "model: Qwen3-0.6B\nslo: {ttft: 200ms, itl: 20ms}\nworkload: {rate: 5/s, isl: 100, osl: 10}\n"
    assert read(tmp_path, ours).request.gpus == ()


def test_a_concurrency_is_a_rate_by_littles_law(tmp_path: Path) -> None:
    request = read(tmp_path, dgdr(workload={"concurrency": 64, "isl": 100, "osl": 100}, sla={"ttft": 1000, "itl": 10}))
    assert request.request.rate == pytest.approx(64 / (1.0 + 100 * 0.01))
    assert "concurrency 64 is planned as 32" in request.request.notes[0]


def test_without_a_load_it_is_the_most_that_the_gpus_keep(tmp_path: Path) -> None:
    request = checked_request(read(tmp_path, dgdr(hardware={"gpuSku": "h200", "totalGpus": 2})).request)
    assert request.rate is None and request.max_gpus == 2


def test_an_end_to_end_target_is_split(tmp_path: Path) -> None:
    request = read(tmp_path, dgdr(sla={"e2eLatency": 10_000}, workload={"requestRate": 1, "osl": 900})).request
    assert request.slo.ttft is not None and request.slo.itl is not None
    assert request.slo.ttft + 900 * request.slo.itl == pytest.approx(10.0)
    assert any("e2eLatency" in note for note in request.notes)


def test_what_means_nothing_here_is_told_and_a_mocker_is_simulated(tmp_path: Path) -> None:
    spec = {
        "image": "x", "searchStrategy": "thorough", "features": {"mocker": {"enabled": True}, "planner": {}},
        "workload": {"requestRate": 1}, "autoApply": False,
    }  # fmt: skip
    intent = read(tmp_path, dgdr(**spec))
    assert intent.request.engine == "sim" and not intent.apply
    assert [note.split()[0] for note in intent.request.notes] == ["image", "searchStrategy", "features.planner"]


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ("- a\n", "not a mapping"),
        ("a: [", "can't be read"),
        (EIGHT.replace("ttft", "tttf"), r"slo.tttf is not a field \(did you mean ttft"),
        (EIGHT.replace("engine: vllm", "engine: tgi"), r"engine"),
        (EIGHT.replace("500ms", "500mss"), "slo.ttft '500mss' has the unknown unit"),
        (EIGHT.replace("model: Qwen/Qwen3-8B\n", ""), "model"),
        ({**DGDR, "apiVersion": "nvidia.com/v1alpha1"}, "v1alpha1"),
        ({**DGDR, "kind": "DynamoGraphDeployment"}, "only nvidia.com/v1beta1 DynamoGraphDeploymentRequest"),
        (dgdr(hardware={"gpuSku": "mi300x"}), "mi300x"),
        (dgdr(hardware={"gpusku": "h100"}), r"spec.hardware.gpusku is not a field \(did you mean gpuSku"),
        (dgdr(backend="trtllm"), "trtllm"),
        (dgdr(workload={"requestRate": 1, "concurrency": 2}), "concurrency and requestRate"),
        (dgdr(sla={"e2eLatency": 100, "ttft": 5}), "e2eLatency and ttft or itl"),
        (dgdr(sla={"itl": -1}), "itl"),
    ],
)
def test_a_mistake_is_named_with_its_fix(tmp_path: Path, document: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read(tmp_path, document)


def test_names_of_gpus_from_clusters_are_known() -> None:
    names = {"h200_sxm": "h200", "NVIDIA-H100-80GB-HBM3": "h100", "gb200": "gb200", "NVIDIA L40S": "l40s"}
    assert {name: gpu_of_sku(name) for name in names} == names
