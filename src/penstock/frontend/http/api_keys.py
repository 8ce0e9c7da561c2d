"""API keys, admin keys, the request rate of each key, and what keeps other sites' pages and strange peers out.

Requests between the frontend processes of one cluster are signed (`PeerGuard`). The caller's own key is not passed on:
a holder of the secret has access, only for reading, except below `PEERS`, where frontends end and forget each other's
stored responses. A signature binds method, receiver, path and query, a time and a nonce; it is valid for `SPAN` seconds
and for one request.
"""

import base64
import binascii
import hashlib
import ipaddress
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from penstock.config.cluster_secret_file import private_text
from penstock.config.settings.tenant_settings import HASHED, TenantSettings, hashed
from penstock.kernel.errors import ClientError, ConfigError, OverloadedError
from penstock.kernel.secret import ClusterSecret
from penstock.router.requests.refusals import RATE_LIMIT
from penstock.runtime.cluster_state.peer_signature import PURPOSE, VERSION, parts

NO_TENANTS: Mapping[str, Sequence[str]] = MappingProxyType({})
CALLERS_MAX = 16_384
"""Callers whose rate is remembered; beyond it the longest idle are forgotten, which can only allow more requests."""


class Unauthorized(ClientError):
    """No valid key; ``challenge`` is the value of WWW-Authenticate."""

    def __init__(self, message: str, challenge: str, hint: str | None = None) -> None:
        super().__init__(message, status=401, code="invalid_api_key", hint=hint)
        self.challenge = challenge


class ApiKeys:
    """A set of secret keys, known by their SHA-256.

    The digest of what is offered is looked up, so the time says nothing about the keys.

    Args:
        keys: of no tenant, in full or as `penstock.config.settings.tenant_settings.hashed` writes them.
        tenants: tenant -> its keys, in the same form.
    """

    def __init__(self, keys: Sequence[str], tenants: Mapping[str, Sequence[str]] = NO_TENANTS) -> None:
        self._names: dict[str, str] = {}
        self.tenants: dict[str, str] = {}
        """Name of a key -> its tenant."""
        for key in keys:
            self._names[hashed(key)] = _name_of(hashed(key))
        for tenant, own in tenants.items():
            for key in own:
                name = f"{tenant}/{_name_of(hashed(key))}"
                self._names[hashed(key)] = name
                self.tenants[name] = tenant
        self.needed = bool(self._names)
        """Whether there is any: without keys nobody is asked for one."""

    def name(self, offered: str | None) -> str | None:
        """Return the name under which a key may be logged, or None where it is not one of them."""
        if offered is None:
            return None
        digest = hashlib.sha256(offered.encode("utf-8", "surrogateescape")).hexdigest()
        return self._names.get(HASHED + digest)


def tenant_keys(tenants: Mapping[str, TenantSettings]) -> dict[str, list[str]]:
    """Return each tenant's keys, with those of its files.

    Raises:
        ConfigError: a file can't be read, or a key is of two tenants.
    """
    found: dict[str, list[str]] = {}
    owners: dict[str, str] = {}
    for name, settings in tenants.items():
        keys = list(settings.keys)
        for file in settings.key_files:
            where = f"tenants.{name}.key_files: {file}"
            lines = private_text(Path(file).expanduser(), where).splitlines()
            keys += [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
        found[name] = keys = [hashed(key) for key in keys]
        for key in keys:
            if owners.setdefault(key, name) != name:
                raise ConfigError(
                    f"tenants.{owners[key]} and tenants.{name} have the same key {_name_of(key)}", hint="give it to one"
                )
    return found


def _name_of(key: str) -> str:
    return f"key-{key.removeprefix(HASHED)[:8]}"


class KeyRates:
    """A token bucket per caller.

    Args:
        rate: requests per second, or None for no limit.
        burst: requests that may come at once.
        clock: seconds, any origin.
    """

    def __init__(self, rate: float | None, burst: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.limited = rate is not None
        self._rate = rate
        self._burst = float(burst)
        self._clock = clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._buckets)

    def take(self, caller: str) -> None:
        """Take one request's token.

        Raises:
            OverloadedError: 429 with the seconds until there is one again.
        """
        if self._rate is None:
            return
        now = self._clock()
        left, since = self._buckets.pop(caller, (self._burst, now))
        left = min(self._burst, left + (now - since) * self._rate)
        if left >= 1.0:
            self._buckets[caller] = (left - 1.0, now)
        else:
            self._buckets[caller] = (left, now)
        if len(self._buckets) > CALLERS_MAX:
            self._buckets.popitem(last=False)
        if left < 1.0:
            wait = (1.0 - left) / self._rate
            text = f"more than {self._rate:g} requests per second with this key"
            raise OverloadedError(text, retry_after=wait, status=429, code=RATE_LIMIT)


def bearer(headers: Mapping[str, str]) -> str | None:
    """Return the key of an ``Authorization: Bearer`` header, or None."""
    kind, _, value = headers.get("authorization", "").partition(" ")
    return value.strip() if kind.lower() == "bearer" and value.strip() else None


def basic_password(headers: Mapping[str, str]) -> str | None:
    """Return the password of an ``Authorization: Basic`` header, or None: how a browser sends the admin key."""
    kind, _, value = headers.get("authorization", "").partition(" ")
    if kind.lower() != "basic":
        return None
    try:
        decoded = base64.b64decode(value.strip(), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return None
    return decoded.partition(":")[2]


def is_loopback(address: str | None) -> bool:
    """Return whether an address, or a host name in a header, means this machine. A Unix socket does."""
    if address is None or address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address.strip("[]").split("%")[0]).is_loopback
    except ValueError:
        return address.endswith(".localhost")


def check_admin(keys: ApiKeys, headers: Mapping[str, str], *, remote: str | None, host: str, method: str) -> None:
    """Check that a caller may use the admin routes.

    With admin keys one of them is needed. Without, callers of this machine are accepted, unless the request came
    through a proxy, or a browser sends it on behalf of another site's page.

    Raises:
        ClientError: 401 or 403.
    """
    if method not in ("GET", "HEAD") and not _same_site(headers, host):
        raise ClientError("this request comes from another site's page", status=403, code="cross_site")
    if keys.needed:
        if keys.name(bearer(headers)) is None and keys.name(basic_password(headers)) is None:
            raise Unauthorized("this route needs an admin key", 'Basic realm="penstock admin"')
        return
    forwarded = any(name in headers for name in ("forwarded", "x-forwarded-for", "x-real-ip"))
    if forwarded or not is_loopback(remote) or not is_loopback(_host_name(host)):
        raise ClientError(
            "this route is for callers on this machine",
            status=403,
            code="admin_only",
            hint="set frontend.security.admin_keys to use it from elsewhere",
        )


def check_binding(host: str, keys: bool, insecure: bool) -> None:
    """Refuse to serve the network without keys.

    Raises:
        ConfigError: the address is not loopback, and there is neither a key nor ``insecure``.
    """
    if not is_loopback(host) and not keys and not insecure:
        raise ConfigError(
            f"frontend.host {host} can be reached from other machines, but no API key is set",
            hint="set tenants or frontend.security.api_keys, or frontend.security.insecure=true to serve everyone",
        )


def _same_site(headers: Mapping[str, str], host: str) -> bool:
    if headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
        return False
    origin = headers.get("origin")
    return origin is None or origin.split("://", 1)[-1] == host


def _host_name(host: str) -> str:
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.rpartition(":")[0] if host.count(":") == 1 else host


log = logging.getLogger("penstock.peers")

SPAN = 30
"""Seconds by which two processes' clocks may differ."""
PEERS = "/peer/"
"""Where the routes begin that only frontends of the cluster use."""
NONCES_MAX = 100_000
"""Nonces remembered. With more requests in `SPAN` seconds the next ones are refused."""


class PeerGuard:
    """Recognises requests of this cluster's other frontends.

    Args:
        secret: of the cluster; without one no request is accepted this way.
        clock: seconds since 1970.
    """

    def __init__(self, secret: ClusterSecret | None, clock: Callable[[], float] = time.time) -> None:
        self.refused: dict[str, int] = {}
        """Signed requests that were refused, by reason."""
        self._secret = secret
        self._clock = clock
        self._nonces: OrderedDict[str, float] = OrderedDict()

    def admits(self, header: str | None, method: str, host: str, target: str) -> bool:
        """Return whether a request with this header is of another frontend of the cluster; true once for each."""
        if header is None:
            return False
        why = self._fault(header, method, host, target)
        if why is None:
            return True
        count = self.refused[why] = self.refused.get(why, 0) + 1
        if count & (count - 1) == 0:  # the 1st, 2nd, 4th...: an unknown caller must not fill the log
            log.warning("request %d that says it is of another frontend is not let in: %s", count, why)
        return False

    def _fault(self, header: str, method: str, host: str, target: str) -> str | None:
        words = header.split(" ")
        if not words[0].isascii() or not words[0].isdigit() or len(words[0]) > 9:
            return "malformed"
        if int(words[0]) > VERSION:
            return "newer"
        if len(words) != 4 or not words[1].isascii() or not words[1].isdigit() or len(words[1]) > 15:
            return "malformed"
        at, nonce = int(words[1]), words[2]
        allowed = method == "GET" or target.startswith(PEERS)
        if self._secret is None or not allowed or not 16 <= len(nonce) <= 64:
            return "not allowed"
        if not self._secret.verify(words[3], PURPOSE, *parts(method, host, target, at, nonce)):
            return "wrong secret"
        now = self._clock()
        if abs(now - at) > SPAN:
            return "too old"
        while self._nonces and next(iter(self._nonces.values())) < now - 2 * SPAN:
            self._nonces.popitem(last=False)
        if nonce in self._nonces or len(self._nonces) >= NONCES_MAX:
            return "repeated"
        self._nonces[nonce] = now
        return None
