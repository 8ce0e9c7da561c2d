"""Plan run: from a request to verified deployments, their table, and the folder of configs."""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from penstock.profiler.deployment_plan.deployment_config import config_yaml
from penstock.profiler.deployment_plan.deployment_search import Deployment, DeploymentSearch
from penstock.profiler.deployment_plan.engine_candidates import EngineCatalog
from penstock.profiler.deployment_plan.measured_profiles import with_measured
from penstock.profiler.deployment_plan.plan_request import PRICES, PlanRequest, checked_request
from penstock.profiler.deployment_plan.plan_verification import VerifiedDeployment, verified
from penstock.profiler.deployment_plan.planned_traffic import PlannedTraffic, traffic_of
from penstock.profiler.deployment_plan.slo_floors import SloFloor, floor_of, largest_factor
from penstock.report.run.judged_slo import slo_json
from penstock.report.run.run_page import write_report

CONFIG = "penstock.yaml"
"""Name of the best deployment's config in the folder of a plan."""
MORE_SHOWN = 5
"""Deployments that are shown by closed forms alone."""


class PlanOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to a request: the verified deployments, the best first; others by closed forms; or the floor it hits."""

    request: PlanRequest
    rate: float
    prompt: float
    answer: float
    answer_rate: float
    best: tuple[VerifiedDeployment, ...] = ()
    others: tuple[Deployment, ...] = ()
    floor: SloFloor | None = None
    notes: tuple[str, ...] = ()
    config: str | None = None
    page: str | None = None

    @property
    def feasible(self) -> bool:
        """Whether a simulated deployment meets the SLO."""
        return bool(self.best) and self.best[0].meets

    def per_million(self, deployment: Deployment) -> float:
        """Return dollars per million tokens of answers, at the traffic's own rate."""
        return deployment.price / 3600.0 / self.answer_rate * 1e6


def plan(request: PlanRequest, *, output: Path | None = None, jobs: int | None = None) -> PlanOutcome:
    """Return the cheapest deployments of a request.

    Args:
        output: folder that gets the configs, plan.json, and the simulations with the page of the best one; None leaves
            nothing.
        jobs: simulations at once; None is one for each core.
    Raises:
        ConfigError: the request, its trace, model, GPUs or profiles are at fault.
        EngineError: a profile was to be taken, and the engine did not start or answer.
    """
    request = with_measured(checked_request(request), output)
    if request.trace is None and request.rate is None:
        request = with_highest_rate(request)
    traffic = traffic_of(request)
    catalog = EngineCatalog(request, traffic)
    deployments = DeploymentSearch(request, traffic, catalog).deployments()
    outcome = PlanOutcome(
        request=request,
        rate=traffic.rate,
        prompt=traffic.prompt,
        answer=traffic.answer,
        answer_rate=traffic.answer_rate,
        notes=(*request.notes, *_guessed(request), *traffic.notes, *catalog.notes),
    )
    if not deployments:
        return msgspec.structs.replace(outcome, floor=floor_of(request, traffic, catalog))
    chosen = to_verify(deployments, request.verify)
    others = [each for each in deployments if each not in chosen][:MORE_SHOWN]
    if output is not None:
        best = verified(request, traffic, chosen, output / "simulations", jobs=jobs)
        outcome = msgspec.structs.replace(outcome, best=tuple(best), others=tuple(others))
        return _written(outcome, traffic, output)
    with tempfile.TemporaryDirectory(prefix="penstock-plan-") as folder:
        best = verified(request, traffic, chosen, Path(folder), jobs=jobs)
    return msgspec.structs.replace(outcome, best=tuple(best), others=tuple(others))


def with_highest_rate(request: PlanRequest) -> PlanRequest:
    """Return the request at the highest rate that its GPUs keep by closed forms; at 1/s where they keep none."""
    probe = msgspec.structs.replace(request, rate=1.0)
    traffic = traffic_of(probe)
    factor = largest_factor(probe, traffic, EngineCatalog(probe, traffic))
    if factor is None:
        return probe
    note = f"planned for {factor:,.3g} requests/s, the highest rate that {request.max_gpus} GPUs keep by closed forms"
    return msgspec.structs.replace(request, rate=factor, notes=(*request.notes, note))


def to_verify(deployments: Sequence[Deployment], count: int) -> list[Deployment]:
    """Return the cheapest few, and the cheapest of a mode that is not among them: both modes are to be compared."""
    chosen = list(deployments[:count])
    for mode in ("aggregated", "disaggregated"):
        if all(each.mode != mode for each in chosen):
            chosen += [each for each in deployments if each.mode == mode][:1]
    return chosen


def _guessed(request: PlanRequest) -> list[str]:
    guessed = [f"{gpu} ${PRICES[gpu]:g}" for gpu in request.gpus if gpu not in request.prices]
    return [f"prices per GPU and hour are guesses: {', '.join(guessed)}; --price replaces them"] if guessed else []


def _written(outcome: PlanOutcome, traffic: PlannedTraffic, output: Path) -> PlanOutcome:
    for number, each in enumerate(outcome.best, 1):
        lines = (
            f"Planned by 'penstock plan' for {outcome.rate:,.2f} requests/s of {outcome.prompt:,.0f} + "
            f"{outcome.answer:,.0f} tokens:",
            f"{each.attainment:.1%} of {len(traffic.requests):,} simulated requests were in SLO, "
            f"${each.deployment.price:,.2f} an hour.",
            *each.sources,
        )
        name = CONFIG if number == 1 else f"deployment-{number}.yaml"
        (output / name).write_text(config_yaml(outcome.request, each.deployment, lines))
    page = write_report(Path(outcome.best[0].folder))
    outcome = msgspec.structs.replace(outcome, config=str(output / CONFIG), page=str(page))
    (output / "plan.json").write_bytes(msgspec.json.format(msgspec.json.encode(outcome_json(outcome))) + b"\n")
    return outcome


def outcome_json(outcome: PlanOutcome) -> Mapping[str, Any]:
    """Return an outcome with stable keys; times in seconds, shares 0..1, dollars; null is unknown."""
    request = outcome.request

    def row(deployment: Deployment) -> Mapping[str, Any]:
        return {
            "label": deployment.label,
            "mode": deployment.mode,
            "gpus": deployment.gpus,
            "price_per_hour": deployment.price,
            "price_per_million_answer_tokens": outcome.per_million(deployment),
            "expected_attainment": deployment.expected,
            "expected_binds": deployment.binds,
            "pools": deployment.pools,
        }

    plain: Mapping[str, Any] = msgspec.to_builtins(
        {
            "schema": 1,
            "model": request.name,
            "engine": request.engine,
            "slo": slo_json(request.slo),
            "attainment": request.attainment,
            "traffic": {"rate_per_s": outcome.rate, "prompt_tokens": outcome.prompt, "answer_tokens": outcome.answer},
            "feasible": outcome.feasible,
            "deployments": [
                {
                    **row(each.deployment),
                    "simulated_attainment": each.attainment,
                    "meets": each.meets,
                    "ttft_s": each.ttft,
                    "itl_mean_s": each.itl,
                    "hit_rate": each.hit_rate,
                    "simulations": each.simulations,
                    "binds": each.binds,
                    "timing": each.sources,
                }
                for each in outcome.best
            ],
            "others": [row(each) for each in outcome.others],
            "floor": outcome.floor,
            "notes": outcome.notes,
            "config": outcome.config,
        }
    )
    return plain


HEADINGS = ("DEPLOYMENT", "GPUS", "$/H", "$/M OUT", "EXPECTED", "IN SLO", "TTFT p50/95/99", "ITL p50/95/99", "BINDS")
"""Columns of `rows`; milliseconds. ``EXPECTED`` is by closed forms, ``IN SLO`` in simulation."""
SPARE = ("EXPECTED", "$/M OUT", "ITL p50/95/99", "BINDS")
"""Those that a narrow terminal does without."""


def rows(outcome: PlanOutcome) -> list[Sequence[Any]]:
    """Return the deployments as rows of a table: those that were simulated, then those of closed forms alone."""

    def row(mark: str, deployment: Deployment, binds: str, *simulated: str) -> Sequence[Any]:
        price = (f"{deployment.price:,.2f}", f"{outcome.per_million(deployment):,.3f}")
        return [f"{mark} {deployment.label}", deployment.gpus, *price, f"{deployment.expected:.1%}", *simulated, binds]

    def spread(one: VerifiedDeployment, name: str) -> str:
        times = getattr(one, name)
        return (
            "-" if times is None else "/".join(f"{1e3 * getattr(times, point):,.0f}" for point in ("p50", "p95", "p99"))
        )

    first = [
        row(
            "-" if not each.meets else "*" if number == 0 else " ",
            each.deployment,
            each.binds,
            f"{each.attainment:.1%}",
            spread(each, "ttft"),
            spread(each, "itl"),
        )
        for number, each in enumerate(outcome.best)
    ]
    return [*first, *(row(" ", each, each.binds, "", "", "") for each in outcome.others)]


def sentences(outcome: PlanOutcome) -> list[str]:
    """Return what stands below the table, or in its place: the floor, sources of timing, notes, what was written."""
    lines = []
    if outcome.floor is not None:
        lines.append(f"No deployment meets the SLO: the floor is {outcome.floor.floor}. {outcome.floor.reason}.")
        lines += [f"What would change it: {change}" for change in outcome.floor.changes]
    elif not outcome.feasible:
        lines.append(
            "None of the simulated deployments meets the SLO within their corrections; the first comes nearest."
        )
    if any(not each.meets for each in outcome.best):
        lines.append("A - before a deployment: it misses the SLO with all replicas that were tried.")
    lines += [source for each in outcome.best[:1] for source in each.sources]
    lines += [f"note: {note}" for note in outcome.notes]
    if outcome.config is not None:
        lines.append(f"Written: {outcome.config}, page of its simulation {outcome.page}")
    return lines
