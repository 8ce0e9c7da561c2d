"""Does a PenstockCluster that says what it wants get its pools by one plan, and is what can't be planned refused?"""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import cast

import pytest

pytest.importorskip("lightkube")

from lightkube import AsyncClient, KubeConfig
from lightkube.resources.core_v1 import Node

from penstock.kernel.errors import ConfigError
from penstock.kernel.values import JsonObject
from penstock_kubernetes.operator.cluster_spec import read_spec
from penstock_kubernetes.operator.planned_spec import waits_for_approval, with_plan
from tests.doubles.kubernetes.api.api_faults import ApiFault
from tests.doubles.kubernetes.api.api_server import ApiServer

NOBODY = cast("AsyncClient", None)
LINES: JsonObject = {
    "model": "llama-3.1-8b",
    "hardware": {"gpu": "h100", "max_gpus": 2},
    "slo": {"ttft": "500ms", "itl": "30ms"},
    "workload": {"rate": 2, "isl": 500, "osl": 50},
}
DYNAMOS: JsonObject = {
    "apiVersion": "nvidia.com/v1beta1",
    "kind": "DynamoGraphDeploymentRequest",
    "spec": {"model": "Qwen/Qwen3-0.6B", "backend": "vllm", "sla": {"ttft": 200.0, "itl": 20.0}, "autoApply": True},
}


def resource(request: object, **more: object) -> JsonObject:
    metadata = {"name": "wanted", "namespace": "default", "generation": 1}
    return {"metadata": metadata, "spec": {"request": request, **more}}


def node(name: str, product: str, gpus: int) -> Node:
    labels = {"nvidia.com/gpu.product": product}
    status = {"allocatable": {"nvidia.com/gpu": str(gpus)}}
    return Node.from_dict({"metadata": {"name": name, "labels": labels}, "status": status})


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[tuple[ApiServer, AsyncClient]]:
    async with ApiServer(tmp_path / "api") as server:
        client = AsyncClient(config=KubeConfig.from_file(server.kubeconfig).get(), trust_env=False)
        yield server, client
        await client.close()


async def test_eight_lines_become_pools_and_what_the_spec_says_counts_more(tmp_path: Path) -> None:
    given = {"pools": {"main": {"replicas": 3}}}
    asked = resource(LINES, models={"llama-3.1-8b": given}, frontend={"processes": 2})
    whole, plan = await with_plan(NOBODY, asked, {}, tmp_path)
    spec = read_spec(whole, tmp_path)
    pool = spec.settings.models["llama-3.1-8b"].pools["main"]
    assert (pool.replicas, pool.sim.timing.gpu, spec.frontends) == (3, "h100", 2)
    assert spec.settings.slo.ttft == 0.5 and plan["config"]["models"]["llama-3.1-8b"]["pools"]["main"]["replicas"] == 1


async def test_a_request_is_planned_once(tmp_path: Path) -> None:
    _, plan = await with_plan(NOBODY, resource(LINES), {}, tmp_path)
    marked = {**plan, "config": {"models": {"kept": {}}}}
    whole, again = await with_plan(NOBODY, resource(LINES, frontend={"processes": 2}), marked, tmp_path)
    assert again is marked and list(whole["spec"]["models"]) == ["kept"]
    assert (await with_plan(NOBODY, resource({**LINES, "auto_apply": False}), marked, tmp_path))[1] is marked
    for wrong in (
        {"auto_apply": "no"},
        {"autoApply": False},
        {"spec": "x"},
    ):  # no approval, which a plan must not bring
        with pytest.raises(ConfigError):
            await with_plan(NOBODY, resource({**LINES, **wrong}), marked, tmp_path)
    changed = {**LINES, "workload": {"rate": 3, "isl": 500, "osl": 50}}
    whole, again = await with_plan(NOBODY, resource(changed), marked, tmp_path)
    assert again["request"] != plan["request"] and list(whole["spec"]["models"]) == ["llama-3.1-8b"]
    assert await with_plan(NOBODY, {"spec": {"models": {}}}, again, tmp_path) == ({"spec": {"models": {}}}, {})


async def test_without_a_gpu_it_is_planned_for_those_of_the_nodes(
    tmp_path: Path, api: tuple[ApiServer, AsyncClient]
) -> None:
    server, client = api
    with pytest.raises(ConfigError, match=r"no node has nvidia\.com/gpu .*gpuSku"):
        await with_plan(client, resource(DYNAMOS), {}, tmp_path)
    for each in (node("a", "NVIDIA-L40S", 1), node("b", "NVIDIA-H200", 1), node("c", "NVIDIA-H200", 1)):
        await client.create(each)
    whole, _ = await with_plan(client, resource(DYNAMOS), {}, tmp_path)
    (model,) = whole["spec"]["models"].values()
    pools = model["pools"].values()
    assert {pool["sim"]["timing"]["gpu"] for pool in pools} == {"h200"}
    assert sum(pool["replicas"] * pool["gpus"] for pool in pools) <= whole["spec"]["planner"]["budget"]["max_gpus"] == 2
    server.faults.add(ApiFault(kind="unauthorized", resources=("nodes",)))
    with pytest.raises(ConfigError, match=r"nodes can't be looked at: .*gpuSku"):
        await with_plan(client, resource(DYNAMOS), {}, tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slo": {"ttft": "1ms", "itl": "1ms"}}, r"no deployment meets the SLO: ITL 1\.0 ms: .*--ttft above"),
        ({"slo": {"ttft": "fast"}}, r"slo\.ttft 'fast'"),
        ({"model": "/etc/passwd"}, "is a path"),
        ({"model": "../../secrets"}, "is a path"),
        ({"hardware": {"gpu": ["h100", "/var/run/gpu.yaml"]}}, "is a path"),
        ({"workload": {"trace": "/etc/passwd"}}, r"workload\.trace names a file"),
        ({"profile": "measured"}, "profile names a file"),
        ({"engine": "sglang"}, "SGLang's servers are started elsewhere"),
    ],
)
async def test_what_cannot_be_planned_is_refused(change: JsonObject, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^spec\.request: ") as caught:
        await with_plan(NOBODY, resource({**LINES, **change}), {}, tmp_path)
    assert caught.match(message)


@pytest.mark.parametrize(
    ("request_", "held"),
    [
        (LINES, False),
        ({**LINES, "auto_apply": False}, True),
        (DYNAMOS, False),
        ({**DYNAMOS, "spec": {**DYNAMOS["spec"], "autoApply": False}}, True),
    ],
)
def test_a_request_is_applied_unless_it_says_no(request_: JsonObject, held: bool) -> None:
    assert waits_for_approval(resource(request_)) is held
