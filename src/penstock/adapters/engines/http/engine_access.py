"""Engine access: the headers and the TLS that a pool's engines ask for, and the HTTP sessions that use them.

Settings name files and variables, so that no key is in a config, a card or a record; each process reads them itself.
"""

import os
import ssl
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import aiohttp
from multidict import CIMultiDict
from yarl import URL

from penstock.adapters.http_session import HttpSession
from penstock.adapters.tls import client_context
from penstock.config.settings.cluster_settings import ModelSettings
from penstock.config.settings.pool_access_settings import PoolAccessSettings
from penstock.kernel.errors import ConfigError
from penstock.kernel.values import WorkerCard


class EngineAccess(NamedTuple):
    """What a server is sent with every request, and the TLS of its connections; None trusts the system."""

    headers: Mapping[str, str] = {}
    tls: ssl.SSLContext | None = None


OPEN = EngineAccess()
KEY_ENV = {"vllm": "VLLM_API_KEY", "llamacpp": "LLAMA_API_KEY"}
"""Kind of engine -> the variable from which one that is started here takes the key that it asks for."""


def read_access(settings: PoolAccessSettings, where: str, env: Mapping[str, str] = os.environ) -> EngineAccess:
    """Read the files and variables that a pool's settings name.

    Args:
        where: dotted name of those settings.
    Raises:
        ConfigError: one is missing, or no key or certificate is in it.
    """
    headers = {
        name.lower(): _header_text(value, f"{where}.headers.{name}", env) for name, value in settings.headers.items()
    }
    if (key := api_key_of(settings, where, env)) is not None:
        headers["authorization"] = f"Bearer {key}"
    tls = settings.ca or settings.cert
    return EngineAccess(
        headers, client_context(ca=settings.ca, cert=settings.cert, key=settings.cert_key) if tls else None
    )


def api_key_of(settings: PoolAccessSettings, where: str, env: Mapping[str, str] = os.environ) -> str | None:
    """Return the key that a pool's settings name; None where they name none.

    Raises:
        ConfigError: it can't be read.
    """
    if settings.api_key_file is not None:
        return _header_text(f"file:{settings.api_key_file}", f"{where}.api_key_file", env)
    if settings.api_key_env is not None:
        return _header_text(f"env:{settings.api_key_env}", f"{where}.api_key_env", env)
    return None


def key_env(engine: str, access: EngineAccess) -> dict[str, str]:
    """Return the environment by which an engine that is started here asks for the key that we send."""
    kind, _, key = access.headers.get("authorization", "").partition(" ")
    return {KEY_ENV[engine]: key} if kind == "Bearer" and engine in KEY_ENV else {}


class EngineAccesses:
    """The access to every server that this process has heard of; any other is open.

    Args:
        models: by name, with the pools whose settings a server's card names.
    """

    def __init__(self, models: Mapping[str, ModelSettings], env: Mapping[str, str] = os.environ) -> None:
        self._models, self._env = models, env
        self._pools: dict[tuple[str, str], EngineAccess] = {}
        self._servers: dict[str, EngineAccess] = {}

    def enter(self, url: str, model: str, pool: str | None) -> None:
        """Know to which pool of ``models.MODEL.pools`` a server belongs; None: to none that asks for anything.

        Raises:
            ConfigError: the pool is not in the settings of this process, or a file that it names can't be read.
        """
        if self._servers:
            self._servers.pop(_origin(url), None)
        if pool is not None:
            self._servers[_origin(url)] = self.of_pool(model, pool)

    def of_pool(self, model: str, pool: str) -> EngineAccess:
        """Return the access to a pool's engines, read once; see `enter` for the errors."""
        key, where = (model, pool), f"models.{model}.pools.{pool}.access"
        if key not in self._pools:
            entry = self._models.get(model)
            if entry is None or pool not in entry.pools:
                raise ConfigError(f"its engines need {where}, and there is no such pool in the settings here")
            self._pools[key] = read_access(entry.pools[pool].access, where, self._env)
        return self._pools[key]

    def enter_card(self, card: WorkerCard) -> None:
        """Know a worker's server; see `enter`."""
        self.enter(card.url, card.model, card.access)

    def at(self, url: str) -> EngineAccess:
        """Return the access to the server of a URL."""
        return self._servers.get(_origin(url), OPEN) if self._servers else OPEN

    def session(self) -> HttpSession:
        """Return a session for requests to engines."""
        return HttpSession(lambda: engine_session(self.at))


def engine_session(access: Callable[[str], EngineAccess], **options: Any) -> aiohttp.ClientSession:
    """Return aiohttp's session, each of whose requests has its server's headers and TLS; after a redirect, the other's.

    Args:
        access: by URL; `EngineAccesses.at`, or what is right for one server.
        options: of aiohttp's session.
    """

    class AccessedRequest(aiohttp.ClientRequest):
        def __init__(self, method: str, url: URL, **given: Any) -> None:
            there = access(str(url))
            headers = CIMultiDict(given.pop("headers", None) or {})
            for name, value in there.headers.items():
                headers.setdefault(name, value)
            if there.tls is not None:
                given["ssl"] = there.tls
            super().__init__(method, url, headers=headers, **given)

    return aiohttp.ClientSession(request_class=AccessedRequest, **options)


def refused(status: int | None, pool: str = "pools.NAME") -> str:
    """Return what an engine's status says about our access, to follow a sentence; nothing for any other status."""
    if status == 401:
        return f": it asks for an API key: set {pool}.access.api_key_file or api_key_env to the right one"
    return f": it forbids us: look at {pool}.access, its key, headers and certificate" if status == 403 else ""


def _origin(url: str) -> str:
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return f"{parts.scheme}://{parts.hostname}:{port}"


def _header_text(value: str, where: str, env: Mapping[str, str]) -> str:
    """Return a header's text: its own, that of file:PATH or that of env:NAME."""
    kind, colon, name = value.partition(":")
    if not colon or kind not in ("file", "env"):
        return value
    try:
        text = Path(name).read_text().strip() if kind == "file" else env.get(name, "").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{where}: {name} can't be read: {error}", hint="name a file that this user may read"
        ) from error
    if not text or not text.isascii() or not text.isprintable():
        what = f"the file {name}" if kind == "file" else f"the environment variable {name}"
        raise ConfigError(
            f"{where}: {what} has no value of one line of ASCII", hint="put the key there, and nothing else"
        )
    return text
