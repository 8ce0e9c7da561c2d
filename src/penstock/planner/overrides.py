"""Override tracker of the planner: desired replicas that another writer set, its own orders, and unreadable sources."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from penstock.kernel.values import Pool
from penstock.planner.observation import BROKEN_AFTER, Health, ModelState, Observation
from penstock.planner.plugins.proposals import CEILING, Reason

REPEAT_AFTER = 600.0
"""Seconds without a binding ceiling after which it is reported again."""
ORDERS = 16
"""Orders that are remembered while a connector has not caught up."""


@dataclass(slots=True)
class OverrideTracker:
    """Memory over ticks. Times in seconds of the run."""

    ordered: dict[str, int] = field(default_factory=dict)
    """Pool -> the last order to the connector."""
    orders: dict[str, list[int]] = field(default_factory=dict)
    """Pool -> earlier orders that the connector may still apply, the newest last."""
    observed_desired: dict[str, int] = field(default_factory=dict)
    """Pool -> the connector's desired replicas in the last observation."""
    manual: dict[str, float] = field(default_factory=dict)
    """Pool that another writer has set -> until when that is respected."""
    readable: dict[str, float] = field(default_factory=dict)
    """Model -> when its traffic was last read."""
    health: dict[str, Health] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    """Pool -> why the connector could not carry out its order."""
    late: dict[str, int] = field(default_factory=dict)
    """Pool -> replicas that were given up because they did not begin to serve."""

    short: dict[str, float] = field(default_factory=dict)
    """Model -> when the ceiling last held its fleet back."""

    def record_order(self, targets: Mapping[str, int]) -> None:
        """Record an order to the connector. A slow one may apply an older number after a newer order."""
        for name, count in targets.items():
            if self.ordered.get(name) != count:
                self.orders[name] = [*self.orders.get(name, ()), count][-ORDERS:]
            self.ordered[name] = count

    def unread(self, observation: Observation) -> list[Reason]:
        """Return, for each model whose traffic could not be read, why; for the record of the tick, after `observe`."""
        return [
            Reason(
                code=f"source_{self.health[model]}",
                text=f"the traffic of {model} can't be read: {each.why or 'its source does not say why'}",
                facts={"model": model},
            )
            for model, each in observation.models.items()
            if self.health[model] != "fresh"
        ]

    def observe(self, observation: Observation, hold: float) -> list[Reason]:
        """Compare an observation with the orders; return what an operator should know."""
        reasons = self._others(observation, hold)
        for model, each in observation.models.items():
            reasons += self._source(model, each, observation.at)
        return reasons

    def _others(self, observation: Observation, hold: float) -> list[Reason]:
        reasons: list[Reason] = []
        for _, name, state in observation.pools():
            pool = state.pool
            before = self.observed_desired.get(name)
            ours = (before, self.ordered.get(name, before), *self.orders.get(name, ()))
            if pool.desired == self.ordered.get(name):
                self.orders.pop(name, None)  # it has caught up: from now on an older number is another writer's
            if before is not None and pool.desired not in ours:
                self.manual[name] = observation.at + hold
                text = f"an operator set {name} from {before} to {pool.desired}; that is left alone for {hold:g} s"
                facts = {"pool": name, "was": before, "is": pool.desired, "hold": hold}
                reasons.append(Reason(code="manual", text=text, facts=facts))
            self.observed_desired[name] = pool.desired
        self.manual = {name: until for name, until in self.manual.items() if until > observation.at}
        return reasons

    def _source(self, model: str, observed: ModelState, at: float) -> list[Reason]:
        if observed.traffic is not None and observed.health != "broken":
            self.readable[model], self.health[model] = at, observed.health
            return []
        silent = at - self.readable.setdefault(model, at)
        now: Health = "broken" if observed.health == "broken" or silent >= BROKEN_AFTER else "stale"
        before, self.health[model] = self.health.get(model), now
        if now != "broken" or before == "broken":
            return []
        why = f": {observed.why}" if observed.why else ""
        text = f"the traffic of {model} can't be read for {silent:.0f} s{why}; nothing is taken away meanwhile"
        return [Reason(code="source_broken", text=text, facts={"model": model, "seconds": silent})]

    def not_started(self, name: str, pool: Pool, given_up: int, deadline: float) -> Reason | None:
        """Record how many replicas of a pool were given up; return the reason where these are more than before."""
        before, self.late[name] = self.late.get(name, 0), given_up
        if given_up <= before:
            return None
        why = f": {pool.problem}" if pool.problem else ""
        text = (
            f"{given_up} of {pool.desired} replicas of {name} failed, or did not come to serve within {deadline:g} s"
            f"{why}; they count no more until they do: see why they don't start"
        )
        return Reason(code="not_started", text=text, facts={"pool": name, "given_up": given_up})

    def ceiling_reached(self, at: float, bound: Sequence[Reason]) -> list[Reason]:
        """Record the limits that bound a tick; return what an operator should know: a ceiling that begins to bind."""
        reasons = []
        for each in bound:
            if each.code == CEILING:
                last = self.short.get(each.facts["model"])
                if last is None or at - last > REPEAT_AFTER:
                    reasons.append(each)
                self.short[each.facts["model"]] = at
        return reasons

    def hold_reason(self, pool: str, model: str, wanted: int, desired: int) -> Reason | None:
        """Return why a pool must stay as it is, or None where ``wanted`` is allowed."""
        if pool in self.manual:
            until = self.manual[pool]
            text = f"{pool} stays at {desired}, which an operator has set, until second {until:.0f} of the run"
            return Reason(code="manual", text=text, facts={"pool": pool, "wanted": wanted, "until": until})
        if wanted < desired and self.health.get(model) != "fresh":
            state = self.health.get(model)
            text = f"{pool} stays at {desired} instead of {wanted}: the traffic of {model} is {state}, not known"
            return Reason(code=f"source_{state}", text=text, facts={"pool": pool, "wanted": wanted})
        return None
