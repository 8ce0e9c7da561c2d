"""kubectl 1.35 before the API server: what it shows and accepts is what the double is held to."""

import asyncio
import json
import subprocess
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import aiohttp
import pytest

from tests.kubernetes.api_client import ApiClient
from tests.kubernetes.conftest import RunningApi
from tests.kubernetes.widget_kind import NAME, deployment, pod, widget, widget_definition


class Kubectl:
    """Runs kubectl in a test's namespace."""

    def __init__(self, program: Path, kubeconfig: Path, namespace: str) -> None:
        self.command = [str(program), "--kubeconfig", str(kubeconfig), "--namespace", namespace]

    def run(self, *arguments: str, stdin: object = None) -> tuple[int, str]:
        """Return the exit code and everything that was printed."""
        text = None if stdin is None else json.dumps(stdin)
        done = subprocess.run(
            [*self.command, *arguments],
            input=text,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=60,
        )
        return done.returncode, done.stdout.strip()

    def __call__(self, *arguments: str, stdin: object = None) -> str:
        """Return what a command that works prints."""
        code, text = self.run(*arguments, stdin=stdin)
        assert code == 0, text
        return text

    def waits(self, action: Callable[[], object], *arguments: str) -> str:
        """Return what a command prints that waits for something; ``action`` happens once it watches."""
        command = [*self.command, "-v=6", *arguments]  # its log names its requests, each when its answer has begun
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stderr is not None
            log = []
            for line in process.stderr:
                log.append(line)
                if "watch=true" in line:
                    action()
                    break
            printed, rest = process.communicate(timeout=60)
        assert process.returncode == 0, "".join([*log, rest])
        return printed.strip()

    def refused(self, *arguments: str, stdin: object = None) -> str:
        """Return what a command that fails prints."""
        code, text = self.run(*arguments, stdin=stdin)
        assert code != 0, text
        return text


@pytest.fixture
def kube(kubectl: Path, api_server: RunningApi, namespace: str) -> Kubectl:
    """kubectl as the administrator."""
    return Kubectl(kubectl, api_server.kubeconfig, namespace)


@pytest.fixture
def defined(kube: Kubectl) -> Iterator[None]:
    """The widgets' definition."""
    kube("apply", "-f", "-", stdin=widget_definition())
    kube("wait", "--for=condition=Established", f"crd/{NAME}", "--timeout=10s")
    yield
    kube("delete", "crd", NAME, "--ignore-not-found")


def test_apply_with_and_without_validation(kube: Kubectl) -> None:
    assert kube("apply", "-f", "-", stdin=deployment()) == "deployment.apps/web created"
    assert kube("apply", "-f", "-", stdin=deployment()) == "deployment.apps/web unchanged"
    assert (
        kube("apply", "--validate=false", "-f", "-", stdin=deployment(replicas=3)) == "deployment.apps/web configured"
    )
    typo = deployment()
    typo["spec"]["replica"] = 3
    assert 'unknown field "spec.replica"' in kube.refused("apply", "-f", "-", stdin=typo)
    less = deployment(replicas=3)
    del less["spec"]["template"]["spec"]["containers"][0]["env"]
    kube("apply", "-f", "-", stdin=less)
    assert kube("get", "deploy", "web", "-o", "jsonpath={.spec.template.spec.containers[0].env}") == ""


def test_apply_server_side_with_conflicts(kube: Kubectl) -> None:
    kube("apply", "--server-side", "-f", "-", stdin=deployment())
    kube("scale", "deploy/web", "--replicas=5")
    text = kube.refused("apply", "--server-side", "-f", "-", stdin=deployment())
    assert "conflict" in text and ".spec.replicas" in text
    assert kube("get", "deploy", "web", "-o", "jsonpath={.spec.replicas}") == "5"
    kube("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=deployment())
    assert kube("get", "deploy", "web", "-o", "jsonpath={.spec.replicas}") == "2"


def test_diff_shows_what_would_change(kube: Kubectl) -> None:
    kube("apply", "-f", "-", stdin=deployment())
    code, text = kube.run("diff", "-f", "-", stdin=deployment(image="sim:2"))
    assert code == 1
    assert "-      - image: sim:1" in text.replace("-        image", "-      - image")
    assert "+" in text and "sim:2" in text
    assert kube.run("diff", "-f", "-", stdin=deployment()) == (0, "")


@pytest.mark.slow
def test_get_in_all_forms(kube: Kubectl) -> None:
    kube("create", "-f", "-", stdin=deployment())
    kube("label", "deploy", "web", "tier=front")
    assert kube("get", "deploy").split()[:5] == ["NAME", "READY", "UP-TO-DATE", "AVAILABLE", "AGE"]
    assert kube("get", "deploy", "-l", "tier=front", "-o", "name") == "deployment.apps/web"
    assert "No resources found" in kube("get", "deploy", "-l", "tier!=front")
    assert kube(
        "get", "deploy", "--field-selector", "metadata.name=web", "-o", "jsonpath={..metadata.name}"
    ).startswith("web")
    assert json.loads(kube("get", "deploy", "web", "-o", "json"))["spec"]["replicas"] == 2
    assert "FRONT" not in kube("get", "deploy", "--show-labels") and "tier=front" in kube(
        "get", "deploy", "--show-labels"
    )
    assert "(NotFound)" in kube.refused("get", "deploy", "other")


def test_get_watch_prints_each_change(kube: Kubectl, namespace: str) -> None:
    kube("create", "configmap", "a", "--from-literal=x=1")
    command = [*kube.command, "get", "configmaps", "-w", "--output-watch-events", "--field-selector", "metadata.name=a"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline(), process.stdout.readline()]
        kube("patch", "configmap", "a", "--type=merge", "-p", '{"data":{"y":"2"}}')
        lines.append(process.stdout.readline())
        kube("delete", "configmap", "a")
        lines.append(process.stdout.readline())
        process.terminate()
    assert [line.split()[:3] for line in lines[1:]] == [
        ["ADDED", "a", "1"],
        ["MODIFIED", "a", "2"],
        ["DELETED", "a", "2"],
    ]


def test_scale_with_a_precondition(kube: Kubectl) -> None:
    kube("create", "-f", "-", stdin=deployment())
    assert kube("scale", "deploy/web", "--replicas=4", "--current-replicas=2") == "deployment.apps/web scaled"
    assert "Expected replicas to be 2, was 4" in kube.refused(
        "scale", "deploy/web", "--replicas=1", "--current-replicas=2"
    )


@pytest.mark.slow
def test_rollout_status_follows_the_status(kube: Kubectl, api: ApiClient, namespace: str, double: RunningApi) -> None:
    kube("create", "-f", "-", stdin=deployment())
    path = f"/apis/apps/v1/namespaces/{namespace}/deployments/web/status"
    counts = {"replicas": 2, "updatedReplicas": 2, "readyReplicas": 2, "availableReplicas": 2}

    def ready() -> None:
        api.patch(path, {"status": {"observedGeneration": 1, **counts}})

    text = kube.waits(ready, "rollout", "status", "deploy/web", "--timeout=20s")
    assert "Waiting for deployment" in text
    assert text.splitlines()[-1] == 'deployment "web" successfully rolled out'
    kube("rollout", "restart", "deploy/web")
    assert "restartedAt" in kube("get", "deploy", "web", "-o", "yaml")


@pytest.mark.slow
def test_wait_for_a_condition_a_field_and_an_end(kube: Kubectl, api: ApiClient, namespace: str) -> None:
    kube("create", "-f", "-", stdin=pod("a"))
    path = f"/api/v1/namespaces/{namespace}/pods/a/status"
    ready = [{"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}]
    api.patch(path, {"status": {"phase": "Running", "conditions": ready}})
    assert kube("wait", "--for=condition=Ready", "pod/a", "--timeout=10s") == "pod/a condition met"
    assert kube("wait", "--for=jsonpath={.status.phase}=Running", "pod/a", "--timeout=10s") == "pod/a condition met"

    def deleted() -> None:
        api.delete(f"/api/v1/namespaces/{namespace}/pods/a")

    assert kube.waits(deleted, "wait", "--for=delete", "pod/a", "--timeout=20s").startswith("pod/a condition met")


@pytest.mark.slow
def test_delete_waits_for_finalizers(kube: Kubectl) -> None:
    kube("create", "configmap", "a")
    kube("patch", "configmap", "a", "--type=merge", "-p", '{"metadata":{"finalizers":["penstock.io/test"]}}')
    assert "timed out" in kube.refused("delete", "configmap", "a", "--timeout=1s")
    kube("patch", "configmap", "a", "--type=json", "-p", '[{"op":"remove","path":"/metadata/finalizers"}]')
    assert "NotFound" in kube.refused("get", "configmap", "a")


@pytest.mark.slow
def test_patches_of_three_types(kube: Kubectl) -> None:
    kube("create", "-f", "-", stdin=deployment())
    image = '{"spec":{"template":{"spec":{"containers":[{"name":"engine","image":"sim:2"}]}}}}'
    kube("patch", "deploy", "web", "-p", image)
    kube("patch", "deploy", "web", "--type=merge", "-p", '{"spec":{"replicas":3}}')
    kube("patch", "deploy", "web", "--type=json", "-p", '[{"op":"add","path":"/metadata/labels","value":{"a":"b"}}]')
    item = json.loads(kube("get", "deploy", "web", "-o", "json"))
    [container] = item["spec"]["template"]["spec"]["containers"]
    assert (container["image"], container["env"][0]["name"], item["spec"]["replicas"]) == ("sim:2", "A", 3)
    assert item["metadata"]["labels"] == {"a": "b"}
    kube("set", "env", "deploy/web", "B=2")
    kube("set", "image", "deploy/web", "engine=sim:3")
    assert "sim:3" in kube("describe", "deploy", "web")


@pytest.mark.slow
def test_a_kind_of_our_own(kube: Kubectl, defined: None) -> None:
    assert kube("apply", "-f", "-", stdin=widget("a")) == "widget.test.penstock.io/a created"
    assert kube("get", "wd").splitlines()[1].split()[:2] == ["a", "3"]
    assert "red" in kube("get", "wd", "-o", "wide")
    assert "How large the widget is." in kube("explain", "widget.spec.size")
    assert "replicas" in kube("explain", "deployment.spec")
    text = kube.refused("patch", "wd", "a", "--type=merge", "-p", '{"spec":{"size":99,"colour":"green"}}')
    assert "spec.size in body should be less than or equal to 10" in text
    assert 'Unsupported value: "green": supported values: "red", "blue"' in text
    assert "strict decoding error" in kube.refused("apply", "-f", "-", stdin=widget("a", oops=1))
    kube("scale", "wd", "a", "--replicas=3")
    kube("patch", "wd", "a", "--subresource=status", "--type=merge", "-p", '{"status":{"phase":"Ready"}}')
    kube("wait", "wd/a", "--for=jsonpath={.status.phase}=Ready", "--timeout=10s")
    kube("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=widget("a", size=4))
    item = json.loads(kube("get", "wd", "a", "-o", "json"))
    assert (item["spec"]["size"], item["spec"]["replicas"], item["status"]["phase"]) == (4, 3, "Ready")
    kube("delete", "crd", NAME)
    assert kube.refused("get", "wd")


@pytest.mark.slow
def test_events_of_an_object(kube: Kubectl, api: ApiClient, namespace: str) -> None:
    item = json.loads(kube("create", "-o", "json", "-f", "-", stdin=pod("a")))
    about = {"kind": "Pod", "name": "a", "namespace": namespace, "uid": item["metadata"]["uid"], "apiVersion": "v1"}
    event = {"metadata": {"name": "a.1"}, "involvedObject": about, "reason": "Drained", "message": "It is empty."}
    event |= {"type": "Normal", "count": 1, "lastTimestamp": item["metadata"]["creationTimestamp"]}
    api.post(f"/api/v1/namespaces/{namespace}/events", event | {"source": {"component": "penstock"}})
    assert "It is empty." in kube("get", "events")
    assert "It is empty." in kube("events", "--for", "pod/a")
    assert "It is empty." in kube("describe", "pod", "a")


@pytest.mark.slow
def test_create_commands(kube: Kubectl) -> None:
    for arguments in (
        ("configmap", "a", "--from-literal=x=y"),
        ("secret", "generic", "a", "--from-literal=x=y"),
        ("serviceaccount", "a"),
    ):
        assert kube("create", *arguments).endswith("created")
    assert kube("get", "secret", "a", "-o", "jsonpath={.data.x}") == "eQ=="
    assert "already exists" in kube.refused("create", "configmap", "a")
    assert kube("create", "token", "a", "--duration=10m")


def test_logs_are_those_of_the_kubelet(kube: Kubectl, double: RunningApi, namespace: str) -> None:
    kube("create", "-f", "-", stdin=pod("a"))
    assert "waiting to start" in kube.refused("logs", "a")
    file = double.kubeconfig.parent / "logs" / namespace / "a" / "engine.log"
    file.parent.mkdir(parents=True)
    file.write_text("first\nsecond\n")
    assert kube("logs", "a") == "first\nsecond"
    assert kube("logs", "a", "--tail=1", "-c", "engine") == "second"
    assert "container other is not valid" in kube.refused("logs", "a", "-c", "other")


class Echo(BaseHTTPRequestHandler):
    """Answers with what it is sent."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        """Say nothing."""


@pytest.fixture
def echo_port() -> Iterator[int]:
    """The port of an HTTP server that stands for a pod's."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Echo) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


def test_port_forward_in_plain_channels(
    api: ApiClient, kube: Kubectl, namespace: str, double: RunningApi, echo_port: int
) -> None:
    kube("create", "-f", "-", stdin=pod("a"))
    path = f"/api/v1/namespaces/{namespace}/pods/a"
    api.patch(f"{path}/status", {"status": {"phase": "Running", "podIP": "127.0.0.1"}})
    assert asyncio.run(_post_by_channels(f"{double.url}{path}/portforward?ports={echo_port}")).endswith(b"hello")


async def _post_by_channels(url: str) -> bytes:
    async with aiohttp.ClientSession() as session, session.ws_connect(url, protocols=["v4.channel.k8s.io"]) as socket:
        opened = [await socket.receive_bytes(), await socket.receive_bytes()]
        assert [message[0] for message in opened] == [0, 1]
        await socket.send_bytes(b"\0POST / HTTP/1.0\r\nContent-Length: 5\r\n\r\nhello")
        text = b""
        async for message in socket:
            text += message.data[1:]
        return text


def test_an_outage_is_told_by_kubectl(kube: Kubectl, double: RunningApi, api: ApiClient) -> None:
    api.send("POST", "/faults", {"kind": "error", "resources": ["secrets"], "times": 1})
    assert "a fault that a test asked for" in kube.refused("get", "secrets", "a")
