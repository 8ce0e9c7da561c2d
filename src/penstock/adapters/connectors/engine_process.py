"""Engine processes as their runner knows them: a process that serves, its launch spec and the template of a pool."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol


class EngineProcess(NamedTuple):
    """A process that serves. ``pid``: None where others run it; ``card``: fields that are better known here."""

    worker: str
    pool: str
    url: str
    pid: int | None
    card: dict[str, Any]


class StartReader(Protocol):
    """Reads a start's log: `penstock.adapters.engines.start_log.StartLog`."""

    def read(self, line: str, at: float) -> None: ...
    def phases(self, born: float, served: float) -> dict[str, float | None]: ...


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
    def differences(self, command: Sequence[str]) -> Sequence[str]: ...
    def start_log(self) -> StartReader: ...


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
