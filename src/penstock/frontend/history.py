"""What happened to a request that is over? The last decisions and ends, kept for explain and the page.

Decisions are kept as JSON text: thousands of them with a candidate per worker would otherwise be a million small
objects, and each full run of the garbage collector would hold the event loop for as long as it walks them. Ends have
few parts, so they stay what they are until somebody asks.
"""

from collections import OrderedDict, deque
from itertools import islice
from typing import Any

import msgspec

from penstock.router.events import Closed, Decision


class History:
    """Bounded memory of decisions and ends; the oldest go.

    Args:
        decisions_max, closed_max: how many of each are kept.
    """

    def __init__(self, decisions_max: int, closed_max: int) -> None:
        self._decisions: deque[tuple[str, bytes]] = deque(maxlen=decisions_max)
        self._by_request: dict[str, list[bytes]] = {}
        self._closed: OrderedDict[str, Closed] = OrderedDict()
        self._closed_max = closed_max
        self._encode = msgspec.json.Encoder().encode

    def decided(self, decision: Decision) -> msgspec.Raw:
        """Remember where a request went and why; return the decision as JSON, so that nobody encodes it again."""
        line = self._encode(decision)
        if self._decisions.maxlen:
            if len(self._decisions) == self._decisions.maxlen:
                request, _ = self._decisions[0]
                known = self._by_request[request]
                del known[0]  # the deque's oldest is the oldest of its request too
                if not known:
                    del self._by_request[request]
            self._decisions.append((decision.request, line))
            self._by_request.setdefault(decision.request, []).append(line)
        return msgspec.Raw(line)

    def closed(self, closed: Closed) -> None:
        """Remember how a request ended; an id that is used again replaces its older end."""
        self._closed.pop(closed.id, None)
        self._closed[closed.id] = closed
        if len(self._closed) > self._closed_max:
            self._closed.popitem(last=False)

    def explain(self, request: str) -> dict[str, Any] | None:
        """Return a request's end and its decisions as plain data, or None where neither is known."""
        closed, decisions = self._closed.get(request), self._by_request.get(request)
        if closed is None and decisions is None:
            return None
        return {
            "request": None if closed is None else self._plain(closed),
            "decisions": [msgspec.json.decode(line) for line in decisions or ()],
        }

    def last_closed(self, limit: int) -> list[dict[str, Any]]:
        """Return the newest ends first."""
        return [self._plain(closed) for closed in islice(reversed(self._closed.values()), limit)]

    def last_decisions(self, limit: int) -> list[dict[str, Any]]:
        """Return the newest decisions first."""
        return [msgspec.json.decode(line) for _, line in islice(reversed(self._decisions), limit)]

    def _plain(self, closed: Closed) -> dict[str, Any]:
        found: dict[str, Any] = msgspec.json.decode(self._encode(closed))
        return found
