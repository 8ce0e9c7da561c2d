"""`StudyFinding`: an order that the published study reports, whether this search has it too, and the numbers.

Source: captions of figures 6 to 11 of "Beyond the Buzz" (arXiv 2506.05508). The source gives no absolute numbers, so
orders are all that can be compared.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from penstock.profiler.design_space.design_study import (
    BALANCED,
    GENERATION_HEAVY,
    PREFILL_HEAVY,
    SLOWEST,
    DesignSpace,
)

ALMOST_NONE = 1.1
"""A gain below this is almost none."""
LOST = 0.9
"""A fixed ratio loses where it gives less than this share of the best."""
SMALL = 10e9
"""Parameters below which the source sees nothing to gain from a split."""
SMALL_DOMAIN = 8
"""GPUs of a link domain that a larger one is compared with."""
HELPED = 1.05
"""By how much a larger domain must help."""


@dataclass(frozen=True, slots=True)
class StudyFinding:
    """One order. ``numbers``: what it is judged by, for a reader."""

    name: str
    holds: bool
    numbers: str


def findings(spaces: Sequence[DesignSpace]) -> list[StudyFinding]:
    """Return what can be said of these cases; an order for which a model or traffic is missing is left out."""
    by_place = {(space.case.model, space.case.traffic): space for space in spaces}
    models = list(dict.fromkeys(space.case.model for space in spaces))
    heavy = [by_place[model, PREFILL_HEAVY] for model in models if (model, PREFILL_HEAVY) in by_place]
    parts = [_envelope(heavy), _by_size(heavy), _by_traffic(by_place, models), _ratio(heavy), _fixed_ratio(heavy)]
    return [part for part in [*parts, *_domain(heavy)] if part is not None]


def _envelope(spaces: Sequence[DesignSpace]) -> StudyFinding | None:
    """Figure 6: co-located engines are the envelope of both of their kinds, and a split is above it in the middle."""
    if not spaces:
        return None
    kept, texts = True, []
    for space in spaces:
        at, gains = space.speeds(), space.gains()
        parts = (space.without_piggyback, space.with_piggyback)
        upper = np.maximum(*(part.density_at(at) for part in parts))
        middle = float(gains[len(gains) // 2]) if len(gains) else 0.0
        kept = kept and np.allclose(space.colocated.density_at(at), upper)
        kept = kept and (middle > 1.0 or space.served.shape.params < SMALL)
        texts.append(f"{space.case.model} {middle:.2f} at {at[len(at) // 2]:.0f} tokens/s" if len(at) else "nothing")
    return StudyFinding(
        "6: over 10 billion parameters a split is above co-located engines, the envelope of both kinds, in the middle",
        kept,
        _of(texts),
    )


def _by_size(spaces: Sequence[DesignSpace]) -> StudyFinding | None:
    """Figure 7: what a split gains grows with the model."""
    sized = sorted((space.served.shape.params_active, space.gain or 0.0, space.case.model) for space in spaces)
    if len(sized) < 2:
        return None
    dense = [gain for _, gain, model in sized if not _has_experts(spaces, model)]
    kept = all(one < other for one, other in pairwise(dense))
    # A model with many experts is large by all of its weights, not by those that one token passes.
    if dense and len(dense) < len(sized):
        kept = kept and all(gain > dense[0] for _, gain, model in sized if _has_experts(spaces, model))
    texts = [f"{model} {gain:.2f}" for _, gain, model in sized]
    return StudyFinding("7: the gain grows with the model", kept, _of(texts))


def _has_experts(spaces: Sequence[DesignSpace], model: str) -> bool:
    return any(space.case.model == model and space.served.shape.experts > 0 for space in spaces)


def _by_traffic(spaces: dict[tuple[str, str], DesignSpace], models: Sequence[str]) -> StudyFinding | None:
    """Figure 8: prefill-heavy traffic gains most, generation-heavy traffic almost nothing."""
    order = (PREFILL_HEAVY, BALANCED, GENERATION_HEAVY)
    rows = [(model, [spaces[model, name].gain or 0.0 for name in order if (model, name) in spaces]) for model in models]
    rows = [(model, gains) for model, gains in rows if len(gains) == len(order)]
    if not rows:
        return None
    kept = all(one > two > three and three < ALMOST_NONE for _, (one, two, three) in rows)
    texts = [f"{model} {one:.2f} > {two:.2f} > {three:.2f}" for model, (one, two, three) in rows]
    return StudyFinding(f"8: {' > '.join(order)}, the last almost none", kept, _of(texts))


def _ratio(spaces: Sequence[DesignSpace]) -> StudyFinding | None:
    """Figure 9: the best ratio of GPUs moves with the model and with the speed that is asked for."""
    if len(spaces) < 2:
        return None
    ends = [(space.case.model, space.ratio_at(SLOWEST) or 0.0, space.ratio_at(_fast(space)) or 0.0) for space in spaces]
    slow = [one for _, one, _ in ends]
    kept = all(one > other for _, one, other in ends) and max(slow) > 1.5 * min(slow)
    texts = [f"{model} {one:.2f} to {other:.2f}" for model, one, other in ends]
    return StudyFinding(
        f"9: the best ratio moves with the model, and falls from {SLOWEST:g} tokens/s on", kept, _of(texts)
    )


def _fixed_ratio(spaces: Sequence[DesignSpace]) -> StudyFinding | None:
    """Figure 10: a ratio that is best at one end of the speeds loses at the other, and the best one is the envelope."""
    if not spaces:
        return None
    kept, texts = True, []
    for space in spaces:
        ends = (SLOWEST, _fast(space))
        best = [float(space.disaggregated.density_at(np.array(speed))) for speed in ends]
        shares = []
        for speed in ends:
            fixed = space.fixed(space.ratio_at(speed))
            shares += [float(fixed.density_at(np.array(end))) / most for end, most in zip(ends, best, strict=True)]
        relaxed_there, relaxed_elsewhere, tight_elsewhere, tight_there = shares
        kept = kept and max(relaxed_elsewhere, tight_elsewhere) < LOST < min(relaxed_there, tight_there)
        texts.append(f"{space.case.model} {relaxed_elsewhere:.0%} and {tight_elsewhere:.0%}")
    return StudyFinding("10: a fixed ratio loses at the end that it was not made for; it gives there", kept, _of(texts))


def _domain(spaces: Sequence[DesignSpace]) -> list[StudyFinding]:
    """Figure 11: a larger link domain helps models with experts at medium speed, and dense ones at the fast end."""
    found = []
    for space in spaces:
        if space.case.domain <= SMALL_DOMAIN or space.served.shape.params < SMALL:
            continue
        small = DesignSpace(replace(space.case, domain=SMALL_DOMAIN))
        if space.served.shape.experts:
            at = space.speeds()
            middle = at[len(at) // 4 : len(at) * 3 // 4]
            ratio = space.disaggregated.density_at(middle) / small.disaggregated.density_at(middle)
            helped, what = float(np.nanmax(ratio)), "tokens/s per GPU at medium speed"
        else:
            helped = float(space.disaggregated.speed.max() / small.disaggregated.speed.max())
            what = "the fastest speed"
        name = f"11: {space.case.domain} GPUs of a link domain over {SMALL_DOMAIN} help {space.case.model}"
        found.append(StudyFinding(name, helped > HELPED, f"{what} x {helped:.2f}"))
    return found


def _fast(space: DesignSpace) -> float:
    """Return a speed near the fast end that both kinds of deployment reach."""
    at = space.speeds()
    return float(at[len(at) * 7 // 8]) if len(at) else SLOWEST


def _of(texts: Sequence[str]) -> str:
    return "; ".join(texts)
