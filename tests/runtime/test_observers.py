"""Does what is seen of workers reach the status, the metrics and the router that decides?"""

import asyncio
from typing import Any

import pytest

from penstock.adapters.telemetry.frontend_metrics import FrontendMetrics
from penstock.config.settings.cluster_settings import CanarySettings, ClusterSettings, EngineStatsSettings
from penstock.kernel.values import TIERS_LABEL, Prompt, RequestId, WorkerCard, WorkerId
from penstock.router.events import Arrived, Dispatch, OperatorNote, Publish, ReplayWanted, WorkerJoined
from penstock.router.router import Router
from penstock.router.settings import RouterSettings
from penstock.router.status_rows import WorkerStatus
from penstock.runtime.live_driver import LiveDriver
from penstock.runtime.node.worker_observers import WorkerObservers
from penstock_lab.engine.settings import SimSettings
from penstock_lab.sim.sim_server import start
from penstock_lab.simulate.tiers.tier_plan import TierPlan

PATIENCE = 30.0
W = WorkerId("w")
SETTINGS = ClusterSettings(
    engine_stats=EngineStatsSettings(interval=0.05), canary=CanarySettings(idle=0.05, timeout=5.0)
)


class Stand:
    """A live router with one worker, and the observers of it."""

    def __init__(self, url: str, labels: dict[str, str] | None = None) -> None:
        self.router = Router(RouterSettings(), name="me", seed=1)
        self.live = LiveDriver({"router": self.router})
        self.notes: list[str] = []
        self.live.on(OperatorNote, lambda now, sender, effect: self.notes.append(effect.kind))
        for kind in (Publish, ReplayWanted, Dispatch):
            self.live.on(kind, lambda now, sender, effect: None)  # type: ignore[type-abstract]
        self.observers = WorkerObservers(SETTINGS, self.live, self.router, "me")
        self.card = WorkerCard(id=W, epoch=1, model="sim", url=url, engine="sim", block_size=16, labels=labels or {})
        self.live.post("router", WorkerJoined(card=self.card))
        self.observers.start(self.card)
        self.task = asyncio.create_task(self.observers.run())

    def row(self) -> WorkerStatus:
        status = self.router.status(self.live.now())
        self.observers.describe(status)
        return status.workers[0]

    async def until(self, met: Any) -> WorkerStatus:
        async with asyncio.timeout(PATIENCE):
            while not met(self.row()):
                await asyncio.sleep(0.01)
        return self.row()

    async def close(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        await self.observers.close()
        self.live.close()


async def test_the_router_learns_what_loading_from_tiers_costs() -> None:
    settings = SimSettings(block_size=16, kv_blocks=64, max_model_len=512)
    server = await start(settings, cache=TierPlan(host=1 << 30, disk=1 << 32))
    stand = Stand(server.url, {TIERS_LABEL: "lru"})
    try:
        await stand.until(lambda row: stand.router.pools["sim"].index.tier_costs.costs)
        costs, tiers = stand.router.pools["sim"].index.tier_costs.costs[W], server.live.engine.tiers
        assert tiers is not None and costs == tiers.costs(server.live.now())
        assert 0 < costs.host_token < costs.disk_token and costs.compute > 0 and not costs.own_host
    finally:
        await stand.close()
        await server.stop()


async def test_an_idle_engine_is_asked_for_tokens_and_what_it_did_is_shown() -> None:
    server = await start(SimSettings(block_size=16, kv_blocks=64, max_model_len=512))
    stand = Stand(server.url)
    try:
        row = await stand.until(lambda row: row.steps and row.steps.wall_passes and row.canary.sent > 1)
        assert row.steps.source == "engine" and row.steps.estimated == []
        assert row.canary.verdict == "alive" and row.canary.missed == 0
        assert row.state == "ready"
        metrics = FrontendMetrics("r")
        status = stand.router.status(stand.live.now())
        stand.observers.describe(status)
        metrics.read_status(status, [stand.card], 1.0)
        text = metrics.render()
        assert 'penstock_engine_pass_seconds{model="sim",source="engine",worker="w"}' in text
        assert 'penstock_canaries_total{result="answered",worker="w"}' in text
    finally:
        await stand.close()
        await server.stop()


async def test_an_engine_without_tokens_is_cordoned_until_it_makes_one() -> None:
    server = await start(SimSettings(block_size=16, kv_blocks=64, max_model_len=512), faults=True)
    stand = Stand(server.url)
    try:
        server.server.faults.error_rate = 1.0  # its health stays good
        row = await stand.until(lambda row: row.state == "cordoned")
        assert "canaries in a row brought no token" in row.why_not and row.canary.missed >= 2
        assert "worker_cordoned" in stand.notes
        server.server.faults.error_rate = 0.0
        row = await stand.until(lambda row: row.state == "ready")
        assert row.why_not is None and row.canary.verdict == "alive"
    finally:
        await stand.close()
        await server.stop()


async def test_a_worker_that_runs_a_request_or_drains_is_not_asked() -> None:
    server = await start(SimSettings(block_size=16, kv_blocks=64, max_model_len=512))
    stand = Stand(server.url)
    try:
        assert stand.observers._busy(W) == (0, 0)
        stand.live.post("router", Arrived(id=RequestId("r"), model="sim", prompt=Prompt(32, [1, 2])))
        assert stand.observers._busy(W) == (1, 1)
        assert len(stand.observers._sample_loads([W])[0].silent) == 1
        assert stand.observers._busy(WorkerId("gone")) is None
        assert stand.observers._sample_loads([WorkerId("gone")])[0].silent == ()
    finally:
        await stand.close()
        await server.stop()


async def test_a_watcher_that_ends_is_told_and_does_not_end_the_other(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server = await start(SimSettings(block_size=16, kv_blocks=64, max_model_len=512))
    stand = Stand(server.url)
    try:
        monkeypatch.setattr(stand.observers.canary, "look", lambda now: 1 / 0)
        async with asyncio.timeout(PATIENCE):
            while not stand.observers.faults:
                await asyncio.sleep(0.01)
        assert "there are no canaries of workers any more" in caplog.text
        await stand.until(lambda row: row.steps is not None)
    finally:
        await stand.close()
        await server.stop()
