"""From an installation to an answer, on the double of a whole cluster: the chart, an upgrade, plain manifests."""

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kubernetes.cluster_process import ClusterProcess, running_cluster
from tests.kubernetes.setup.kustomize_base import CHART, ROOT

pytestmark = pytest.mark.slow
CONFIG = """
name: plain
models:
  sim:
    pools:
      main: {engine: sim, replicas: 2, sim: {timing: {speed_up: 10}}}
planner:
  {enabled: true, policy: static, load_interval: 1s, throughput_interval: 2s, budget: {min_replicas: 3, max_gpus: 8}}
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterProcess]:
    """A cluster whose nodes have the image penstock: this Python with this Penstock."""
    programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    own = {"entrypoint": [sys.executable, "-m", "penstock"], "env": {"PYTHONPATH": f"{ROOT}/src", "PATH": programs}}
    with running_cluster(tmp_path_factory.mktemp("cluster"), speed=20, images={"penstock": own}) as made:
        yield made


class Tools:
    """helm and kubectl in a namespace of the cluster."""

    def __init__(self, cluster: ClusterProcess, helm: Path, kubectl: Path, namespace: str, home: Path) -> None:
        self.kubectl_words = [str(kubectl), "--namespace", namespace]
        self.helm_words = [str(helm), "--namespace", namespace]
        self._cluster = cluster
        self._environment = {**os.environ, "KUBECONFIG": str(cluster.kubeconfig), "HOME": str(home)}

    def helm(self, *words: str) -> str:
        return self._run([*self.helm_words, *words])

    def kubectl(self, *words: str, text: str | None = None) -> str:
        return self._run([*self.kubectl_words, *words], text)

    def get(self, *words: str) -> Any:
        return json.loads(self.kubectl("get", *words, "-o", "json"))

    def service(self, name: str) -> str:
        """Return the URL of a Service, once it answers."""
        spec = self.get("service", name)["spec"]
        url, end = f"http://{spec['clusterIP']}:{spec['ports'][0]['port']}", time.monotonic() + 20
        while True:
            try:
                urllib.request.urlopen(f"{url}/health", timeout=5).close()
            except OSError:
                assert time.monotonic() < end, f"{url} does not answer"
                time.sleep(0.1)
            else:
                return url

    def _run(self, words: list[str], text: str | None = None) -> str:
        answer = subprocess.run(words, env=self._environment, input=text, capture_output=True, text=True, timeout=120)
        if answer.returncode:
            logs = "".join(path.read_text()[-1500:] for path in (self._cluster.folder / "logs").rglob("*.log"))
            raise AssertionError(f"{words}: {answer.stdout}{answer.stderr}\n{logs}")
        return answer.stdout


@pytest.fixture
def tools(cluster: ClusterProcess, helm: Path, kubectl: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Tools:
    namespace = request.node.name.replace("_", "-")[:50].strip("-")
    tools = Tools(cluster, helm, kubectl, namespace, tmp_path)
    tools.kubectl("create", "namespace", namespace)
    tools.kubectl("wait", "--for=create", "configmap/kube-root-ca.crt", "--timeout", "20s")
    return tools


def chat(url: str, key: str) -> int:
    """Return how many tokens a chat completion has."""
    body = {"model": "sim", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5}
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
    return int(json.load(urllib.request.urlopen(request, timeout=30))["usage"]["completion_tokens"])


def test_an_installed_chart_answers_and_so_does_its_upgrade(tools: Tools) -> None:
    values = ("--set", "operator.enabled=false,simulated.enabled=true,crds.install=false")
    tools.helm("install", "demo", str(CHART), *values, "--wait", "--timeout", "100s")
    name = "demo-penstock-simulated"
    key = tools.kubectl("get", "secret", name, "-o", 'go-template={{index .data "api-key" | base64decode}}')
    url = tools.service(name)
    assert chat(url, key) == 5
    with pytest.raises(urllib.error.HTTPError, match="401"):
        chat(url, "another key")
    more = ("--set", "simulated.config.models.sim.pools.main.replicas=3")
    tools.helm("upgrade", "demo", str(CHART), *values, *more, "--wait", "--timeout", "100s")
    assert chat(tools.service(name), key) == 5, "the key is the same"
    tools.helm("uninstall", "demo", "--wait")
    assert not tools.get("deployments")["items"]


def test_plain_manifests_serve_over_pods_that_the_planner_scales(tools: Tools, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(CONFIG)
    render = [sys.executable, "-m", "penstock", "render", "kubernetes", str(tmp_path / "c.yaml")]
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": f"{ROOT}/src", "HOME": str(tmp_path)}
    manifests = subprocess.run(render, env=environment, capture_output=True, text=True, check=True).stdout
    tools.kubectl("create", "secret", "generic", "penstock-keys", "--from-literal=api-key=" + "k" * 32)
    tools.kubectl("apply", "-f", "-", text=manifests)
    tools.kubectl("rollout", "status", "deployment/penstock", "--timeout", "100s")
    end = time.monotonic() + 60
    while tools.get("deployment", "plain-main")["spec"]["replicas"] != 3:
        assert time.monotonic() < end, tools.kubectl("logs", "deployment/penstock")
        time.sleep(0.5)
    tools.kubectl("rollout", "status", "deployment/plain-main", "--timeout", "60s")
    assert chat(tools.service("penstock"), "k" * 32) == 5
