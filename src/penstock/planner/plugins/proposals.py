"""Results of a plugin: a prediction, targets with reasons, no change, or a veto."""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from penstock.kernel.values import UNKNOWN_SHAPE, RequestShape, Role

Kind = Literal["set", "at_least", "at_most"]
"""Kinds of target: this many; a floor; a ceiling."""


CEILING = "ceiling"
"""Code of the reason that gives how many GPUs a model lacks."""


class Reason(msgspec.Struct, frozen=True, kw_only=True):
    """Why a decision was made. ``code``: one word or few for metrics; ``text``: a sentence with numbers; ``facts``:
    the numbers as plain data; ``pools``: those that it is about, none for all pools together."""

    code: str
    text: str
    facts: dict[str, Any] = {}
    pools: tuple[str, ...] = ()


class PoolTarget(msgspec.Struct, frozen=True, kw_only=True):
    """Desired replicas of one pool."""

    pool: str
    replicas: int
    kind: Kind = "set"


class Flip(msgspec.Struct, frozen=True, kw_only=True):
    """Change so many workers of a model from role ``frm`` to role ``to``, once they have finished their requests."""

    model: str
    frm: Role
    to: Role
    count: int = 1


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """Expected traffic of one model in the next ``seconds``; a field that is None is not predicted.

    Args:
        requests: that arrive in those seconds.
        shape: the mean request.
        quantiles: of the arrival rate (requests/s), by rank, at each of ``horizons`` seconds from now.
        source: which predictor, for display.
        weights: of the predictors in a mixture, by name.
        period: seconds of the pattern that is followed; None where none is.
        saved: share of the error that following it saves, beside the best that knows no pattern.
    """

    seconds: float
    requests: float | None = None
    shape: RequestShape[float | None] = UNKNOWN_SHAPE
    horizons: tuple[float, ...] = ()
    quantiles: Mapping[float, tuple[float, ...]] = {}
    source: str = ""
    weights: Mapping[str, float] = {}
    period: float | None = None
    saved: float = 0.0

    def filled(self, weaker: "Prediction") -> "Prediction":
        """Return this prediction, with its empty fields filled from another."""
        changes: dict[str, Any] = {"shape": self.shape.filled(weaker.shape)}
        if self.requests is None:
            changes["requests"] = weaker.requests
        if not self.quantiles:
            names = ("horizons", "quantiles", "weights", "period", "saved")
            changes |= {name: getattr(weaker, name) for name in names}
        return msgspec.structs.replace(self, **changes)


class Accept(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """No change; ``reasons``: where there is something to report."""

    reasons: tuple[Reason, ...] = ()


class Predicted(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Predictions by model. ``final``: weaker predictors are not called."""

    models: Mapping[str, Prediction]
    final: bool = False


class Override(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """These targets; pools that are not named keep the result of the stage before.

    Args:
        bound: limits that keep it from wanting more.
        final: no weaker plugin contributes to this stage.
        evidence: basis of the choice, as plain data: candidates with their predicted attainment and cost.
    """

    targets: tuple[PoolTarget, ...]
    flips: tuple[Flip, ...] = ()
    reasons: tuple[Reason, ...] = ()
    bound: tuple[Reason, ...] = ()
    final: bool = False
    evidence: dict[str, Any] = {}


class Reject(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A veto: nothing may change in this tick."""

    reasons: tuple[Reason, ...]


Result = Accept | Predicted | Override | Reject
