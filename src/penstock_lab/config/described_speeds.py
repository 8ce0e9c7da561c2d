"""Described speeds: what is known of engines before they serve, from profiles and timing models, and an earlier trace.

Entries of the seam ``speeds``: of all pools for the planner's policies, and of one worker for the router.
"""

import gzip
import logging
from pathlib import Path

import msgspec

from penstock import extension
from penstock.config.settings.cluster_settings import ClusterSettings, PoolSettings
from penstock.kernel.errors import ConfigError
from penstock.kernel.values import JsonObject, RequestShape, Role, WorkerCard
from penstock.planner.forecast.trace_interval import TraceInterval
from penstock.planner.performance.speed_sources import KnownSpeeds, SourceName
from penstock.planner.policies.policy_inputs import PolicyInputs
from penstock_dynamo.profile_folder import pool_profile
from penstock_lab.config.timing_files import load_timing
from penstock_lab.engine.self_benchmark import perf_metrics
from penstock_lab.engine.settings import SimSettings

log = logging.getLogger("penstock.planner")

DESCRIBED: dict[str, SourceName] = {
    "aiconfigurator": "aiconfigurator",
    "operators": "profile",
    "roofline": "roofline",
    "table": "profile",
}
"""Kinds of timing of a simulated engine that describe a real engine -> their name as a source."""


def inputs_of(settings: ClusterSettings) -> PolicyInputs:
    """Return the policies' inputs beside observations. Some 20 ms per kind of simulated engine.

    Raises:
        ConfigError: a profile, a timing table or a trace can't be read.
    """
    measured: dict[bytes, JsonObject] = {}
    known: dict[str, dict[Role, KnownSpeeds]] = {}
    for model, entry in settings.models.items():
        for name, pool in sorted(entry.pools.items()):
            if pool.role in known.get(model, {}):
                continue  # policies plan the first pool of a role
            metrics: dict[SourceName, JsonObject] = {}
            why_not: dict[SourceName, str] = {}
            described = DESCRIBED.get(pool.sim.timing.kind)
            profile = pool_profile(model, name, pool, settings.planner.classic.profile)
            if _is_simulated(pool):
                metrics["self-benchmark"] = _measured(pool.sim, measured)
            else:
                why_not["self-benchmark"] = f"{pool.engine} measures nothing of itself"
                if described is not None and not (described == "profile" and profile is not None):
                    metrics[described] = _measured(pool.sim, measured)
            known.setdefault(model, {})[pool.role] = KnownSpeeds(metrics=metrics, profile=profile, why_not=why_not)
    trace = settings.planner.classic.forecast.warm_up_trace
    return PolicyInputs(slo=settings.slo, speeds=known, traces={} if trace is None else {"": rows_of(Path(trace))})


def described_speed(settings: ClusterSettings, card: WorkerCard) -> dict[str, float] | None:
    """Return the lines of prefill and decode that the router's latency cost takes, by a pool's own profile.

    For engines that do not measure themselves: None where no pool of its model and role names what describes it.

    Raises:
        ConfigError: the profile is of another model or engine, or can't be read.
    """
    entry = settings.models.get(card.model)
    for name, pool in () if entry is None else entry.pools.items():
        if pool.role == card.role and pool.sim.timing.kind in DESCRIBED:
            pool_profile(card.model, name, pool)
            # The line counts KV blocks, and those are the engine's own.
            block_size = card.block_size or pool.sim.block_size
            fit = _measured(msgspec.structs.replace(pool.sim, block_size=block_size), {})["fit"]
            return {name: float(value) for name, value in fit.items()}
    return None


def rows_of(path: Path) -> list[TraceInterval]:
    """Return the requests of a trace in any known format, ``.gz`` or not.

    Raises:
        ConfigError: it can't be read, or its format is unknown.
    """
    reader = extension.entry("trace format", "any", "planner.classic.forecast.warm_up_trace")
    try:
        with gzip.open(path) if path.name.endswith(".gz") else path.open("rb") as file:
            trace = reader(None, file, name=str(path), skip_bad=True, block_size=None)
            rows = [TraceInterval(request.at, RequestShape(request.isl, request.osl)) for request in trace]
    except (OSError, EOFError) as error:
        raise ConfigError(
            f"planner.classic.forecast.warm_up_trace {path} can't be read: {error}",
            hint="name a trace, such as 'penstock trace info' takes it",
        ) from error
    if not trace.timed:
        raise ConfigError(
            f"planner.classic.forecast.warm_up_trace {path} has no times, and so no rate",
            hint="give it times with 'penstock trace convert FILE OUT --target-rate N', or name another trace",
        )
    for note in trace.notes:
        log.warning("the warm-up trace %s: %s", path, note)
    if trace.skipped:
        log.warning("the warm-up trace %s has bad rows (%d), such as: %s", path, trace.skipped, trace.errors[0])
    return rows


def _is_simulated(pool: PoolSettings) -> bool:
    return pool.engine == "sim" and not pool.attached


def _measured(sim: SimSettings, before: dict[bytes, JsonObject]) -> JsonObject:
    """Return the self-benchmark of an engine of these settings; pools of equal engines are measured once."""
    key = msgspec.json.encode(sim)
    if key not in before:
        before[key] = perf_metrics(sim, load_timing(sim.timing))
    return before[key]
