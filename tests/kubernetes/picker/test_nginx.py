"""A real nginx carries what our picker chose: nothing is lost, delayed or forgotten."""

import asyncio
import os
import signal
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from penstock.router.settings import RouterSettings
from tests.frontend.stand import Engine, answer, eventually
from tests.kubernetes.picker.gateway_stand import breaks_off, chosen, ended, gateway
from tests.servers import children_of


async def test_each_request_reaches_the_worker_that_the_decision_names() -> None:
    async with gateway("nginx") as found:
        ids = {}
        for number in range(12):
            text = f"prompt number {number % 4} " * 40
            reply = await found.chat(text, stream=bool(number % 2))
            assert reply.status == 200, await reply.text()
            ids[reply.headers["x-request-id"]] = reply
        records = await ended(found, 12)
        decided = chosen(found)
        assert set(decided) == set(ids) == {record.id for record in records}
        reached = {headers["x-request-id"]: engine.name for engine in found.stand.engines for headers in engine.headers}
        assert reached == decided
        assert {record.outcome for record in records} == {"ok"}
        assert found.count("taken") == 12 and not found.picker.open
        repeats = [decided[id] for id in ids]
        assert repeats[:4] == repeats[4:8] == repeats[8:], "each prefix goes where it went first"


async def test_a_stream_is_not_delayed_and_its_times_reach_the_record() -> None:
    async with gateway("nginx", 1) as found:
        found.stand.engines[0].reply = lambda request, body: answer(request, body, 6, gap=0.1)
        loop = asyncio.get_running_loop()
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}
        arrived = []
        async with found.http.post("/v1/chat/completions", json=body) as reply:
            async for line in reply.content:
                if line.startswith(b"data:"):
                    arrived.append(loop.time())
                if len(arrived) == 4:
                    [worker] = found.stand.router.status(found.stand.live.now()).workers
                    assert worker.active_requests == 1, "its load counts while nginx carries it"
        assert len(arrived) == 8 and arrived[-1] - arrived[0] > 0.4
        [record] = await ended(found, 1)
        assert record.outcome == "ok" and 0 < record.ttft < record.e2e
        assert record.e2e - record.ttft > 0.4


async def test_an_answer_whose_head_and_break_come_at_once_is_the_engines_fault() -> None:
    """As on a busy machine: nginx sends on what it has read, and meets the end while it does."""
    async with gateway("nginx", 1) as found:
        assert found.process is not None
        workers = children_of(found.process.pid)

        def all_get(number: signal.Signals) -> None:
            for worker in workers:
                os.kill(worker, number)

        async def dies(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            all_get(signal.SIGSTOP)
            asyncio.get_running_loop().call_later(0.1, all_get, signal.SIGCONT)
            return await breaks_off(request)

        found.stand.engines[0].reply = dies
        with pytest.raises(aiohttp.ClientPayloadError):
            await found.chat(stream=True)
        [record] = await ended(found, 1)
        assert record.outcome == "failed" and "broke off" in record.reason


async def test_a_worker_that_joins_is_used_at_once_and_named_in_the_file() -> None:
    async with gateway("nginx", 1) as found:
        fresh = Engine("fresh")
        await fresh.start()
        found.stand.engines.append(fresh)
        found.stand.join(fresh)
        for number in range(6):
            assert (await found.chat(f"{number} " * 100)).status == 200
        assert found.served()["fresh"] > 0, "before nginx has read its name"
        await eventually(lambda: fresh.url in (found.folder / "workers.conf").read_text())


async def test_a_dead_worker_costs_no_request_and_the_router_chooses_again() -> None:
    async with gateway("nginx", 3) as found:
        await found.stand.engines[0].stop()
        for number in range(9):
            reply = await found.chat(f"{number} " * 100)
            assert reply.status == 200
        records = await ended(found, 9)
        assert {record.outcome for record in records} == {"ok"}
        assert any(record.attempts > 1 for record in records)
        assert found.served()["e0"] == 0


async def test_a_body_larger_than_any_buffer_is_seen_as_a_whole() -> None:
    async with gateway("nginx", 1) as found:
        assert (await found.chat("word " * 500_000)).status == 200
        [record] = await ended(found, 1)
        assert record.isl > 400_000 and len(found.stand.engines[0].bodies[0]) > 2_500_000


async def test_a_request_whose_end_is_never_reported_is_closed_by_its_deadline_and_counted() -> None:
    async with gateway("nginx", 1, router=RouterSettings(request_timeout=0.5)) as found:
        await found.chat()
        [record] = await ended(found, 1)
        found.listener._enter = lambda report: None  # type: ignore[method-assign]
        await found.chat()
        records = await ended(found, 2)
        assert (record.outcome, records[1].outcome) == ("ok", "expired") and found.count("lost") == 1
