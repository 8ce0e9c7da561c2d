"""Is one worker of each kind asked what it measured of itself, and no more often than that?"""

import asyncio
from typing import Any

import msgspec
from aiohttp import web

from penstock.adapters.engines.http.engine_access import EngineAccesses
from penstock.adapters.stores.memory_store import MemoryStore
from penstock.kernel.values import WorkerCard, WorkerId
from penstock.planner.events import Benchmarked
from penstock.runtime.cluster_state.membership import MembershipEntry, key_of
from penstock.runtime.planning import planner_node
from penstock.runtime.planning.planner_node import EngineBenchmarks

TOLD = {"prefill": [{"tokens": 100, "seconds": 0.1}], "decode": [{"batch": 1, "kv_tokens": 100, "seconds": 0.01}]}


async def test_each_kind_is_asked_once_and_who_has_nothing_to_tell_is_left_alone(monkeypatch: Any) -> None:
    monkeypatch.setattr(planner_node, "BENCHMARKS_EVERY", 0.01)
    asked: list[str] = []

    def server(name: str, answer: dict[str, Any] | None) -> web.Application:
        async def metrics(request: web.Request) -> web.Response:
            asked.append(name)
            return web.json_response(answer) if answer is not None else web.Response(status=404)

        app = web.Application()
        app.router.add_get("/get_perf_metrics", metrics)
        return app

    runners = []
    store, told = MemoryStore(), []
    for name, model, answer in (("a", "m", TOLD), ("b", "m", TOLD), ("c", "mute", None)):
        runner = web.AppRunner(server(name, answer))
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        runners.append(runner)
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        card = WorkerCard(id=WorkerId(name), epoch=1, model=model, url=url)
        await store.put(key_of(card.id), msgspec.json.encode(MembershipEntry(card=card)))

    def heard(event: Benchmarked) -> None:
        told.append(event)

    task = asyncio.create_task(EngineBenchmarks(store, EngineAccesses({}), heard).run())
    try:
        async with asyncio.timeout(10.0):
            while asked.count("c") < planner_node.BENCHMARK_TRIES or not told:
                await asyncio.sleep(0.01)
            with_more_time = len(asked)
            for _ in range(20):
                await asyncio.sleep(0.01)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        for runner in runners:
            await runner.cleanup()
    assert [(event.model, event.role, event.metrics) for event in told] == [("m", "aggregated", TOLD)]
    assert len(asked) == with_more_time == 1 + planner_node.BENCHMARK_TRIES
