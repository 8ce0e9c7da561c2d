"""Stage messages: an `AskPlugin` as protobuf, and plugin answers checked before they reach the planner."""

import math
from typing import Any

import msgspec

from penstock.planner.events import AskPlugin
from penstock.planner.observation import Observation
from penstock.planner.plugins.plugin_registry import PluginSpec, Stage
from penstock.planner.plugins.proposals import Accept, Override, Predicted, Prediction, Reject, Result
from penstock_extras.plugins.protobuf_convert import ConversionError, fill, plain, struct_of
from penstock_extras.plugins.protobuf_messages import message

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
REPLICAS_MAX = 1_000_000


def question_of(ask: AskPlugin) -> Any:
    """Return the message ``Question``."""
    return _fill_by_name("Question", ask)


def observation_of(given: Any) -> Observation:
    """Return the message ``Observation`` as ours.

    Raises:
        ConversionError: it does not fit.
    """
    fields = plain(given)
    for name, model in fields["models"].items():
        for state in model["pools"].values():
            state["pool"]["model"] = name
    return struct_of(fields, Observation)


def answer_of(result: Result) -> Any:
    """Return the message ``Answer``."""
    kind_name = next(kind_name for kind_name, kind in _KINDS.items() if isinstance(result, kind))
    answer = message("Answer")()
    below = getattr(answer, kind_name)
    below.SetInParent()
    fill(below, result)
    return answer


def result_of(answer: Any, stage: Stage) -> Result:
    """Return what a plugin answered.

    Raises:
        ConversionError: it answered nothing, a result that its stage can't use, or meaningless numbers.
    """
    kind_name = answer.WhichOneof("answer")
    if kind_name is None:
        raise ConversionError("it answered nothing; say accept where nothing is to be changed")
    given = {name: value for name, value in plain(getattr(answer, kind_name)).items() if value is not None}
    result: Result = struct_of(given, _KINDS[kind_name])
    if isinstance(result, Predicted) != (stage == "predict") and isinstance(result, Predicted | Override):
        raise ConversionError(f"{kind_name} is not an answer to stage {stage}")
    if isinstance(result, Predicted):
        for model, prediction in result.models.items():
            _check_prediction(model, prediction)
    elif isinstance(result, Override):
        _check_override(result)
    return result


def spec_of(given: Any) -> PluginSpec:
    """Return the spec of an external plugin.

    Raises:
        ConversionError: the stage is not named, or a number is invalid.
    """
    fields = plain(given)
    for name in ("interval", "window"):
        if not math.isfinite(fields[name]) or fields[name] < 0:
            raise ConversionError(f"{name} is {fields[name]:g}; it takes seconds, 0 or more")
    if fields["stage"] not in METHODS:
        raise ConversionError(f"stage is {fields['stage']}; it takes one of {', '.join(METHODS)}")
    return struct_of({**fields, "outside": True}, PluginSpec)


def spec_message(spec: PluginSpec) -> Any:
    """Return the message ``PluginSpec``."""
    return _fill_by_name("PluginSpec", spec)


def _fill_by_name(name: str, source: msgspec.Struct) -> Any:
    """Return a message whose every field is the attribute of the same name."""
    into = message(name)()
    return fill(into, {field: getattr(source, field) for field in into.DESCRIPTOR.fields_by_name})


def _check_prediction(model: str, prediction: Prediction) -> None:
    numbers = {
        "seconds": prediction.seconds,
        "requests": prediction.requests,
        "period": prediction.period,
        "saved": prediction.saved,
        **msgspec.structs.asdict(prediction.shape),
    }
    for name, value in numbers.items():
        if value is not None and not (math.isfinite(value) and value >= 0):
            raise ConversionError(f"{name} of {model} is {value:g}; it takes 0 or more")
    for rank, rates in prediction.quantiles.items():
        if not 0 <= rank <= 1 or len(rates) != len(prediction.horizons):
            raise ConversionError(
                f"quantile {rank:g} of {model} has {len(rates)} rates for {len(prediction.horizons)} horizons; ranks "
                "go from 0 to 1, and each has one rate for each horizon"
            )
        if not all(math.isfinite(rate) and rate >= 0 for rate in rates):
            raise ConversionError(f"quantile {rank:g} of {model} has a rate below 0, or one that is not a number")
    for name, weight in prediction.weights.items():
        if not (math.isfinite(weight) and weight >= 0):
            raise ConversionError(f"the weight of {name!r} for {model} is {weight:g}; it takes 0 or more")


def _check_override(result: Override) -> None:
    for target in result.targets:
        if not target.pool or not 0 <= target.replicas <= REPLICAS_MAX:
            raise ConversionError(
                f"target {target.pool!r} with {target.replicas} replicas; it takes a pool and 0 or more"
            )
    for flip in result.flips:
        if flip.count < 1 or flip.frm == flip.to:
            raise ConversionError(
                f"flip of {flip.count} workers of {flip.model!r} from {flip.frm} to {flip.to} is none"
            )
