"""Manifests of a config: what they hold, and that an API server takes them from the real kubectl."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.config.reading.load import load
from penstock.kernel.errors import ConfigError
from penstock_kubernetes.kubernetes_manifests import KEYS, kubernetes_yaml
from tests.kubernetes.conftest import RunningApi

CONFIG = """
name: llm
models:
  org/model:
    pools:
      prefill: {engine: vllm, role: prefill, replicas: 1, gpus: 2}
      decode: {engine: vllm, role: decode, replicas: 3, gpus: 1, args: ["--max-num-seqs", "64"]}
planner: {enabled: true, budget: {max_gpus: 12}}
"""


def rendered(tmp_path: Path, text: str = CONFIG, *overrides: str) -> dict[tuple[str, str], Any]:
    (tmp_path / "c.yaml").write_text(text)
    manifests = yaml.safe_load_all(kubernetes_yaml(load(tmp_path / "c.yaml", overrides, {}).settings))
    return {(each["kind"], each["metadata"]["name"]): each for each in manifests}


def test_each_pool_is_a_deployment_whose_pods_the_config_selects(tmp_path: Path) -> None:
    objects = rendered(tmp_path)
    decode = objects["Deployment", "llm-decode"]["spec"]
    pod = decode["template"]
    container = pod["spec"]["containers"][0]
    assert container["resources"] == {"limits": {"nvidia.com/gpu": 1}}
    assert container["args"][-2:] != [] and "--max-num-seqs" in container["args"]
    assert '"endpoint": "tcp://*:5557"' in container["args"][container["args"].index("--kv-events-config") + 1]
    assert pod["metadata"]["annotations"] == {"penstock.io/kv-events": "5557", "penstock.io/kv-replay": "5558"}
    config = yaml.safe_load(objects["ConfigMap", "penstock"]["data"]["penstock.yaml"])
    pools = config["models"]["org/model"]["pools"]
    for name in ("prefill", "decode"):
        selector = dict(part.split("=") for part in pools[name]["selector"].split(","))
        labels = objects["Deployment", f"llm-{name}"]["spec"]["template"]["metadata"]["labels"]
        assert selector.items() <= labels.items()
    assert config["planner"]["kubernetes"]["pools"] == {
        "prefill": "Deployment/llm-prefill",
        "decode": "Deployment/llm-decode",
    }


def test_a_name_that_no_label_takes_becomes_one_that_selects_the_same_pods(tmp_path: Path) -> None:
    objects = rendered(tmp_path, CONFIG.replace("name: llm", "name: Our Chat"))
    config = yaml.safe_load(objects["ConfigMap", "penstock"]["data"]["penstock.yaml"])
    selector = config["models"]["org/model"]["pools"]["decode"]["selector"]
    (pod,) = (
        each["spec"]["template"]["metadata"]["labels"]
        for (kind, name), each in objects.items()
        if (kind == "Deployment" and name.endswith("decode")) or "decode" in name
    )
    assert " " not in "".join(pod.values())
    assert dict(part.split("=") for part in selector.split(",")).items() <= pod.items()


def test_applied_again_it_leaves_alone_what_a_planner_scales(tmp_path: Path) -> None:
    scaled = rendered(tmp_path)["Deployment", "llm-decode"]["spec"]
    assert "replicas" not in scaled
    alone = rendered(tmp_path, CONFIG, "planner.enabled=false")["Deployment", "llm-decode"]["spec"]
    assert alone["replicas"] == 3


def test_a_pod_with_gpus_has_shared_memory_and_gives_way_to_its_successor(tmp_path: Path) -> None:
    spec = rendered(tmp_path)["Deployment", "llm-prefill"]["spec"]
    pod = spec["template"]["spec"]
    assert pod["volumes"] == [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    assert pod["containers"][0]["volumeMounts"] == [{"name": "shm", "mountPath": "/dev/shm"}]
    assert spec["strategy"] == {"rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}}
    plain = rendered(tmp_path, "models: {m: {pools: {main: {replicas: 2}}}}")["Deployment", "penstock-main"]["spec"]
    assert "strategy" not in plain and plain["replicas"] == 2 and "volumes" not in plain["template"]["spec"]


def test_the_rights_are_those_of_the_pools_and_no_more(tmp_path: Path) -> None:
    rules = rendered(tmp_path)["Role", "penstock"]["rules"]
    writes = [rule for rule in rules if "patch" in rule["verbs"]]
    assert writes == [
        {
            "apiGroups": ["apps"],
            "resources": ["deployments/scale"],
            "resourceNames": ["llm-prefill", "llm-decode"],
            "verbs": ["patch"],
        }
    ]
    alone = rendered(tmp_path, CONFIG, "planner.enabled=false")["Role", "penstock"]["rules"]
    assert alone == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}]


def test_what_penstock_writes_runs_without_root_and_with_a_key(tmp_path: Path) -> None:
    pod = rendered(tmp_path)["Deployment", "penstock"]["spec"]["template"]["spec"]
    container = pod["containers"][0]
    assert pod["securityContext"]["runAsNonRoot"] and container["securityContext"]["readOnlyRootFilesystem"]
    assert container["env"][0]["valueFrom"]["secretKeyRef"]["name"] == KEYS


def test_the_rendered_config_is_one_that_up_takes(tmp_path: Path) -> None:
    text = rendered(tmp_path)["ConfigMap", "penstock"]["data"]["penstock.yaml"]
    (tmp_path / "again.yaml").write_text(text)
    environment = {"PENSTOCK_FRONTEND__SECURITY__API_KEYS": "k" * 32}
    assert load(tmp_path / "again.yaml", (), environment).settings.planner.connector == "kubernetes"


def test_engines_of_which_no_pods_are_made_are_refused_by_name(tmp_path: Path) -> None:
    text = "models: {m: {pools: {main: {engine: llamacpp, model_path: x.gguf}}}}"
    with pytest.raises(ConfigError, match="pool main of m is llamacpp"):
        rendered(tmp_path, text)


def test_an_api_server_takes_them_from_kubectl(tmp_path: Path, kubectl: Path, api_server: RunningApi) -> None:
    (tmp_path / "c.yaml").write_text(CONFIG)
    render = [sys.executable, "-m", "penstock", "render", "kubernetes", str(tmp_path / "c.yaml")]
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": "src", "HOME": str(tmp_path)}
    manifests = subprocess.run(render, env=environment, capture_output=True, text=True, check=True).stdout
    apply = [str(kubectl), "--kubeconfig", str(api_server.kubeconfig), "apply", "-f", "-", "--dry-run=server"]
    answer = subprocess.run(apply, input=manifests, capture_output=True, text=True, env={"HOME": str(tmp_path)})
    assert answer.returncode == 0, answer.stderr
    assert "deployment.apps/llm-decode created (server dry run)" in answer.stdout
