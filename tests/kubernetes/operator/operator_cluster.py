"""A Kubernetes cluster's double with its kubelet, our resources and an operator in it, for tests with kubectl."""

import json
import os
import signal
import ssl
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from penstock.adapters.listen_address import free_port
from penstock.kernel.values import JsonObject
from tests.suites import ROOT

CRDS = Path(__file__).parents[3] / "deploy/helm/penstock/files/crds"
PATIENCE = 60.0
SCRIPT = {"speed": 5}
"""Pauses of back-off and of lost nodes take a fifth of their time."""


FAST: JsonObject = {"drain_timeout": 10, "stop_grace": 2}


def spec(replicas: int, **more: object) -> JsonObject:
    """Return a spec with one pool of simulated engines."""
    pools = {"main": {"replicas": replicas}}
    return {"models": {"sim": {"tokenizer": "builtin:sim", "pools": pools}}, "supervise": FAST, **more}


class OperatorCluster:
    """What a test does with it; everything is in namespace default."""

    def __init__(self, folder: Path, kubectl: Path) -> None:
        self.folder = folder
        self.url = ""
        """Of the API server."""
        self.env = {**os.environ, "KUBECONFIG": str(folder / "cluster/kubeconfig")}
        self.operators: list[subprocess.Popen[str]] = []
        self._kubectl = kubectl

    def kubectl(self, *words: str, given: str | None = None) -> str:
        done = subprocess.run(
            [self._kubectl, *words], input=given, env=self.env, capture_output=True, text=True, timeout=PATIENCE
        )
        assert done.returncode == 0, f"kubectl {' '.join(words)}: {done.stderr}"
        return done.stdout

    def penstock(self, *words: str, kubeconfig: Path | None = None) -> str:
        done = self.penstock_ended(*words, kubeconfig=kubeconfig)
        assert done.returncode == 0, f"penstock {' '.join(words)}: {done.stdout}{done.stderr}"
        return done.stdout

    def penstock_ended(self, *words: str, kubeconfig: Path | None = None) -> "subprocess.CompletedProcess[str]":
        """Run a command of ours, and return how it ended; ``kubeconfig``: in place of the cluster's own."""
        env = self.env | ({"KUBECONFIG": str(kubeconfig)} if kubeconfig else {})
        command = [sys.executable, "-m", "penstock", *words]
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=PATIENCE)

    def kubeconfig_with_contexts(self, path: Path) -> Path:
        """Write a kubeconfig whose context "dev" is this cluster; the current one is an API server that is gone."""
        config = yaml.safe_load(Path(self.env["KUBECONFIG"]).read_text())
        (context,) = config["contexts"]
        context["name"] = "dev"
        config["clusters"].append({"name": "gone", "cluster": {"server": f"http://127.0.0.1:{free_port()}"}})
        config["contexts"].append({"name": "gone", "context": {**context["context"], "cluster": "gone"}})
        config["current-context"] = "gone"
        path.write_text(yaml.safe_dump(config))
        return path

    def get(self, *words: str) -> JsonObject:
        found: JsonObject = json.loads(self.kubectl("get", *words, "-o", "json"))
        return found

    def apply(self, name: str, spec: JsonObject) -> None:
        resource = {
            "apiVersion": "penstock.io/v1alpha1",
            "kind": "PenstockCluster",
            "metadata": {"name": name},
            "spec": spec,
        }
        self.kubectl("apply", "-f", "-", given=json.dumps(resource))

    def start_operator(self) -> "subprocess.Popen[str]":
        log = (self.folder / f"operator-{len(list(self.folder.glob('operator-*.log')))}.log").open("w")
        words = ["operator", "--namespace", "default", "--runs", str(self.folder / "runs"), "--image", "penstock"]
        process = subprocess.Popen(
            [sys.executable, "-m", "penstock", *words], env=self.env, stdout=log, stderr=log, text=True
        )
        self.operators.append(process)
        return process

    def stop_operator(self, process: "subprocess.Popen[str]") -> None:
        self.operators.remove(process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0

    def fault(self, kind: str, **more: object) -> None:
        """Begin a fault of the API server."""
        trusting = ssl.create_default_context()
        trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
        body = json.dumps({"kind": kind, **more}).encode()
        with urllib.request.urlopen(f"{self.url}/faults", body, timeout=10, context=trusting) as answer:
            assert answer.status == 200

    def log(self) -> str:
        return "".join(path.read_text() for path in sorted(self.folder.glob("operator-*.log")))

    def until(self, there: Callable[[], object], what: str, *, every: float = 0.2, patience: float = PATIENCE) -> None:
        end = time.monotonic() + patience
        while True:
            try:
                if there():
                    return
            except (OSError, AssertionError):
                pass
            assert time.monotonic() < end, f"{what}\n{self.log()[-4000:]}"
            time.sleep(every)

    def status(self, name: str) -> JsonObject:
        found: JsonObject = self.get("penstock", name).get("status") or {}
        return found

    def condition(self, name: str, kind: str) -> JsonObject:
        return next((dict(each) for each in self.status(name).get("conditions", []) if each["type"] == kind), {})

    def ready(self, name: str, replicas: int) -> bool:
        status = self.status(name)
        return (status.get("replicas"), status.get("ready")) == (replicas, replicas) and self.condition(
            name, "Available"
        ).get("status") == "True"

    def settled(self, name: str, replicas: int) -> bool:
        """Return whether its engines serve, and are as the spec wants that was applied last."""
        resource = self.get("penstock", name)
        taken = (resource.get("status") or {}).get("observedGeneration") == resource["metadata"]["generation"]
        return taken and self.ready(name, replicas) and self.condition(name, "UpToDate").get("status") == "True"

    def pods(self, component: str = "engine", *, name: str = "demo") -> dict[str, JsonObject]:
        labels = f"app.kubernetes.io/component={component},app.kubernetes.io/instance={name}"
        listed = self.get("pods", "-l", labels)["items"]
        return {pod["metadata"]["name"]: pod for pod in listed if not pod["metadata"].get("deletionTimestamp")}

    def addresses(self) -> set[str]:
        """Return where its engines are; their numbers depend on what was replaced before."""
        return {pod["status"]["podIP"] for pod in self.pods().values()}

    def uids(self) -> set[str]:
        """Return what tells the engines' pods apart, whatever their names are."""
        return {pod["metadata"]["uid"] for pod in self.pods().values()}

    def service(self, name: str) -> str:
        spec = self.get("service", name)["spec"]
        return f"http://{spec['clusterIP']}:{spec['ports'][0]['port']}"

    def chat(self, name: str, *, tokens: int = 8) -> JsonObject:
        return chat(self.service(name), tokens)


def chat(url: str, tokens: int) -> JsonObject:
    """Return the answer to a question."""
    with asked(url, tokens, stream=False) as answer:
        found: JsonObject = json.load(answer)
    return found


def asked(url: str, tokens: int, *, stream: bool) -> Any:
    """Return an open answer to a question."""
    body = {"model": "sim", "messages": [{"role": "user", "content": "hello"}], "max_tokens": tokens, "stream": stream}
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
    return urllib.request.urlopen(request, timeout=30)


class Load(threading.Thread):
    """Sends one streamed request after another until it is told to end: as a client, so without the API server."""

    def __init__(self, cluster: OperatorCluster, name: str = "demo") -> None:
        super().__init__()
        self.answered = 0
        self.failures: list[str] = []
        self.over = threading.Event()
        self._cluster = cluster
        self._url = cluster.service(name)

    def run(self) -> None:
        while not self.over.is_set():
            try:
                with asked(self._url, 32, stream=True) as answer:
                    text = answer.read().decode()
                assert '"finish_reason":"length"' in text and text.endswith("[DONE]\n\n"), text
                self.answered += 1
            except urllib.error.HTTPError as error:
                self.failures.append(f"{error.code}: {error.read().decode(errors='replace')}")
            except Exception as error:  # noqa: BLE001 - the test says which one it was
                self.failures.append(repr(error))
            self.over.wait(0.02)  # light: pods, API server and operator share the machine with it

    def goes_on(self) -> None:
        """Wait until some more requests are answered."""
        before = self.answered
        self._cluster.until(lambda: self.answered > before + 3, "requests", every=0.05)

    def __enter__(self) -> "Load":
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.over.set()
        self.join()


@contextmanager
def operator_cluster(folder: Path, kubectl: Path) -> Iterator[OperatorCluster]:
    """Start a cluster with our resources and one operator."""
    (folder / "script.json").write_text(json.dumps(SCRIPT))
    command = [sys.executable, "-m", "tests.doubles.kubernetes", "--kubelet", "--folder", str(folder / "cluster")]
    with (folder / "cluster.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "--script", str(folder / "script.json")], cwd=ROOT, stdout=subprocess.PIPE, stderr=log, text=True
        )
    cluster = OperatorCluster(folder, kubectl)
    try:
        assert process.stdout is not None
        first = process.stdout.readline()
        assert first, (folder / "cluster.log").read_text()
        cluster.url = json.loads(first)["url"]
        cluster.kubectl("apply", "--server-side", "-f", str(CRDS))
        cluster.start_operator()
        yield cluster
    finally:
        for operator in cluster.operators:
            operator.send_signal(signal.SIGTERM)
            operator.wait(20)
        process.terminate()
        process.wait(20)
