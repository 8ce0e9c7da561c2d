"""helm and kubectl as the truth for controllers and kubelet: a chart becomes pods that answer, and goes away again.

Where PENSTOCK_KUBECONFIG names a cluster they run against that one, whose nodes pull the image `python:3`.
"""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest

from tests.kubernetes.cluster_process import running_cluster

pytestmark = pytest.mark.slow

CHART = {
    "Chart.yaml": "{apiVersion: v2, name: web, version: 0.1.0}",
    "values.yaml": "{text: one, replicas: 2, image: 'python:3'}",
    "templates/content.yaml": """
        apiVersion: v1
        kind: ConfigMap
        metadata: {name: "{{ .Release.Name }}"}
        data: {index.html: "{{ .Values.text }}"}
        """,
    "templates/service.yaml": """
        apiVersion: v1
        kind: Service
        metadata: {name: "{{ .Release.Name }}"}
        spec: {selector: {app: "{{ .Release.Name }}"}, ports: [{port: 80, targetPort: http}]}
        """,
    "templates/deployment.yaml": """
        apiVersion: apps/v1
        kind: Deployment
        metadata: {name: "{{ .Release.Name }}"}
        spec:
          replicas: {{ .Values.replicas }}
          progressDeadlineSeconds: 5
          selector: {matchLabels: {app: "{{ .Release.Name }}"}}
          template:
            metadata:
              labels: {app: "{{ .Release.Name }}"}
              annotations: {content: "{{ .Values.text }}"}
            spec:
              terminationGracePeriodSeconds: 1
              containers:
                - name: web
                  image: "{{ .Values.image }}"
                  command: [python, -m, http.server, "8000", --directory, /content]
                  ports: [{name: http, containerPort: 8000}]
                  readinessProbe: {httpGet: {path: /, port: http}, periodSeconds: 1}
                  volumeMounts: [{name: content, mountPath: /content}]
              volumes: [{name: content, configMap: {name: "{{ .Release.Name }}"}}]
        """,
    "templates/tests/answers.yaml": """
        apiVersion: v1
        kind: Pod
        metadata:
          name: "{{ .Release.Name }}-answers"
          annotations: {helm.sh/hook: test, helm.sh/hook-delete-policy: before-hook-creation}
        spec:
          restartPolicy: Never
          containers:
            - name: ask
              image: "python:3"
              command: [python, -c, "import urllib.request as r; print(r.urlopen('http://{{.Release.Name}}/').read())"]
        """,
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The kubeconfig of a cluster: the double's, or the one that PENSTOCK_KUBECONFIG names."""
    if named := os.environ.get("PENSTOCK_KUBECONFIG"):
        yield Path(named).expanduser()
        return
    with running_cluster(tmp_path_factory.mktemp("cluster"), speed=20) as made:
        yield made.kubeconfig


@pytest.fixture(scope="module")
def chart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chart")
    for name, text in CHART.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(dedent(text).strip())
    return folder


class Shell:
    """Runs helm and kubectl in a namespace of the cluster."""

    def __init__(self, cluster: Path, namespace: str, programs: dict[str, Path], home: Path) -> None:
        self.namespace = namespace
        self._programs = programs
        self._environment = {**os.environ, "KUBECONFIG": str(cluster), "HOME": str(home)}

    def fails(self, line: str, **more: str) -> str:
        """Run a command that is to fail; return what it writes."""
        result = self._run(line, more)
        assert result.returncode != 0, result.stdout
        return result.stdout + result.stderr

    def __call__(self, line: str, **more: str) -> str:
        """Run a command; return its output."""
        result = self._run(line, more)
        assert result.returncode == 0, f"{line}\n{result.stdout}\n{result.stderr}"
        return result.stdout

    def _run(self, line: str, more: dict[str, str]) -> "subprocess.CompletedProcess[str]":
        program, *words = [more.get(word, word) for word in line.split()]
        command = [str(self._programs[program]), "--namespace", self.namespace, *words]
        return subprocess.run(command, env=self._environment, capture_output=True, text=True, timeout=90, check=False)


@pytest.fixture
def shell(cluster: Path, kubectl: Path, helm: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Shell]:
    namespace = request.node.name.replace("_", "-")[5:60].strip("-")
    made = Shell(cluster, namespace, {"kubectl": kubectl, "helm": helm}, tmp_path)
    made(f"kubectl create namespace {namespace}")
    yield made
    made(f"kubectl delete namespace {namespace} --timeout=60s")


WAIT = "--wait --timeout 60s"


def test_a_chart_is_installed_upgraded_rolled_back_and_removed(shell: Shell, chart: Path) -> None:
    shell(f"helm install web CHART {WAIT}", CHART=str(chart))
    assert "b'one'" in shell("helm test web --logs")
    shell(f"helm upgrade web CHART --set text=two {WAIT}", CHART=str(chart))
    assert "b'two'" in shell("helm test web --logs")
    shell(f"helm rollback web 1 {WAIT}")
    assert "b'one'" in shell("helm test web --logs")
    shell("helm uninstall web --wait")
    shell("kubectl wait --for=delete pod -l app=web --timeout=30s")
    assert shell("kubectl get deployments,replicasets,services").strip() == ""


def test_an_upgrade_that_does_not_start_fails_and_the_old_pods_serve_on(shell: Shell, chart: Path) -> None:
    shell(f"helm install web CHART {WAIT}", CHART=str(chart))
    bad = "helm upgrade web CHART --set image=absent:1 --set text=two --wait --timeout 8s"
    shell.fails(bad, CHART=str(chart))
    assert "exceeded its progress deadline" in shell.fails("kubectl rollout status deployment/web --timeout=30s")
    pods = shell("kubectl get pods -l app=web")
    assert "ImagePullBackOff" in pods or "ErrImagePull" in pods
    assert "b'one'" in shell("helm test web --logs")
    shell(f"helm rollback web 1 {WAIT}")
    assert "b'one'" in shell("helm test web --logs")


def test_a_rollout_is_restarted_undone_scaled_and_survives_deleted_pods(shell: Shell, chart: Path) -> None:
    shell(f"helm install web CHART {WAIT}", CHART=str(chart))
    before = shell("kubectl get pods -l app=web -o name").split()
    shell("kubectl rollout restart deployment/web")
    assert "successfully rolled out" in shell("kubectl rollout status deployment/web --timeout=60s")
    shell(f"kubectl wait --for=delete {' '.join(before)} --timeout=30s")
    shell("kubectl rollout undo deployment/web")
    shell("kubectl rollout status deployment/web --timeout=60s")
    assert shell("kubectl rollout history deployment/web").split()[-2] == "3"
    shell("kubectl scale deployment/web --replicas=3")
    shell(
        "kubectl wait --for=jsonpath=READY deployment/web --timeout=60s",
        **{"--for=jsonpath=READY": "--for=jsonpath={.status.readyReplicas}=3"},
    )
    shell("kubectl delete pod -l app=web --timeout=30s")
    shell("kubectl rollout status deployment/web --timeout=60s")
    assert shell("kubectl get deployment web -o jsonpath={.status.availableReplicas}") == "3"
