"""What does a plugin answer? A prediction, targets with a reason, nothing to say, or a veto."""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from penstock.kernel.values import Role

Kind = Literal["set", "at_least", "at_most"]
"""Of a target: this many; a floor; a ceiling."""


class Because(msgspec.Struct, frozen=True, kw_only=True):
    """Why something was decided. ``code``: one word or few for metrics; ``text``: a sentence with numbers; ``facts``:
    the numbers as plain data."""

    code: str
    text: str
    facts: dict[str, Any] = {}


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """How many replicas a pool should have."""

    pool: str
    replicas: int
    kind: Kind = "set"


class Flip(msgspec.Struct, frozen=True, kw_only=True):
    """So many workers of a model that do ``frm`` should do ``to``, once they have finished what they have."""

    model: str
    frm: Role
    to: Role
    count: int = 1


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """What is expected of one model's traffic in the ``seconds`` to come; what is None is not predicted.

    Args:
        requests: that arrive in those seconds.
        isl, osl: mean tokens of prompt and output.
        quantiles: of the arrival rate (requests/s), by rank, at each of ``horizons`` seconds from now.
        source: which predictor, for people.
        weights: of those whose forecasts are mixed, by name, where it is a mixture.
    """

    seconds: float
    requests: float | None = None
    isl: float | None = None
    osl: float | None = None
    hit_rate: float | None = None
    accept_length: float | None = None
    horizons: tuple[float, ...] = ()
    quantiles: Mapping[float, tuple[float, ...]] = {}
    source: str = ""
    weights: Mapping[str, float] = {}

    def filled(self, weaker: "Prediction") -> "Prediction":
        """Return this one, with what it leaves open taken from another."""
        changes: dict[str, Any] = {}
        for name in ("requests", "isl", "osl", "hit_rate", "accept_length"):
            if getattr(self, name) is None:
                changes[name] = getattr(weaker, name)
        if not self.quantiles:
            changes |= {"horizons": weaker.horizons, "quantiles": weaker.quantiles, "weights": weaker.weights}
        return msgspec.structs.replace(self, **changes)


class Accept(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Nothing is to be changed; ``because``: where there is something to say about it."""

    because: tuple[Because, ...] = ()


class Predicted(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """By model. ``final``: weaker predictors are not asked."""

    models: Mapping[str, Prediction]
    final: bool = False


class Override(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """These targets; pools that are not named stay as the stage before said.

    Args:
        final: nobody weaker has a say in this stage.
        evidence: what the choice was made from, as plain data: candidates with their predicted attainment and cost.
    """

    targets: tuple[Target, ...]
    flips: tuple[Flip, ...] = ()
    because: tuple[Because, ...] = ()
    final: bool = False
    evidence: dict[str, Any] = {}


class Reject(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Nothing may be changed in this tick."""

    because: tuple[Because, ...]


Result = Accept | Predicted | Override | Reject
