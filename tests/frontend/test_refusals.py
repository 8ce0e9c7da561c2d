"""Refusals as a client sees them: each cause of a 429 or 503 has its own code, and 412 is for who wants a cache hit."""

from typing import Any

from aiohttp import web

from penstock.config.settings.frontend_settings import FrontendSettings, LimitSettings
from tests.frontend.stand import Stand, stand

FLOOD = 120


async def refusal(s: Stand, **more: Any) -> tuple[int, str]:
    answer = await s.chat(**more)
    return answer.status, (await answer.json())["error"]["code"]


async def test_each_cause_has_its_status_and_code() -> None:
    async with stand(0) as s:
        assert await refusal(s) == (503, "no_worker")
        s.service.gate.draining = True
        assert await refusal(s) == (503, "draining")
        s.service.gate.draining = False
    limited = FrontendSettings(limits=LimitSettings(inflight_max=1, rate=0.01, burst=2))
    async with stand(frontend=limited) as s:
        s.service.gate.enter()
        assert await refusal(s) == (429, "inflight_limit")
        s.service.gate.leave()
        assert (await s.chat()).status == 200
        assert await refusal(s) == (429, "rate_limit")
    async with stand() as s:

        async def full(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            return web.json_response({"error": {"message": "full"}}, status=503)

        s.engines[0].reply = full
        assert await refusal(s) == (503, "engine_busy")


async def test_prefer_if_available_is_refused_with_412_until_the_prompt_is_cached() -> None:
    text = "a long question " * 50
    async with stand() as s:
        asks = {"prefer": "respond-async, if-available"}
        assert await refusal(s, text=text, headers=asks) == (412, "not_cached")
        assert not s.engines[0].bodies
        assert (await s.chat(text)).status == 200
        assert (await s.chat(text, headers=asks)).status == 200


async def test_an_engine_that_takes_a_session_is_told_of_it() -> None:
    for engine, named in (("vllm", ["s-1", None]), ("sglang", [None, None])):
        async with stand(card={"engine": engine}) as s:
            await s.chat(headers={"x-penstock-session-id": "s-1"})
            await s.chat()
            assert [headers.get("x-session-id") for headers in s.engines[0].headers] == named
            await s.chat(prompt_cache_key="größe")
            last = s.engines[0].headers[-1].get("x-session-id")
            assert (last is not None and last.isascii()) if engine == "vllm" else last is None


async def test_a_flood_of_names_adds_few_series() -> None:
    async with stand() as s:

        async def flood(round: str, count: int) -> int:
            for n in range(count):
                name = f"{round}{n}"
                headers = {
                    "x-request-id": name,
                    "x-penstock-program-id": name,
                    "x-penstock-session-id": name,
                    "x-penstock-context-type": name,
                    "x-penstock-cache-salt": name,
                    "user-agent": name,
                    "authorization": f"Bearer {name}",
                    "prefer": "if-available" if n % 3 == 0 else name,
                }
                await s.chat(name, headers, user=name, metadata={"run_id": name}, prompt_cache_key=name)
                await s.chat(name, model=name)
                await s.chat(name, nvext={"session_control": {"action": name, "session_id": name}})
                await s.http.get(f"/v1/models/{name}")
                await s.http.get(f"/{name}")
                await s.http.post(f"/v1/{name}", json={"model": name})
            text = await (await s.http.get("/metrics")).text()
            return sum(1 for line in text.splitlines() if line and not line.startswith("#"))

        before = await flood("a", 20)
        assert await flood("b", FLOOD) - before < 10
