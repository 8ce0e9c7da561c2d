"""What is an engine to a connector, and what must be handed in to start and to part with one?"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol


class Engine(NamedTuple):
    """A process that serves. ``card``: fields of its card that whoever started it knows better than it does."""

    worker: str
    pool: str
    url: str
    pid: int
    card: dict[str, Any]


class LaunchLike(Protocol):
    """How to start an engine: `penstock.adapters.engines.launch.Launch`."""

    @property
    def argv(self) -> tuple[str, ...]: ...
    @property
    def env(self) -> dict[str, str]: ...
    @property
    def url(self) -> str | None: ...
    @property
    def start_timeout(self) -> float | None: ...
    @property
    def card(self) -> dict[str, Any]: ...


class Template(NamedTuple):
    """How to start an engine of a pool.

    ``component``: names its entries in the state file, and ``component-number`` its engines. ``launch``: from (worker,
    free port, GPUs). ``gpus``: how many each engine has.
    """

    component: str
    launch: Callable[[str, int, Sequence[int]], LaunchLike]
    gpus: int = 0

    def worker(self, number: int) -> str:
        """Return the id of the engine with a number."""
        return f"{self.component}-{number}"

    def number(self, worker: str) -> int | None:
        """Return the number of the engine with an id; None where it is none of these."""
        component, _, number = worker.rpartition("-")
        return int(number) if component == self.component and number.isdecimal() else None


class Care(Protocol):
    """What the rest of a supervisor does about engines."""

    async def lacks(self, url: str) -> str | None:
        """Say what a server that was started still lacks, or None once it serves."""
        ...

    async def came(self, engine: Engine) -> None:
        """It serves: let the routers know. Called again where it stays although it was to leave.

        Raises:
            PenstockError: it is not what it should be; it is ended and started again.
        """
        ...

    async def leave(self, engine: Engine) -> None:
        """Return when it may be ended; cancelled where it may stay after all."""
        ...

    async def gone(self, engine: Engine) -> None:
        """It has ended."""
        ...
