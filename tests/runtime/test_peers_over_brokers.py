"""Do routers hear each other's placements and sessions also where somebody stands between them?"""

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest

from penstock.adapters.planes.nats_plane import NatsPlane
from penstock.adapters.planes.zmq_forwarder import Forwarder
from penstock.adapters.stores.memory_store import MemorySpace, MemoryStore
from penstock.config.settings.cluster_settings import ClusterSettings
from penstock.config.settings.discovery_settings import DiscoverySettings, NatsSettings
from penstock.kernel.secret import ClusterSecret
from penstock.kernel.values import Target, WorkerCard, WorkerId
from penstock.router.events import OperatorNote, Placement, Publish, WorkerJoined
from penstock.router.router import Router
from penstock.router.settings import AffinitySettings, RouterSettings
from penstock.runtime.backends import nats_prefix, open_plane
from penstock.runtime.cluster_state.placement_sync import FrontendCard, PlacementSync
from penstock.runtime.live_driver import LiveDriver

SECRET = ClusterSecret("the secret of the broker tests")
WORKER = Target(WorkerId("w"))


@pytest.fixture(params=["zmq", "forwarder", "nats"])
async def settings(request: pytest.FixtureRequest, tmp_path) -> AsyncIterator[ClusterSettings]:
    if request.param == "zmq":
        yield ClusterSettings()
    elif request.param == "forwarder":
        forwarder = Forwarder("tcp://127.0.0.1:0", "tcp://127.0.0.1:0", secret=SECRET).start()
        ends = forwarder.publish_endpoint, forwarder.subscribe_endpoint
        yield ClusterSettings(discovery=DiscoverySettings(plane="forwarder", forwarder=ends))
        forwarder.close()
    else:
        servers = NatsSettings(urls=(request.getfixturevalue("nats").url,))
        yield ClusterSettings(name=tmp_path.name, discovery=DiscoverySettings(plane="nats", nats=servers))


def test_clusters_with_odd_names_have_subjects_of_their_own() -> None:
    names = ["a", "a.b", "a b", "*", ">", ""]
    prefixes = [nats_prefix(ClusterSettings(name=name)) for name in names]
    assert len(set(prefixes)) == len(names)
    assert all(prefix.count(".") == 1 and not set(" *>") & set(prefix) for prefix in prefixes)


async def test_load_and_sessions_of_one_router_are_known_to_the_other(settings: ClusterSettings) -> None:
    space = MemorySpace()
    card = WorkerCard(id=WorkerId("w"), url="u", model="m", block_size=4, epoch=1)
    sides = []
    for name in ("one", "two"):
        router = Router(RouterSettings(affinity=AffinitySettings(mode="soft")), name=name, shared=True)
        live = LiveDriver({"router": router})
        live.on(OperatorNote, lambda now, sender, effect: None)
        plane = open_plane(settings, name, SECRET)
        own = FrontendCard(id=name, url="", admin_url="", pid=1, plane=getattr(plane, "endpoint", ""), run="")
        peers = PlacementSync(MemoryStore(space), live, plane, own, 30.0)
        live.post("router", WorkerJoined(card=card))
        await peers.announce()
        sides.append((router, live, plane, peers))
    running = [asyncio.create_task(peers.run()) for *_, peers in sides]
    (_, _, plane, mine), (other, *_) = sides
    assert isinstance(plane, NatsPlane) == (settings.discovery.plane == "nats")

    def says(**more: object) -> None:
        placement = msgspec.convert({"id": "r", "model": "m", "target": WORKER, **more}, Placement)
        mine._publish(0, "router", Publish(placement=placement))

    try:
        async with asyncio.timeout(20):
            while not len(other.pools["m"].active):  # a subscription takes a moment to arrive
                says(step="placed", prompt={"isl": 8}, session="s")
                await asyncio.sleep(0.01)
            assert other.pools["m"].active.load(WORKER).prefill_tokens == 8
            assert other.pools["m"].affinity.target("s", 0) == WORKER
            says(step="ended")
            while len(other.pools["m"].active):
                await asyncio.sleep(0.01)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for _, live, plane, _ in sides:
            await plane.close()
            live.close()
