"""Context of a plugin: the observations of this tick and before, the predictions, and the last stage's baseline."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from penstock.kernel.values import Traffic
from penstock.planner.observation import ModelState, Observation, PoolState
from penstock.planner.plugins.proposals import Prediction
from penstock.planner.settings import BudgetSettings
from penstock.planner.sizing.start_up_times import StartingReplica, StartUpTimes


@dataclass(frozen=True, slots=True)
class PluginContext:
    """One tick, as a stage sees it. Plugins read it and change nothing in it.

    Args:
        tick: counts up by one.
        observations: of the last minutes, this tick's last; spaced as ticks are.
        predictions: by model, of stage PREDICT.
        baseline: pool -> replicas, from the stage before; in the first one, the present desired replicas.
        start_ups: how long replicas took until they served.
        coming: pool -> its starting replicas, with the expected time of each; given-up ones are left out.
        budget: limits of all pools together and of each.
        manual: pools that another writer has set, with the second until which that is respected.
    """

    tick: int
    at: float
    observations: Sequence[Observation]
    baseline: Mapping[str, int]
    predictions: Mapping[str, Prediction] = field(default_factory=dict)
    start_ups: StartUpTimes = field(default_factory=StartUpTimes)
    coming: Mapping[str, StartingReplica] = field(default_factory=dict)
    budget: BudgetSettings = field(default_factory=BudgetSettings)
    manual: Mapping[str, float] = field(default_factory=dict)

    @property
    def observation(self) -> Observation:
        return self.observations[-1]

    def model(self, name: str) -> ModelState | None:
        """Return this tick's state of a model."""
        return self.observation.models.get(name)

    def pool(self, name: str) -> PoolState | None:
        """Return this tick's state of a pool."""
        return next((pool for _, each, pool in self.observation.pools() if each == name), None)

    def within(self, seconds: float) -> Sequence[Observation]:
        """Return the observations whose windows end in the last ``seconds``, at least this tick's."""
        first = len(self.observations) - 1
        since = self.at - seconds + 1e-6
        while first > 0 and self.observations[first - 1].at > since:
            first -= 1
        return self.observations[first:]

    def traffic(self, model: str, seconds: float) -> Traffic | None:
        """Return a model's traffic of the last ``seconds``; None where this tick could not read it.

        Earlier observations that were not readable are left out, so the sum may cover fewer seconds: its ``seconds``
        has how many.
        """
        total: Traffic | None = None
        for look in self.within(seconds):
            observed = look.models.get(model)
            if observed is not None and observed.traffic is not None:
                total = observed.traffic if total is None else total + observed.traffic
        newest = self.model(model)
        return None if newest is None or newest.traffic is None else total
