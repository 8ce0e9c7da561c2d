"""What every connector of a planner does alike: it tells pools, takes a level however often, and never raises."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Protocol

import msgspec
import pytest
from aiohttp import web
from lightkube import AsyncClient, KubeConfig
from lightkube.resources.apps_v1 import Deployment

from penstock.adapters.connectors import webhook
from penstock.adapters.connectors.scale_connector import ScaleConnector
from penstock.adapters.connectors.webhook import WebhookConnector
from penstock.adapters.stores.etcd_client import EtcdClient
from penstock.adapters.stores.memory_store import MemorySpace, MemoryStore
from penstock.config.settings.planning_settings import VirtualSettings, WebhookSettings
from penstock.kernel.errors import PenstockError
from penstock.kernel.values import Pool, Replica
from penstock.planner.plugins.proposals import Reason
from penstock.runtime.cluster_state.desired_state import (
    DESIRED,
    POOLS,
    PoolSpec,
    PoolStatus,
    decode,
    put,
)
from penstock.runtime.planning.desired_state_connector import AdminApiConnector, DesiredStateConnector
from penstock_dynamo.virtual.virtual_connector import VirtualConnector
from penstock_dynamo.virtual.virtual_keys_access import VirtualClient, connect, keys_of
from penstock_kubernetes.connector.api_access import ApiAccess
from penstock_kubernetes.connector.kubernetes_connector import KubernetesConnector
from penstock_kubernetes.connector.scaled_object import ScaledObject
from tests.doubles.kubernetes.api.api_server import ApiServer
from tests.servers import Etcd

WHY = (Reason(code="test", text="a test wants it"),)


class Harness(Protocol):
    """A connector with pools prefill and decode of one replica each, somebody who obeys it, and an outage."""

    connector: ScaleConnector

    async def obey(self) -> dict[str, int]:
        """Carry out what is wanted, and return what that is."""
        ...

    async def fail(self) -> None: ...

    async def close(self) -> None: ...


def report(name: str, replicas: int) -> PoolStatus:
    found = tuple(Replica(id=f"{name}-{n}", state="ready") for n in range(replicas))
    pool = Pool(model="m", role=name, desired=replicas, replicas=found)  # type: ignore[arg-type]
    return PoolStatus(pool=pool, kind="process")


class Wishes:
    def __init__(self) -> None:
        self.space = MemorySpace()
        self.store = MemoryStore(self.space)
        self.connector: ScaleConnector = DesiredStateConnector(MemoryStore(self.space))

    async def open(self) -> "Wishes":
        for name in ("prefill", "decode"):
            await put(self.store, POOLS + name, report(name, 1))
        return self

    async def obey(self) -> dict[str, int]:
        wanted = {"prefill": 1, "decode": 1}
        for key, raw in (await self.store.list(DESIRED)).items():
            wish = decode(PoolSpec, raw)
            assert wish is not None
            wanted[key.removeprefix(DESIRED)] = wish.replicas
        for name, count in wanted.items():
            await put(self.store, POOLS + name, report(name, count))
        return wanted

    async def fail(self) -> None:
        self.space.outage = "the test took it away"

    async def close(self) -> None:
        await self.connector.close()


class Virtual:
    def __init__(self, url: str, namespace: str) -> None:
        self.client: VirtualClient = connect([url], namespace, every=0.01)
        self.etcd = EtcdClient([url], timeout=0.5)
        pools: Any = {"prefill": 1, "decode": 1}
        self.connector: ScaleConnector = VirtualConnector(
            keys_of(self.etcd, namespace), VirtualSettings(namespace=namespace), model="m", pools=pools
        )

    async def obey(self) -> dict[str, int]:
        decision = await self.client.get()
        if decision is None:
            return {"prefill": 1, "decode": 1}
        await self.client.complete(decision)
        assert decision.num_prefill_workers is not None
        assert decision.num_decode_workers is not None
        return {"prefill": decision.num_prefill_workers, "decode": decision.num_decode_workers}

    async def fail(self) -> None:
        self.etcd.urls = ("http://127.0.0.1:1",)

    async def close(self) -> None:
        await self.connector.close()
        await self.client.close()


class OverHttp:
    """A receiver of POSTs that is also a cluster's admin routes."""

    def __init__(self) -> None:
        self.wanted = {"prefill": 1, "decode": 1}
        self.status = 200
        self.url = ""
        self.connector: ScaleConnector
        self._runner: web.AppRunner | None = None

    async def open(self, kind: str) -> "OverHttp":
        app = web.Application()
        app.router.add_post("/hook", self._hook)
        app.router.add_post("/admin/scale", self._scale)
        app.router.add_get("/admin/desired", self._desired)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        if kind == "remote":
            self.connector = AdminApiConnector(self.url, "key")
        else:
            settings = WebhookSettings(url=f"{self.url}/hook", secret="s" * 16)
            pools = {name: Pool(model="m", role=name, desired=1) for name in self.wanted}  # type: ignore[arg-type]
            self.connector = WebhookConnector(settings, pools=pools)
        return self

    async def _hook(self, request: web.Request) -> web.Response:
        self.wanted = json.loads(await request.read())["targets"]
        return web.Response()

    async def _scale(self, request: web.Request) -> web.Response:
        self.wanted |= (await request.json())["pools"]
        return web.json_response({"pools": {}})

    async def _desired(self, request: web.Request) -> web.Response:
        pools = [
            {
                **msgspec.to_builtins(report(name, count).pool),
                "kind": "process",
                "name": name,
                "revision": None,
                "ready": 0,
            }
            for name, count in self.wanted.items()
        ]
        return web.json_response({"pools": pools, "drains": {}, "drained": {}, "restart": None})

    async def obey(self) -> dict[str, int]:
        return self.wanted

    async def fail(self) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    async def close(self) -> None:
        await self.connector.close()
        if self._runner is not None:
            await self._runner.cleanup()


class Deployments:
    """Two Deployments of an API server in this process."""

    def __init__(self, folder: Path) -> None:
        self.server = ApiServer(folder)
        self.connector: ScaleConnector
        self.client: AsyncClient

    async def open(self) -> "Deployments":
        await self.server.__aenter__()
        config = KubeConfig.from_file(self.server.kubeconfig).get()
        self.client = AsyncClient(config=config)
        client = AsyncClient(config=config)
        targets = []
        for name in ("prefill", "decode"):
            await self.client.create(deployment(name))
            pool = Pool(model="m", role=name, desired=1)  # type: ignore[arg-type]
            targets.append(ScaledObject(client, "Deployment", name, pool=name, configured=pool))
        self.connector = KubernetesConnector(targets, ApiAccess(client), namespace="default")
        return self

    async def obey(self) -> dict[str, int]:
        stored = [await self.client.get(Deployment, name) for name in ("prefill", "decode")]
        return {each.metadata.name: each.spec.replicas for each in stored}  # type: ignore[union-attr,misc]

    async def fail(self) -> None:
        await self.server.__aexit__(None, None, None)

    async def close(self) -> None:
        await self.connector.close()
        await self.client.close()
        await self.server.__aexit__(None, None, None)


def deployment(name: str) -> Deployment:
    """Return a Deployment of one pod."""
    labels = {"app": name}
    container = {"name": "main", "image": "vllm"}
    template = {"metadata": {"labels": labels}, "spec": {"containers": [container]}}
    spec = {"replicas": 1, "selector": {"matchLabels": labels}, "template": template}
    return Deployment.from_dict({"metadata": {"name": name}, "spec": spec})


@pytest.fixture(params=["wishes", "virtual", "webhook", "remote", "kubernetes"])
async def harness(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Harness]:
    found: Harness
    if request.param == "kubernetes":
        found = await Deployments(tmp_path).open()
    elif request.param == "wishes":
        found = await Wishes().open()
    elif request.param == "virtual":
        etcd: Etcd = request.getfixturevalue("etcd")
        found = Virtual(etcd.url, request.node.name.replace("[", "-").rstrip("]"))
    else:
        found = await OverHttp().open(request.param)
    yield found
    await found.close()


async def test_it_tells_the_pools_that_there_are(harness):
    found = await harness.connector.look()
    assert {name: (pool.model, pool.role, pool.desired) for name, pool in found.items()} == {
        "prefill": ("m", "prefill", 1),
        "decode": ("m", "decode", 1),
    }
    assert harness.connector.describe()


async def test_what_is_said_is_wanted_and_seen_to_be_wanted(harness):
    await harness.connector.look()
    assert await harness.connector.scale({"decode": 3}, (), WHY) == {}
    assert await harness.obey() == {"prefill": 1, "decode": 3}
    found = await harness.connector.look()
    assert {name: pool.desired for name, pool in found.items()} == {"prefill": 1, "decode": 3}


async def test_it_is_a_level_that_may_be_said_again(harness):
    await harness.connector.look()
    for _ in range(3):
        assert await harness.connector.scale({"prefill": 2, "decode": 3}, (), WHY) == {}
        assert await harness.obey() == {"prefill": 2, "decode": 3}
        await harness.connector.look()
    assert await harness.connector.scale({"prefill": 0}, (), WHY) == {}
    assert await harness.obey() == {"prefill": 0, "decode": 3}


async def test_a_pool_that_is_not_there_is_a_problem_and_no_error(harness):
    await harness.connector.look()
    assert set(await harness.connector.scale({"elsewhere": 3}, (), WHY)) == {"elsewhere"}
    assert await harness.obey() == {"prefill": 1, "decode": 1}


async def test_an_outage_is_a_problem_of_each_pool_and_looking_says_so(harness, monkeypatch):
    monkeypatch.setattr(webhook, "BACKOFF", 0.01)
    await harness.connector.look()
    await harness.fail()
    async with asyncio.timeout(20):
        problems = await harness.connector.scale({"decode": 3}, (), WHY)
        assert set(problems) == {"decode"}
        assert problems["decode"]
        if not isinstance(harness.connector, WebhookConnector):  # whoever takes POSTs tells nothing
            with pytest.raises(PenstockError):
                await harness.connector.look()


async def test_closing_twice_is_no_error_and_changes_nothing(harness):
    await harness.connector.look()
    await harness.connector.scale({"decode": 2}, (), WHY)
    await harness.connector.close()
    await harness.connector.close()
    assert (await harness.obey())["decode"] == 2
