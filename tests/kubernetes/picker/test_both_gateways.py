"""What nginx and HAProxy have in common before a picker of ours: lost engines, refusals, and life without a picker."""

import asyncio
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from penstock.router.settings import RouterSettings
from tests.frontend.stand import answer, answer_well, eventually
from tests.kubernetes.picker.gateway_stand import breaks_off, ended, gateway

REFUSES = {"nginx": 502, "haproxy": 503}
"""Status of each where nobody can be asked."""

pytestmark = pytest.mark.parametrize("kind", list(REFUSES))


async def test_an_engine_lost_in_mid_stream_is_its_own_fault_and_a_client_that_leaves_is_not(kind: str) -> None:
    async def dies(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if b"die" not in await request.read():
            return await answer(request, body, 50, gap=0.05)
        return await breaks_off(request)

    async with gateway(kind, 1) as found:
        found.stand.engines[0].reply = dies
        body = {"model": "m", "messages": [{"role": "user", "content": "die"}], "stream": True}
        with pytest.raises(aiohttp.ClientPayloadError):
            async with found.http.post("/v1/chat/completions", json=body) as reply:
                await reply.read()
        [record] = await ended(found, 1)
        assert record.outcome == "failed" and "broke off" in record.reason
        body["messages"] = [{"role": "user", "content": "live"}]
        async with found.http.post("/v1/chat/completions", json=body) as reply:
            await reply.content.readline()
        records = await ended(found, 2)
        assert records[1].outcome == "cancelled"


async def test_overload_and_bad_requests_pass_through_with_their_reason(kind: str) -> None:
    async with gateway(kind, 1, router=RouterSettings(inflight_max=1)) as found:
        found.stand.engines[0].reply = lambda request, body: answer(request, body, 10, gap=0.1)
        running = asyncio.create_task(found.chat("long", stream=True))
        await eventually(lambda: found.served()["e0"])
        reply = await found.chat("refused")
        assert reply.status == 429 and int(reply.headers["retry-after"]) >= 1
        assert "error" in await reply.json()
        assert (await running).status == 200
        unknown = await found.http.post("/v1/completions", json={"model": "other", "prompt": "x"})
        assert unknown.status == 404 and "other" in await unknown.text()
        broken = await found.http.post("/v1/chat/completions", data=b"{")
        assert broken.status == 400
        models = await (await found.http.get("/v1/models")).json()
        assert [one["id"] for one in models["data"]] == ["m"]


async def test_without_a_picker_requests_go_on_and_what_was_answered_is_whole(kind: str) -> None:
    async with gateway(kind) as found:
        for engine in found.stand.engines:
            engine.reply = lambda request, body: answer(request, body, 8, gap=0.05)
        running = [asyncio.create_task(found.chat(f"{number}", stream=True)) for number in range(8)]
        await eventually(lambda: sum(found.served().values()) == 8)
        await found.listener.close()
        for engine in found.stand.engines:
            engine.reply = answer_well
        later = [await found.chat(f"later {number}") for number in range(4)]
        assert [reply.status for reply in later] == [200] * 4
        for reply in await asyncio.gather(*running):
            assert reply.status == 200 and (await reply.text()).endswith("data: [DONE]\n\n")


async def test_at_its_start_a_picker_says_what_such_a_gateway_can_not_do(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="penstock.picker"):
        async with gateway(kind, 1):
            assert "no migration in mid-stream, no hedging, no check of usage" in caplog.text


async def test_without_a_picker_a_closed_gateway_refuses(kind: str) -> None:
    async with gateway(kind, 1, failure="close") as found:
        assert (await found.chat()).status == 200
        await found.listener.close()
        assert (await found.chat()).status == REFUSES[kind] and found.served()["e0"] == 1
