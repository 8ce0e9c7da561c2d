"""What does an `Ask` look like on the wire, and which answers are taken? Checked before they reach the planner."""

import math
from typing import Any

import msgspec

from penstock.adapters.plugins.convert import Unfit, fill, plain
from penstock.adapters.plugins.messages import message
from penstock.planner.events import Ask
from penstock.planner.plugins import Spec, Stage
from penstock.planner.proposals import Accept, Override, Predicted, Prediction, Reject, Result

METHODS: dict[Stage, tuple[str, str]] = {
    "predict": ("Predictor", "Predict"),
    "propose": ("Proposer", "Propose"),
    "reconcile": ("Reconciler", "Reconcile"),
    "constrain": ("Constrainer", "Constrain"),
}
"""Stage -> service and method."""
_KINDS: dict[str, type[Accept] | type[Predicted] | type[Override] | type[Reject]] = {
    "accept": Accept,
    "predicted": Predicted,
    "override": Override,
    "reject": Reject,
}
_SPEC = ("id", "stage", "priority", "interval", "hold", "needs", "requires", "window", "version", "endpoint")
REPLICAS_MAX = 1_000_000


def question_of(ask: Ask) -> Any:
    """Return the message ``Question``."""
    return fill(
        message("Question")(),
        {
            "tick": ask.tick,
            "plugin": ask.plugin,
            "stage": ask.stage,
            "deadline": ask.deadline,
            "observation": ask.observation,
            "predictions": ask.predictions,
            "proposal": ask.proposal,
        },
    )


def answer_of(result: Result) -> Any:
    """Return the message ``Answer``."""
    word = next(word for word, kind in _KINDS.items() if isinstance(result, kind))
    answer = message("Answer")()
    below = getattr(answer, word)
    below.SetInParent()
    fill(below, result)
    return answer


def result_of(answer: Any, stage: Stage) -> Result:
    """Return what a plugin answered.

    Raises:
        Unfit: it answered nothing, something that its stage has no use for, or numbers that mean nothing.
    """
    word = answer.WhichOneof("answer")
    if word is None:
        raise Unfit("it answered nothing; say accept where nothing is to be changed")
    given = {name: value for name, value in plain(getattr(answer, word)).items() if value is not None}
    try:
        result: Result = msgspec.convert(given, _KINDS[word])
    except msgspec.ValidationError as error:
        raise Unfit(str(error)) from None
    if isinstance(result, Predicted) != (stage == "predict") and isinstance(result, Predicted | Override):
        raise Unfit(f"{word} is no answer to stage {stage}")
    if isinstance(result, Predicted):
        for model, prediction in result.models.items():
            _check_prediction(model, prediction)
    elif isinstance(result, Override):
        _check_override(result)
    return result


def spec_of(given: Any) -> Spec:
    """Return the spec of a plugin outside.

    Raises:
        Unfit: the stage is not named, or a number is none.
    """
    found = plain(given)
    for name in ("interval", "window"):
        if not math.isfinite(found[name]) or found[name] < 0:
            raise Unfit(f"{name} is {found[name]:g}; it takes seconds, 0 or more")
    if found["stage"] not in METHODS:
        raise Unfit(f"stage is {found['stage']}; it takes one of {', '.join(METHODS)}")
    try:
        return msgspec.convert({**found, "outside": True}, Spec)
    except msgspec.ValidationError as error:
        raise Unfit(str(error)) from None


def spec_message(spec: Spec) -> Any:
    """Return the message ``PluginSpec``."""
    return fill(message("PluginSpec")(), {name: getattr(spec, name) for name in _SPEC})


def _check_prediction(model: str, prediction: Prediction) -> None:
    for name in ("seconds", "requests", "isl", "osl", "hit_rate", "accept_length"):
        value = getattr(prediction, name)
        if value is not None and not (math.isfinite(value) and value >= 0):
            raise Unfit(f"{name} of {model} is {value:g}; it takes 0 or more")
    for rank, rates in prediction.quantiles.items():
        if not 0 <= rank <= 1 or len(rates) != len(prediction.horizons):
            raise Unfit(
                f"quantile {rank:g} of {model} has {len(rates)} rates for {len(prediction.horizons)} horizons; ranks "
                "go from 0 to 1, and each has one rate for each horizon"
            )
        if not all(math.isfinite(rate) and rate >= 0 for rate in rates):
            raise Unfit(f"quantile {rank:g} of {model} has a rate below 0, or one that is no number")
    for name, weight in prediction.weights.items():
        if not (math.isfinite(weight) and weight >= 0):
            raise Unfit(f"the weight of {name!r} for {model} is {weight:g}; it takes 0 or more")


def _check_override(result: Override) -> None:
    for target in result.targets:
        if not target.pool or not 0 <= target.replicas <= REPLICAS_MAX:
            raise Unfit(f"target {target.pool!r} with {target.replicas} replicas; it takes a pool and 0 or more")
    for flip in result.flips:
        if flip.count < 1 or flip.frm == flip.to:
            raise Unfit(f"flip of {flip.count} workers of {flip.model!r} from {flip.frm} to {flip.to} is none")
