"""Clairvoyant schedule: the cheapest that a search over the simulator finds when every arrival is known.

Start-ups take as long for it as for all policies. The search has two parts:

1. Schedules by need: at each moment the cheapest fleet (`bench.planner_study.scenario.fleet`) for the true
   rate's highest mean within a short window, ordered a start-up time ahead, and kept over gaps that are shorter
   than a start-up. The price of a miss is swept, which gives a front from lean to eager.
2. From the cheapest of them that reaches the wanted share, workers are removed, stretch by stretch, for as long as
   simulations still reach it: first where the closed forms predict the least harm.

It is an upper bound of the least cost, not the least cost itself: the search is bounded.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from bench.planner_study.scenario import LAYOUTS, POOLS, StudyResult, fleet, priced, run, sizing_of
from bench.planner_study.traffic import rate_over_time
from penstock.kernel.values import Role
from penstock.planner.observation import Observation
from penstock.planner.sizing.fleet_sizing import Sizing
from penstock_lab.traffic.traffic_request import TrafficRequest

SLOT = 15.0
"""Seconds of one step of a schedule."""
PRICES: tuple[float, ...] = (6.0, 15.0, 40.0, 120.0)
WINDOW = 2
"""Slots on either side over which the highest rate counts."""
WANTED = 0.99
"""Attainment to reach, or else the best schedule's."""
STRETCH = 12
"""Slots that are changed at once in the second part."""
TRIES = 10
"""Stretches that are tried with a worker less."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """Workers that serve in each slot, by role. They are ordered a start-up time before."""

    slots: Mapping[Role, Sequence[int]]
    start_up: float

    def decide(self, observation: Observation) -> Mapping[str, int]:
        """Return the desired replicas for now, so that the scheduled workers serve a start-up time later."""
        now = int((observation.at + 1e-6) // SLOT)
        ahead = int((observation.at + self.start_up + 1e-6) // SLOT)
        targets = {}
        for role, wanted in self.slots.items():
            # No worker that will be needed until then may be removed.
            targets[POOLS[role]] = max(wanted[min(slot, len(wanted) - 1)] for slot in range(now, ahead + 1))
        return targets

    def first(self) -> dict[Role, int]:
        """Return the workers of the first slot."""
        return {role: wanted[0] for role, wanted in self.slots.items()}


def by_need(
    requests: Sequence[TrafficRequest], seconds: float, layout: str, start_up: float, sizing: Sizing
) -> Schedule:
    """Return the schedule of the first part at one price of a miss, which is the sizing's."""
    rates = np.asarray(rate_over_time(requests, seconds, SLOT))
    smooth = np.convolve(np.pad(rates, 1, mode="edge"), np.ones(3) / 3.0, mode="valid")
    highest = [float(smooth[max(0, at - WINDOW) : at + WINDOW + 1].max()) for at in range(len(smooth))]
    fleets = [fleet(layout, rate, sizing) for rate in highest]
    return Schedule({role: [each[role] for each in fleets] for role in LAYOUTS[layout]}, start_up)


def search(requests: Sequence[TrafficRequest], seconds: float, layout: str, start_up: float) -> list[StudyResult]:
    """Return the results of all schedules that were tried, the refined ones last.

    Cost: ``len(PRICES)`` + ``TRIES`` simulations.
    """
    results: list[tuple[Schedule, StudyResult]] = []
    sizing = sizing_of(layout, requests)
    for price in PRICES:
        schedule = by_need(requests, seconds, layout, start_up, priced(sizing, price))
        results.append((schedule, _judged(requests, seconds, schedule)))
    wanted = min(WANTED, max(result.attainment for _, result in results))
    able = [each for each in results if each[1].attainment >= wanted]
    best, result = min(able, key=lambda each: each[1].gpu_hours)
    rates = np.asarray(rate_over_time(requests, seconds, SLOT))
    for role, first in _by_pain(best, rates, sizing)[:TRIES]:
        slots = {each: list(counts) for each, counts in best.slots.items()}
        slots[role][first : first + STRETCH] = [max(1, n - 1) for n in slots[role][first : first + STRETCH]]
        if slots[role] == list(best.slots[role]):
            continue
        schedule = Schedule(slots, start_up)
        judged = _judged(requests, seconds, schedule)
        results.append((schedule, judged))
        if judged.attainment >= wanted and judged.gpu_hours < result.gpu_hours:
            best, result = schedule, judged
    return [judged for _, judged in results]


def _judged(requests: Sequence[TrafficRequest], seconds: float, schedule: Schedule) -> StudyResult:
    return run(requests, schedule.first(), schedule.start_up, seconds, policy=schedule, interval=5.0)


def _by_pain(schedule: Schedule, rates: "np.typing.NDArray[np.float64]", sizing: Sizing) -> list[tuple[Role, int]]:
    """Return (role, first slot) of every stretch, first those where one worker less is expected to hurt least."""
    stretches: list[tuple[float, Role, int]] = []
    for role in schedule.slots:
        for first in range(0, len(rates), STRETCH):
            part = slice(first, first + STRETCH)
            workers = {each: np.asarray(counts[part], dtype=np.float64) for each, counts in schedule.slots.items()}
            fewer = {**workers, role: np.maximum(1.0, workers[role] - 1.0)}
            observed = rates[part][: len(workers[role])]
            lost = float(np.sum((sizing.attainment(workers, observed) - sizing.attainment(fewer, observed)) * observed))
            stretches.append((lost, role, first))
    return [(role, first) for _, role, first in sorted(stretches)]
