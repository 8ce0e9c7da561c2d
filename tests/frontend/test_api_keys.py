"""Who is let in, how often, and what is never written down?"""

import asyncio
import base64
import logging

import pytest

from penstock.config.settings.frontend_settings import FrontendSettings, LimitSettings, SecuritySettings
from penstock.frontend.http.api_keys import CALLERS_MAX, ApiKeys, KeyRates, check_admin, check_binding, is_loopback
from penstock.frontend.http_server import tls_context
from penstock.frontend.logs import TextFormatter
from penstock.kernel.errors import ClientError, ConfigError, OverloadedError
from tests.frontend.stand import stand

KEY = "sk-very-secret-key"


async def test_api_key_is_needed_where_set_and_never_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with stand(frontend=FrontendSettings(security=SecuritySettings(api_keys=("other", KEY)))) as s:
        for headers in ({}, {"authorization": "Bearer nope"}, {"authorization": KEY}, {"authorization": "Bearer "}):
            answer = await s.chat(headers=headers)
            assert answer.status == 401 and answer.headers["www-authenticate"].startswith("Bearer")
            assert (await answer.json())["error"]["type"] == "authentication_error"
        assert (await s.http.get("/v1/models")).status == 401
        assert (await s.http.get("/health")).status == 200
        assert s.engines[0].bodies == []
        answer = await s.chat(headers={"authorization": f"Bearer {KEY}"})
        assert answer.status == 200
        assert "authorization" not in s.engines[0].headers[0]
        text = "\n".join(TextFormatter().format(record) for record in caplog.records)
        assert KEY not in text and "caller=key-" in text
        assert "penstock_unauthorized_total 5" in await (await s.http.get("/metrics")).text()


async def test_rate_limit_is_per_key() -> None:
    frontend = FrontendSettings(
        security=SecuritySettings(api_keys=("a", "b")), limits=LimitSettings(rate=0.001, burst=2)
    )
    async with stand(frontend=frontend) as s:
        found = [(await s.chat(headers={"authorization": "Bearer a"})).status for _ in range(3)]
        assert found == [200, 200, 429]
        refused = await s.chat(headers={"authorization": "Bearer a"})
        assert int(refused.headers["retry-after"]) > 100
        assert (await refused.json())["error"]["type"] == "rate_limit_error"
        assert (await s.chat(headers={"authorization": "Bearer b"})).status == 200


def test_bucket_refills_with_time() -> None:
    now = [0.0]
    rates = KeyRates(2.0, 1, clock=lambda: now[0])
    rates.take("a")
    with pytest.raises(OverloadedError) as caught:
        rates.take("a")
    assert caught.value.retry_after == pytest.approx(0.5)
    now[0] = 0.5
    rates.take("a")
    for number in range(CALLERS_MAX + 10):
        rates.take(f"caller-{number}")
    assert len(rates) == CALLERS_MAX


async def test_process_limit_on_requests_in_flight() -> None:
    async with stand(frontend=FrontendSettings(limits=LimitSettings(inflight_max=1))) as s:
        s.service.gate.enter()
        answer = await s.chat()
        assert answer.status == 429 and answer.headers["retry-after"] == "1"
        s.service.gate.leave()
        assert (await s.chat()).status == 200


async def test_admin_without_key_is_for_this_machine_only() -> None:
    async with stand() as s:
        assert (await s.http.get("/admin/status")).status == 200
        assert (await s.http.get("/ui")).status == 200
        for headers in (
            {"x-forwarded-for": "1.2.3.4"},
            {"host": "evil.example"},
            {"host": "evil.example:8000"},
        ):
            answer = await s.http.get("/admin/status", headers=headers)
            assert answer.status == 403, headers
        for headers in ({"origin": "http://evil.example"}, {"sec-fetch-site": "cross-site"}):
            assert (await s.http.post("/clear_kv_blocks", headers=headers)).status == 403
        assert s.engines[0].resets == 0


async def test_admin_key_by_bearer_or_browser() -> None:
    frontend = FrontendSettings(security=SecuritySettings(admin_keys=("root",), api_keys=("user",)))
    async with stand(frontend=frontend) as s:
        assert (await s.http.get("/admin/status")).status == 401
        asked = await s.http.get("/ui")
        assert asked.status == 401 and asked.headers["www-authenticate"].startswith("Basic")
        assert (await s.http.get("/admin/status", headers={"authorization": "Bearer user"})).status == 401
        assert (await s.http.get("/admin/status", headers={"authorization": "Bearer root"})).status == 200
        basic = base64.b64encode(b"anyone:root").decode()
        assert (await s.http.get("/ui", headers={"authorization": f"Basic {basic}"})).status == 200
        for junk in ("Basic !!!", "Basic /w==", "Basic"):
            assert (await s.http.get("/ui", headers={"authorization": junk})).status == 401


async def test_admin_port_takes_the_routes_off_the_public_one() -> None:
    async with stand(frontend=FrontendSettings(admin_port=0)) as s:
        assert s.server.admin_url != s.server.url and s.server.admin_url.startswith("http://127.0.0.1:")
        for path in ("/ui", "/ui/main.js", "/admin/status", "/admin/requests", "/admin/timeline"):
            assert (await s.http.get(path)).status == 404
            async with s.http.get(s.server.admin_url + path) as answer:
                assert answer.status == 200
        async with s.http.post(s.server.admin_url + "/v1/completions") as answer:
            assert answer.status == 404


def test_remote_callers_are_refused_without_admin_keys() -> None:
    with pytest.raises(ClientError) as caught:
        check_admin(ApiKeys(()), {}, remote="192.0.2.1", host="127.0.0.1:8000", method="GET")
    assert caught.value.status == 403
    check_admin(ApiKeys(()), {}, remote="::1", host="[::1]:8000", method="GET")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "192.0.2.1", "example.org"])
def test_binding_elsewhere_needs_a_key(host: str) -> None:
    with pytest.raises(ConfigError):
        check_binding(host, False, False)
    check_binding(host, True, False)
    check_binding(host, False, True)


def test_loopback_addresses() -> None:
    assert all(is_loopback(address) for address in ("127.0.0.1", "127.8.8.8", "::1", "localhost", "a.localhost", None))
    assert not any(is_loopback(address) for address in ("0.0.0.0", "", "10.0.0.1", "localhost.evil.example"))


def test_tls_needs_both_files() -> None:
    assert tls_context(FrontendSettings()) is None
    with pytest.raises(ConfigError):
        tls_context(FrontendSettings(security=SecuritySettings(tls_cert="a.pem")))
    with pytest.raises(ConfigError):
        tls_context(FrontendSettings(security=SecuritySettings(tls_cert="nope.pem", tls_key="nope.key")))


async def test_draining_says_503_and_lets_streams_finish() -> None:
    from tests.frontend.stand import answer

    async with stand() as s:

        async def slow(request, body):  # type: ignore[no-untyped-def]
            return await answer(request, body, 5, gap=0.05)

        s.engines[0].reply = slow
        running = await s.chat(stream=True)
        await running.content.readany()
        idle = await s.http.get("/live")  # a connection that stays open
        assert idle.status == 200
        draining = asyncio.create_task(s.server.drain(5.0))
        await asyncio.sleep(0)
        assert s.service.gate.draining
        health = await s.http.get("/health")
        assert health.status == 503 and (await health.json())["status"] == "draining"
        assert (await running.read()).endswith(b"data: [DONE]\n\n")
        assert await draining
        assert s.records[0].outcome == "ok"
