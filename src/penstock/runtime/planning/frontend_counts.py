"""Request counts of a frontend for planners: one set of counters per model, since the frontend's start."""

from collections.abc import Callable

from penstock.kernel.values import Traffic
from penstock.planner.sizing.request_counts import RequestCounts


class FrontendCounts:
    """All models of one frontend process.

    Args:
        now: seconds, any origin.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._started = now()
        self._models: dict[str, RequestCounts] = {}
        self.copies: dict[str, str] = {}
        """Shadows' copies that have not ended, and their models: where one waits, no client does."""

    def of(self, model: str) -> RequestCounts:
        """Return a model's counters, created where it is new."""
        counts = self._models.get(model)
        if counts is None:
            counts = self._models[model] = RequestCounts()
        return counts

    def totals(self) -> dict[str, Traffic]:
        """Return every model's counters as they are."""
        seconds = self._now() - self._started
        return {model: counts.totals(seconds) for model, counts in self._models.items()}
