"""Tuning trials: candidates in simulation, and the search that halves them towards a Pareto front.

Cheap rungs come first, and only the best of each go on to the next; the gain of one candidate over another is judged
from the same requests.
Source: successive halving (Jamieson and Talwalkar 2016), here with non-dominated layers instead of one objective.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf, sqrt
from typing import NamedTuple, TypeVar

import msgspec

from penstock.kernel.machine import nanos
from penstock.kernel.request_record import RequestRecord
from penstock.kernel.statistics import percentile
from penstock.kernel.values import Slo
from penstock_lab.profiler.tuning.tuning_space import Candidate
from penstock_lab.report.run.run_summary import judged_by
from penstock_lab.report.simulation.simulation_run import SimulationVariant, planner_of
from penstock_lab.simulate.simulated_cluster import SimulatedCluster
from penstock_lab.traffic.traffic_request import TrafficRequest

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
        """Tell whether it is at least as good in both, and better in one, or of equal ones the less strained.

        So a layer has one of each score: many equal ones would crowd the cheaper ones out of the next rung.
        """
        as_good = self.attainment >= other.attainment and self.gpu_hours <= other.gpu_hours
        return as_good and (self[:2] != other[:2] or self.strain < other.strain)


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
    layer = next(_dominance_layers(scores), [])
    best: dict[tuple[float, float], C] = {}
    for candidate in layer:
        best.setdefault(scores[candidate][:2], candidate)
    return sorted(best.values(), key=lambda candidate: scores[candidate].gpu_hours)


def ranked(scores: Mapping[C, TrialScore]) -> list[C]:
    """Return all candidates, the best first: layer by layer."""
    return [candidate for layer in _dominance_layers(scores) for candidate in layer]


def _dominance_layers(scores: Mapping[C, TrialScore]) -> Iterator[list[C]]:
    """Yield layers that no later one dominates; within one, the least strained first."""
    left = dict(scores)
    while left:
        layer = [one for one in left if not any(other.dominates(left[one]) for other in left.values())]
        yield sorted(layer, key=lambda candidate: scores[candidate].strain)
        for candidate in layer:
            del left[candidate]


BLOCKS = 20
"""Stretches of the traffic whose gains are taken as independent of each other; T is the quantile for so many."""
T = 2.093
"""97.5 % quantile of Student's t with 19 degrees of freedom."""


class TuningTrial(msgspec.Struct, frozen=True, kw_only=True):
    """One candidate on a stretch of the traffic.

    Args:
        share: of the traffic that was searched; ``holdout``: on the traffic that was not.
        in_slo: per request in order of arrival, whether it was answered in full within the SLO.
    """

    candidate: Candidate
    share: float
    holdout: bool
    attainment: float
    gpu_hours: float
    strain: float
    in_slo: bytes

    @property
    def score(self) -> TrialScore:
        """What it is judged by."""
        return TrialScore(self.attainment, self.gpu_hours, self.strain)


class Gain(msgspec.Struct, frozen=True, kw_only=True):
    """More attainment than with the present config; ``low`` to ``high`` is where it lies with 95 %."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningTask:
    """One trial to be carried out. ``seconds``: length of the stretch; ``share`` and ``holdout``: as `TuningTrial`."""

    candidate: Candidate
    variant: SimulationVariant
    seconds: float
    share: float
    holdout: bool


def carry_out(traffic: Sequence[TrafficRequest], task: TuningTask) -> TuningTrial:
    """Simulate one candidate.

    Args:
        traffic: the stretch's requests; only those before ``task.seconds`` arrive.
    """
    settings, plan = task.variant.settings, msgspec.structs.replace(task.variant.plan, until=task.seconds)
    slo = judged_by(settings.slo)
    ended: list[tuple[float, str, bool, float]] = []

    def end(record: RequestRecord) -> None:
        if record.outcome != "cancelled":
            ended.append((record.arrival, record.id, record.within(slo), _strain_of(record, slo)))

    cluster = SimulatedCluster(plan, traffic, planner=planner_of(settings), record=end)
    cluster.run()
    ended.sort()
    strains = sorted(strain for *_, strain in ended)
    return TuningTrial(
        candidate=task.candidate,
        share=task.share,
        holdout=task.holdout,
        attainment=sum(in_slo for _, _, in_slo, _ in ended) / len(ended) if ended else 1.0,
        gpu_hours=cluster.fleet.gpu_hours(nanos(task.seconds)),  # the last answers take longer or shorter by chance
        strain=percentile(strains, 0.99) if strains else 0.0,
        in_slo=bytes(in_slo for _, _, in_slo, _ in ended),
    )


def gain(ours: TuningTrial, before: TuningTrial) -> Gain | None:
    """Return how much more attainment one has than another on the same requests; None where those are too few.

    The difference of each request is exact, since both got the same ones; neighbours in time are not independent, so
    the interval comes from the means of `BLOCKS` stretches.
    """
    count = min(len(ours.in_slo), len(before.in_slo))
    if count < 2 * BLOCKS:
        return None
    differences = [here - there for here, there in zip(ours.in_slo, before.in_slo)]
    bounds = [count * number // BLOCKS for number in range(BLOCKS + 1)]
    means = [sum(differences[low:high]) / (high - low) for low, high in pairwise(bounds)]
    mean = sum(means) / BLOCKS
    spread = T * sqrt(sum((each - mean) ** 2 for each in means) / (BLOCKS - 1) / BLOCKS)
    return Gain(mean=mean, low=mean - spread, high=mean + spread)


def _strain_of(record: RequestRecord, slo: Slo) -> float:
    """Return the larger of TTFT and mean ITL over their targets; above 1 is a miss."""
    targets = slo.of(record.service_class)
    if record.outcome != "ok" or record.ttft is None:
        return inf
    strain = record.ttft / targets.ttft if targets.ttft else 0.0
    return max(strain, record.itl.mean / targets.itl) if targets.itl and record.itl is not None else strain
