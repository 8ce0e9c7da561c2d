"""A planner as a process that scales a Deployment, refuses a ceiling, and tells KEDA and Prometheus the same number."""

import asyncio
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lightkube import Client, KubeConfig
from lightkube.resources.apps_v1 import Deployment
from lightkube.resources.core_v1 import Namespace

from penstock_extras.plugins.protobuf_messages import KEDA, message, service
from tests.kubernetes.conftest import RunningApi
from tests.servers import free_ports

ROOT = Path(__file__).resolve().parents[2]
NAMESPACE = "planner-scales"
CONFIG = """
models:
  m:
    pools:
      decode: {{engine: vllm, replicas: 1}}
discovery: {{kubernetes: {{namespace: {namespace}}}}}
planner:
  policy: static
  load_interval: 500ms
  throughput_interval: 1s
  source: prometheus
  connector: kubernetes
  kubernetes: {{pools: {{decode: Deployment/vllm}}}}
  budget: {{max_gpus: 6}}
  prometheus: {{url: "http://127.0.0.1:9"}}
  metrics_port: {metrics}
  external_scaler_port: {keda}
  plugins:
    use:
      want: {{module: tests.kubernetes.wanting, name: Want, stage: propose, options: {{replicas: "9"}}}}
"""


def until(there: Callable[[], object], why: Callable[[], str]) -> None:
    """Wait until something is so, for at most half a minute."""
    end = time.monotonic() + 30
    while not there():
        assert time.monotonic() < end, why()
        time.sleep(0.05)


async def keda_metric(port: int) -> int:
    grpc = pytest.importorskip("grpc")
    reference = message("ScaledObjectRef", KEDA)(name="vllm", scalerMetadata={"pool": "decode"})
    path, kind, reply = service("ExternalScaler", KEDA)["GetMetrics"]
    question = message("GetMetricsRequest", KEDA)(scaledObjectRef=reference, metricName="x")
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        send = channel.unary_unary(
            path, request_serializer=kind.SerializeToString, response_deserializer=reply.FromString
        )
        return int((await send(question, timeout=5)).metricValues[0].metricValue)


def test_a_planner_process_scales_a_deployment_up_to_its_ceiling(api_server: RunningApi, tmp_path: Path) -> None:
    client = Client(config=KubeConfig.from_file(api_server.kubeconfig).get(), namespace=NAMESPACE, trust_env=False)
    client.create(Namespace.from_dict({"metadata": {"name": NAMESPACE}}))
    resources = {"limits": {"nvidia.com/gpu": "2"}}
    container: dict[str, Any] = {"name": "main", "image": "vllm/vllm-openai", "resources": resources}
    template = {"metadata": {"labels": {"app": "vllm"}}, "spec": {"containers": [container]}}
    spec = {"replicas": 1, "selector": {"matchLabels": {"app": "vllm"}}, "template": template}
    client.create(Deployment.from_dict({"metadata": {"name": "vllm"}, "spec": spec}))

    def replicas() -> int:
        return int(client.get(Deployment, "vllm").to_dict()["spec"]["replicas"])

    metrics, keda = free_ports(2)
    (tmp_path / "planner.yaml").write_text(CONFIG.format(namespace=NAMESPACE, metrics=metrics, keda=keda))
    env = {**os.environ, "PYTHONPATH": f"{ROOT}/src:{ROOT}", "PYTHONUNBUFFERED": "1"}
    env["KUBECONFIG"] = str(api_server.kubeconfig)
    log = tmp_path / "log"
    planner = subprocess.Popen(
        [sys.executable, "-m", "penstock", "planner", "planner.yaml"],
        cwd=tmp_path,
        env=env,
        stdout=log.open("w"),
        stderr=subprocess.STDOUT,
    )
    try:
        until(lambda: planner.poll() is not None or replicas() == 3, log.read_text)
        assert planner.poll() is None, log.read_text()
        text = urllib.request.urlopen(f"http://127.0.0.1:{metrics}/metrics").read().decode()
        assert 'penstock_planner_pool_target{pool="decode"} 3' in text
        assert asyncio.run(keda_metric(keda)) == 3
    finally:
        planner.send_signal(signal.SIGINT)
        planner.wait(30)
    assert planner.returncode == 0
    assert "it scales by Deployment vllm in namespace planner-scales" in log.read_text()
    assert replicas() == 3, "9 replicas of 2 GPUs are wanted, and 6 GPUs are the ceiling"
