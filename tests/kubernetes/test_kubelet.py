"""Kubelet of the double: pods as processes of this machine, from image pull to SIGKILL."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

pytest.importorskip("lightkube")

from penstock.adapters.engines.http.engine_call import EngineBroken
from penstock.adapters.engines.http.http1_client import Http1Client
from penstock.adapters.http1_connection import LOST_AFTER
from penstock.kernel.values import JsonObject
from tests.doubles.kubernetes.cluster_script import ClusterScript, ScriptedImage, ScriptedNode
from tests.doubles.kubernetes.controllers.cluster_objects import condition
from tests.doubles.kubernetes.kubelet.pod_sandbox import command_of, expand
from tests.kubernetes.cluster_process import need_namespaces, running_cluster
from tests.kubernetes.cluster_world import workload
from tests.kubernetes.kubelet_world import PATIENCE_S, KubeletWorld, kubelet_world

SERVER = ["python", "-m", "http.server", "8000"]
SLEEPER = ["sleep", "1000"]
SCRIPT = ClusterScript(
    nodes=(ScriptedNode("a"), ScriptedNode("b")),
    images={"absent": ScriptedImage(failures=-1), "late": ScriptedImage(failures=1), "echo": ScriptedImage(("echo",))},
    speed=20,
)


def test_references_to_variables_are_expanded() -> None:
    assert expand("$(A)-$$(A)-$(B)", {"A": "1"}) == "1-$(A)-$(B)"
    container: JsonObject = {"args": ["--port", "$(PORT)"]}
    assert command_of(container, ScriptedImage(("engine",)), {"PORT": "80"}) == ["engine", "--port", "80"]
    assert command_of(container, ScriptedImage(), {}) == []


slow = pytest.mark.slow


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[KubeletWorld]:
    need_namespaces()
    async with kubelet_world(tmp_path, SCRIPT) as made:
        yield made


async def test_a_container_gets_what_its_pod_says(world: KubeletWorld) -> None:
    await world.create("ConfigMap", "facts", data={"color": "blue", "a.conf": "depth = 2"})
    await world.create("Secret", "keys", data={"token": "c2VjcmV0"})
    script = (
        "import os, socket; e = os.environ; "
        "print(e['COLOR'], e['TOKEN'], e['NAME'], e['BOTH'], e['color'], os.getcwd(), sep=','); "
        "print(open('/etc/engine/a.conf').read(), open('/secret/token').read(), os.listdir('/scratch'), sep=','); "
        "print(e['IP'] == socket.gethostbyname(socket.gethostname()), os.getpid(), e['KUBERNETES_SERVICE_PORT']); "
        "print(len(open('/var/run/secrets/kubernetes.io/serviceaccount/token').read()) > 10)"
    )
    env = [
        {"name": "COLOR", "valueFrom": {"configMapKeyRef": {"name": "facts", "key": "color"}}},
        {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "keys", "key": "token"}}},
        {"name": "NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "BOTH", "value": "$(COLOR)-$(NAME)"},
    ]
    mounts = {"config": "/etc/engine", "keys": "/secret", "scratch": "/scratch"}
    container: JsonObject = {
        "command": ["python", "-c", script],
        "env": env,
        "envFrom": [{"configMapRef": {"name": "facts"}}],
        "workingDir": "/srv",
        "volumeMounts": [{"name": name, "mountPath": path} for name, path in mounts.items()],
    }
    config = {"name": "facts", "items": [{"key": "a.conf", "path": "a.conf"}]}
    volumes = [
        {"name": "config", "configMap": config},
        {"name": "keys", "secret": {"secretName": "keys"}},
        {"name": "scratch", "emptyDir": {}},
    ]
    await world.pod("facts", container, volumes=volumes, restartPolicy="Never")
    await world.until(lambda: world.phase("facts") in ("Succeeded", "Failed"), "it ends")
    assert world.log("facts").splitlines() == [
        "blue,secret,facts,blue-facts,blue,/srv",
        "depth = 2,secret,[]",
        "True 1 443",
        "True",
    ]
    assert world.phase("facts") == "Succeeded" and not os.path.exists("/etc/engine")  # noqa: PTH110, ASYNC240


@slow
async def test_pods_find_each_other_by_the_names_of_services(world: KubeletWorld) -> None:
    template = {
        "metadata": {"labels": {"app": "web"}},
        "spec": {
            "terminationGracePeriodSeconds": 0,
            "containers": [
                {
                    "name": "web",
                    "image": "any",
                    "command": SERVER,
                    "ports": [{"name": "http", "containerPort": 8000}],
                    "readinessProbe": {"httpGet": {"port": "http"}, "periodSeconds": 1},
                }
            ],
        },
    }
    await world.create("ReplicaSet", "web", "apps/v1", spec=workload("ReplicaSet", "web", 2, template=template)["spec"])
    service = {"selector": {"app": "web"}, "ports": [{"port": 80, "targetPort": "http"}]}
    await world.create("Service", "web", spec=service)
    await world.create("Service", "each", spec={"clusterIP": "None", **service})
    await world.until(lambda: len(world.ready_pods()) == 2, "two pods on the same port")
    script = (
        "import socket, urllib.request as r; "
        "print(r.urlopen('http://web.default.svc.cluster.local', timeout=9).status, "
        "len({a[4][0] for a in socket.getaddrinfo('each', 80)}))"
    )
    await world.pod("client", {"command": ["python", "-c", script]}, restartPolicy="Never")
    await world.until(lambda: world.phase("client") in ("Succeeded", "Failed"), "the client ends")
    assert world.log("client").split() == ["200", "2"]


@slow
async def test_a_crash_is_followed_by_longer_and_longer_pauses(world: KubeletWorld) -> None:
    began = time.monotonic()
    await world.pod("crash", {"command": ["python", "-c", "import sys; sys.exit(3)"]})
    await world.until(lambda: world.waiting("crash") == "CrashLoopBackOff", "it is held back")
    assert world.container("crash")["lastState"]["terminated"]["exitCode"] == 3
    await world.until(lambda: world.container("crash")["restartCount"] >= 3, "it is tried again")
    assert time.monotonic() - began > (10 + 20) / SCRIPT.speed
    assert world.phase("crash") == "Running"


@slow
async def test_an_image_that_is_not_there_and_one_that_comes_late(world: KubeletWorld) -> None:
    await world.pod("absent", {"image": "registry/absent:1"})
    await world.pod("late", {"image": "late", "command": SLEEPER})
    await world.pod("echo", {"image": "registry:5000/echo:2@sha256:0", "args": ["hello"]}, restartPolicy="Never")
    await world.until(lambda: world.waiting("absent") == "ImagePullBackOff", "the pull fails")
    await world.until(lambda: world.ready("late"), "the second pull succeeds")
    await world.until(lambda: world.phase("echo") == "Succeeded", "the image's command runs")
    assert world.log("echo") == "hello\n"
    assert world.phase("absent") == "Pending"


@slow
async def test_probes_decide_on_readiness_and_on_a_restart(world: KubeletWorld) -> None:
    once = {"periodSeconds": 1, "failureThreshold": 1}
    ready = {"exec": {"command": ["test", "-e", "/tmp/ready"]}, **once}
    alive = {"exec": {"command": ["test", "!", "-e", "/tmp/dead"]}, **once}
    start = {"exec": {"command": ["test", "-e", "/tmp/started"]}, "periodSeconds": 1, "failureThreshold": 30}
    steps = "sleep 0.5; touch /tmp/started; sleep 1; touch /tmp/ready; sleep 2; rm /tmp/ready; sleep 1; touch /tmp/dead"
    command = ["sh", "-c", f"{steps}; sleep 1000"]
    probes = {"readinessProbe": ready, "livenessProbe": alive, "startupProbe": start}
    await world.pod("probed", {"command": command, **probes})
    await world.until(lambda: world.container("probed").get("started"), "the startup probe passes")
    assert not world.ready("probed")
    await world.until(lambda: world.ready("probed"), "it is ready")
    await world.until(lambda: not world.ready("probed"), "and not any more")
    await world.until(lambda: world.container("probed")["restartCount"] == 1, "the liveness probe restarts it")


@slow
async def test_a_missing_config_map_is_waited_for(world: KubeletWorld) -> None:
    probe = {"httpGet": {"port": 8000}, "periodSeconds": 1}
    source = [{"configMapRef": {"name": "later"}}]
    await world.pod("web", {"command": SERVER, "readinessProbe": probe, "envFrom": source})
    await world.until(lambda: world.waiting("web") == "CreateContainerConfigError", "it says what is missing")
    await world.create("ConfigMap", "later", data={})
    await world.until(lambda: world.ready("web"), "it starts once that is there")


TRAP = "trap 'echo term; sleep 0.2; exit 0' TERM; echo up; while :; do sleep 0.05; done"


@slow
async def test_the_end_of_a_pod_is_its_hook_then_sigterm_then_sigkill(world: KubeletWorld) -> None:
    hook = {"preStop": {"exec": {"command": ["sh", "-c", "echo hook >> /shared/log"]}}}
    mount = [{"name": "shared", "mountPath": "/shared"}]
    polite = {"command": ["sh", "-c", TRAP], "lifecycle": hook, "volumeMounts": mount}
    shared = [{"name": "shared", "emptyDir": {}}]
    await world.pod("polite", polite, volumes=shared, terminationGracePeriodSeconds=20)
    await world.pod("deaf", {"command": SLEEPER}, terminationGracePeriodSeconds=1)  # process 1 without a handler
    await world.until(lambda: world.ready("polite") and world.ready("deaf"), "both run")
    await world.until(lambda: "up" in world.log("polite"), "its trap is set")
    written = world.folder / "pods" / world.get("polite")["metadata"]["uid"] / "volumes/shared/log"
    began = time.monotonic()
    for name in ("polite", "deaf"):
        await world.objects.delete(world.get(name))
    assert world.get("polite")["metadata"]["deletionTimestamp"]
    await world.until(lambda: not world.get("polite") and not world.get("deaf"), "both are gone")
    assert 1.0 <= time.monotonic() - began < 15
    assert world.log("polite") == "up\nterm\n" and written.read_text() == "hook\n"


@slow
async def test_signals_evictions_and_cuts_on_demand(world: KubeletWorld) -> None:
    probe = {"httpGet": {"port": 8000}, "periodSeconds": 1, "failureThreshold": 1}
    await world.pod("one", {"command": SERVER, "readinessProbe": probe})
    await world.until(lambda: world.ready("one"), "it runs")
    await world.cluster.send_signal("default", "one", "KILL")
    await world.until(lambda: world.container("one")["restartCount"] == 1, "it is started again")
    assert world.container("one")["lastState"]["terminated"]["exitCode"] == 128 + signal.SIGKILL
    await world.until(lambda: world.ready("one"), "it is ready again")
    await world.cluster.cut_network("default", "one")
    await world.until(lambda: not world.ready("one"), "nobody reaches it")
    await world.cluster.cut_network("default", "one", away=False)
    await world.until(lambda: world.ready("one"), "it is reached again")
    await world.cluster.evict("default", "one")
    await world.until(lambda: world.get("one")["status"].get("reason") == "Evicted", "it is evicted")
    assert world.phase("one") == "Failed" and not world.ready("one")
    await world.objects.delete(world.get("one"))
    await world.until(lambda: not world.get("one"), "its object can be deleted")


@slow
async def test_a_lost_node_is_unknown_then_its_pods_are_replaced(world: KubeletWorld) -> None:
    body = {"containers": [{"name": "engine", "image": "any", "command": SLEEPER}], "terminationGracePeriodSeconds": 1}
    template = {"metadata": {"labels": {"app": "engine"}}, "spec": body}
    spec = workload("ReplicaSet", "engine", 1, template=template)["spec"]
    await world.create("ReplicaSet", "engine", "apps/v1", spec=spec)
    await world.until(world.ready_pods, "an engine runs")
    lost = world.ready_pods()[0]
    node = world.get(lost)["spec"]["nodeName"]

    def state() -> object:
        return condition(world.objects.get("Node", "", node) or {}, "Ready").get("status")

    await world.cluster.lose_node(node)
    await world.until(lambda: state() == "Unknown", "the node is silent")
    await world.until(lambda: not world.ready(lost), "its pod gets no traffic")
    await world.until(world.ready_pods, "another one on the other node")
    assert world.get(lost)["metadata"]["deletionTimestamp"], "its deletion waits for its kubelet"
    await world.cluster.lose_node(node, None)
    await world.until(lambda: state() == "True" and not world.get(lost), "the node is back, the pod has ended")


@slow
@pytest.mark.parametrize("how", ["off", "cut"])
async def test_a_request_on_a_lost_node_ends_long_before_its_timeouts(world: KubeletWorld, how: str) -> None:
    script = """
import socket, time
def take():
    connection = server.accept()[0]
    connection.recv(65536)
    return connection
server = socket.create_server(("", 8000))
print("up", flush=True)
answered, queued = take(), take()
answered.sendall(b"HTTP/1.1 200 OK\\r\\n\\r\\n")
kept = take()
kept.sendall(b"HTTP/1.1 200 OK\\r\\ncontent-length: 2\\r\\n\\r\\n{}")
time.sleep(1000)
"""
    await world.pod("one", {"command": ["python", "-c", script]})
    await world.until(lambda: "up" in world.log("one"), "it listens")
    client = Http1Client()
    url = f"http://{world.get('one')['status']['podIP']}:8000"
    *calls, whole, late = (client.call(url, "/v1/completions", b"{}", {}) for _ in range(4))
    try:
        begun = [asyncio.ensure_future(each.begin()) for each in calls]
        done, queued = await asyncio.wait(begun, return_when="FIRST_COMPLETED")
        assert [task.result() for task in done] == [None], "one of them is answered"
        await whole.begin()
        assert await whole.read() == b"{}"
        whole.close()  # its connection is kept
        await world.cluster.lose_node(world.get("one")["spec"]["nodeName"], how)
        await asyncio.sleep(0.5)  # the kubelet looks every 20 ms
        answered = calls[begun.index(done.pop())]
        async with asyncio.timeout(PATIENCE_S):
            for rest in (late.begin(), answered.next(), queued.pop()):
                with pytest.raises(EngineBroken, match=f"no packet of the engine's host for {LOST_AFTER} s"):
                    await rest
    finally:
        await client.close()


def alive(pid: int) -> bool:
    """Return whether a process runs."""
    try:
        return b"Z" not in Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[:1]
    except OSError:
        return False


@slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_nothing_outlives_the_cluster(tmp_path: Path, number: signal.Signals) -> None:
    from lightkube import AsyncClient, KubeConfig
    from lightkube.models.core_v1 import Container, PodSpec
    from lightkube.models.meta_v1 import ObjectMeta
    from lightkube.resources.core_v1 import Pod

    with running_cluster(tmp_path) as cluster:
        client = AsyncClient(config=KubeConfig.from_file(cluster.kubeconfig).get(), trust_env=False)
        command = ["sh", "-c", "setsid sleep 12345 & sleep 12345"]
        spec = PodSpec(containers=[Container(name="c", image="any", command=command)])
        await client.create(Pod(metadata=ObjectMeta(name="sleeper", namespace="default"), spec=spec))
        sleepers: list[int] = []
        end = time.monotonic() + PATIENCE_S
        while len(sleepers) < 2:
            assert time.monotonic() < end, "two processes of the pod"
            await asyncio.sleep(0.1)
            sleepers = _processes(b"sleep\x0012345\x00")
        devices = _devices()
        os.kill(cluster.process.pid, number)
        cluster.process.wait(20)
        while any(map(alive, sleepers)):
            assert time.monotonic() < end, "they end with the cluster"
            await asyncio.sleep(0.05)
        while devices and devices <= _devices():
            assert time.monotonic() < end, "its network is gone too"
            await asyncio.sleep(0.05)


def _devices() -> set[str]:
    return {path.name for path in Path("/sys/class/net").glob("psk*")}


def _processes(command: bytes) -> list[int]:
    return [int(path.name) for path in Path("/proc").glob("[0-9]*") if _read(path / "cmdline") == command]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
