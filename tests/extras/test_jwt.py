"""Are an issuer's tokens accepted as they should be, while it rotates its keys, goes down, or is impersonated?"""

import base64
import hmac
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import jwt
import pytest
from aiohttp import web
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from penstock.config.settings.cluster_settings import ClusterSettings, ModelSettings, PoolSettings
from penstock.config.settings.frontend_settings import FrontendSettings, SecuritySettings
from penstock.config.settings.tenant_settings import JwtSettings, TenantSettings
from penstock.kernel.errors import OverloadedError
from penstock_extras.jwt.issuer_keys import FRESH, KEYS_AGE_MAX, RETRY, IssuerKeys
from penstock_extras.jwt.jwt_verifier import JwtVerifier
from tests.frontend.stand import stand

RSA = rsa.generate_private_key(public_exponent=65537, key_size=2048)
CURVE = ec.generate_private_key(ec.SECP256R1())


class Issuer:
    """An OIDC issuer on loopback, whose keys change and which may fail."""

    def __init__(self) -> None:
        self.keys: dict[str, Any] = {"one": RSA}
        self.fetches = 0
        self.fails = False
        self.url = ""

    async def start(self) -> web.AppRunner:
        app = web.Application()
        app.router.add_get("/.well-known/openid-configuration", self._discover)
        app.router.add_get("/keys", self._keys)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        return runner

    async def _discover(self, request: web.Request) -> web.Response:
        return web.json_response({"issuer": self.url, "jwks_uri": f"{self.url}/keys"})

    async def _keys(self, request: web.Request) -> web.Response:
        self.fetches += 1
        if self.fails:
            raise web.HTTPServiceUnavailable
        published: list[dict[str, Any]] = [
            {"kty": "oct", "kid": "shared", "k": "c2VjcmV0LXNlY3JldC1zZWNyZXQtc2VjcmV0LTEyMw"}
        ]
        for kid, key in self.keys.items():
            kind = jwt.algorithms.RSAAlgorithm if isinstance(key, rsa.RSAPrivateKey) else jwt.algorithms.ECAlgorithm
            published.append({**kind.to_jwk(key.public_key(), as_dict=True), "kid": kid, "use": "sig"})
        return web.json_response({"keys": published})

    def token(self, *, kid: str | None = "one", key: Any = RSA, algorithm: str = "RS256", **claims: Any) -> str:
        now = time.time()
        body = {"iss": self.url, "aud": "penstock", "exp": now + 60, "tenant": "acme", "sub": "someone", **claims}
        body = {name: value for name, value in body.items() if value is not None}
        return jwt.encode(body, key, algorithm, headers={} if kid is None else {"kid": kid})


@asynccontextmanager
async def issuer() -> AsyncIterator[Issuer]:
    found = Issuer()
    runner = await found.start()
    try:
        yield found
    finally:
        await runner.cleanup()


@asynccontextmanager
async def verifier(of: Issuer, now: list[float]) -> AsyncIterator[JwtVerifier]:
    settings = JwtSettings(issuer=of.url, audience="penstock")
    keys = IssuerKeys(settings, lambda: now[0])
    try:
        yield JwtVerifier(settings, {"acme"}, keys)
    finally:
        await keys.close()


async def refused(check: JwtVerifier, token: str) -> str:
    with pytest.raises(Exception) as caught:
        await check.name(token)
    return f"{getattr(caught.value, 'status', '')} {caught.value}"


async def test_a_frontend_takes_tokens_and_keys_beside_each_other() -> None:
    async with issuer() as of:
        settings = ClusterSettings(
            models={"m": ModelSettings(pools={"main": PoolSettings()})},
            tenants={"acme": TenantSettings(models=("m",)), "beta": TenantSettings(keys=("beta-key",))},
            frontend=FrontendSettings(
                security=SecuritySettings(
                    jwt=JwtSettings(issuer=of.url, audience="penstock", jwks_url=f"{of.url}/keys")
                )
            ),
        )
        async with stand(settings=settings) as s:
            for token in (of.token(), "beta-key"):
                assert (await s.chat(headers={"authorization": f"Bearer {token}"})).status == 200
            assert (await s.http.get("/v1/models", headers={"authorization": f"Bearer {of.token()}"})).status == 200
            assert next((record.tenant, record.key) for record in s.records) == ("acme", "acme/jwt")
            assert "authorization" not in s.engines[0].headers[0]
            for token, why in (
                (of.token(exp=time.time() - 3600), "expired"),
                (of.token(aud="another"), "udience"),
                (of.token(iss="http://evil"), "ssuer"),
                (of.token(exp=None), "exp"),
                ("a.b.c", "not accepted"),
            ):
                answer = await s.chat(headers={"authorization": f"Bearer {token}"})
                assert answer.status == 401 and why in (await answer.json())["error"]["message"], token
                assert 'error="invalid_token"' in answer.headers["www-authenticate"]
            answer = await s.chat(headers={"authorization": f"Bearer {of.token(tenant='nobody')}"})
            assert answer.status == 403 and (await answer.json())["error"]["code"] == "unknown_tenant"
            assert (await s.chat()).status == 401
            assert len(s.engines[0].bodies) == 2


async def test_only_signatures_count() -> None:
    now = [0.0]
    async with issuer() as of, verifier(of, now) as check:
        assert await check.name(of.token()) == "acme/jwt"
        assert await check.name(of.token(exp=time.time() - 10)) == "acme/jwt", "clocks may differ a little"
        claims = {"iss": of.url, "aud": "penstock", "tenant": "acme"}
        unsigned = jwt.encode(claims, None, "none", headers={"kid": "one"})
        assert "'none' is not accepted" in await refused(check, unsigned)
        public = RSA.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        named = jwt.encode(claims, "x" * 32, "HS256", headers={"kid": "one"}).rpartition(".")[0]
        mac = hmac.digest(public, named.encode(), "sha256")
        confused = f"{named}.{base64.urlsafe_b64encode(mac).decode().rstrip('=')}"
        assert "'HS256' is not accepted" in await refused(check, confused)
        now[0] += RETRY
        assert "has no such key" in await refused(check, of.token(kid="shared"))
        other = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        assert "401" in await refused(check, of.token(key=other))
        assert "is not one of its key" in await refused(check, of.token(key=CURVE, algorithm="ES256"))
        assert "401" in await refused(check, of.token() + "x" * 20_000)


async def test_new_keys_are_fetched_once_and_old_ones_end() -> None:
    now = [0.0]
    async with issuer() as of, verifier(of, now) as check:
        assert await check.name(of.token()) == "acme/jwt"
        of.keys["two"] = CURVE
        fresh = of.token(kid="two", key=CURVE, algorithm="ES256")
        assert "no such key" in await refused(check, fresh), "not yet: one fetch in so many seconds"
        for number in range(50):
            await refused(check, of.token(kid=f"made-up-{number}"))
        assert of.fetches == 1
        now[0] += RETRY
        assert await check.name(fresh) == "acme/jwt" and of.fetches == 2
        del of.keys["one"]
        now[0] += FRESH + 1
        assert await check.name(of.token()) == "acme/jwt", "it goes on while new ones are fetched"
        await check.keys._fetching  # type: ignore[misc]
        assert "no such key" in await refused(check, of.token())


async def test_known_keys_go_on_for_a_day_while_the_issuer_is_away() -> None:
    now = [0.0]
    async with issuer() as of, verifier(of, now) as check:
        of.fails = True
        with pytest.raises(OverloadedError, match="answered 503"):
            await check.name(of.token())
        of.fails = False
        now[0] += RETRY
        assert await check.name(of.token()) == "acme/jwt"
        of.fails = True
        for _ in range(5):
            now[0] += FRESH + 1
            assert await check.name(of.token()) == "acme/jwt"
            await check.keys._fetching  # type: ignore[misc]
        assert "answered 503" in check.keys.failure
        now[0] += KEYS_AGE_MAX
        with pytest.raises(OverloadedError):
            await check.name(of.token())
