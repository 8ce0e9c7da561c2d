"""`EngineRequest`: one request in the simulated engine, and the queues in which requests wait (FCFS, priority)."""

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from penstock.kernel.machine import Nanos, Snapshot
from penstock.kernel.values import Prompt
from penstock_lab.engine.events import SubmitRequest
from penstock_lab.engine.simulated_output import SimulatedOutput

_NOTHING: dict[str, int] = {}
State = Literal["waiting", "pulling", "landed", "prefilling", "decoding", "gone"]


class EngineRequest:
    """One request. Tokens unless the name says otherwise; ``named`` and ``private`` are blocks that it holds.

    While it decodes, ``generated`` stays as it was when it joined at step ``join``, and ``private`` is not kept:
    `penstock_lab.engine.decode_batch` works both out from the engine's step counter.
    """

    def __init__(
        self,
        submit: SubmitRequest,
        serial: int,
        arrived: Nanos,
        prompt: int,
        chain: Sequence[int],
        answer: SimulatedOutput,
        target: int,
        priority: int,
    ) -> None:
        self.submit = submit
        self.serial = serial
        self.arrived = arrived
        self.prompt = prompt
        self.chain = chain
        self.answer = answer
        self.target = target
        self.priority = priority
        self.state: State = "waiting"
        self.generated = self.computed = self.named = self.private = self.cached = 0
        self.remote = 0
        """Prompt tokens to be brought from another engine; 0 once that was tried."""
        self.brought = 0
        """Prompt tokens that were, or are on their way; 0 after a preemption."""
        self.pulled = 0
        """Prompt tokens that its first pass found brought."""
        self.loading = 0
        """Blocks that are on their way from the tiers below."""
        self.tried = False
        """Whether that failed, so that it is computed."""
        self.sources = _NOTHING
        """tier -> prompt tokens that its first pass had from there; they count as cached, too."""
        self.started: Nanos | None = None
        self.first: Nanos | None = None
        self.preemptions = 0
        self.paused: Nanos | None = None
        """When its last token came, where it was preempted since."""
        self.order = self.join = self.ends = self.drafted = 0
        self.ladder: npt.NDArray[np.int64] | None = None

    @property
    def id(self) -> str:
        return self.submit.id

    @property
    def tokens_so_far(self) -> int:
        """Prompt and output tokens so far, unless it decodes."""
        return self.prompt + self.generated

    def dump(self) -> dict[str, Any]:
        """Return the state as plain data."""
        state: Snapshot = {name: getattr(self, name) for name in _DUMPED}
        submit = self.submit
        plain: dict[str, Any] = {name: list(value) for name in ("tokens", "output") if (value := getattr(submit, name))}
        if submit.prompt is not None:
            plain["prompt"] = Prompt(submit.prompt.isl, list(submit.prompt.blocks))
        submit = msgspec.structs.replace(submit, **plain)
        return {**state, "chain": list(self.chain), "submit": msgspec.to_builtins(submit)}

    @classmethod
    def load(
        cls,
        state: Snapshot,
        submit: SubmitRequest,
        answer: SimulatedOutput,
        chain: Callable[[Sequence[int]], Sequence[int]] = list,
    ) -> "EngineRequest":
        """Return the request that `dump` wrote; ``chain`` makes a chain of names."""
        request = cls(submit, 0, 0, 0, chain(state["chain"]), answer, 0, 0)
        for name in _DUMPED:
            setattr(request, name, state[name])
        return request


_DUMPED = (
    "serial",
    "arrived",
    "prompt",
    "target",
    "priority",
    "state",
    "generated",
    "computed",
    "named",
    "private",
    "cached",
    "remote",
    "brought",
    "pulled",
    "loading",
    "tried",
    "sources",
    "started",
    "first",
    "preemptions",
    "paused",
    "order",
    "join",
    "ends",
    "drafted",
)


class WaitingQueue(Protocol):
    """Requests that wait, the next one first."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[EngineRequest]: ...

    def head(self) -> EngineRequest:
        """Return the next one; there must be one."""
        ...

    def add(self, request: EngineRequest) -> None:
        """Take a new one in."""
        ...

    def put_back(self, request: EngineRequest) -> None:
        """Take in one that was preempted."""
        ...

    def remove(self, request: EngineRequest) -> None:
        """Take one out, wherever it stands."""
        ...


class Fcfs:
    """First come, first served; a preempted request goes to the front."""

    def __init__(self) -> None:
        self._line: OrderedDict[str, EngineRequest] = OrderedDict()

    def __len__(self) -> int:
        return len(self._line)

    def __iter__(self) -> Iterator[EngineRequest]:
        return iter(self._line.values())

    def head(self) -> EngineRequest:
        return next(iter(self._line.values()))

    def add(self, request: EngineRequest) -> None:
        self._line[request.submit.id] = request

    def put_back(self, request: EngineRequest) -> None:
        self._line[request.submit.id] = request
        self._line.move_to_end(request.submit.id, last=False)

    def remove(self, request: EngineRequest) -> None:
        del self._line[request.submit.id]


class ByPriority:
    """Lower priority numbers first, then by arrival, preempted or not."""

    def __init__(self) -> None:
        self._line: list[EngineRequest] = []

    def __len__(self) -> int:
        return len(self._line)

    def __iter__(self) -> Iterator[EngineRequest]:
        return iter(self._line)

    def head(self) -> EngineRequest:
        return self._line[0]

    def add(self, request: EngineRequest) -> None:
        insort(self._line, request, key=rank)

    def put_back(self, request: EngineRequest) -> None:
        insort(self._line, request, key=rank)

    def remove(self, request: EngineRequest) -> None:
        del self._line[bisect_left(self._line, rank(request), key=rank)]


def rank(request: EngineRequest) -> tuple[int, int]:
    """Return what priority scheduling sorts by: the lowest runs first, the highest is preempted first."""
    return (request.priority, request.serial)
