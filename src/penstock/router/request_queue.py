"""Queue of requests that wait for a worker: bounded, with strict classes, a policy and ageing.

A higher strict class goes before every lower one. Within a class the policy's score decides, highest first. Those that
have waited for ``age_after`` have starved: a tenth of the work that leaves the queue is theirs, oldest first. All of it
would make every policy FCFS as soon as waiting is longer than that, which is when the order matters.
"""

import heapq
from collections.abc import Callable, Iterator

import msgspec

from penstock.kernel.errors import InvariantError
from penstock.kernel.machine import SECOND, Nanos, nanos
from penstock.kernel.values import RequestId
from penstock.router.settings import QueuePolicy, QueueSettings


class QueuedRequest(msgspec.Struct, frozen=True):
    """What a policy may look at."""

    id: RequestId
    arrived: Nanos
    priority: int
    strict: int
    deadline: Nanos
    new_tokens: int
    """Prompt tokens less the best overlap over all workers, as of arrival."""
    tenant: str = ""
    """Whose share it is of, where router.queue.shares has any."""
    work: int = 0
    """Tokens of the prompt and of the expected output, where there are shares."""


class FadingSum(msgspec.Struct):
    """A sum whose parts fade: as it was, and when."""

    sum: float = 0.0
    at: Nanos = 0


class SharesState(msgspec.Struct):
    """State of the shares of a `penstock.router.fair_queue.FairQueue`, by tenant."""

    serving: dict[str, int]
    kicked: bool
    _clock: float
    _finish: dict[str, float]
    _demand: dict[str, FadingSum]
    _used: dict[str, FadingSum]
    _paced: dict[str, Nanos]
    _crowding: dict[str, Nanos]
    _full: FadingSum
    _arrivals: FadingSum
    _began: Nanos | None
    _outputs: dict[str, float]


class QueueState(msgspec.Struct):
    """State of a queue; ``dues`` and ``shares`` where tenants have shares."""

    waiting: list[QueuedRequest]
    due: int = 0
    dues: dict[str, int] = {}
    shares: SharesState | None = None


Score = Callable[[QueuedRequest], float]
"""Higher goes first. Source: Dynamo's queue keys (its name: router queue policy); edf is ours."""

POLICIES: dict[QueuePolicy, Score] = {
    "fcfs": lambda w: max(w.priority, 0) - w.arrived / SECOND,
    "lcfs": lambda w: w.priority + w.arrived / SECOND,
    # Smith's rule (1956): weight over processing time minimises the weighted mean completion.
    "wspt": lambda w: (1 + max(w.priority, 0)) / max(1, w.new_tokens),
    "edf": lambda w: -(w.deadline / SECOND - max(w.priority, 0)),
}


OTHERS_PER_STARVED = 9
"""Prompt tokens of the others that leave the queue for one of the starved requests, while there are any.

So the oldest waits for ten times the work of older ones at most, however many better ones come, and WSPT keeps nine
tenths of what it gains: the table is in docs/concepts/routing.md.
"""


class RequestQueue:
    """Requests that no worker may take yet."""

    def __init__(self, settings: QueueSettings) -> None:
        self._settings = settings
        self._score = POLICIES[settings.policy]
        self._age_after = nanos(settings.age_after)
        self._classes: dict[int, dict[RequestId, QueuedRequest]] = {}
        """Strict class -> its requests in order of arrival."""
        self._heaps: dict[int, list[tuple[float, int, RequestId]]] = {}
        self.waiting: dict[RequestId, int] = {}
        """Strict class of each request; to be read only."""
        self.work = 0
        """Tokens of the waiting requests; to be read only."""
        self._sequence = 0
        self._due = 0
        """Prompt tokens of others that go before the next starved request."""

    def __len__(self) -> int:
        return len(self.waiting)

    def __contains__(self, request: RequestId) -> bool:
        return request in self.waiting

    def __iter__(self) -> Iterator[QueuedRequest]:
        for members in self._classes.values():
            yield from members.values()

    def add(self, waiting: QueuedRequest) -> None:
        """Let a request wait; the caller has looked at the limit."""
        self._sequence += 1
        self.waiting[waiting.id] = waiting.strict
        self.work += waiting.work
        self._classes.setdefault(waiting.strict, {})[waiting.id] = waiting
        heapq.heappush(self._heaps.setdefault(waiting.strict, []), (-self._score(waiting), self._sequence, waiting.id))

    def remove(self, request: RequestId) -> bool:
        """Take a request out wherever it stands; return False where it does not wait."""
        strict = self.waiting.pop(request, None)
        if strict is None:
            return False
        members = self._classes[strict]
        self.work -= members.pop(request).work
        if not members:
            del self._classes[strict]
            del self._heaps[strict]
        elif len(self._heaps[strict]) > 64 and len(self._heaps[strict]) > 2 * len(members):
            # Removed requests stay in the heap until they surface: rebuild before they outnumber the living.
            self._heaps[strict] = [entry for entry in self._heaps[strict] if entry[2] in members]
            heapq.heapify(self._heaps[strict])
        return True

    def peek(self, now: Nanos) -> QueuedRequest | None:
        """Return the request that goes next, or None where none waits."""
        if not self._classes:
            return None
        strict = max(self._classes)
        oldest = next(iter(self._classes[strict].values()))
        if not self._due and now - oldest.arrived >= self._age_after:
            return oldest
        return self._best(strict)

    def take(self, waiting: QueuedRequest) -> None:
        """Take out the request that went next, and count its work for the share of the starved."""
        work = max(1, waiting.new_tokens)
        if waiting == self._best(waiting.strict):
            self._due = max(0, self._due - work)
        else:
            self._due += work * OTHERS_PER_STARVED
        self.remove(waiting.id)

    def _best(self, strict: int) -> QueuedRequest:
        """Return the request of a class that the policy prefers."""
        members = self._classes[strict]
        heap = self._heaps[strict]
        while heap[0][2] not in members:
            heapq.heappop(heap)
        return members[heap[0][2]]

    def waited(self, strict: int, now: Nanos, tenant: str | None = None) -> Nanos:
        """Return how long the longest waiting request has waited, of those that go before a new one of a class.

        ``tenant``: whose it is, where tenants have shares.
        """
        firsts = (next(iter(members.values())) for strictness, members in self._classes.items() if strictness >= strict)
        return max((now - first.arrived for first in firsts), default=0)

    def owe(self, due: int) -> None:
        """Take over the share of the starved as it stood."""
        self._due = due

    def snapshot(self) -> QueueState:
        return QueueState(waiting=list(self), due=self._due)

    def restore(self, state: QueueState) -> None:
        self.__init__(self._settings)  # type: ignore[misc]
        self._due = state.due
        for waiting in state.waiting:
            self.add(waiting)

    def check(self) -> None:
        if sum(len(m) for m in self._classes.values()) != len(self.waiting):
            raise InvariantError("the queue's classes and its index of requests differ")
        for strict, members in self._classes.items():
            if not set(members) <= {entry[2] for entry in self._heaps[strict]}:
                raise InvariantError(f"a request of strict class {strict} waits outside the heap")
