"""Planner inputs that exist before any observation: engine profiles and benchmarks, and a trace of an earlier time."""

import gzip
from collections.abc import Mapping
from pathlib import Path

import msgspec

from penstock.config.files.profile_folder import read_profile
from penstock.config.files.timing_files import load_timing
from penstock.config.settings.cluster_settings import ClusterSettings, PoolSettings
from penstock.engine.self_benchmark import perf_metrics
from penstock.engine.settings import SimSettings
from penstock.kernel.errors import ConfigError
from penstock.kernel.values import RequestShape, Role
from penstock.planner.forecast.warm_up import TraceInterval
from penstock.planner.performance.speed_sources import KnownSpeeds, SourceName
from penstock.planner.policies.policy_inputs import PolicyInputs
from penstock.traffic.formats.trace_format import reader

DESCRIBED: dict[str, SourceName] = {"aiconfigurator": "aiconfigurator", "operators": "profile", "roofline": "roofline"}
"""Kinds of timing of a simulated engine that describe a real engine -> their name as a source."""


def inputs_of(settings: ClusterSettings) -> PolicyInputs:
    """Return the policies' inputs beside observations. Some 20 ms per kind of simulated engine.

    Raises:
        ConfigError: a profile, a timing table or a trace can't be read.
    """
    classic = settings.planner.classic
    profile = None if classic.profile is None else read_profile(classic.profile)
    measured: dict[bytes, Mapping[str, object]] = {}
    known: dict[str, dict[Role, KnownSpeeds]] = {}
    for model, entry in settings.models.items():
        for pool in entry.pools.values():
            metrics: dict[SourceName, Mapping[str, object]] = {}
            why_not: dict[SourceName, str] = {}
            described = DESCRIBED.get(pool.sim.timing.kind)
            if _simulated(pool):
                metrics["self-benchmark"] = _measured(pool.sim, measured)
            else:
                why_not["self-benchmark"] = f"{pool.engine} measures nothing of itself"
                if described is not None and not (described == "profile" and profile is not None):
                    metrics[described] = _measured(pool.sim, measured)
            known.setdefault(model, {})[pool.role] = KnownSpeeds(metrics=metrics, profile=profile, why_not=why_not)
    trace = classic.forecast.warm_up_trace
    return PolicyInputs(slo=settings.slo, speeds=known, traces={} if trace is None else {"": rows_of(Path(trace))})


def rows_of(path: Path) -> list[TraceInterval]:
    """Return the requests of a trace in any known format, ``.gz`` or not.

    Raises:
        ConfigError: it can't be read, or its format is unknown.
    """
    try:
        with gzip.open(path) if path.name.endswith(".gz") else path.open("rb") as file:
            trace = reader(None, file, name=str(path), skip_bad=True, block_size=None)
            return [TraceInterval(request.at, RequestShape(request.isl, request.osl)) for request in trace]
    except (OSError, EOFError) as error:
        raise ConfigError(
            f"planner.classic.forecast.warm_up_trace {path} can't be read: {error}",
            hint="name a trace, such as 'penstock trace info' takes it",
        ) from error


def _simulated(pool: PoolSettings) -> bool:
    return pool.engine == "sim" and not pool.urls


def _measured(sim: SimSettings, before: dict[bytes, Mapping[str, object]]) -> Mapping[str, object]:
    """Return the self-benchmark of an engine of these settings; pools of equal engines are measured once."""
    key = msgspec.json.encode(sim)
    if key not in before:
        before[key] = perf_metrics(sim, load_timing(sim.timing))
    return before[key]
