"""Plan run: from a request to verified deployments, their table, and the folder of configs."""

import asyncio
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from penstock.config.settings.cluster_settings import PoolSettings
from penstock.kernel.errors import ConfigError
from penstock.kernel.plurals import counted
from penstock.kernel.values import RequestShape
from penstock_lab.engine.settings import SimSettings, TimingSettings
from penstock_lab.engine.timing.gpus import gpu_of_sku
from penstock_lab.profiler.deployment_plan.deployment_config import config_yaml
from penstock_lab.profiler.deployment_plan.deployment_search import Deployment, DeploymentSearch
from penstock_lab.profiler.deployment_plan.engine_candidates import EngineCatalog
from penstock_lab.profiler.deployment_plan.plan_request import PRICES, PlanRequest, checked_request
from penstock_lab.profiler.deployment_plan.plan_verification import VerifiedDeployment, verified
from penstock_lab.profiler.deployment_plan.planned_traffic import BLOCK, PlannedTraffic, traffic_of
from penstock_lab.profiler.deployment_plan.slo_floors import SloFloor, context_floor, floor_of, largest_factor
from penstock_lab.profiler.measurement.measured_engines import FoundGpus, machine_gpus
from penstock_lab.profiler.measurement.profile_run import ProfileOptions, run
from penstock_lab.profiler.measurement.sweep import SweepOptions
from penstock_lab.report.outcome import json_text
from penstock_lab.report.run.run_page import write_report
from penstock_lab.report.run.run_summary import slo_json

MEASURE = "measure"
"""In place of a profile's folder: take one. A folder of that name is ``./measure``."""
PROFILE_SECONDS = 1800.0
"""Time of one GPU's profile, over all sizes: a sweep of vLLM at four sizes is mostly done by then. A guess."""


def with_measured(request: PlanRequest, output: Path | None) -> PlanRequest:
    """Return the request with profiles taken where it asks for them; one that is there already goes on.

    Args:
        output: folder of the plan; each GPU's profile is ``profile-GPU`` in it.
    Raises:
        ConfigError: there is no folder for it, or engines of this kind are not started here.
        EngineError: an engine did not start or answer.
    """
    profiles = dict(request.profiles)
    for key in [key for key, path in profiles.items() if path == MEASURE]:
        if output is None:
            raise ConfigError(f"the profile {key}={MEASURE} has no folder", hint="give --output")
        if request.engine == "sglang":
            raise ConfigError(
                f"the profile {key}={MEASURE} is of SGLang, which is not started here",
                hint="penstock profile URL measures one that runs",
            )
        gpu, _, size = key.partition(":")
        folder = output / f"profile-{Path(gpu).stem}{size}"
        asyncio.run(run(_profile_options(request, gpu, (int(size),) if size else (), folder)))
        profiles[key] = str(folder)
    return msgspec.structs.replace(request, profiles=profiles)


def _profile_options(request: PlanRequest, gpu: str, sizes: tuple[int, ...], folder: Path) -> ProfileOptions:
    rated = request.trace is not None or request.rate is not None
    traffic = traffic_of(request if rated else msgspec.structs.replace(request, rate=1.0))
    mix = traffic.mix
    simulated = request.engine == "sim"
    timing = TimingSettings(kind="roofline", model=request.path, gpu=gpu)
    sim = SimSettings(block_size=BLOCK, async_scheduling=True, timing=timing)
    pool = PoolSettings(
        engine=request.engine, replicas=1, model_path=None if simulated else request.repository, sim=sim
    )
    return ProfileOptions(
        sweep=SweepOptions(shape=RequestShape(mix.mean(mix.isl), mix.mean(mix.osl))),
        out=folder,
        slo=request.slo,
        pool=pool,
        model=request.name,
        sizes=sizes or (_simulated_sizes(request, traffic, gpu) if simulated else ()),
        seconds=PROFILE_SECONDS,
        gpus=request.max_gpus,
    )


def _simulated_sizes(request: PlanRequest, traffic: PlannedTraffic, gpu: str) -> tuple[int, ...]:
    """Return the sizes of a simulated engine that fit its GPUs' memory; real ones are as many as the machine has."""
    fitting = EngineCatalog(msgspec.structs.replace(request, profiles={}), traffic).candidates["aggregated"]
    timings = [engine.sim.timing for engine in fitting if engine.gpu == gpu]
    return tuple(sorted({each.tensor_parallel_size for each in timings if each.expert_parallel_size == 1}))


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
    token_rate: float
    """Tokens per second that are paid for: of answers, or of prompts where there are none."""
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
        """Return dollars per million tokens of answers, at the rate asked for; of prompts, where there are none."""
        return deployment.price / 3600.0 / self.token_rate * 1e6


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
    request = with_measured(checked_request(with_gpus(request)), output)
    if request.trace is None and request.rate is None:
        request = with_highest_rate(request)
    traffic = traffic_of(request)
    short = context_floor(request, traffic)
    catalog = EngineCatalog(request, traffic)
    deployments = [] if short is not None else DeploymentSearch(request, traffic, catalog).deployments()
    outcome = PlanOutcome(
        request=request,
        rate=traffic.rate,
        prompt=traffic.prompt,
        answer=traffic.answer,
        token_rate=traffic.tokens_per_second(traffic.answer if request.answers else traffic.prompt),
        notes=(*request.notes, *_price_notes(request), *traffic.notes, *catalog.notes),
    )
    if not deployments:
        return msgspec.structs.replace(outcome, floor=short or floor_of(request, traffic, catalog))
    outcome = msgspec.structs.replace(outcome, notes=(*outcome.notes, *_refusal_notes(request, traffic)))
    chosen = to_verify(deployments, request.verify)
    others = [each for each in deployments if each not in chosen][:MORE_SHOWN]
    if output is not None:
        best = verified(request, traffic, chosen, output / "simulations", jobs=jobs)
        outcome = msgspec.structs.replace(outcome, best=tuple(best), others=tuple(others))
        return _write_plan(outcome, traffic, output)
    with tempfile.TemporaryDirectory(prefix="penstock-plan-") as folder:
        best = verified(request, traffic, chosen, Path(folder), jobs=jobs)
    return msgspec.structs.replace(outcome, best=tuple(best), others=tuple(others))


def with_gpus(request: PlanRequest) -> PlanRequest:
    """Return a request that names no GPU for those of this machine; as it is where there are none either.

    Raises:
        ConfigError: they are not in the table of GPUs.
    """
    there = FoundGpus() if request.gpus else machine_gpus(os.environ)
    if there.name is None:
        return request
    count = len(there.indices)
    most = count if request.max_gpus is None else min(count, request.max_gpus)
    kind = gpu_of_sku(there.name)
    note = f"no GPU was named: planned for this machine's {counted(count, f'{there.name}')}, as {kind}"
    return msgspec.structs.replace(request, gpus=(kind,), max_gpus=most, notes=(*request.notes, note))


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


def _refusal_notes(request: PlanRequest, traffic: PlannedTraffic) -> list[str]:
    context = request.shape().context
    longer = 0 if context is None else traffic.longer_than(context)
    if not longer:
        return []
    told = f"{counted(longer, 'request')} of {len(traffic.requests):,}"
    return [f"{told} are longer than the {context:,} tokens of the model, which refuses them: they count as missed"]


def _price_notes(request: PlanRequest) -> list[str]:
    guessed = [f"{gpu} ${PRICES[gpu]:g}" for gpu in request.gpus if gpu not in request.prices]
    return [f"prices per GPU and hour are guesses: {', '.join(guessed)}; --price replaces them"] if guessed else []


def _write_plan(outcome: PlanOutcome, traffic: PlannedTraffic, output: Path) -> PlanOutcome:
    for number, each in enumerate(outcome.best, 1):
        lines = (
            f"Planned by 'penstock plan' for {outcome.rate:,.2f} requests/s of {outcome.prompt:,.0f} + "
            f"{outcome.answer:,.0f} tokens:",
            f"{each.attainment:.1%} of {len(traffic.requests):,} simulated requests were in SLO, "
            f"${each.deployment.price:,.2f} an hour.",
            *each.sources,
        )
        name = CONFIG if number == 1 else f"deployment-{number}.yaml"
        (output / name).write_text(config_yaml(outcome.request, each.deployment, lines, planner=True))
    page = write_report(Path(outcome.best[0].folder))
    outcome = msgspec.structs.replace(outcome, config=str(output / CONFIG), page=str(page))
    (output / "plan.json").write_text(json_text(outcome_json(outcome)))
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
            f"price_per_million_{'answer' if request.answers else 'prompt'}_tokens": outcome.per_million(deployment),
            "expected_attainment": deployment.expected,
            "expected_binds": deployment.binds,
            "pools": deployment.pools,
        }

    return {
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


PER_PROMPTS = "$/M IN"
"""What stands in place of ``$/M OUT`` where a model makes no tokens."""
HEADINGS = ("DEPLOYMENT", "GPUS", "$/H", "$/M OUT", "EXPECTED", "IN SLO", "TTFT p50/95/99", "ITL p50/95/99", "BINDS")
"""Columns of `rows`; milliseconds. ``EXPECTED`` is by closed forms, ``IN SLO`` in simulation."""
SPARE = ("EXPECTED", "$/M OUT", "ITL p50/95/99", "BINDS")
"""Those that a narrow terminal does without."""


def headings(outcome: PlanOutcome) -> Sequence[str]:
    """Return the columns of an outcome's rows."""
    return HEADINGS if outcome.request.answers else [each.replace("$/M OUT", PER_PROMPTS) for each in HEADINGS]


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
