"""How does a step that plans one model plan all of them? One of it for each model that is seen, answers joined."""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from penstock.kernel.values import Role
from penstock.planner.context import Context
from penstock.planner.plugins import LearnsSpeeds, Plugin, Spec
from penstock.planner.proposals import Accept, Because, Flip, Override, Predicted, Prediction, Reject, Result, Target


class PerModel:
    """One plugin per model, made when the model is first seen.

    Args:
        id: of the whole; the rest of its spec is that of a single one.
        make: model -> plugin.
    """

    def __init__(self, id: str, make: Callable[[str], Plugin]) -> None:
        self.spec: Spec = msgspec.structs.replace(make("").spec, id=id)
        self._make = make
        self._of: dict[str, Plugin] = {}

    def evaluate(self, context: Context) -> Result:
        results: dict[str, Result] = {}
        for model in context.observation.models:
            if model not in self._of:
                self._of[model] = self._make(model)
            results[model] = self._of[model].evaluate(context)
        return joined(results)

    def benchmarked(self, model: str, role: Role, metrics: Mapping[str, Any]) -> None:
        """Tell the model's own step, where it makes use of that."""
        if model not in self._of:
            self._of[model] = self._make(model)
        own = self._of[model]
        if isinstance(own, LearnsSpeeds):
            own.benchmarked(model, role, metrics)

    def snapshot(self) -> Any:
        return {model: plugin.snapshot() for model, plugin in self._of.items()}

    def restore(self, state: Any) -> None:
        for model, told in state.items():
            self._of[model] = self._make(model)
            self._of[model].restore(told)


def joined(results: Mapping[str, Result]) -> Result:
    """Return the answers of several models as one: a veto of one is that of all, since a tick is one."""
    predictions: dict[str, Prediction] = {}
    targets: list[Target] = []
    flips: list[Flip] = []
    because: list[Because] = []
    evidence: dict[str, Any] = {}
    predicted = False
    for model, result in results.items():
        if isinstance(result, Reject):
            return result
        if isinstance(result, Predicted):
            predicted = True
            predictions |= result.models
            continue
        because += result.because
        if isinstance(result, Override):
            targets += result.targets
            flips += result.flips
            prefix = f"{model} " if len(results) > 1 else ""
            evidence |= {prefix + key: value for key, value in result.evidence.items()}
    if predicted:
        return Predicted(models=predictions)
    if not targets and not flips:
        return Accept(because=tuple(because))
    return Override(targets=tuple(targets), flips=tuple(flips), because=tuple(because), evidence=evidence)
