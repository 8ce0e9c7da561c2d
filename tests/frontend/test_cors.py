"""CORS: pages of allowed origins may call the API, whole, streamed and refused; others, and admin routes, never."""

import pytest

from penstock.config.settings.frontend_settings import FrontendSettings, SecuritySettings
from tests.frontend.stand import stand

APP, OTHER = "https://app.example.com", "https://evil.example"
ALLOW = "access-control-allow-origin"
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}


def settings(*origins: str, keys: tuple[str, ...] = ("key",)) -> FrontendSettings:
    return FrontendSettings(security=SecuritySettings(cors_origins=origins, api_keys=keys))


def asked(
    origin: str, method: str = "POST", names: str = "authorization,content-type,x-stainless-os"
) -> dict[str, str]:
    return {
        "origin": origin,
        "access-control-request-method": method,
        "access-control-request-headers": names,
    }


@pytest.mark.parametrize(
    ("path", "method"),
    [
        ("/v1/chat/completions", "POST"),
        ("/v1/messages", "POST"),
        ("/v1/responses/resp_1", "DELETE"),
        ("/v1/models", "GET"),
        ("/v1/files", "POST"),
        ("/v1/embeddings", "POST"),
    ],
)
async def test_a_browser_of_an_allowed_origin_is_told_that_it_may(path: str, method: str) -> None:
    async with stand(frontend=settings(APP)) as s:
        answer = await s.http.options(path, headers=asked(APP, method))
        assert answer.status == 204 and answer.headers[ALLOW] == APP
        assert method in answer.headers["access-control-allow-methods"]
        assert "x-stainless-os" in answer.headers["access-control-allow-headers"]
        assert "origin" in answer.headers["vary"] and "access-control-allow-credentials" not in answer.headers
        refused = await s.http.options(path, headers=asked(OTHER, method))
        assert refused.status in (401, 404, 405) and ALLOW not in refused.headers


async def test_whole_answers_streams_and_errors_carry_it() -> None:
    key = {"authorization": "Bearer key", "origin": APP}
    async with stand(frontend=settings(APP)) as s:
        for headers, body, status in (
            (key, CHAT, 200),
            (key, {**CHAT, "stream": True}, 200),
            ({"origin": APP}, CHAT, 401),
            (key, {**CHAT, "model": "nobody"}, 404),
            (key, {**CHAT, "messages": 1}, 400),
        ):
            answer = await s.http.post("/v1/chat/completions", json=body, headers=headers)
            assert (answer.status, answer.headers[ALLOW], answer.headers["vary"]) == (status, APP, "origin")
            await answer.read()
        for path, status in (("/v1/models", 200), ("/v1/nothing", 404), ("/v1/responses/none", 404)):
            answer = await s.http.get(path, headers=key)
            assert (answer.status, answer.headers[ALLOW]) == (status, APP)
        other = await s.http.post("/v1/chat/completions", json=CHAT, headers={**key, "origin": OTHER})
        assert other.status == 200 and ALLOW not in other.headers and other.headers["vary"] == "origin"
        assert ALLOW not in (await s.http.get("/v1/models", headers={"authorization": "Bearer key"})).headers


@pytest.mark.parametrize("path", ["/admin/status", "/ui", "/", "/clear_kv_blocks", "/v1/load_lora_adapter", "/metrics"])
async def test_admin_routes_never_do(path: str) -> None:
    async with stand(frontend=settings(APP, "*", keys=())) as s:
        for answer in (
            await s.http.options(path, headers=asked(APP)),
            await s.http.get(path, headers={"origin": APP}),
            await s.http.post(path, headers={"origin": APP}),
        ):
            assert ALLOW not in answer.headers, answer.status


async def test_any_origin_may_be_allowed_and_none_is_by_default() -> None:
    async with stand(frontend=settings("*")) as s:
        assert (await s.http.options("/v1/models", headers=asked(OTHER, "GET"))).headers[ALLOW] == "*"
    async with stand(frontend=settings()) as s:
        answer = await s.http.options("/v1/models", headers=asked(APP, "GET"))
        assert answer.status != 204 and ALLOW not in answer.headers and "vary" not in answer.headers


async def test_a_header_line_of_the_client_breaks_no_head() -> None:
    async with stand(frontend=settings(APP)) as s:
        answer = await s.http.options("/v1/models", headers=asked(APP, "GET", "café"))
        assert answer.status == 204 and "access-control-allow-headers" not in answer.headers
