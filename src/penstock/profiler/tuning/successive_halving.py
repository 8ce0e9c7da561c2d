"""Successive halving towards a Pareto front: cheap rungs first, and only the best of each go on to the next.

Source: successive halving (Jamieson and Talwalkar 2016), here with non-dominated layers instead of one objective.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

C = TypeVar("C", bound=Hashable)

KEEP = 2
"""One in so many goes on to the next rung."""


class TrialScore(NamedTuple):
    """What a trial is judged by: more attainment and fewer GPU-hours; ``strain`` decides between equals.

    ``strain``: 99th percentile, over requests, of the larger of TTFT and ITL over their targets.
    """

    attainment: float
    gpu_hours: float
    strain: float

    def dominates(self, other: "TrialScore") -> bool:
        """Tell whether it is at least as good in both, and not the same."""
        here, there = (self.attainment, -self.gpu_hours), (other.attainment, -other.gpu_hours)
        return here != there and here[0] >= there[0] and here[1] >= there[1]


def halve(
    candidates: Sequence[C],
    rungs: Sequence[float],
    evaluate: Callable[[Sequence[C], float], Mapping[C, TrialScore]],
    always: C,
) -> Mapping[C, TrialScore]:
    """Return the scores of those that came to the last rung.

    Args:
        candidates: different ones.
        rungs: shares of the traffic, ascending; the last is 1.
        evaluate: gives the scores of candidates on a share of the traffic, the same traffic for all.
        always: a candidate that is never left out: what the others are compared with.
    """
    left = list(dict.fromkeys([always, *candidates]))
    scores: Mapping[C, TrialScore] = {}
    for number, share in enumerate(rungs):
        scores = evaluate(left, share)
        if number + 1 < len(rungs):
            best = ranked(scores)[: max(2, -(-len(scores) // KEEP))]
            left = list(dict.fromkeys([always, *best]))
    return scores


def front(scores: Mapping[C, TrialScore]) -> list[C]:
    """Return the candidates that no other dominates, the cheapest first; of equal ones the least strained."""
    layer = next(_layers(scores), [])
    best: dict[tuple[float, float], C] = {}
    for candidate in layer:
        best.setdefault(scores[candidate][:2], candidate)
    return sorted(best.values(), key=lambda candidate: scores[candidate].gpu_hours)


def ranked(scores: Mapping[C, TrialScore]) -> list[C]:
    """Return all candidates, the best first: layer by layer."""
    return [candidate for layer in _layers(scores) for candidate in layer]


def _layers(scores: Mapping[C, TrialScore]) -> Iterator[list[C]]:
    """Yield layers that no later one dominates; within one, the least strained first."""
    left = dict(scores)
    while left:
        layer = [one for one in left if not any(other.dominates(left[one]) for other in left.values())]
        yield sorted(layer, key=lambda candidate: scores[candidate].strain)
        for candidate in layer:
            del left[candidate]
