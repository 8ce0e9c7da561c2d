"""`penstock epp --pool` with a real Envoy: requests follow the pods that an InferencePool selects, and objectives."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightkube")

from penstock_kubernetes.picker.envoy_config import EnvoyPlan, envoy_config
from penstock_kubernetes.picker.ext_proc_stream import OBJECTIVE
from penstock_kubernetes.picker.objectives import GROUPS, VERSION
from tests.kubernetes.api_client import ApiClient
from tests.kubernetes.conftest import running_double
from tests.kubernetes.discovery.test_pod_pool import POOLS
from tests.kubernetes.picker.test_epp_command import envoy
from tests.kubernetes.programs import program
from tests.kubernetes.test_objectives import definition
from tests.live.cluster import Served, post, served, until
from tests.servers import free_ports

pytestmark = pytest.mark.slow

POOL = "/apis/inference.networking.k8s.io/v1/namespaces/default/inferencepools"
OBJECTIVES = f"/apis/{GROUPS[0]}/{VERSION}/namespaces/default/inferenceobjectives"
CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
PODS = "/api/v1/namespaces/default/pods"


@contextmanager
def engine(host: str, port: int) -> Iterator[str]:
    """Run a simulated engine that stands for a pod's."""
    words = ["engine", "sim", "--model", "sim", "--host", host, "--port", str(port), "--no-kv-events"]
    process = subprocess.Popen([sys.executable, "-m", "penstock", *words], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline()
        yield host
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(20)


def start_pod(api: ApiClient, name: str, address: str) -> None:
    """Report a pod as ready at an address, as a kubelet does."""
    containers = [{"name": "engine", "image": "engine"}]
    metadata = {"name": name, "labels": {"app": "sim"}}
    api.post(PODS, {"metadata": metadata, "spec": {"containers": containers}})
    status = {"podIP": address, "phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
    api.patch(f"{PODS}/{name}/status", {"status": status})


def workers(cluster: Served) -> list[str]:
    """Return the hosts of the workers that are ready."""
    listed: list[dict[str, Any]] = cluster.get("/admin/status")[1]["workers"]
    return sorted(worker["url"].split("/")[2].split(":")[0] for worker in listed if worker["state"] == "ready")


def ask(url: str, text: str, **headers: str) -> tuple[int, dict[str, str]]:
    body = {"model": "sim", "messages": [{"role": "user", "content": text}], "max_tokens": 4}
    status, _, answered = post(f"{url}/v1/chat/completions", body, headers)
    return status, answered


def ask_long(url: str, name: str, ended: list[str]) -> None:
    """Ask with a prompt that takes its engine a while; ``urgent`` names the objective of that name."""
    headers = {OBJECTIVE: "urgent"} if name == "urgent" else {}
    if ask(url, f"{name} " * 12_000, **headers)[0] == 200:
        ended.append(name)


def test_requests_follow_the_pods_of_a_pool_and_its_objectives(tmp_path: Path) -> None:
    program("envoy")
    folder = tmp_path / "api"
    folder.mkdir()
    listen, target, picker, admin = free_ports(4)
    hosts = [f"127.0.{os.getpid() % 200 + 1}.{number}" for number in (1, 2, 3)]
    with ExitStack() as stack:
        server = stack.enter_context(running_double(folder))
        api = stack.enter_context(ApiClient(server.url))
        for crd in (POOLS, definition(GROUPS[0]).to_dict()):
            api.post(CRDS, crd)
        selector = {"matchLabels": {"app": "sim"}}
        api.post(
            POOL, {"metadata": {"name": "chat"}, "spec": {"selector": selector, "targetPorts": [{"number": target}]}}
        )
        spec = {"priority": 5, "poolRef": {"name": "chat"}}
        api.post(OBJECTIVES, {"metadata": {"name": "urgent"}, "spec": spec})
        for number, host in enumerate(hosts):
            stack.enter_context(engine(host, target))
            if number < 2:
                start_pod(api, f"pod-{number}", host)
        words = ["epp", "--pool", "chat", "--namespace", "default", "--engine", "sim", "--picker.tls", "false"]
        words += ["--picker.fallbacks", "0", "--picker.listen_port", str(picker), "--frontend.port", "0"]
        words += ["--router.queue.threshold", "0"]  # a worker prefills one prompt at a time
        cluster = stack.enter_context(served(tmp_path, *words, env={"KUBECONFIG": str(server.kubeconfig)}))
        until(lambda: workers(cluster) == hosts[:2], 30, lambda: cluster.text)
        plan = EnvoyPlan(f"127.0.0.1:{listen}", [f"127.0.0.1:{picker}"], fallbacks=0, admin=f"127.0.0.1:{admin}")
        url = stack.enter_context(envoy(tmp_path, envoy_config(plan), listen))
        answers = [ask(url, f"question {number} " * 20) for number in range(12)]
        assert {status for status, _ in answers} == {200}
        assert len({headers["x-penstock-worker"] for _, headers in answers}) == 2, "both pods are asked"

        start_pod(api, "pod-2", hosts[2])
        until(lambda: workers(cluster) == hosts, 30, lambda: cluster.text)
        for name in ("pod-0", "pod-1"):
            api.send("DELETE", f"{PODS}/{name}", gracePeriodSeconds="0")
        until(lambda: workers(cluster) == hosts[2:], 30, lambda: cluster.text)
        answers = [ask(url, f"another {number} " * 20) for number in range(6)]
        assert {status for status, _ in answers} == {200}
        assert len({headers["x-penstock-worker"] for _, headers in answers}) == 1

        ended: list[str] = []
        names = ["first", "second", "third", "fourth", "urgent"]
        askers = [threading.Thread(target=ask_long, args=(url, name, ended)) for name in names]
        for one in askers:
            one.start()
            time.sleep(0.05)  # so that they arrive in this order
        for one in askers:
            one.join(60)
        assert len(ended) == 5 and ended.index("urgent") < ended.index("fourth"), "an objective goes before the others"
