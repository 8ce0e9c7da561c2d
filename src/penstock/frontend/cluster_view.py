"""Cluster view: what a frontend needs of the node behind it, and a request's connection to the router."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple, Protocol

from penstock.adapters.seams import Store
from penstock.adapters.sources.frontend_counters import FrontendCounters
from penstock.config.settings.cluster_settings import ClusterSettings
from penstock.kernel.machine import Effect, Nanos
from penstock.kernel.values import RequestId, Target, WorkerCard, WorkerId
from penstock.router.events import Arrived, Closed, Dispatch, Resume
from penstock.router.kv_index.image_placeholders import ImagePlaceholders
from penstock.runtime.kv_events.peer_blocks import PeerBlocks
from penstock.runtime.node.adapter_loads import AdapterLoads
from penstock.runtime.node.node_status import NodeStatus
from penstock.runtime.planning.counters_export import FrontendCounts


class RequestTicket(Protocol):
    """One request's connection to the router: `penstock.runtime.node.tickets.Ticket`."""

    id: RequestId
    attempt: int
    closed: Closed | None
    aborted: bool

    async def next(self) -> Dispatch | Closed: ...
    def first_token(self, attempt: int | None = None) -> None: ...
    def grown(self, tokens: int) -> None: ...
    def finished(self, tokens: int | None, cached: int | None, attempt: int | None = None) -> None: ...
    def failed(
        self,
        reason: str,
        *,
        retryable: bool,
        worker_at_fault: bool = True,
        status: int | None = None,
        retry_after: float | None = None,
        resume: Resume | None = None,
        leaving: bool = False,
        received: bool = True,
        attempt: int | None = None,
        served_by: WorkerId | None = None,
    ) -> None: ...
    def staged(self, attempt: int, *, kv_retained: bool, cached: int | None) -> None: ...
    def cancelled(self) -> None: ...


class TicketDesk(Protocol):
    """All requests' connections to the router: `penstock.runtime.node.tickets.Tickets`."""

    def arrive(self, event: Arrived) -> RequestTicket: ...
    def is_open(self, request: RequestId) -> bool: ...
    def listen(self, listener: Callable[[Nanos, Effect], None]) -> None: ...


class BelievedBlocks(NamedTuple):
    """What the router believes that a worker has. ``hashes``: the worker's own, of host memory and of what is below."""

    state: str
    hashes: tuple[Sequence[int], Sequence[int]]


class ClusterView(Protocol):
    """What a frontend needs of the node behind it, beside tickets."""

    name: str
    """Name of this process's router."""

    @property
    def store(self) -> Store | None:
        """Store for the operators' desired state; None where there is none."""
        ...

    @property
    def started(self) -> ClusterSettings:
        """The settings of the start, before operators changed some."""
        ...

    @property
    def adapters(self) -> AdapterLoads | None:
        """LoRA adapters: which there are, and their loads; None where nothing is loaded."""
        ...

    def now(self) -> Nanos:
        """Return the router's time."""
        ...

    def status(self) -> NodeStatus:
        """Return the status for operators: models, workers, queues, counts, findings."""
        ...

    def cards(self) -> Sequence[WorkerCard]:
        """Return the cards of all present workers."""
        ...

    def changes(self) -> int:
        """Return how often workers have changed: `cards` and `block_size` stay the same while this does."""
        ...

    def is_current(self, card: WorkerCard) -> bool:
        """Return whether the worker of this card, in the same epoch, is still present."""
        ...

    def alone(self, card: WorkerCard) -> bool:
        """Return whether no other worker can take requests for the model of this card."""
        ...

    @property
    def silent(self) -> Collection[WorkerId]:
        """Workers that do not answer the health checks of their supervisors."""
        ...

    def doubt(self, worker: WorkerId, on: bool, reason: str) -> None:
        """Send a worker requests only where no other is left, or as before."""
        ...

    def prefill_tokens(self, model: str, target: Target) -> int:
        """Return how many prompt tokens wait at a target for their first output, of all frontends' requests."""
        ...

    def images(self, model: str) -> ImagePlaceholders | None:
        """Return what is known of the images that a model's engines hold."""
        ...

    def block_size(self, model: str) -> int:
        """Return a model's tokens per block, by which the router compares prefixes."""
        ...

    def ready(self, model: str) -> int:
        """Return how many workers can take a request of a model now."""
        ...

    def believed(self, worker: WorkerId) -> BelievedBlocks | None:
        """Return which blocks the router believes in a worker's lower tiers; None where there is no such worker."""
        ...

    def kv_events(self) -> Mapping[tuple[str, str], int]:
        """Return how many KV events were applied, by (event type, result)."""
        ...

    def kv_blocks(self, target: Target) -> PeerBlocks | None:
        """Return all that is known of a worker's rank, for another frontend; None where it is not all."""
        ...

    def counters(self) -> Mapping[str, float]:
        """Return health of loop, router and KV events.

        Seconds: loop_longest, loop_recent, kv_lag (of what waits now), kv_lag_longest (of the last minute); counts:
        loop_stalls, router_faults, kv_waiting (ranks), kv_skipped (batches), kv_joining and kv_from_peers
        (ranks).
        """
        ...

    def notes(self) -> Mapping[str, int]:
        """Return how often each kind of note was taken."""
        ...

    def export_counters(self, counts: FrontendCounts) -> FrontendCounters:
        """Return the counters for planners: this frontend's counts, and the workers as they are."""
        ...

    def peers(self) -> Sequence[str]:
        """Return the admin URLs of the cluster's other frontend processes."""
        ...
