"""How does one tick go from what was seen to what should be? Stage by stage; it may wait for plugins outside."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from penstock.planner.context import Context
from penstock.planner.merge import Merged, merge, merge_predictions
from penstock.planner.plugins import STAGES, Registry, Seat, Spec, Stage
from penstock.planner.proposals import Accept, Because, Flip, Override, Predicted, Prediction, Reject, Result
from penstock.planner.record import PluginSaid


class Answer(msgspec.Struct):
    """What one plugin said in the stage that is under way."""

    spec: Spec
    result: Result


class Tick(msgspec.Struct):
    """A tick under way. ``stage``: index into `STAGES`; ``waiting``: plugin outside -> second by which it must have
    answered; ``baseline``: what the stage before said."""

    number: int
    at: float
    due: float
    """When it should have begun."""
    stage: int = 0
    asked: bool = False
    looking: bool = True
    baseline: dict[str, int] = {}
    predictions: dict[str, Prediction] = {}
    waiting: dict[str, float] = {}
    answers: list[Answer] = []
    said: list[PluginSaid] = []
    evidence: dict[str, Any] = {}
    because: list[Because] = []
    lost: list[Because] = []
    bound: list[Because] = []
    vetoed: list[Because] = []
    flips: tuple[Flip, ...] = ()

    @property
    def over(self) -> bool:
        """Whether every stage has come to its end."""
        return self.stage == len(STAGES)

    def answered(self, seat: Seat, result: Result) -> None:
        """Take in an answer."""
        targets = {t.pool: t.replicas for t in result.targets} if isinstance(result, Override) else {}
        because = () if isinstance(result, Predicted) else result.because
        kind = type(result).__name__.lower()
        self.said.append(
            PluginSaid(id=seat.spec.id, stage=seat.spec.stage, result=kind, targets=targets, because=because)
        )
        self.answers.append(Answer(seat.spec, result))
        if isinstance(result, Override) and result.evidence:
            self.evidence[seat.spec.id] = result.evidence

    def silent(self, seat: Seat, kind: str, why: str) -> None:
        """Note that a plugin contributes nothing, and why."""
        because = (Because(code=kind, text=why),)
        self.said.append(PluginSaid(id=seat.spec.id, stage=seat.spec.stage, result=kind, because=because))

    def close_stage(self) -> None:
        """Join what was said in the stage, and go on to the next one; a veto ends the tick."""
        stage = STAGES[self.stage]
        answers = [(answer.spec, answer.result) for answer in self.answers]
        if stage == "predict":
            self.predictions = merge_predictions(answers)
        else:
            merged: Merged = merge(self.baseline, answers, constrain=stage == "constrain")
            reasons = [b for _, result in answers if isinstance(result, Override | Accept) for b in result.because]
            if stage == "constrain":
                changed = merged.targets != self.baseline
                self.bound += reasons if changed else []
            else:
                self.because += reasons
                self.flips = merged.flips or self.flips
            self.lost += merged.notes
            self.baseline = merged.targets
            if any(isinstance(result, Reject) for _, result in answers):
                self.vetoed += merged.vetoed
                self.stage = len(STAGES) - 1
        self.stage += 1
        self.asked, self.answers, self.waiting = False, [], {}


Ask = Callable[[Seat, Stage], None]


def open_stage(
    tick: Tick, registry: Registry, context: Context, base: float, *, ask: Ask, strict: bool
) -> Iterator[Because]:
    """Ask everybody who takes part in the stage; yield what somebody should hear of.

    Args:
        ask: sends the question to a plugin outside; its answer comes later.
        strict: let errors of plugins through, as tests want it.
    """
    tick.asked = True
    stage = STAGES[tick.stage]
    for seat in registry.of(stage):
        missing = [name for name in seat.spec.requires if name == "predictions" and not tick.predictions]
        if missing:
            tick.silent(seat, "unsatisfied", f"it needs {', '.join(missing)}, and there are none in this tick")
            continue
        # By the grid, not by when a timer fired: a tick that is a moment late must not cost the next one its plugins.
        if not seat.due(tick.due, base):
            held = seat.held()
            if held is not None:
                tick.answers.append(Answer(seat.spec, held))
                targets = {target.pool: target.replicas for target in held.targets}
                tick.said.append(PluginSaid(id=seat.spec.id, stage=stage, result="held", targets=targets))
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
            text = f"planner plugin {seat.spec.id} failed and has no say in this tick: {type(error).__name__}: {error}"
            yield Because(code="plugin_error", text=text, facts={"plugin": seat.spec.id, "failures": seat.failures})
            continue
        seat.succeeded(tick.due, result)
        tick.answered(seat, result)


def pools_within(seen: Sequence[tuple[str, str, Any]], mode: str) -> set[str]:
    """Return the pools that a mode plans."""
    roles = {
        "auto": {"aggregated", "prefill", "decode", "encode"},
        "aggregated": {"aggregated"},
        "disaggregated": {"prefill", "decode"},
        "prefill": {"prefill"},
        "decode": {"decode"},
    }[mode]
    return {name for _, name, pool in seen if pool.role in roles}
