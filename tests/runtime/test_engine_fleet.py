"""An engine's entry in the store waits out an outage, and the engine is not started again for it."""

import asyncio
from pathlib import Path

from penstock.adapters.connectors.engine_process import EngineProcess
from penstock.adapters.connectors.state_file import StateFile
from penstock.adapters.stores.memory_store import MemorySpace, MemoryStore
from penstock.config.settings.cluster_settings import SuperviseSettings
from penstock.runtime.cluster_state.membership import entry_of, key_of
from penstock.runtime.supervision import engine_fleet
from penstock.runtime.supervision.engine_fleet import EngineFleet
from penstock.testing import card
from tests.adapters.connectors.holding import eventually


async def test_an_entry_is_written_once_the_store_is_back(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(engine_fleet, "RETRY", 0.01)
    space = MemorySpace()
    state = StateFile.open(tmp_path / "state", "test")
    fleet = EngineFleet(MemoryStore(space), SuperviseSettings(), state, logs=tmp_path, ttl=10.0, env={})
    space.outage = "gone"
    writing = asyncio.create_task(fleet._announce(card("w"), draining=False))
    await asyncio.sleep(0.05)
    assert not writing.done() and fleet.workers == 0
    space.outage = None
    await eventually(writing.done)
    assert await MemoryStore(space).list(key_of("w"))
    assert fleet.workers == 1
    await fleet.stop()
    assert not await MemoryStore(space).list(key_of("w"))
    state.close()


async def test_a_server_whose_url_ends_with_a_slash_stays_the_one_that_it_was(tmp_path: Path) -> None:
    space = MemorySpace()
    state = StateFile.open(tmp_path / "state", "test")
    fleet = EngineFleet(MemoryStore(space), SuperviseSettings(), state, logs=tmp_path, ttl=10.0, env={})
    known = card("w", url="http://127.0.0.1:9")
    await fleet._announce(known, draining=False)
    await fleet.publish(EngineProcess("w", "p", "http://127.0.0.1:9/", None, {}), known.role, draining=False)
    (raw,) = (await MemoryStore(space).list(key_of("w"))).values()
    again = entry_of(raw)
    assert again is not None and again.card.epoch > known.epoch and again.card.started_epoch == known.incarnation
    await fleet.stop()
    state.close()
