"""Pods of engines that crash, are evicted and are lost with their node while a frontend serves: no request fails."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

pytest.importorskip("lightkube")

from penstock.kernel.values import JsonObject
from tests.doubles.kubernetes.cluster_script import ClusterScript, ScriptedNode, own_image
from tests.kubernetes.cluster_process import need_namespaces
from tests.kubernetes.kubelet_world import KubeletWorld, kubelet_world

pytestmark = pytest.mark.slow

NODES = (ScriptedNode("front", gpus=0), ScriptedNode("gpu-1", gpus=2), ScriptedNode("gpu-2", gpus=2))
ENGINE = ["engine", "sim", "--model", "sim", "--host", "0.0.0.0", "--port", "8000", "--no-kv-events"]
FRONTEND = ["attach", "--selector", "app=engine", "--model", "sim", "--engine", "sim", "--frontend.host", "0.0.0.0"]
FRONTEND += ["--set", "frontend.security.insecure=true"]
ROUTE = "/v1/chat/completions"
ASK = {
    "model": "sim",
    "messages": [{"role": "user", "content": "Say something long."}],
    "max_tokens": 40,
    "stream": True,
}


def deployment(app: str, replicas: int, args: list[str], **spec: object) -> JsonObject:
    container: JsonObject = {"name": app, "image": "penstock", "args": args}
    container["ports"] = [{"name": "http", "containerPort": 8000}]
    container["readinessProbe"] = {"httpGet": {"path": "/health", "port": "http"}, "periodSeconds": 1}
    if app == "engine":
        container["resources"] = {"limits": {"nvidia.com/gpu": "1"}}
    template = {"metadata": {"labels": {"app": app}}, "spec": {"containers": [container], **spec}}
    return {"replicas": replicas, "selector": {"matchLabels": {"app": app}}, "template": template}


class Callers:
    """Clients that ask one streamed question after the other."""

    def __init__(self, url: str) -> None:
        self.whole = 0
        self.failures: list[str] = []
        self._url = url

    async def serving(self) -> bool:
        """Return whether a question is answered."""
        try:
            async with aiohttp.ClientSession() as session, session.post(f"{self._url}{ROUTE}", json=ASK) as answer:
                return answer.status == 200 and bool(await answer.text())
        except aiohttp.ClientError:
            return False

    async def call(self) -> None:
        async with aiohttp.ClientSession() as session:
            while True:
                async with session.post(f"{self._url}{ROUTE}", json=ASK) as answer:
                    text = await answer.text()
                if answer.status == 200 and text.rstrip().endswith("data: [DONE]") and _tokens(text) > 0:
                    self.whole += 1
                else:
                    self.failures.append(f"{answer.status}: {text[-300:]}")


def _tokens(text: str) -> int:
    chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    return sum(bool(chunk.get("choices")) and "error" not in chunk for chunk in chunks)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[KubeletWorld]:
    need_namespaces()
    script = ClusterScript(nodes=NODES, images={"penstock": own_image()}, speed=20)
    async with kubelet_world(tmp_path, script) as made:
        yield made


def engines(world: KubeletWorld) -> list[str]:
    """Return the engines that are ready."""
    return [name for name in world.ready_pods() if name.startswith("engine-")]


async def test_engines_crash_are_evicted_and_lost_with_their_node_and_no_request_fails(world: KubeletWorld) -> None:
    await world.create("ServiceAccount", "frontend")
    rules = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}]
    await world.create("Role", "frontend", "rbac.authorization.k8s.io/v1", rules=rules)
    subjects = [{"kind": "ServiceAccount", "name": "frontend", "namespace": "default"}]
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "frontend"}
    await world.create("RoleBinding", "frontend", "rbac.authorization.k8s.io/v1", roleRef=role, subjects=subjects)
    own = {"serviceAccountName": "frontend", "nodeSelector": {"kubernetes.io/hostname": "front"}}
    await world.create("Deployment", "engine", "apps/v1", spec=deployment("engine", 3, ENGINE))
    await world.create("Deployment", "frontend", "apps/v1", spec=deployment("frontend", 1, FRONTEND, **own))
    service = {"selector": {"app": "frontend"}, "ports": [{"port": 80, "targetPort": "http"}]}
    url = f"http://{(await world.create('Service', 'frontend', spec=service))['spec']['clusterIP']}"
    await world.until(lambda: len(engines(world)) == 3, "three engines")
    await world.until(lambda: len(world.ready_pods()) == 4, "the frontend answers through its Service")
    callers = Callers(url)
    async with asyncio.timeout(60):
        while not await callers.serving():
            await asyncio.sleep(0.2)
    tasks = [asyncio.create_task(callers.call()) for _ in range(4)]

    async def go_on() -> None:
        count = callers.whole
        await world.until(lambda: callers.whole >= count + 10 or any(task.done() for task in tasks), "answers go on")
        assert not any(task.done() for task in tasks), [task.exception() for task in tasks if task.done()]

    try:
        await go_on()
        crashed = engines(world)[0]
        await world.cluster.send_signal("default", crashed, "KILL")
        await go_on()
        await world.until(lambda: world.container(crashed)["restartCount"] == 1, "it is started again")
        evicted = engines(world)[-1]
        await world.cluster.evict("default", evicted)
        await go_on()
        await world.until(lambda: world.phase(evicted) == "Failed" and len(engines(world)) == 3, "another in its place")
        await world.cluster.lose_node("gpu-1")
        await go_on()
        await world.until(lambda: len(engines(world)) == 2, "only the other node has room")
        await world.cluster.lose_node("gpu-1", None)
        await world.until(lambda: len(engines(world)) == 3, "the node is back")
        await go_on()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert callers.failures == []
