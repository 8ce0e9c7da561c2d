"""Merges several answers of one stage: vetoes, final overrides, floors and ceilings, the strongest first."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from penstock.planner.plugins.plugin_registry import PluginSpec
from penstock.planner.plugins.proposals import Flip, Override, Predicted, Prediction, Reason, Reject, Result

Answers = Sequence[tuple[PluginSpec, Result]]


class MergedTargets(NamedTuple):
    """Outcome of a stage. ``vetoed``: reasons of vetoes in this tick; ``notes``: which answer lost, and to which."""

    targets: dict[str, int]
    flips: tuple[Flip, ...] = ()
    vetoed: tuple[Reason, ...] = ()
    notes: tuple[Reason, ...] = ()


def merge(baseline: Mapping[str, int], answers: Answers, *, constrain: bool = False) -> MergedTargets:
    """Join the targets of one stage.

    A veto ends the stage. Else the strongest final answer (`Override.final`) counts verbatim. Else, pool by pool: a
    floor is the highest ``at_least``, a ceiling the lowest ``at_most``; between them the strongest ``set`` counts, or
    the baseline; a floor above the ceiling wins.

    Args:
        baseline: pool -> replicas of the stage before; pools without an answer keep theirs.
        constrain: no plugin may set or be final, only bound.
    """
    ordered = sorted(answers, key=lambda each: each[0].priority)
    vetoes = [reason for _, result in ordered if isinstance(result, Reject) for reason in result.reasons]
    if any(isinstance(result, Reject) for _, result in ordered):
        return MergedTargets(dict(baseline), vetoed=tuple(vetoes))
    notes: list[Reason] = []
    overrides = [(spec, result) for spec, result in ordered if isinstance(result, Override)]
    if not constrain:
        for spec, result in overrides:
            if result.final:
                targets = {target.pool: target.replicas for target in result.targets}
                silenced = [other.id for other, _ in overrides if other.id != spec.id]
                if silenced:
                    notes.append(_note("final", f"{spec.id} has the last word before {', '.join(silenced)}"))
                return MergedTargets({**baseline, **targets}, result.flips, notes=tuple(notes))
    merged = dict(baseline)
    for pool in dict.fromkeys(target.pool for _, result in overrides for target in result.targets):
        words = [(spec, t) for spec, result in overrides for t in result.targets if t.pool == pool]
        sets = [] if constrain else [(spec, t) for spec, t in words if t.kind == "set"]
        wanted = sets[0][1].replicas if sets else baseline.get(pool, 0)
        for spec, target in sets[1:]:
            if target.replicas != wanted:
                text = f"{spec.id} wanted {target.replicas} of {pool}; {sets[0][0].id} is stronger and wants {wanted}"
                notes.append(_note("weaker", text))
        floor = max((t.replicas for _, t in words if t.kind == "at_least"), default=None)
        ceiling = min((t.replicas for _, t in words if t.kind == "at_most"), default=None)
        if floor is not None and ceiling is not None and floor > ceiling:
            notes.append(_note("floor_over_ceiling", f"{pool}: a floor of {floor} wins over a ceiling of {ceiling}"))
        if ceiling is not None:
            wanted = min(ceiling, wanted)
        if floor is not None:
            wanted = max(floor, wanted)
        merged[pool] = wanted
    flips = () if constrain else next((result.flips for _, result in overrides if result.flips), ())
    return MergedTargets(merged, flips, notes=tuple(notes))


def merge_predictions(answers: Answers) -> dict[str, Prediction]:
    """Join predictions: the first plugin with a value counts, field by field; ``final`` stops after it."""
    merged: dict[str, Prediction] = {}
    for _, result in sorted(answers, key=lambda each: each[0].priority):
        if isinstance(result, Predicted):
            for model, prediction in result.models.items():
                merged[model] = prediction if model not in merged else merged[model].filled(prediction)
            if result.final:
                break
    return merged


def _note(code: str, text: str) -> Reason:
    return Reason(code=code, text=text)
