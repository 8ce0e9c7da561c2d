"""Measured profiles: those that a plan takes of engines that it starts here, before it plans."""

import asyncio
from pathlib import Path

import msgspec

from penstock.config.settings.cluster_settings import PoolSettings
from penstock.engine.settings import SimSettings, TimingSettings
from penstock.kernel.errors import ConfigError
from penstock.kernel.values import RequestShape
from penstock.profiler.deployment_plan.engine_candidates import EngineCatalog
from penstock.profiler.deployment_plan.plan_request import PlanRequest
from penstock.profiler.deployment_plan.planned_traffic import BLOCK, PlannedTraffic, traffic_of
from penstock.profiler.measurement.profile_run import ProfileOptions, run
from penstock.profiler.measurement.sweep import SweepOptions

MEASURE = "measure"
"""In place of a profile's folder: take one. A folder of that name is ``./measure``."""
SECONDS = 1800.0
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
        asyncio.run(run(_options(request, gpu, (int(size),) if size else (), folder)))
        profiles[key] = str(folder)
    return msgspec.structs.replace(request, profiles=profiles)


def _options(request: PlanRequest, gpu: str, sizes: tuple[int, ...], folder: Path) -> ProfileOptions:
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
        seconds=SECONDS,
        gpus=request.max_gpus,
    )


def _simulated_sizes(request: PlanRequest, traffic: PlannedTraffic, gpu: str) -> tuple[int, ...]:
    """Return the sizes of a simulated engine that fit its GPUs' memory; real ones are as many as the machine has."""
    fitting = EngineCatalog(msgspec.structs.replace(request, profiles={}), traffic).candidates["aggregated"]
    timings = [engine.sim.timing for engine in fitting if engine.gpu == gpu]
    return tuple(sorted({each.tensor_parallel_size for each in timings if each.expert_parallel_size == 1}))
