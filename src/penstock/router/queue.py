"""In which order do requests wait for a worker? A bounded queue with strict classes, a policy and ageing.

A higher strict class goes before every lower one. Within a class the policy's score decides, highest first; but a
request that has waited for ``age_after`` goes before all scores of its class, oldest first, so that none starves.
"""

import heapq
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from penstock.kernel.errors import InvariantError
from penstock.kernel.machine import SECOND, Nanos, nanos
from penstock.kernel.values import RequestId
from penstock.router.settings import QueuePolicy, QueueSettings


class Waiting(msgspec.Struct, frozen=True):
    """What a policy may look at."""

    id: RequestId
    arrived: Nanos
    priority: int
    strict: int
    deadline: Nanos
    new_tokens: int
    """Prompt tokens less the best overlap over all workers, as of arrival."""


Score = Callable[[Waiting], float]
"""Higher goes first. Source: the field's queue keys (field name: router queue policy); edf is ours."""

POLICIES: dict[QueuePolicy, Score] = {
    "fcfs": lambda w: max(w.priority, 0) - w.arrived / SECOND,
    "lcfs": lambda w: w.priority + w.arrived / SECOND,
    # Smith's rule (1956): weight over processing time minimises the weighted mean completion.
    "wspt": lambda w: (1 + max(w.priority, 0)) / max(1, w.new_tokens),
    "edf": lambda w: -(w.deadline / SECOND - max(w.priority, 0)),
}


class RequestQueue:
    """Requests that no worker may take yet."""

    def __init__(self, settings: QueueSettings) -> None:
        self._settings = settings
        self._score = POLICIES[settings.policy]
        self._age_after = nanos(settings.age_after)
        self._classes: dict[int, dict[RequestId, Waiting]] = {}
        """Strict class -> its requests in order of arrival."""
        self._heaps: dict[int, list[tuple[float, int, RequestId]]] = {}
        self._where: dict[RequestId, int] = {}
        self._sequence = 0

    def __len__(self) -> int:
        return len(self._where)

    def __contains__(self, request: RequestId) -> bool:
        return request in self._where

    def __iter__(self) -> Iterator[Waiting]:
        for members in self._classes.values():
            yield from members.values()

    @property
    def full(self) -> bool:
        return len(self._where) >= self._settings.length_max

    def add(self, waiting: Waiting) -> None:
        """Let a request wait; the caller has looked at `full`."""
        self._sequence += 1
        self._where[waiting.id] = waiting.strict
        self._classes.setdefault(waiting.strict, {})[waiting.id] = waiting
        heapq.heappush(self._heaps.setdefault(waiting.strict, []), (-self._score(waiting), self._sequence, waiting.id))

    def remove(self, request: RequestId) -> bool:
        """Take a request out wherever it stands; return False where it does not wait."""
        strict = self._where.pop(request, None)
        if strict is None:
            return False
        members = self._classes[strict]
        del members[request]
        if not members:
            del self._classes[strict]
            del self._heaps[strict]
        elif len(self._heaps[strict]) > 64 and len(self._heaps[strict]) > 2 * len(members):
            # Removed requests stay in the heap until they surface: rebuild before they outnumber the living.
            self._heaps[strict] = [entry for entry in self._heaps[strict] if entry[2] in members]
            heapq.heapify(self._heaps[strict])
        return True

    def peek(self, now: Nanos) -> Waiting | None:
        """Return who goes next, or None where nobody waits."""
        if not self._classes:
            return None
        strict = max(self._classes)
        members = self._classes[strict]
        oldest = next(iter(members.values()))
        if now - oldest.arrived >= self._age_after:
            return oldest
        heap = self._heaps[strict]
        while heap[0][2] not in members:
            heapq.heappop(heap)
        return members[heap[0][2]]

    def waited(self, strict: int, now: Nanos) -> Nanos:
        """Return how long the longest waiting request has waited, of those that go before a new one of a class."""
        firsts = (next(iter(members.values())) for strictness, members in self._classes.items() if strictness >= strict)
        return max((now - first.arrived for first in firsts), default=0)

    def snapshot(self) -> list[Any]:
        return [msgspec.to_builtins(waiting) for waiting in self]

    def restore(self, state: list[Any]) -> None:
        self.__init__(self._settings)  # type: ignore[misc]
        for raw in state:
            self.add(msgspec.convert(raw, Waiting))

    def check(self) -> None:
        if sum(len(m) for m in self._classes.values()) != len(self._where):
            raise InvariantError("the queue's classes and its index of requests differ")
        for strict, members in self._classes.items():
            if not set(members) <= {entry[2] for entry in self._heaps[strict]}:
                raise InvariantError(f"a request of strict class {strict} waits outside the heap")
