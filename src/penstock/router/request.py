"""Where is a request in its life? The phases, the table of transitions and the record of one request.

    queued ──► prefill ──► streaming ──► done
       │          │  ▲          │          ▲
       │          └──┘ retry    │          │
       └──────────┴─────────────┴──────────┘   rejected, failed, cancelled, expired

Whatever happens, a request that arrived has exactly one terminal effect (`Closed`).
"""

from collections.abc import Mapping
from typing import Literal

import msgspec

from penstock.kernel.errors import InvariantError
from penstock.kernel.machine import Nanos
from penstock.kernel.values import RequestId, Target, WorkerId
from penstock.router.events import Arrived, Leg

Phase = Literal["arrived", "queued", "prefill", "streaming", "done"]
Step = Literal["queue", "dispatch", "first", "retry", "close"]

TRANSITIONS: Mapping[tuple[Phase, Step], Phase] = {
    ("arrived", "queue"): "queued",
    ("arrived", "dispatch"): "prefill",
    ("arrived", "close"): "done",
    ("queued", "dispatch"): "prefill",
    ("queued", "close"): "done",
    ("prefill", "first"): "streaming",
    ("prefill", "retry"): "arrived",
    ("prefill", "close"): "done",
    ("streaming", "close"): "done",
}


class Request(msgspec.Struct):
    """One request between `Arrived` and `Closed`."""

    event: Arrived
    arrived: Nanos
    deadline: Nanos
    phase: Phase = "arrived"
    attempt: int = 0
    target: Target | None = None
    tried: list[WorkerId] = []
    legs: list[Leg] = []
    placed: Nanos = 0
    """When it last left the queue or was placed at once."""
    queued: Nanos = 0
    """How long it has waited in the queue, over all attempts."""
    queued_since: Nanos | None = None
    expected_cached: int = 0
    prefill_ahead: int = 0
    """Prefill tokens on its worker when it was placed, its own included: what its TTFT is explained by."""
    first: Nanos | None = None
    tokens: int = 0
    last_failure: str = ""
    last_status: int | None = None
    counted: bool = False
    """It counts among its pool's requests in flight."""

    @property
    def id(self) -> RequestId:
        return self.event.id

    @property
    def on_worker(self) -> bool:
        return self.phase in ("prefill", "streaming")

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
