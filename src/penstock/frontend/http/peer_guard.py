"""Peer guard: recognises signed requests between the frontend processes of one cluster.

The caller's own key is not passed on: a holder of the secret has access, only for reading, except below `PEERS`, where
frontends end and forget each other's stored responses. A signature binds method,
receiver, path and query, a time and a nonce; it is valid for `SPAN` seconds and for one request.
"""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable

from penstock.kernel.secret import ClusterSecret
from penstock.runtime.cluster_state.peer_signature import PURPOSE, VERSION, parts

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
