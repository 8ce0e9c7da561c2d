"""One planner tick, from observation to targets, stage by stage; it may wait for external plugins."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from penstock.planner.plugins.merge import Answers, MergedTargets, merge, merge_predictions
from penstock.planner.plugins.plugin_context import PluginContext
from penstock.planner.plugins.plugin_registry import STAGES, PluginRegistry, PluginSlot, PluginSpec, Stage
from penstock.planner.plugins.proposals import Accept, Flip, Override, Predicted, Prediction, Reason, Reject, Result
from penstock.planner.tick_record import PluginResult, reason_about


class StageAnswer(msgspec.Struct):
    """One plugin's answer in the present stage."""

    spec: PluginSpec
    result: Result


class PlannerTick(msgspec.Struct):
    """A tick in progress. ``stage``: index into `STAGES`; ``waiting``: external plugin -> second of its deadline;
    ``baseline``: result of the stage before."""

    number: int
    at: float
    due: float
    """When it was due to begin."""
    stage: int = 0
    plugin_asked: bool = False
    observing: bool = True
    baseline: dict[str, int] = {}
    predictions: dict[str, Prediction] = {}
    waiting: dict[str, float] = {}
    answers: list[StageAnswer] = []
    plugin_results: list[PluginResult] = []
    evidence: dict[str, Any] = {}
    reasons: list[Reason] = []
    lost: list[Reason] = []
    bound: list[Reason] = []
    vetoed: list[Reason] = []
    flips: tuple[Flip, ...] = ()
    why: dict[str, str] = {}
    """Pool that a stage changed -> the reason of the plugin that decided it."""

    @property
    def over(self) -> bool:
        """Whether every stage is complete."""
        return self.stage == len(STAGES)

    def answered(self, seat: PluginSlot, result: Result) -> None:
        """Record an answer."""
        targets = {t.pool: t.replicas for t in result.targets} if isinstance(result, Override) else {}
        reasons = () if isinstance(result, Predicted) else result.reasons
        kind = type(result).__name__.lower()
        self.plugin_results.append(
            PluginResult(id=seat.spec.id, stage=seat.spec.stage, result=kind, targets=targets, reasons=reasons)
        )
        self.answers.append(StageAnswer(seat.spec, result))
        if isinstance(result, Override) and result.evidence:
            self.evidence[seat.spec.id] = result.evidence

    def silent(self, seat: PluginSlot, kind: str, why: str) -> None:
        """Record that a plugin contributes nothing, and why."""
        reasons = (Reason(code=kind, text=why),)
        self.plugin_results.append(PluginResult(id=seat.spec.id, stage=seat.spec.stage, result=kind, reasons=reasons))

    def close_stage(self) -> None:
        """Merge the answers of the stage, and go on to the next one; a veto ends the tick."""
        stage = STAGES[self.stage]
        answers = [(answer.spec, answer.result) for answer in self.answers]
        if stage == "predict":
            self.predictions = merge_predictions(answers)
        else:
            merged: MergedTargets = merge(self.baseline, answers, constrain=stage == "constrain")
            reasons = [b for _, result in answers if isinstance(result, Override | Accept) for b in result.reasons]
            if stage == "constrain":
                changed = merged.targets != self.baseline
                self.bound += reasons if changed else []
            else:
                self.reasons += reasons
                self.bound += [b for _, result in answers if isinstance(result, Override) for b in result.bound]
                self.flips = merged.flips or self.flips
            self.lost += merged.notes
            for pool, count in merged.targets.items():
                if count != self.baseline.get(pool):
                    self.why[pool] = _deciding_reason(pool, count, answers)
            self.baseline = merged.targets
            if any(isinstance(result, Reject) for _, result in answers):
                self.vetoed += merged.vetoed
                self.stage = len(STAGES) - 1
        self.stage += 1
        self.plugin_asked, self.answers, self.waiting = False, [], {}


def _deciding_reason(pool: str, count: int, answers: Answers) -> str:
    """Return the reason of the plugin that set a pool's number: one about this pool, else one about all."""
    deciding = [
        (spec, result)
        for spec, result in sorted(answers, key=lambda each: each[0].priority)
        if isinstance(result, Override) and any(t.pool == pool and t.replicas == count for t in result.targets)
    ]
    reasons = [reason for _, result in deciding for reason in result.reasons]
    text = reason_about(pool, reasons)
    if text is None:
        text = f"{' and '.join(spec.id for spec, _ in deciding)} wants {count} of {pool} and does not say why"
    return text


Ask = Callable[[PluginSlot, Stage], None]


def open_stage(
    tick: PlannerTick, registry: PluginRegistry, context: PluginContext, base: float, *, ask: Ask, strict: bool
) -> Iterator[Reason]:
    """Call every plugin of the stage that is due; yield what an operator should know.

    Args:
        ask: calls an external plugin; its answer comes later.
        strict: let errors of plugins through, as tests want it.
    """
    tick.plugin_asked = True
    stage = STAGES[tick.stage]
    for seat in registry.of(stage):
        missing = [name for name in seat.spec.requires if name == "predictions" and not tick.predictions]
        if missing:
            tick.silent(seat, "unsatisfied", f"it needs {', '.join(missing)}, and there are none in this tick")
            continue
        # By the grid, not by when a timer fired: a tick that is a moment late must not cost the next one its plugins.
        if not seat.due(tick.due, base):
            standing = seat.standing_override()
            if standing is not None:
                tick.answers.append(StageAnswer(seat.spec, standing))
                targets = {target.pool: target.replicas for target in standing.targets}
                tick.plugin_results.append(PluginResult(id=seat.spec.id, stage=stage, result="held", targets=targets))
            continue
        if seat.plugin is None:
            ask(seat, stage)
            continue
        try:
            result = seat.plugin.evaluate(context)
        except Exception as error:  # supervision boundary: one plugin must not end the tick of all
            if strict:
                raise
            seat.failed(tick.due)
            tick.silent(seat, "error", f"{type(error).__name__}: {error}")
            text = f"planner plugin {seat.spec.id} failed and is left out of this tick: {type(error).__name__}: {error}"
            yield Reason(code="plugin_error", text=text, facts={"plugin": seat.spec.id, "failures": seat.failures})
            continue
        seat.succeeded(tick.due, result)
        tick.answered(seat, result)


def pools_within(pools: Sequence[tuple[str, str, Any]], mode: str) -> set[str]:
    """Return the pools that a mode plans."""
    roles = {
        "auto": {"aggregated", "prefill", "decode", "encode"},
        "aggregated": {"aggregated"},
        "disaggregated": {"prefill", "decode"},
        "prefill": {"prefill"},
        "decode": {"decode"},
    }[mode]
    return {name for _, name, state in pools if state.pool.role in roles}
