"""Pods of a cluster: no Service links; and groups of them, in which an engine spreads over hosts."""

from pathlib import Path

import pytest

from penstock.kernel.errors import ConfigError
from penstock.kernel.values import JsonObject
from penstock_kubernetes.operator.cluster_spec import read_spec
from penstock_kubernetes.operator.engine_group import check_hosts, group_of
from penstock_kubernetes.operator.engine_pod import EnginePod
from penstock_kubernetes.operator.pod_template import engine_pod, process_pod
from penstock_kubernetes.pod_launch import pod_launch

RUNNING: JsonObject = {"metadata": {"labels": {}}, "spec": {}, "status": {"phase": "Running"}}


def pod(engine: str, folder: Path, hosts: int = 1) -> JsonObject:
    pools = {"main": {"engine": engine, "gpus": 4, "model_path": "/models/m"}}
    images = {"vllm": "v", "sglang": "s", "trtllm": "t", "llamacpp": "l"}
    kubernetes = {"images": images, "hosts": {"main": hosts}}
    written = {"models": {"m": {"pools": pools}}, "kubernetes": kubernetes}
    spec = read_spec({"metadata": {"name": "demo", "namespace": "llm"}, "spec": written}, folder)
    pool = spec.settings.models["m"].pools["main"]
    made = engine_pod("demo", spec, "main", pool, pod_launch("main-0", "m", pool, 4), 4, "penstock")
    assert process_pod("demo", spec, "frontend", ["x"], "penstock")["spec"]["enableServiceLinks"] is False
    return {"metadata": {"name": "demo-main-0-1", "labels": {}, "annotations": {}}, "spec": made["spec"]}


def test_a_service_named_penstock_puts_nothing_into_a_pods_environment(tmp_path: Path) -> None:
    assert pod("vllm", tmp_path)["spec"]["enableServiceLinks"] is False, "PENSTOCK_PORT is no setting"


@pytest.mark.parametrize(
    ("engine", "image", "words"),
    [
        ("vllm", "v", "--tensor-parallel-size 4"),
        ("sglang", "s", "--model-path /models/m"),
        ("trtllm", "t", "--tp_size 4"),
        ("llamacpp", "l", "/models/m"),
    ],
)
def test_an_engine_of_each_kind_is_a_pod_of_its_image(engine: str, image: str, words: str, tmp_path: Path) -> None:
    (container,) = pod(engine, tmp_path)["spec"]["containers"]
    assert container["image"] == image
    assert words in " ".join([*container.get("command", []), *container["args"]])
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 4} and "readinessProbe" in container
    assert container["volumeMounts"] == [{"name": "shm", "mountPath": "/dev/shm"}]


@pytest.mark.parametrize(
    ("engine", "ranks"),
    [
        ("vllm", "--nnodes $(LWS_GROUP_SIZE) --node-rank $(LWS_WORKER_INDEX) --master-addr $(LWS_LEADER_ADDRESS)"),
        ("sglang", "--dist-init-addr $(LWS_LEADER_ADDRESS):20000 --nnodes $(LWS_GROUP_SIZE)"),
    ],
)
def test_every_rank_knows_the_group_and_the_leader_answers(engine: str, ranks: str, tmp_path: Path) -> None:
    made = group_of(pod(engine, tmp_path, 2), engine, 2)["spec"]["leaderWorkerTemplate"]
    (leader,), (worker,) = (made[f"{role}Template"]["spec"]["containers"] for role in ("leader", "worker"))
    assert made["size"] == 2 and "restartPolicy" not in made["leaderTemplate"]["spec"]
    assert ranks in " ".join(leader["args"]) and ranks in " ".join(worker["args"])
    assert "--tensor-parallel-size 4" in " ".join(leader["args"]), "of all hosts together"
    assert leader["resources"]["limits"] == worker["resources"]["limits"] == {"nvidia.com/gpu": 2}
    assert "readinessProbe" in leader and "readinessProbe" not in worker
    assert ("--headless" in worker["args"]) == (engine == "vllm") and "--headless" not in leader["args"]


def test_what_can_not_spread_is_refused() -> None:
    with pytest.raises(ConfigError, match="llamacpp can't spread over 2 hosts"):
        check_hosts("llamacpp", 2, 2)
    with pytest.raises(ConfigError, match="3 GPUs of an engine can't be divided among 2 hosts"):
        check_hosts("vllm", 2, 3)


def test_a_group_ends_with_any_of_its_pods() -> None:
    group = EnginePod("g", group=True)
    group.take("g-0-1", RUNNING)
    assert group.end() is None, "its leader is not known yet"
    group.take("g-0", RUNNING)
    assert group.end() is None
    container = {"restartCount": 1, "lastState": {"terminated": {"exitCode": 1}}}
    restarted = {**RUNNING, "status": {"phase": "Running", "containerStatuses": [container]}}
    group.take("g-0-1", restarted)
    assert group.end() == "lost its pod g-0-1, which ended with status 1 and was restarted"
    group.take("g-0-1", None)
    assert group.end() == "lost its pod g-0-1, which was deleted" and not group.deleted
    group.take("g-0", None)
    assert group.deleted


@pytest.mark.parametrize(
    ("kubernetes", "more", "words"),
    [
        ({"strategy": {"main": {"maxSurge": 0, "maxUnavailable": 0}}}, {}, "no pod could be replaced"),
        ({"strategy": {"main": {"maxSurge": -1}}}, {}, "spec.kubernetes"),
        ({"strategy": {"main": {"surge": 1}}}, {}, "surge"),
        ({"strategy": {"mian": {"maxSurge": 0}}}, {}, "pool mian, and there is none"),
        ({"scaled": "other"}, {}, "no such pool"),
        ({}, {"replicas": 3}, "the pools are a, b"),
    ],
)
def test_a_spec_that_can_not_be_carried_out_names_its_place(
    kubernetes: JsonObject, more: JsonObject, words: str, tmp_path: Path
) -> None:
    pools = {"a": {}, "b": {}} if more else {"main": {}}
    written = {"models": {"m": {"pools": pools}}, "kubernetes": kubernetes, **more}
    with pytest.raises(ConfigError, match=words):
        read_spec({"metadata": {"name": "demo", "namespace": "llm"}, "spec": written}, tmp_path)


def test_the_replicas_of_a_spec_are_those_of_the_pool_that_it_names(tmp_path: Path) -> None:
    written = {"models": {"m": {"pools": {"a": {}, "b": {}}}}, "kubernetes": {"scaled": "b"}, "replicas": 7}
    spec = read_spec({"metadata": {"name": "demo", "namespace": "llm"}, "spec": written}, tmp_path)
    assert {name: pool.replicas for name, pool in spec.settings.models["m"].pools.items()} == {"a": 4, "b": 7}
    assert spec.scaled == "b" and "replicas: 7" in spec.config
