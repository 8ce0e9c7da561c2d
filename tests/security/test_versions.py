"""Is every message between our processes refused where it is of a newer major version, counted and told?"""

import asyncio
import logging
from typing import Any

import msgspec
import pytest

from penstock.adapters.planes.zmq_plane import ZmqPlane
from penstock.adapters.stores.memory_store import MemorySpace, MemoryStore
from penstock.router.events import Placement, Publish
from penstock.router.router import Router
from penstock.router.settings import RouterSettings
from penstock.runtime.cluster_state import desired_state
from penstock.runtime.cluster_state.membership import MembershipEntry, key_of
from penstock.runtime.cluster_state.placement_sync import FRONTENDS, TOPIC, FrontendCard, PlacementBatch, PlacementSync
from penstock.runtime.live_driver import LiveDriver
from penstock.testing import card
from tests.runtime.test_membership import Scene

MESSAGES: list[Any] = [
    *(MembershipEntry, FrontendCard, PlacementBatch),
    *(desired_state.PoolSpec, desired_state.DrainSpec, desired_state.SettingSpec, desired_state.RestartSpec),
    *(
        desired_state.PoolStatus,
        desired_state.DrainStatus,
        desired_state.RestartStatus,
        desired_state.DrainAck,
        desired_state.MembershipAcks,
    ),
]


SECOND = dict.fromkeys((desired_state.PoolStatus, PlacementBatch, Placement), 2)


@pytest.mark.parametrize("message", MESSAGES)
def test_every_message_says_its_version(message):
    fields = {field.name: field.default for field in msgspec.structs.fields(message)}
    assert fields["version"] == SECOND.get(message, 1)
    assert not message.__struct_config__.omit_defaults, "the version must stand in what is sent"


async def test_a_worker_of_a_newer_release_does_not_join(caplog):
    scene = Scene()
    try:
        newer = {"version": 2, "card": "of another shape"}
        await scene.store.put("workers/newer", msgspec.json.encode(newer))
        later = {**msgspec.to_builtins(MembershipEntry(card=card("b"))), "version": 2}
        await scene.store.put(key_of(card("b").id), msgspec.json.encode(later))
        await scene.put(card("a"))
        await scene.until(lambda: scene.states() == {"a": "ready"} and scene.membership.newer == 2)
        assert scene.membership.malformed == 0 and "update this one" in caplog.text
    finally:
        await scene.close()


async def test_a_frontend_of_a_newer_release_is_neither_known_nor_heard(caplog):
    caplog.set_level(logging.WARNING)
    space = MemorySpace()
    live = LiveDriver({"router": Router(RouterSettings(), shared=True)})
    live.on(Publish, lambda now, name, effect: None)
    planes = [ZmqPlane(name) for name in ("us", "other")]
    mine, other = (
        FrontendCard(id=plane.name, url="", admin_url="", pid=1, plane=plane.endpoint, run="") for plane in planes
    )
    peers = PlacementSync(MemoryStore(space), live, planes[0], mine, 30.0)
    running = asyncio.create_task(peers.run())
    store = MemoryStore(space)
    try:
        async with asyncio.timeout(20):
            newer = {**msgspec.to_builtins(other), "version": 2}
            await store.put(FRONTENDS + "newer", msgspec.json.encode(newer))
            await store.put(FRONTENDS + "other", msgspec.json.encode(other))
            while set(peers.cards) != {FRONTENDS + "other"} or peers.newer != 1:
                await asyncio.sleep(0.01)
            said = {**msgspec.to_builtins(Placement(step="ended", id="r", model="m", target=("w", 0))), "version": 3}  # type: ignore[arg-type]
            for body in ({"version": 3, "placements": [said]}, {"version": 3, "steps": "unheard of"}):
                before = peers.newer
                while peers.newer == before:
                    await planes[1].publish(TOPIC, msgspec.msgpack.encode(body))
                    await asyncio.sleep(0.01)
        assert peers.malformed == 0 and "a message of placements has version 3" in caplog.text
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        for plane in planes:
            await plane.close()
        live.close()
