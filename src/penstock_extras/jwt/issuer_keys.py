"""Issuer keys: the public keys of an OIDC issuer, cached, renewed in time, and kept while the issuer is away."""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import aiohttp
import jwt
import msgspec

from penstock.config.settings.tenant_settings import JwtSettings
from penstock.kernel.errors import OverloadedError, PenstockError

log = logging.getLogger("penstock.frontend")

FRESH = 300.0
"""Seconds after which keys are fetched again, in the background: a key that the issuer withdrew goes on for so long."""
RETRY = 5.0
"""Least seconds between two fetches: tokens with made-up key ids, or an issuer that is away, cost one in that time."""
KEYS_AGE_MAX = 86_400.0
"""Seconds for which keys go on while the issuer is away: a day of outage stops nobody, a withdrawn key ends."""
TIMEOUT = 5.0
"""Seconds that the issuer has to answer."""
BODY_MAX = 1 << 20
"""Largest answer of the issuer in bytes."""
KEYS_MAX = 256
"""Most keys that are kept of it."""
DISCOVERY = "/.well-known/openid-configuration"


class IssuerError(PenstockError):
    """The issuer did not answer, or not with keys."""


class IssuerKeys:
    """The keys of one issuer.

    Args:
        clock: seconds, any origin.
    """

    def __init__(self, settings: JwtSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._clock = clock
        self._keys: dict[str | None, jwt.PyJWK] = {}
        self._fetched: float | None = None
        self._tried: float | None = None
        self._fetching: asyncio.Task[None] | None = None
        self.failure = ""
        """Why the last fetch failed; empty where it did not."""

    async def key(self, kid: str | None) -> jwt.PyJWK | None:
        """Return the key of that id; None where the issuer has none.

        Raises:
            OverloadedError: 503: no key is known, since the issuer does not answer.
        """
        now = self._clock()
        if self._fetched is not None and now - self._fetched > KEYS_AGE_MAX:
            self._keys, self._fetched = {}, None
        found = self._known(kid)
        stale = self._fetched is None or now - self._fetched > FRESH
        if (stale or found is None) and (self._fetching or self._tried is None or now - self._tried >= RETRY):
            if self._fetching is None:
                self._tried = now
                self._fetching = asyncio.create_task(self._fetch(), name="issuer keys")
            if found is None:
                await asyncio.shield(self._fetching)
                found = self._known(kid)
        if found is None and self._fetched is None:
            raise OverloadedError(
                f"tokens can't be checked at present: {self.failure or 'the keys of the issuer are being fetched'}",
                retry_after=RETRY,
                code="issuer_unavailable",
            )
        return found

    async def close(self) -> None:
        """Stop a fetch that is under way."""
        if self._fetching is not None:
            self._fetching.cancel()
            await asyncio.gather(self._fetching, return_exceptions=True)

    def _known(self, kid: str | None) -> jwt.PyJWK | None:
        if kid is None:  # a token need not name its key where there is no choice
            return next(iter(self._keys.values())) if len(self._keys) == 1 else None
        return self._keys.get(kid)

    async def _fetch(self) -> None:
        try:
            self._keys = await self._read()
            self._fetched, self.failure = self._clock(), ""
        except (IssuerError, aiohttp.ClientError, TimeoutError) as error:
            self.failure = f"{self._settings.issuer}: {error or type(error).__name__}"
            log.warning("the keys of the issuer can't be fetched, known ones go on: %s", self.failure)
        finally:
            self._fetching = None

    async def _read(self) -> dict[str | None, jwt.PyJWK]:
        timeout = aiohttp.ClientTimeout(total=TIMEOUT)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            url = self._settings.jwks_url
            if url is None:
                issuer = self._settings.issuer or ""
                document = await _fetch_json_object(session, issuer.rstrip("/") + DISCOVERY)
                url = document.get("jwks_uri")
                if not isinstance(url, str) or document.get("issuer") != issuer:
                    raise IssuerError(f"{DISCOVERY} has no jwks_uri, or is of another issuer")
            listed = (await _fetch_json_object(session, url)).get("keys")
        if not isinstance(listed, list):
            raise IssuerError(f"{url} has no list of keys")
        keys: dict[str | None, jwt.PyJWK] = {}
        for entry in listed[:KEYS_MAX]:
            # A symmetric key is a secret: one that is published signs nothing.
            if not isinstance(entry, dict) or entry.get("kty") == "oct" or entry.get("use", "sig") != "sig":
                continue
            try:
                keys[entry.get("kid")] = jwt.PyJWK(entry)
            except jwt.PyJWTError as error:
                log.info("a key of %s is of no use here: %s", url, error)
        return keys


async def _fetch_json_object(session: aiohttp.ClientSession, url: str) -> Mapping[str, Any]:
    async with session.get(url, allow_redirects=False) as response:
        if response.status != 200:
            raise IssuerError(f"{url} answered {response.status}")
        body = await response.content.read(BODY_MAX + 1)
        while len(body) <= BODY_MAX and (more := await response.content.read(BODY_MAX + 1 - len(body))):
            body += more
    try:
        found = msgspec.json.decode(body)
    except msgspec.DecodeError as error:
        raise IssuerError(f"{url} answered no JSON: {error}") from error
    if len(body) > BODY_MAX or not isinstance(found, dict):
        raise IssuerError(f"{url} answered no object, or one of more than {BODY_MAX} bytes")
    return found
