"""Plan verification: simulates a deployment on the traffic, and gives or takes replicas until the SLO just holds."""

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import msgspec

from penstock_lab.profiler.deployment_plan.deployment_config import config_yaml
from penstock_lab.profiler.deployment_plan.deployment_search import Deployment
from penstock_lab.profiler.deployment_plan.plan_request import PlanRequest
from penstock_lab.profiler.deployment_plan.planned_traffic import PlannedTraffic
from penstock_lab.report.run.run_summary import LatencySpread, RunSummary
from penstock_lab.report.simulation.simulation_options import SimulateOptions
from penstock_lab.report.simulation.simulation_outcome import SimulationOutcome
from penstock_lab.report.simulation.simulation_run import run, variants_of
from penstock_lab.report.simulation.variant_processes import cores, in_processes

TRIES = 8
"""Most simulations of one deployment: a size, and the corrections of what closed forms err in."""
STEP = 10
"""Corrections are a tenth of a pool at first, one replica at last."""


class VerifiedDeployment(msgspec.Struct, frozen=True, kw_only=True):
    """A deployment and what became of it in simulation.

    ``attainment``: share of all requests in SLO; ``itl``: of each request's mean. ``meets``: it reaches the target.
    ``sources``: per pool the source of its timing and how far it extrapolates.
    """

    deployment: Deployment
    attainment: float
    meets: bool
    ttft: LatencySpread | None
    itl: LatencySpread | None
    hit_rate: float | None
    simulations: int
    binds: str
    """What one replica fewer misses, pool by pool: in simulation where that was tried, else by the closed forms."""
    sources: tuple[str, ...]
    folder: str
    """Run folder of the simulation."""

    @property
    def rank(self) -> tuple[bool, float, int, float]:
        """What deployments are ordered by: those that meet the SLO first, then price, pools and attainment."""
        return not self.meets, round(self.deployment.price, 6), len(self.deployment.pools), -self.attainment


def verified(
    request: PlanRequest, traffic: PlannedTraffic, chosen: Sequence[Deployment], folder: Path, *, jobs: int | None
) -> list[VerifiedDeployment]:
    """Return the deployments with as many replicas as the simulation asks for, cheapest first.

    Args:
        folder: where the run folders go.
        jobs: processes at once; None is one for each core.
    """
    work = partial(verified_one, request, traffic, folder)
    count = min(jobs or cores(), len(chosen))
    results = in_processes(work, chosen, count, quiet=True) if count > 1 else [work(each) for each in chosen]
    return sorted(results, key=lambda each: each.rank)


def verified_one(
    request: PlanRequest, traffic: PlannedTraffic, folder: Path, deployment: Deployment
) -> VerifiedDeployment:
    """Simulate one deployment, and change its replicas until one fewer would miss the SLO."""
    trial = _Trial(request, traffic, folder, deployment)
    counts = tuple(pool.replicas for pool in deployment.pools)
    if trial.meets(counts):
        return trial.result(_fewer_replicas(trial, counts))
    return trial.result(_more_replicas(trial, counts))


_UNSAFE = re.compile(r"[^A-Za-z0-9.]+")
Counts = tuple[int, ...]
"""Replicas of each pool."""


class _Trial:
    """The simulations of one deployment so far, by its replicas."""

    def __init__(self, request: PlanRequest, traffic: PlannedTraffic, folder: Path, deployment: Deployment) -> None:
        self.deployment = deployment
        self._request, self._traffic, self._folder = request, traffic, folder
        self._outcomes: dict[Counts, SimulationOutcome] = {}

    def may(self, counts: Counts) -> bool:
        """Return whether this may be simulated: within the GPUs and the tries, or known already."""
        gpus = self.deployment.with_replicas(counts).gpus
        fits = self._request.max_gpus is None or gpus <= self._request.max_gpus
        return fits and min(counts) >= 1 and (counts in self._outcomes or len(self._outcomes) < TRIES)

    def meets(self, counts: Counts) -> bool:
        """Return whether so many replicas reach the target in simulation."""
        return self.attainment(counts) >= self._request.attainment

    def attainment(self, counts: Counts) -> float:
        return self.outcome(counts).summary.goodput_share or 0.0

    def lacking(self, counts: Counts) -> int:
        """Return the pool that lacks replicas: prefill where TTFT is missed by more than ITL."""
        if len(counts) == 1:
            return 0
        summary = self.outcome(counts).summary
        return 0 if _excess_of(summary, "ttft", self._request) >= _excess_of(summary, "itl_mean", self._request) else 1

    def outcome(self, counts: Counts) -> SimulationOutcome:
        outcome = self._outcomes.get(counts)
        if outcome is None:
            outcome = self._outcomes[counts] = simulated(
                self._request, self._traffic, self.deployment.with_replicas(counts), self._folder
            )
        return outcome

    def _binds(self, counts: Counts) -> str:
        words = []
        for place, pool in enumerate(self.deployment.pools):
            fewer = self._outcomes.get(_changed_counts(counts, place, -1))
            binds: str = "one replica" if counts[place] == 1 else pool.binds
            if fewer is not None and counts[place] != pool.replicas:
                late = _excess_of(fewer.summary, "ttft", self._request) >= _excess_of(
                    fewer.summary, "itl_mean", self._request
                )
                binds = "TTFT" if late else "ITL"
            words.append(binds if len(counts) == 1 else f"{pool.role}: {binds}")
        return ", ".join(words)

    def result(self, counts: Counts) -> VerifiedDeployment:
        outcome = self.outcome(counts)
        return VerifiedDeployment(
            deployment=self.deployment.with_replicas(counts),
            attainment=self.attainment(counts),
            meets=self.meets(counts),
            ttft=outcome.summary.ttft,
            itl=outcome.summary.itl_mean,
            hit_rate=outcome.summary.hit_rate,
            simulations=len(self._outcomes),
            binds=self._binds(counts),
            sources=tuple(note for note in outcome.notes if note.startswith("timing of ")),
            folder=outcome.run,
        )


def _more_replicas(trial: _Trial, counts: Counts) -> Counts:
    """Add replicas to the pool that lacks them; where that does not help, to the other one."""
    place = trial.lacking(counts)
    while not trial.meets(counts):
        more = _changed_counts(counts, place, max(1, counts[place] // STEP))
        if not trial.may(more):
            return counts
        helped = trial.attainment(more) > trial.attainment(counts) + 0.005
        counts = more
        place = trial.lacking(counts) if helped or len(counts) == 1 else 1 - place
    return _fewer_replicas(trial, counts)


def _fewer_replicas(trial: _Trial, counts: Counts) -> Counts:
    """Take replicas away, pool after pool, as long as the target is reached."""
    for place in range(len(counts)):
        step = max(1, counts[place] // STEP)
        while step:
            fewer = _changed_counts(counts, place, -step)
            if trial.may(fewer) and trial.meets(fewer):
                counts = fewer
            else:
                step //= 2
    return counts


def _changed_counts(counts: Counts, place: int, change: int) -> Counts:
    return tuple(n + change * (number == place) for number, n in enumerate(counts))


def _excess_of(summary: RunSummary, name: str, request: PlanRequest) -> float:
    """Return a 95th percentile as a multiple of its target, 0 without one; where nothing was answered, no bound."""
    spread: LatencySpread | None = getattr(summary, name)
    target = request.slo.ttft if name == "ttft" else request.slo.itl
    if target is None:
        return 0.0
    return float("inf") if spread is None else spread.p95 / target


def simulated(request: PlanRequest, traffic: PlannedTraffic, deployment: Deployment, folder: Path) -> SimulationOutcome:
    """Return the outcome of one simulation; the config goes to ``folder`` and is read as `penstock simulate` does."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{_UNSAFE.sub('-', deployment.label)}.yaml"
    path.write_text(config_yaml(request, deployment))
    options = SimulateOptions(
        config=str(path),
        out=folder,
        seed=request.seed,
        html=False,
        decisions=False,
        json=True,
        overrides=("runs.journal=false",),
    )
    (variant,) = variants_of(options)
    return run(options, partial(iter, traffic.requests), variant)
