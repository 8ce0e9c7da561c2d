"""Plug-in watch: measures how long the router's plug-ins take, and has the router go on without those that are slow.

The router reads no clock; that a plug-in is left out reaches it as an event, so that its journal repeats it.
"""

import time
from collections.abc import Callable
from typing import Any

from penstock.router.events import PluginLeftOut
from penstock.router.selection.router_plugins import PluginCandidates, PluginRequest

CALL_BUDGET, CANDIDATE_BUDGET = 1e-3, 1e-5
"""Seconds of a call, and more of them for each candidate: all else that a frontend does for a request takes 0.3 ms."""
OVERRUNS_MAX = 10
"""Calls beyond their budget, of the last `COUNTED` at most, after which a plug-in is left out: one of them may be the
machine's fault, which stops a process now and then."""
COUNTED = 1000
STALL = 0.5
"""Seconds after which one call is enough: every request of the process waited for it."""


class PluginWatch:
    """Calls plug-ins for one router.

    Args:
        post: gives the router an event.
        clock: seconds, any origin.
    """

    def __init__(self, post: Callable[[PluginLeftOut], None], clock: Callable[[], float] = time.perf_counter) -> None:
        self._post, self._clock = post, clock
        self._overruns: dict[str, int] = {}
        self._calls: dict[str, int] = {}

    def call(
        self,
        name: str,
        count: int,
        method: Callable[[PluginRequest, Any], Any],
        request: PluginRequest,
        candidates: PluginCandidates,
    ) -> Any:
        """Call a plug-in with ``count`` candidates, and enter how long it took."""
        began = self._clock()
        try:
            return method(request, candidates)
        finally:
            self._enter(name, self._clock() - began, CALL_BUDGET + count * CANDIDATE_BUDGET)

    def _enter(self, name: str, took: float, budget: float) -> None:
        calls = self._calls[name] = self._calls.get(name, 0) + 1
        if calls % COUNTED == 0:
            self._overruns[name] = 0
        if took <= budget:
            return
        overruns = self._overruns[name] = self._overruns.get(name, 0) + 1
        if took >= STALL:
            self._post(PluginLeftOut(name=name, reason=f"one call took {took:.2f} s"))
        elif overruns >= OVERRUNS_MAX:
            times = f"the last one took {took * 1e3:.1f} ms, {budget * 1e3:.1f} ms are allowed"
            text = f"{overruns} of its calls took too long: {times}"
            self._post(PluginLeftOut(name=name, reason=text))
