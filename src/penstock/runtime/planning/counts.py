"""What does a frontend count for planners? One set of counters per model, since the frontend's start."""

from collections.abc import Callable

from penstock.planner.counts import ModelCounts
from penstock.planner.seen import Traffic


class Counts:
    """All models of one frontend process.

    Args:
        now: seconds, any origin.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._started = now()
        self._models: dict[str, ModelCounts] = {}

    def of(self, model: str) -> ModelCounts:
        """Return a model's counters, made where it is new."""
        found = self._models.get(model)
        if found is None:
            found = self._models[model] = ModelCounts()
        return found

    def told(self) -> dict[str, Traffic]:
        """Return every model's counters as they are."""
        seconds = self._now() - self._started
        return {model: counts.told(seconds) for model, counts in self._models.items()}
