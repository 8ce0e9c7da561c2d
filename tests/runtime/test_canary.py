"""Does one token tell a live engine from a dead one, and is a worker cordoned for misses and never for being busy?"""

import asyncio
import math
import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from penstock.adapters.engines import probe as module
from penstock.adapters.engines.probe import one_token
from penstock.config.settings.cluster_settings import CanarySettings
from penstock.kernel.values import WorkerCard, WorkerId
from penstock.runtime.node.canary import LOOKS, RETRY_MAX, SENT_MAX, Canary, CanaryTarget

PATIENCE = 30.0
TOKEN = {"choices": [{"index": 0, "text": " a", "finish_reason": "length"}], "usage": {"completion_tokens": 1}}
DRAINING = {"error": {"message": "cannot schedule new futures after shutdown", "code": 500}}
W = WorkerId("w")


class Engine:
    """A server whose answer to a completion is set by the test."""

    def __init__(self) -> None:
        self.answer: Any = TOKEN
        self.status = 200
        self.hang = False
        self.made = 0
        self.bodies: list[dict[str, Any]] = []
        self.url = ""

    def card(self, **more: Any) -> WorkerCard:
        return WorkerCard(**{"id": W, "epoch": 1, "model": "m", "url": self.url, "engine": "vllm", **more})

    async def completions(self, request: web.Request) -> web.Response:
        self.bodies.append(await request.json())
        while self.hang:
            await asyncio.sleep(0.01)
        return web.json_response(self.answer, status=self.status)

    async def metrics(self, request: web.Request) -> web.Response:
        self.made += self.growth
        return web.Response(text=f"vllm:generation_tokens_total {self.made}\n")

    growth = 0


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    made = Engine()
    app = web.Application()
    app.router.add_post("/v1/completions", made.completions)
    app.router.add_get("/metrics", made.metrics)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    made.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield made
    made.hang = False
    await runner.cleanup()


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "OTHERS", 0.01)


async def verdict(server: Engine, timeout: float = PATIENCE, **more: Any) -> str:
    async with aiohttp.ClientSession() as http:
        found, seen = await one_token(http, server.card(**more), timeout, "canary-1")
        assert seen
        return found


async def test_a_token_is_life(engine: Engine) -> None:
    assert await verdict(engine) == "alive"
    (body,) = engine.bodies
    assert body["max_tokens"] == 1 and body["model"] == "m" and len(body["prompt"]) < 8


@pytest.mark.parametrize(
    ("status", "answer", "wanted"),
    [
        (200, {"choices": [{"index": 0, "text": "", "finish_reason": "abort"}]}, "missed"),
        (200, {"choices": []}, "missed"),
        (200, "nonsense", "missed"),
        (500, DRAINING, "missed"),
        (500, {"error": "broken"}, "missed"),
        (503, {}, "busy"),
        (429, {}, "busy"),
        (400, {}, "unfit"),
        (401, {}, "missed"),
        (404, {}, "unfit"),
    ],
)
async def test_each_answer_means_what_its_engine_means(engine: Engine, status: int, answer: Any, wanted: str) -> None:
    engine.status, engine.answer = status, answer
    assert await verdict(engine) == wanted


async def test_nobody_there_is_a_miss(engine: Engine) -> None:
    assert await verdict(engine, url="http://127.0.0.1:9") == "missed"


async def test_silence_is_a_miss_unless_others_get_tokens_meanwhile(engine: Engine, soon: None) -> None:
    engine.hang = True
    assert await verdict(engine, timeout=0.05) == "missed"
    engine.growth = 5
    assert await verdict(engine, timeout=0.05) == "busy"
    assert await verdict(engine, timeout=0.05, engine="openai") == "missed"  # it has no such counter


class Router:
    """What the canary asks of the router, and tells it."""

    def __init__(self) -> None:
        self.load: tuple[int, int] | None = (0, 0)
        self.cordons: list[tuple[bool, str]] = []

    def busy(self, worker: WorkerId) -> tuple[int, int] | None:
        return self.load

    def cordon(self, worker: WorkerId, on: bool, reason: str) -> None:
        self.cordons.append((on, reason))


class Canaries:
    """A canary whose clock is the test's: `step` looks once and waits for the answer."""

    def __init__(self, **settings: Any) -> None:
        self.router = Router()
        self.canary = Canary(CanarySettings(**settings), self.router.busy, self.router.cordon)
        self.now = time.monotonic()

    async def step(self, seconds: float) -> None:
        self.now += seconds
        self.canary.look(self.now)
        async with asyncio.timeout(PATIENCE):
            tasks = [one.task for one in self.canary._watched.values() if one.task is not None]
            await asyncio.gather(*tasks)

    @property
    def sent(self) -> int:
        return self.canary.counts["sent"]


async def test_an_idle_worker_is_asked_once_per_idle_time_and_a_used_one_is_not(engine: Engine) -> None:
    all_ = Canaries(idle=30.0)
    all_.canary.start(engine.card())
    await all_.step(1.0)
    assert all_.sent == 0
    await all_.step(30.0)
    assert all_.sent == 1
    await all_.step(29.0)
    assert all_.sent == 1
    await all_.step(2.0)
    assert all_.sent == 2
    all_.router.load = (1, 1)  # it runs a request
    await all_.step(60.0)
    all_.router.load = (0, 2)  # it had one since we looked
    await all_.step(60.0)
    assert all_.sent == 2
    await all_.step(31.0)
    assert all_.sent == 3
    all_.router.load = None  # it drains
    await all_.step(60.0)
    assert all_.sent == 3
    assert all_.canary.status(W) is not None and all_.router.cordons == []
    await all_.canary.close()


async def test_two_misses_cordon_it_and_the_next_answer_lifts_that(engine: Engine) -> None:
    all_ = Canaries(idle=30.0)
    all_.canary.start(engine.card())
    engine.status, engine.answer = 500, DRAINING
    await all_.step(31.0)
    assert all_.router.cordons == []
    await all_.step(6.0)  # after a miss it is asked again soon
    ((on, reason),) = all_.router.cordons
    assert on and "2 canaries in a row" in reason and "cannot schedule new futures" in reason
    assert all_.canary.counts == {"sent": 2, "missed": 2, "cordoned": 1}
    all_.router.load = (1, 7)  # a request that hangs there must not keep it cordoned for ever
    await all_.step(6.0)
    assert len(all_.router.cordons) == 1 and all_.sent == 3
    engine.status, engine.answer = 200, TOKEN
    await all_.step(6.0)
    assert all_.router.cordons[1:] == [(False, reason)]
    assert all_.canary.counts == {"sent": 4, "missed": 3, "cordoned": 0}
    await all_.canary.close()


async def test_a_busy_engine_is_never_cordoned(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.runtime.node.canary.MISSES", 1)
    all_ = Canaries(idle=30.0)
    all_.canary.start(engine.card())
    engine.status, engine.answer = 503, {}
    for _ in range(3):
        await all_.step(31.0)
    assert all_.router.cordons == [] and all_.canary.counts["missed"] == 0


async def test_an_engine_that_refuses_the_request_itself_is_left_alone(engine: Engine) -> None:
    all_ = Canaries(idle=30.0)
    all_.canary.start(engine.card())
    engine.status, engine.answer = 404, {}
    await all_.step(31.0)
    await all_.step(31.0)
    assert all_.sent == 1 and all_.router.cordons == []
    status = all_.canary.status(W)
    assert status is not None and status.verdict == "unfit"
    await all_.canary.close()


async def test_servers_of_unknown_kind_are_never_asked(engine: Engine) -> None:
    all_ = Canaries(idle=30.0)
    all_.canary.start(engine.card(engine="openai"))
    await all_.step(31.0)
    assert all_.sent == 0
    await all_.canary.close()
    off = Canaries(idle=0.0)
    off.canary.start(engine.card())
    await off.step(1000.0)
    assert off.sent == 0 and off.canary.status(W) is None
    await off.canary.run()  # returns at once


async def test_an_answer_that_comes_after_the_worker_left_changes_nothing(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.runtime.node.canary.MISSES", 1)
    all_ = Canaries(idle=30.0)
    engine.hang = True
    all_.canary.start(engine.card())
    all_.now += 31.0
    all_.canary.look(all_.now)
    async with asyncio.timeout(PATIENCE):
        while not engine.bodies:
            await asyncio.sleep(0.01)
    asked = all_.canary._watched[W].task
    assert asked is not None
    engine.status = 500
    all_.canary.start(engine.card(epoch=2))
    engine.hang = False
    await asyncio.gather(asked, return_exceptions=True)
    assert all_.router.cordons == [] and all_.canary.counts["missed"] == 0
    await all_.canary.close()


async def test_a_large_fleet_gets_a_bounded_number_of_canaries_and_each_worker_its_own() -> None:
    canary = Canary(CanarySettings(idle=8.0), lambda worker: (0, 0), lambda *cordon: None)
    sent: list[WorkerId] = []

    async def ask(watched: CanaryTarget) -> None:
        sent.append(watched.card.id)

    canary._ask = ask  # type: ignore[method-assign]
    for number in range(900):
        card = WorkerCard(id=WorkerId(f"w-{number}"), epoch=1, model="m", url="http://127.0.0.1:9", engine="vllm")
        canary.start(card)
    begun, missed, looks = time.monotonic(), canary._watched[WorkerId("w-899")], 0
    missed.misses = 1
    pause, most = RETRY_MAX / LOOKS, math.ceil(SENT_MAX * RETRY_MAX / LOOKS)
    while len(set(sent)) < 900:
        looks, before = looks + 1, len(sent)
        canary.look(begun + 8.0 + looks * pause)
        await asyncio.sleep(0)
        assert len(sent) - before <= most + 1, "those that are well wait for their turn"
        assert looks <= 900 / most + 1
    assert sent.count(missed.card.id) >= looks // LOOKS, "one that missed is asked at its time"
