"""What is a plugin given? What was seen in this tick and before, what is predicted, and what the stage before said."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from penstock.planner.proposals import Prediction
from penstock.planner.seen import ModelSeen, Observation, PoolSeen, Traffic
from penstock.planner.settings import BudgetSettings
from penstock.planner.start_up import Coming, StartUps


@dataclass(frozen=True, slots=True)
class Context:
    """One tick, as a stage sees it. Plugins read it and change nothing in it.

    Args:
        tick: counts up by one.
        looks: observations of the last minutes, this tick's last; spaced as ticks are.
        predictions: by model, of stage PREDICT.
        baseline: pool -> replicas, as the stage before said; in the first one, as is wanted now.
        start_ups: how long replicas took to serve.
        coming: pool -> those that are starting, and when each is expected; given-up ones are left out.
        budget: what all pools together and each may have.
        manual: pools that somebody else has set, with the second until which that is respected.
    """

    tick: int
    at: float
    looks: Sequence[Observation]
    baseline: Mapping[str, int]
    predictions: Mapping[str, Prediction] = field(default_factory=dict)
    start_ups: StartUps = field(default_factory=StartUps)
    coming: Mapping[str, Coming] = field(default_factory=dict)
    budget: BudgetSettings = field(default_factory=BudgetSettings)
    manual: Mapping[str, float] = field(default_factory=dict)

    @property
    def observation(self) -> Observation:
        return self.looks[-1]

    def model(self, name: str) -> ModelSeen | None:
        """Return what this tick saw of a model."""
        return self.observation.models.get(name)

    def pool(self, name: str) -> PoolSeen | None:
        """Return what this tick saw of a pool."""
        return next((pool for _, each, pool in self.observation.pools() if each == name), None)

    def within(self, seconds: float) -> Sequence[Observation]:
        """Return the looks whose windows end in the last ``seconds``, at least this tick's."""
        first = len(self.looks) - 1
        since = self.at - seconds + 1e-6
        while first > 0 and self.looks[first - 1].at > since:
            first -= 1
        return self.looks[first:]

    def traffic(self, model: str, seconds: float) -> Traffic | None:
        """Return a model's traffic of the last ``seconds``; None where this tick could not read it.

        Looks before this one that were not readable are left out, so the sum may be of fewer seconds: it says of how
        many.
        """
        total: Traffic | None = None
        for look in self.within(seconds):
            seen = look.models.get(model)
            if seen is not None and seen.traffic is not None:
                total = seen.traffic if total is None else total + seen.traffic
        newest = self.model(model)
        return None if newest is None or newest.traffic is None else total
