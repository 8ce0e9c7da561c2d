"""What is known before anything is seen? Profiles and benchmarks of the engines, and a trace of an earlier time."""

import gzip
from collections.abc import Mapping
from pathlib import Path

import msgspec

from penstock.config.cluster import ClusterSettings, PoolSettings
from penstock.config.profile_folder import read_profile
from penstock.config.timing_files import load_timing
from penstock.engine.benchmark import perf_metrics
from penstock.engine.settings import SimSettings
from penstock.kernel.errors import ConfigError
from penstock.kernel.values import Role
from penstock.planner.forecast.warm_up import Row
from penstock.planner.performance.sources import Known, SourceName
from penstock.planner.policies.known import Inputs
from penstock.traffic.formats import reader

DESCRIBED: dict[str, SourceName] = {"aiconfigurator": "aiconfigurator", "operators": "profile", "roofline": "roofline"}
"""Kinds of timing that describe a real engine, as a simulation of it takes them, and what they are as a source."""


def inputs_of(settings: ClusterSettings) -> Inputs:
    """Return what the policies are given beside what they see. Some 20 ms per kind of simulated engine.

    Raises:
        ConfigError: a profile, a timing table or a trace can't be read.
    """
    classic = settings.planner.classic
    profile = None if classic.profile is None else read_profile(classic.profile)
    measured: dict[bytes, Mapping[str, object]] = {}
    known: dict[str, dict[Role, Known]] = {}
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
            known.setdefault(model, {})[pool.role] = Known(metrics=metrics, profile=profile, why_not=why_not)
    trace = classic.forecast.warm_up_trace
    return Inputs(known=known, traces={} if trace is None else {"": rows_of(Path(trace))})


def rows_of(path: Path) -> list[Row]:
    """Return the requests of a trace in any format that is known, ``.gz`` or not.

    Raises:
        ConfigError: it can't be read, or looks like no format.
    """
    try:
        with gzip.open(path) if path.name.endswith(".gz") else path.open("rb") as file:
            trace = reader(None, file, name=str(path), skip_bad=True, block_size=None)
            return [Row(request.at, request.isl, request.osl) for request in trace]
    except (OSError, EOFError) as error:
        raise ConfigError(
            f"planner.classic.forecast.warm_up_trace {path} can't be read: {error}",
            hint="name a trace, such as 'penstock trace info' takes it",
        ) from error


def _simulated(pool: PoolSettings) -> bool:
    return pool.engine == "sim" and not pool.urls


def _measured(sim: SimSettings, before: dict[bytes, Mapping[str, object]]) -> Mapping[str, object]:
    """Return what an engine of these settings measures of itself; pools of equal engines are measured once."""
    key = msgspec.json.encode(sim)
    if key not in before:
        before[key] = perf_metrics(sim, load_timing(sim.timing))
    return before[key]
