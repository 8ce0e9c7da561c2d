"""Runs a plugin that plans one model for all models: one instance per observed model, answers joined."""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from penstock.kernel.values import Role
from penstock.planner.plugins.plugin_context import PluginContext
from penstock.planner.plugins.plugin_registry import LearnsSpeeds, PlannerPlugin, PluginSpec
from penstock.planner.plugins.proposals import (
    Accept,
    Flip,
    Override,
    PoolTarget,
    Predicted,
    Prediction,
    Reason,
    Reject,
    Result,
)


class PerModel:
    """One plugin per model, made when the model is first observed.

    Args:
        id: of the whole; the rest of its spec is that of a single plugin.
        make: model -> plugin.
    """

    def __init__(self, id: str, make: Callable[[str], PlannerPlugin]) -> None:
        self.spec: PluginSpec = msgspec.structs.replace(make("").spec, id=id)
        self._make = make
        self._of: dict[str, PlannerPlugin] = {}

    def evaluate(self, context: PluginContext) -> Result:
        results: dict[str, Result] = {}
        for model in context.observation.models:
            if model not in self._of:
                self._of[model] = self._make(model)
            results[model] = _about(tuple(context.observation.models[model].pools), self._of[model].evaluate(context))
        return joined(results)

    def benchmarked(self, model: str, role: Role, metrics: Mapping[str, Any]) -> None:
        """Pass the benchmark to the model's own plugin, where that uses benchmarks."""
        if model not in self._of:
            self._of[model] = self._make(model)
        own = self._of[model]
        if isinstance(own, LearnsSpeeds):
            own.benchmarked(model, role, metrics)

    def snapshot(self) -> Any:
        return {model: plugin.snapshot() for model, plugin in self._of.items()}

    def restore(self, state: Any) -> None:
        for model, saved in state.items():
            self._of[model] = self._make(model)
            self._of[model].restore(saved)


def _about(pools: tuple[str, ...], result: Result) -> Result:
    """Return an answer whose reasons name pools: those of the model, where they name none themselves."""
    if isinstance(result, Predicted):
        return result
    reasons = tuple(b if b.pools else msgspec.structs.replace(b, pools=pools) for b in result.reasons)
    return msgspec.structs.replace(result, reasons=reasons)


def joined(results: Mapping[str, Result]) -> Result:
    """Return the answers of several models as one: one model's veto counts for all, since a tick is one."""
    predictions: dict[str, Prediction] = {}
    targets: list[PoolTarget] = []
    flips: list[Flip] = []
    reasons: list[Reason] = []
    bound: list[Reason] = []
    evidence: dict[str, Any] = {}
    predicted = False
    for model, result in results.items():
        if isinstance(result, Reject):
            return result
        if isinstance(result, Predicted):
            predicted = True
            predictions |= result.models
            continue
        reasons += result.reasons
        if isinstance(result, Override):
            targets += result.targets
            flips += result.flips
            bound += result.bound
            prefix = f"{model} " if len(results) > 1 else ""
            evidence |= {prefix + key: value for key, value in result.evidence.items()}
    if predicted:
        return Predicted(models=predictions)
    if not targets and not flips:
        return Accept(reasons=tuple(reasons))
    return Override(
        targets=tuple(targets), flips=tuple(flips), reasons=tuple(reasons), bound=tuple(bound), evidence=evidence
    )
