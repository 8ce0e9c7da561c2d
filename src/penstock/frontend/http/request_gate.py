"""Request gate: what both HTTP servers share for every request: keys, rates, limits and the count of open requests."""

import asyncio
import re
from collections.abc import Callable, Mapping

from penstock.adapters.telemetry.frontend_metrics import FrontendMetrics
from penstock.config.settings.frontend_settings import FrontendSettings
from penstock.frontend.http.api_keys import ApiKeys, KeyRates
from penstock.frontend.http.peer_guard import PeerGuard

_SANE_ID = re.compile(r"[A-Za-z0-9._:\-]{1,128}\Z")


class RequestGate:
    """One frontend process's gate.

    Args:
        settings: of the start; `use` replaces them.
        routes: paths whose POST goes to an engine; ``{name}`` stands for any one segment.
        new_id: makes the id of a request that names no valid one.
    """

    def __init__(
        self,
        settings: FrontendSettings,
        metrics: FrontendMetrics,
        peer_guard: PeerGuard,
        *,
        routes: frozenset[str],
        new_id: Callable[[], str],
    ) -> None:
        self.settings = settings
        self.metrics = metrics
        self.peer_guard = peer_guard
        self.keys = ApiKeys(settings.security.api_keys)
        self.admin_keys = ApiKeys(settings.security.admin_keys)
        self.rates = KeyRates(settings.limits.rate, settings.limits.burst)
        self.draining = False
        """Whether requests are refused."""
        self.retiring = False
        """Whether a successor accepts the new connections; those that are open here end with their next answer."""
        self.inflight = 0
        """HTTP requests of routed or proxied routes that are being answered."""
        self.idle = asyncio.Event()
        """Set while no request is being answered."""
        self.idle.set()
        self._new_id = new_id
        self._routes = routes
        self._templates = [(_pattern(route), route) for route in sorted(routes) if "{" in route]

    def use(self, settings: FrontendSettings) -> None:
        """Use other settings from now on."""
        before, self.settings = self.settings.limits, settings
        limits = settings.limits
        if (limits.rate, limits.burst) != (before.rate, before.burst):
            self.rates = KeyRates(limits.rate, limits.burst)

    def route(self, path: str) -> str | None:
        """Return the route that a path is of, or None where its requests do not go to engines."""
        if path in self._routes:
            return path
        return next((route for pattern, route in self._templates if pattern.fullmatch(path)), None)

    def enter(self) -> None:
        """Count a request in; `leave` counts it out."""
        self.inflight += 1
        self.idle.clear()

    def leave(self) -> None:
        self.inflight -= 1
        if not self.inflight:
            self.idle.set()

    def request_id(self, headers: Mapping[str, str]) -> str:
        """Return the client's id where it is valid, else a new one."""
        for name in ("x-request-id", "x-dynamo-request-id", "x-penstock-request-id"):
            value = headers.get(name)
            if value is not None and _SANE_ID.match(value):
                return value
        return self._new_id()


def _pattern(route: str) -> re.Pattern[str]:
    return re.compile("[^{}/]+".join(re.escape(part) for part in re.split(r"\{\w+\}", route)))
