"""`RoutedRequest`: the router's record of one request, its phases and the table of their transitions.

    queued ──► remote ──► prefill ──► streaming ──► done
       │     │    │  ▲       │  ▲          │          ▲
       │     └────┼──┼───────┘  │ retry    │          │
       │          └──┴──────────┘          │          │   (remote: a stage before the last, on a worker of its own)
       │             ▲                     │ migrate  │
       │  waiting ───┴─────────────────────┤          │   (waiting_for_worker: none for what comes next is there)
       └──────────┴─────────────┴──────────┴──────────┘   rejected, failed, cancelled, expired

Whatever happens, a request that arrived has exactly one terminal effect (`Closed`).
"""

from collections.abc import Mapping
from typing import Literal

import msgspec

from penstock.kernel.errors import InvariantError
from penstock.kernel.machine import Nanos
from penstock.kernel.values import HandoffProtocol, Prompt, RequestId, Role, Target, WorkerId
from penstock.router.events import Arrived, Failed, Handoff, Resume, StageLeg

Phase = Literal["arrived", "queued", "waiting_for_worker", "remote", "prefill", "streaming", "done"]
Step = Literal["queue", "await_worker", "stage", "staged", "dispatch", "first", "retry", "migrate", "close"]

TRANSITIONS: Mapping[tuple[Phase, Step], Phase] = {
    ("arrived", "queue"): "queued",
    ("arrived", "await_worker"): "waiting_for_worker",
    ("arrived", "dispatch"): "prefill",
    ("arrived", "close"): "done",
    ("queued", "await_worker"): "waiting_for_worker",
    ("queued", "dispatch"): "prefill",
    ("queued", "close"): "done",
    ("waiting_for_worker", "dispatch"): "prefill",
    ("waiting_for_worker", "close"): "done",
    ("arrived", "stage"): "remote",
    ("queued", "stage"): "remote",
    ("waiting_for_worker", "stage"): "remote",
    ("remote", "staged"): "arrived",
    ("remote", "retry"): "arrived",
    ("remote", "close"): "done",
    ("prefill", "first"): "streaming",
    ("prefill", "retry"): "arrived",
    ("prefill", "close"): "done",
    ("streaming", "migrate"): "arrived",
    ("streaming", "close"): "done",
}


HEDGE = "~hedge"
"""Owner of a second attempt's load among the active sequences."""
STAGE = "~stage"
"""Owner of the load of a stage before the last."""


class Hedge(msgspec.Struct):
    """A second attempt that runs beside the first one."""

    attempt: int
    target: Target
    placed: Nanos
    prefill_ahead: int
    cached: int
    unhashed_blocks: int


class Remote(msgspec.Struct):
    """A stage before the last, on a worker of its own, until what it made has been fetched."""

    attempt: int
    stage: Role
    target: Target
    epoch: int
    """Epoch at which that engine joined."""
    protocol: HandoffProtocol
    key: int
    placed: Nanos
    prefill_ahead: int
    leg: int
    """Its place among the request's legs."""
    done: bool = False
    fetches: int = 0
    """Workers that were sent to fetch what it made."""

    @property
    def handoff(self) -> Handoff:
        return Handoff(protocol=self.protocol, key=self.key)


class Believed(msgspec.Struct, frozen=True):
    """Tokens of a prompt that a device's cache had by its events. ``removed``: `KvEventStream.removed` of that time."""

    tokens: int
    removed: int


class UnprovenFault(msgspec.Struct):
    """A failed attempt whose cause may be the worker or the request; the next attempt shows which (`blame`)."""

    worker: WorkerId
    epoch: int
    """Epoch at which that engine joined."""
    placed: Nanos
    status: int | None
    reason: str


class RoutedRequest(msgspec.Struct):
    """One request between `Arrived` and `Closed`."""

    event: Arrived
    arrived: Nanos
    deadline: Nanos
    phase: Phase = "arrived"
    attempt: int = 0
    """The newest attempt's number."""
    current: int = 0
    """The number of the attempt on ``target``; the newest, but for a hedge."""
    hedge: Hedge | None = None
    remote: Remote | None = None
    staged: int = 0
    """Stages before the last that are done."""
    encoded: bool = False
    """Its images have been encoded, or nobody is to do that beforehand."""
    encode: tuple[int, ...] = ()
    """Places of the media that are to be encoded; empty once they were, or were counted as failed."""
    encode_done: bool = False
    """Whether an encode worker has done it."""
    media_cached: int | None = None
    """Its media that were encoded already; None where that was not asked."""
    local: str = ""
    """Why its prefill is no longer done remotely; empty while it may be."""
    flow: str = ""
    """Why its present stage is the one that it is."""
    remote_cached: int | None = None
    """Prompt tokens that the remote prefill took from a cache."""
    target: Target | None = None
    tries: int = 0
    """Attempts since it last had output."""
    tried: list[tuple[WorkerId, int]] = []
    """Workers that failed since then, each with its epoch: one that came back may try again."""
    legs: list[StageLeg] = []
    placed: Nanos = 0
    """When it last left the queue or was placed at once."""
    queued: Nanos = 0
    """How long it has waited in the queue, over all attempts."""
    queued_since: Nanos | None = None
    waited_for: str = ""
    """Why it was let wait, where its tenant's share was the reason."""
    expected_cached: int = 0
    believed: "Believed | None" = None
    """What of them its worker's own events said was in its device's cache."""
    prefill_ahead: int = 0
    """Prefill tokens on its worker when it was placed, its own included: what its TTFT is explained by."""
    transfer_blocks: int | None = None
    """Blocks that its worker was to fetch from another one; None where it does the prefill."""
    first: Nanos | None = None
    resumed_prompt: Prompt | None = None
    """Its prompt with the output that a later leg goes on from."""
    tokens: int = 0
    resumed: int = 0
    """Output tokens that stand in ``prompt``."""
    migrations: int = 0
    last_failure: str = ""
    last_status: int | None = None
    last_retry_after: float | None = None
    unproven: UnprovenFault | None = None
    at_fault: str = ""
    """Why it is itself at fault, and not the workers that failed; empty while nothing says so."""
    adapter_plan: str = ""
    """Whether its worker holds its LoRA adapter or loads it."""
    adapter_cold: bool = False
    """It waits on its worker for the adapter, so that its TTFT says nothing about the worker's speed."""
    awaits_adapter: bool = False
    """It waits until a worker has room for its LoRA adapter."""
    prefetches: bool = False
    """The tiers of its worker bring its blocks up when its session's next request is likely."""
    counted: bool = False
    """It counts among its pool's requests in flight."""
    work: int = 0
    """Tokens that it counts in its tenant's share; 0 before it is sent to a worker, and where there are no shares."""

    @property
    def id(self) -> RequestId:
        return self.event.id

    @property
    def prompt(self) -> Prompt:
        """What its next leg has to prefill: the prompt as it arrived, and the output so far where a worker was lost."""
        return self.event.prompt if self.resumed_prompt is None else self.resumed_prompt

    def note_failure(self, event: Failed) -> None:
        """Keep what an attempt failed of: it is the request's own reason where no other attempt follows."""
        self.last_failure, self.last_status = event.reason, event.status
        self.last_retry_after = event.retry_after

    @property
    def on_worker(self) -> bool:
        """Whether a worker that answers the client has it."""
        return self.phase in ("prefill", "streaming")

    @property
    def handed(self) -> bool:
        """Whether a worker holds, or is making, what the one that answers is to fetch."""
        return self.remote is not None and self.remote.stage == "prefill"

    def staging(self, attempt: int) -> bool:
        """Whether this is an attempt that runs and does a stage before the last."""
        return self.remote is not None and not self.remote.done and attempt == self.remote.attempt

    def resume(self, point: Resume) -> None:
        """Let the next leg go on from the output so far."""
        self.resumed_prompt = point.prompt
        self.tokens = self.resumed = point.tokens
        self.migrations += 1
        self.tries = 0
        self.local = ""

    def pin(self, worker: WorkerId) -> None:
        """Let the next leg be on a worker that a gateway in front has chosen already."""
        wish = msgspec.structs.replace(self.event.preferences, worker=worker, rank=None, allowed=None)
        self.event = msgspec.structs.replace(self.event, preferences=wish)
        self.local = "a gateway chose another worker"

    def leave_queue(self, now: Nanos) -> None:
        """Stop the clock of its waiting, if it runs."""
        if self.queued_since is not None:
            self.queued += now - self.queued_since
            self.queued_since = None

    def step(self, step: Step) -> None:
        """Go to the next phase.

        Raises:
            InvariantError: the table has no such transition.
        """
        phase = TRANSITIONS.get((self.phase, step))
        if phase is None:
            raise InvariantError(f"request {self.id} in phase {self.phase} cannot {step}")
        self.phase = phase
