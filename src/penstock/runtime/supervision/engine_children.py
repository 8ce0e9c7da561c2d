"""Engine children: processes that a supervisor keeps beside the engines of this machine, at the seam ``child``.

An entry is called with an `EngineSite` and returns the `EngineChildren` of one kind, such as all tier processes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from penstock.adapters.engines.launch import EngineAddition
from penstock.adapters.seams import Store
from penstock.config.settings.cluster_settings import PoolSettings, SuperviseSettings
from penstock.runtime.cluster_state.crash_log import CrashBook


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSite:
    """This machine, as the place of engines and of what runs beside them.

    Args:
        state, namespace: folder of the supervisor's state file, and its name in there.
        logs: folder for their logs.
        env: theirs, with the cluster's secret where there is one.
        host: address on which other machines reach them.
        ttl: seconds after which what they put into the store goes when this process dies.
    """

    settings: SuperviseSettings
    state: Path
    namespace: str
    logs: Path
    env: Mapping[str, str]
    host: str
    crashes: CrashBook
    store: Store
    ttl: float


class EngineChildren(Protocol):
    """All processes of one kind: `add` each pool, `begin`, then `stop`."""

    def add(self, base: str, model: str, pool: PoolSettings) -> None:
        """Know a pool whose workers are called ``base-0`` and so on.

        Raises:
            ConfigError: it asks for what this machine has not.
        """
        ...

    def addition(self, worker: str, pool: PoolSettings) -> EngineAddition | None:
        """Return what the start of an engine needs; None where none is beside it.

        Raises:
            ConfigError: the engine's environment lacks what it needs.
        """
        ...

    def begin(self) -> None:
        """Start those that do not wait for an engine."""
        ...

    def spawned(self, worker: str, base: str, number: int) -> None:
        """Run one beside an engine that starts, the ``number``-th of its pool; it outlives restarts of the engine."""
        ...

    def forgotten(self, worker: str, base: str) -> None:
        """End that of an engine which is gone for good."""
        ...

    def use(self, settings: SuperviseSettings) -> None:
        """Use these settings from now on."""
        ...

    async def stop(self) -> None:
        """End all of them."""
        ...
