"""How fast are the engines of each role? What is known of them beforehand, corrected by the passes that are seen."""

from collections.abc import Mapping
from typing import Any

from penstock.kernel.values import Role
from penstock.planner.performance.live import LiveRegression
from penstock.planner.performance.sources import ORDER, Known, pick
from penstock.planner.performance.table import Table
from penstock.planner.seen import ModelSeen

ROLES: tuple[Role, ...] = ("aggregated", "prefill", "decode")


EACH_TICK = 8
"""Engines that are learnt from in one tick: more of a kind say hardly more."""


class Speeds:
    """A performance model per role.

    Args:
        known: what is known beforehand.
    Raises:
        ConfigError: a source is there and is not what it must be.
    """

    def __init__(self, known: Mapping[Role, Known]) -> None:
        self._of: dict[Role, LiveRegression] = {}
        self._turn = 0
        self._told: dict[Role, dict[str, Any]] = {}
        """What workers told of themselves while this ran."""
        self._sure: set[Role] = set()
        """Roles whose workers have measured themselves."""
        for role in ROLES:
            picked = pick(known[role], role=role) if role in known else None
            self._of[role] = LiveRegression(None if picked is None else picked.model)
            if picked is not None and picked.source == ORDER[0]:
                self._sure.add(role)

    def of(self, role: Role) -> LiveRegression:
        """Return the model of a role."""
        return self._of[role]

    def ready(self, role: Role) -> bool:
        """Say whether it can answer."""
        return self._of[role].ready

    def benchmarked(self, role: Role, metrics: Mapping[str, Any]) -> bool:
        """Take in what a worker measured of itself; False where one of its role had done so before.

        Raises:
            ConfigError: it is not what it must be.
        """
        if role in self._sure or role not in self._of:
            return False
        self._of[role] = LiveRegression(Table.of_metrics(metrics, ORDER[0]))
        self._told[role] = dict(metrics)
        self._sure.add(role)
        return True

    def learn(self, seen: ModelSeen) -> None:
        """Take in what some of the engines told of their passes since the look before: each has its turn."""
        telling = [engine for engine in seen.engines(*ROLES) if engine.steps is not None]
        for place in range(min(EACH_TICK, len(telling))):
            engine = telling[(self._turn + place) % len(telling)]
            assert engine.steps is not None
            self._of[engine.role].learn(engine.steps)
        self._turn += EACH_TICK

    def snapshot(self) -> dict[str, Any]:
        return {
            "turn": self._turn,
            "told": dict(self._told),
            "of": {role: model.snapshot() for role, model in self._of.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        for role, metrics in state["told"].items():
            self.benchmarked(role, metrics)
        for role, model in self._of.items():
            model.restore(state["of"][role])
        self._turn = state["turn"]
