"""What happened to a request that is over? The last decisions and ends, kept for explain and the page."""

from collections import OrderedDict, deque
from typing import Any

import msgspec

from penstock.router.events import Closed, Decision


class History:
    """Bounded memory of decisions and ends; the oldest go.

    Args:
        decisions_max, closed_max: how many of each are kept.
    """

    def __init__(self, decisions_max: int, closed_max: int) -> None:
        self._decisions: deque[Decision] = deque(maxlen=decisions_max)
        self._by_request: dict[str, list[Decision]] = {}
        self._closed: OrderedDict[str, Closed] = OrderedDict()
        self._closed_max = closed_max

    def decided(self, decision: Decision) -> None:
        """Remember where a request went and why."""
        if not self._decisions.maxlen:
            return
        if len(self._decisions) == self._decisions.maxlen:
            oldest = self._decisions[0]
            known = self._by_request[oldest.request]
            known.remove(oldest)
            if not known:
                del self._by_request[oldest.request]
        self._decisions.append(decision)
        self._by_request.setdefault(decision.request, []).append(decision)

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
            "request": None if closed is None else msgspec.to_builtins(closed),
            "decisions": [msgspec.to_builtins(decision) for decision in decisions or ()],
        }

    def last_closed(self, limit: int) -> list[dict[str, Any]]:
        """Return the newest ends first."""
        newest = list(reversed(self._closed.values()))[: max(0, limit)]
        return [msgspec.to_builtins(closed) for closed in newest]

    def last_decisions(self, limit: int) -> list[dict[str, Any]]:
        """Return the newest decisions first."""
        newest = list(reversed(self._decisions))[: max(0, limit)]
        return [msgspec.to_builtins(decision) for decision in newest]
