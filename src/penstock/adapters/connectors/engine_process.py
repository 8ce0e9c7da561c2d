"""Engine processes as connectors know them: launch spec, template of a pool, and the hooks at start and end."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol


class EngineProcess(NamedTuple):
    """A process that serves. ``card``: fields of its card that its starter knows better than the engine."""

    worker: str
    pool: str
    url: str
    pid: int
    card: dict[str, Any]


class LaunchSpec(Protocol):
    """How to start an engine: `penstock.adapters.engines.launch.Launch`."""

    @property
    def argv(self) -> tuple[str, ...]: ...
    @property
    def env(self) -> dict[str, str]: ...
    @property
    def url(self) -> str | None: ...
    @property
    def start_timeout(self) -> float: ...
    @property
    def card(self) -> dict[str, Any]: ...


class EngineTemplate(NamedTuple):
    """How to start an engine of a pool.

    ``component``: names its entries in the state file, and ``component-number`` its engines. ``launch``: from (worker,
    free port, GPUs). ``gpus``: how many each engine has.
    """

    component: str
    launch: Callable[[str, int, Sequence[int]], LaunchSpec]
    gpus: int = 0

    def worker(self, number: int) -> str:
        """Return the id of the engine with a number."""
        return f"{self.component}-{number}"

    def number(self, worker: str) -> int | None:
        """Return the number of the engine with an id; None where it is none of these."""
        component, _, number = worker.rpartition("-")
        return int(number) if component == self.component and number.isdecimal() else None


class ReplicaHooks(Protocol):
    """What the rest of a supervisor does when the state of an engine changes."""

    async def missing(self, url: str) -> str | None:
        """Return what a started server still lacks, or None once it serves."""
        ...

    async def replica_ready(self, engine: EngineProcess) -> None:
        """The engine serves: announce it to the routers. Called again where an engine that was to leave stays.

        Raises:
            PenstockError: the engine is not what it should be; it is ended and started again.
        """
        ...

    async def leave(self, engine: EngineProcess) -> None:
        """Return when the engine may be ended; cancelled where it may stay after all."""
        ...

    async def replica_ended(self, engine: EngineProcess) -> None:
        """The engine has ended."""
        ...

    def crashed(self, worker: str, reason: str) -> None:
        """A desired engine ended or did not start; ``reason``: a verb and what follows. It is started again."""
        ...
