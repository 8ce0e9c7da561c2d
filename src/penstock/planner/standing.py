"""What does the planner remember between ticks of pools and sources? Who else set numbers, and what can't be read."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.planner.proposals import Because
from penstock.planner.seen import Health, ModelSeen, Observation, PoolSeen

ORDERS = 16
"""Numbers that are remembered while a connector has not caught up."""


@dataclass(slots=True)
class Standing:
    """Memory over ticks. Times in seconds of the run."""

    told: dict[str, int] = field(default_factory=dict)
    """Pool -> what was last said to the connector."""
    orders: dict[str, list[int]] = field(default_factory=dict)
    """Pool -> what else was said that the connector may still come to want, the newest last."""
    found: dict[str, int] = field(default_factory=dict)
    """Pool -> what the connector wanted at the last look."""
    manual: dict[str, float] = field(default_factory=dict)
    """Pool that somebody else has set -> until when that is respected."""
    readable: dict[str, float] = field(default_factory=dict)
    """Model -> when its traffic was last read."""
    health: dict[str, Health] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    """Pool -> why the connector could not want what it was told."""
    late: dict[str, int] = field(default_factory=dict)
    """Pool -> replicas that were given up because they do not come to serve."""

    def say(self, targets: Mapping[str, int]) -> None:
        """Take in what is said to the connector. A slow one may come to want an older number after a newer was said."""
        for name, count in targets.items():
            if self.told.get(name) != count:
                self.orders[name] = [*self.orders.get(name, ()), count][-ORDERS:]
            self.told[name] = count

    def look(self, seen: Observation, hold: float, stale_after: float) -> list[Because]:
        """Take in a look; return what somebody should hear of."""
        told = self._others(seen, hold)
        for model, each in seen.models.items():
            told += self._source(model, each, seen.at, stale_after)
        return told

    def _others(self, seen: Observation, hold: float) -> list[Because]:
        told: list[Because] = []
        for _, name, pool in seen.pools():
            before = self.found.get(name)
            ours = (before, self.told.get(name, before), *self.orders.get(name, ()))
            if pool.desired == self.told.get(name):
                self.orders.pop(name, None)  # it has caught up: from now on an older number is somebody else's
            if before is not None and pool.desired not in ours:
                self.manual[name] = seen.at + hold
                text = f"somebody else set {name} from {before} to {pool.desired}; that is left alone for {hold:g} s"
                facts = {"pool": name, "was": before, "is": pool.desired, "hold": hold}
                told.append(Because(code="manual", text=text, facts=facts))
            self.found[name] = pool.desired
        self.manual = {name: until for name, until in self.manual.items() if until > seen.at}
        return told

    def _source(self, model: str, seen: ModelSeen, at: float, stale_after: float) -> list[Because]:
        if seen.traffic is not None and seen.health != "broken":
            self.readable[model], self.health[model] = at, seen.health
            return []
        silent = at - self.readable.setdefault(model, at)
        now: Health = "broken" if seen.health == "broken" or silent >= stale_after else "stale"
        before, self.health[model] = self.health.get(model), now
        if now != "broken" or before == "broken":
            return []
        why = f": {seen.why}" if seen.why else ""
        text = f"the traffic of {model} can't be read for {silent:.0f} s{why}; nothing is taken away meanwhile"
        return [Because(code="source_broken", text=text, facts={"model": model, "seconds": silent})]

    def lacks(self, name: str, pool: PoolSeen, given_up: int, deadline: float) -> Because | None:
        """Take in how many replicas of a pool were given up; say so where these are more than before."""
        before, self.late[name] = self.late.get(name, 0), given_up
        if given_up <= before:
            return None
        why = f": {pool.problem}" if pool.problem else ""
        text = (
            f"{given_up} of {pool.desired} replicas of {name} failed, or did not come to serve within {deadline:g} s"
            f"{why}; they count no more until they do: see why they don't start"
        )
        return Because(code="not_started", text=text, facts={"pool": name, "given_up": given_up})

    def keeps(self, pool: str, model: str, wanted: int, desired: int) -> Because | None:
        """Say why a pool must stay as it is, or None where ``wanted`` may be."""
        if pool in self.manual:
            until = self.manual[pool]
            text = f"{pool} stays at {desired}, which somebody else has set, until second {until:.0f} of the run"
            return Because(code="manual", text=text, facts={"pool": pool, "wanted": wanted, "until": until})
        if wanted < desired and self.health.get(model) != "fresh":
            state = self.health.get(model)
            text = f"{pool} stays at {desired} instead of {wanted}: the traffic of {model} is {state}, not known"
            return Because(code=f"source_{state}", text=text, facts={"pool": pool, "wanted": wanted})
        return None

    def snapshot(self) -> dict[str, Any]:
        """Return the memory as plain data."""
        return {name: dict(getattr(self, name)) for name in self.__slots__}

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> "Standing":
        """Return what `snapshot` wrote."""
        return cls(**{name: dict(state.get(name, {})) for name in cls.__slots__})
