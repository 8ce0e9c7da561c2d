"""Sim checks: what is wrong with the simulated engines and the profiles of a config, and with the files they name."""

from collections.abc import Iterator
from pathlib import Path

from penstock.config.checks import FROM_HERE
from penstock.config.reading.problems import Complaint
from penstock.config.settings.cluster_settings import ClusterSettings, PoolSettings
from penstock.kernel.errors import ConfigError
from penstock_dynamo.profile_folder import pool_profile, read_profile
from penstock_lab.config.timing_files import timing_files
from penstock_lab.engine.settings import checked, checked_monotone
from penstock_lab.engine.timing.gpus import GPUS


def sim_complaints(settings: ClusterSettings) -> Iterator[Complaint]:
    """Return the contradictions between settings of simulated engines."""
    for path, pool in _simulated_pools(settings):
        for check in (lambda pool=pool: checked(pool.sim), lambda pool=pool: checked_monotone(pool.sim.timing)):
            try:
                check()
            except ConfigError as error:
                yield (*path, "sim"), error.message, error.hint
        if pool.block_size is not None and pool.block_size != pool.sim.block_size:
            hint = "leave block_size out: the engine tells it"
            yield (*path, "block_size"), f"is {pool.block_size}, but sim.block_size is {pool.sim.block_size}", hint


def sim_files(settings: ClusterSettings) -> Iterator[Complaint]:
    """Return the timing files that are not there, and the profiles that can't be read."""
    for path, pool in _simulated_pools(settings):
        for knob, file in timing_files(pool.sim.timing).items():
            if not Path(file).exists():
                hint = f"a GPU is one of {', '.join(GPUS)}, or a YAML file; {FROM_HERE}" if knob == "gpu" else FROM_HERE
                yield (*path, "sim", "timing", knob), f"{file} is not there", hint
    yield from _profiles(settings)


def _simulated_pools(settings: ClusterSettings) -> Iterator[tuple[tuple[str, ...], PoolSettings]]:
    for model, entry in settings.models.items():
        for name, pool in entry.pools.items():
            if pool.engine == "sim" and not pool.attached:
                yield ("models", model, "pools", name), pool


def _profiles(settings: ClusterSettings) -> Iterator[Complaint]:
    of_all = settings.planner.classic.profile
    if of_all is not None:
        try:
            read_profile(of_all)
        except ConfigError as error:
            yield ("planner", "classic", "profile"), error.message, error.hint
            of_all = None
    for model, entry in settings.models.items():
        for name, pool in entry.pools.items():
            timing = pool.sim.timing
            own = timing.kind == "table" and timing.profile is not None and Path(timing.profile).is_dir()
            path = ("models", model, "pools", name, "sim", "timing", "profile")
            try:
                pool_profile(model, name, pool, of_all)
            except ConfigError as error:
                yield path if own else ("planner", "classic", "profile"), error.message, error.hint
