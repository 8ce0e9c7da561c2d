"""A real HAProxy carries what our picker chose: nothing is lost, delayed or forgotten."""

import asyncio

from tests.frontend.stand import Engine, answer, eventually
from tests.kubernetes.picker.gateway_stand import chosen, ended, gateway


async def test_each_request_reaches_the_worker_that_the_decision_names() -> None:
    async with gateway("haproxy") as found:
        ids = []
        for number in range(12):
            reply = await found.chat(f"prompt number {number % 4} " * 40, stream=bool(number % 2))
            assert reply.status == 200, await reply.text()
        records = await ended(found, 12)
        decided = chosen(found)
        reached = {headers["x-request-id"]: engine.name for engine in found.stand.engines for headers in engine.headers}
        assert reached == decided and set(decided) == {record.id for record in records}
        assert {record.outcome for record in records} == {"ok"}
        assert found.count("taken") == 12 and not found.picker.open
        ids = [record.id for record in sorted(records, key=lambda record: record.arrival)]
        repeats = [decided[id] for id in ids]
        assert repeats[:4] == repeats[4:8] == repeats[8:], "each prefix goes where it went first"


async def test_a_stream_is_not_delayed_and_its_times_reach_the_record() -> None:
    async with gateway("haproxy", 1) as found:
        found.stand.engines[0].reply = lambda request, body: answer(request, body, 6, gap=0.1)
        loop = asyncio.get_running_loop()
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}
        arrived = []
        async with found.http.post("/v1/chat/completions", json=body) as reply:
            async for line in reply.content:
                if line.startswith(b"data:"):
                    arrived.append(loop.time())
        assert len(arrived) == 8 and arrived[-1] - arrived[0] > 0.4
        [record] = await ended(found, 1)
        assert record.outcome == "ok" and record.e2e - record.ttft > 0.4


async def test_a_worker_that_joins_is_used_at_once_and_named_in_the_file() -> None:
    async with gateway("haproxy", 1) as found:
        fresh = Engine("fresh")
        await fresh.start()
        found.stand.engines.append(fresh)
        found.stand.join(fresh)
        for number in range(6):
            assert (await found.chat(f"{number} " * 100)).status == 200
        assert found.served()["fresh"] > 0, "before HAProxy has read its name"
        await eventually(lambda: fresh.url.removeprefix("http://") in (found.folder / "workers.cfg").read_text())


async def test_a_dead_worker_costs_no_request_and_the_record_names_the_one_that_answered() -> None:
    async with gateway("haproxy", 3) as found:
        await found.stand.engines[0].stop()
        for number in range(9):
            reply = await found.chat(f"{number} " * 100)
            assert reply.status == 200
        records = await ended(found, 9)
        assert {record.outcome for record in records} == {"ok"}
        reached = {headers["x-request-id"]: engine.name for engine in found.stand.engines for headers in engine.headers}
        assert {record.id: record.legs[-1].worker for record in records} == reached


async def test_a_body_larger_than_the_buffer_is_routed_by_its_beginning_and_counted() -> None:
    async with gateway("haproxy") as found:
        for number in range(4):
            assert (await found.chat(f"long prompt {number % 2} " * 40_000)).status == 200
        await ended(found, 4)
        assert found.count("clipped") == 4
        engines = [engine for engine in found.stand.engines for _ in engine.bodies]
        assert all(len(body) > 400_000 for engine in engines for body in engine.bodies), "the engine gets all of it"
        decided = list(chosen(found).values())
        assert decided[:2] == decided[2:], "by its beginning each goes where it went before"
