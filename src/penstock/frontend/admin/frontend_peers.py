"""Frontend peers: requests between the frontend processes over their admin ports, signed with the cluster's secret.

The caller's own key is not passed on: a holder of the secret has access, only for reading. A signature binds method,
receiver, path and query, a time and a nonce; it is valid for `SPAN` seconds and for one request.
"""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import aiohttp
from yarl import URL

from penstock.kernel.secret import ClusterSecret
from penstock.runtime.cluster_state.peer_signature import PURPOSE, VERSION, parts, signed

if TYPE_CHECKING:
    from penstock.frontend.service import Service

log = logging.getLogger("penstock.peers")

SPAN = 30
"""Seconds by which two processes' clocks may differ."""
NONCES_MAX = 100_000
"""Nonces remembered. With more requests in `SPAN` seconds the next ones are refused."""
TIMEOUT = 2.0
"""Seconds that another frontend process has to answer."""


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
        if self._secret is None or method != "GET" or not 16 <= len(nonce) <= 64:
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


async def from_peers(service: "Service", path: str, *, text: bool = False) -> list[Any]:
    """Return what the other frontend processes of this cluster answer; those that do not are left out.

    Args:
        path: with query, such as ``/admin/status?scope=process``.
        text: return texts, not JSON.
    """
    answers = await by_peer(service, path, text=text)
    return [answer for answer in answers.values() if answer is not None]


async def by_peer(service: "Service", path: str, *, text: bool = True) -> dict[str, Any]:
    """Return the same by each peer's admin URL; None for those that do not answer."""
    urls = service.cluster.peers()
    if not urls:
        return {}
    timeout = aiohttp.ClientTimeout(total=TIMEOUT)
    async with aiohttp.ClientSession(timeout=timeout) as http:
        wanted = [URL(url.rstrip("/") + path, encoded=True) for url in urls]
        answers = await asyncio.gather(*(_get(http, url, signed(service.secret, url), text) for url in wanted))
    return dict(zip(urls, answers, strict=True))


def findings(service: "Service") -> list[dict[str, Any]]:
    """Return findings for the operator about refused requests."""
    refused = service.peer_guard.refused
    findings = []
    for why, hint in (
        ("wrong secret", "give all processes of the cluster the same PENSTOCK_CLUSTER_SECRET"),
        ("newer", "processes of one cluster run the same release; update this one"),
        ("too old", f"the clocks of the cluster's machines differ by more than {SPAN} s: run a time service"),
    ):
        if refused.get(why):
            text = f"{refused[why]} requests that say they are of another frontend were not let in: {why}"
            findings.append({"level": "warning", "text": text, "hint": hint})
    return findings


async def _get(http: aiohttp.ClientSession, url: URL, headers: dict[str, str], text: bool) -> Any:
    try:
        async with http.get(url, headers=headers, allow_redirects=False) as response:
            if response.status != 200:
                if response.status in (401, 403):
                    log.warning("the frontend at %s does not let us in: another cluster secret", url.origin())
                return None
            return await response.text() if text else await response.json()
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError):
        return None  # a process that is ending must not fail the answer of the others
