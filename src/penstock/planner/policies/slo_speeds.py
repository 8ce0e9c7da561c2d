"""Engine speeds per role for policy slo: known speeds, corrected by the observed passes.

Where nothing is known and engines report no passes, their answers are used.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from penstock.kernel.machine import Snapshot
from penstock.kernel.values import Role
from penstock.planner.observation import ModelState
from penstock.planner.performance.benchmark_table import BenchmarkTable
from penstock.planner.performance.live_regression import LiveRegression, is_informative
from penstock.planner.performance.speed_sources import ORDER, KnownSpeeds, pick
from penstock.planner.performance.streamed_answers import decode_row, prefill_row
from penstock.planner.plugins.plugin_context import PluginContext
from penstock.planner.remembering import Remembering

ROLES: tuple[Role, ...] = ("aggregated", "prefill", "decode")


EACH_TICK = 8
"""Engines that are learnt from in one tick: more of a kind add hardly anything."""
ANSWERS_OVER = 10.0
"""Seconds of answers that are learnt from at once, where engines report no passes."""


class RoleSpeeds(Remembering):
    """A performance model per role.

    Args:
        known: known speeds before serving.
    Raises:
        ConfigError: a source exists and is not as it must be.
    """

    _benchmarks: dict[Role, dict[str, Any]]
    """Workers' own measurements during this run."""
    _of: dict[Role, LiveRegression]
    _turn: int
    _heard: float
    """When answers were last used."""

    def __init__(self, known: Mapping[Role, KnownSpeeds]) -> None:
        self._of = {}
        self._turn = 0
        self._heard = 0.0
        self._benchmarks = {}
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
        """Return whether it can answer."""
        return self._of[role].ready

    def benchmarked(self, role: Role, metrics: Mapping[str, Any]) -> bool:
        """Add a worker's own measurement; False where a worker of its role had sent one before.

        Raises:
            ConfigError: it is not as it must be.
        """
        if role in self._sure or role not in self._of:
            return False
        self._of[role] = LiveRegression(BenchmarkTable.of_metrics(metrics, ORDER[0]))
        self._benchmarks[role] = dict(metrics)
        self._sure.add(role)
        return True

    def learn(self, observed: ModelState) -> None:
        """Add the reported passes of some engines since the last observation, each engine in turn."""
        telling = [engine for engine in observed.engines(*ROLES) if engine.steps is not None]
        for place in range(min(EACH_TICK, len(telling))):
            engine = telling[(self._turn + place) % len(telling)]
            assert engine.steps is not None
            self._of[engine.role].learn(engine.steps)
        self._turn += EACH_TICK

    def learn_from_answers(self, context: PluginContext, model: str) -> None:
        """Add the answers of the last seconds, for roles without anything better."""
        observed = context.model(model)
        if observed is None or context.at - self._heard < ANSWERS_OVER:
            return
        recent = context.traffic(model, ANSWERS_OVER)
        if recent is None:
            return
        self._heard = context.at
        for role, speed in self._of.items():
            engines = list(observed.engines(role))
            if not engines or speed.prior is not None or any(is_informative(each.steps) for each in engines):
                continue
            most = min(each.limits.max_num_seqs or np.inf for each in engines)
            rows = [
                None if role == "decode" else prefill_row(recent, len(engines), most),
                None if role == "prefill" else decode_row(recent, len(engines), most),
            ]
            for row in rows:
                if row is not None:
                    speed.add(*row)
                    speed.learnt_of = "answers"

    def restore(self, state: Snapshot) -> None:
        for role, metrics in state["benchmarks"].items():
            self.benchmarked(role, metrics)
        super().restore(state)
