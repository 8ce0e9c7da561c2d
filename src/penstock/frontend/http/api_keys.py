"""API keys, admin keys, the request rate of each key, and protection against requests from other sites' pages."""

import base64
import binascii
import hashlib
import hmac
import ipaddress
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence

from penstock.kernel.errors import ClientError, ConfigError, OverloadedError

CALLERS_MAX = 16_384
"""Callers whose rate is remembered; beyond it the longest idle are forgotten, which can only allow more requests."""


class Unauthorized(ClientError):
    """No valid key; ``challenge`` is the value of WWW-Authenticate."""

    def __init__(self, message: str, challenge: str, hint: str | None = None) -> None:
        super().__init__(message, status=401, code="invalid_api_key", hint=hint)
        self.challenge = challenge


class ApiKeys:
    """A set of secret keys, compared in constant time."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._keys = [key.encode() for key in keys]
        self.needed = bool(keys)
        """Whether there is any: without keys nobody is asked for one."""
        self._names = [f"key-{hashlib.sha256(key).hexdigest()[:8]}" for key in self._keys]

    def name(self, offered: str | None) -> str | None:
        """Return the name under which a key may be logged, or None where it is not one of them."""
        if offered is None:
            return None
        matched: str | None = None
        given = offered.encode("utf-8", "surrogateescape")
        for key, name in zip(self._keys, self._names):
            # All are compared, so that the time does not reveal which one was close.
            if hmac.compare_digest(key, given):
                matched = name
        return matched


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
            raise OverloadedError(
                f"more than {self._rate:g} requests per second with this key", retry_after=wait, status=429
            )


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


def check_binding(host: str, api_keys: Sequence[str], insecure: bool) -> None:
    """Refuse to serve the network without keys.

    Raises:
        ConfigError: the address is not loopback, and there is neither a key nor ``insecure``.
    """
    if not is_loopback(host) and not api_keys and not insecure:
        raise ConfigError(
            f"frontend.host {host} can be reached from other machines, but no API key is set",
            hint="set frontend.security.api_keys, or frontend.security.insecure=true to serve everyone",
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
