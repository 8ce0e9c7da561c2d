"""Response store: the responses that a client may ask for again or go on from, for a time and within a size.

They are whole conversations, too large and too private for the discovery store: in memory of one process, and in memory
of the machine that its frontends share (`penstock.frontend.shared_responses`). Other frontends ask for them, and one
that ends hands them over (`penstock.frontend.dialects.response_reach`).
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import msgspec

from penstock.adapters.background_tasks import BackgroundTasks
from penstock.frontend.shared_responses import HeldResponse, SharedResponses
from penstock.runtime.records.response_folder import RESPONSE_TTL

RESPONSE_BYTES_MAX = 256 * 1024 * 1024
"""Most bytes of all: some two thousand conversations of 30,000 tokens. The longest unused go first."""


@dataclass(slots=True)
class StoredResponse:
    """A response.

    Args:
        owner: the API key's name, or nothing where no keys are set.
        session: of its whole conversation, by which the router sends it where its cache is.
        body: the response object, as JSON.
        items: the conversation with its answer, as the JSON of the API's items; the answer's are also in the body.
        task: makes a background response.
    """

    id: str
    owner: str
    session: str
    body: bytes
    items: bytes = b""
    task: asyncio.Task[None] | None = None
    used: float = 0.0

    @property
    def size(self) -> int:
        return len(self.body) + len(self.items)

    def for_peers(self) -> HeldResponse:
        """Return what another process needs of it."""
        return HeldResponse(self.id, self.owner, self.session, self.body, items=self.items)


class ResponseStore:
    """All of one process, in the order of their last use.

    Args:
        shared: gets each as well; None keeps them in this process alone.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, shared: SharedResponses | None = None) -> None:
        self._clock = clock
        self._shared = shared
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()
        self._bytes = 0
        self._tasks = BackgroundTasks()

    def put(self, response: StoredResponse) -> None:
        """Take a response, or what has become of it."""
        self.remove(response.id)
        response.used = self._clock()
        self._responses[response.id] = response
        self._bytes += response.size
        if self._shared is not None:
            self._shared.put(response.for_peers(), running=response.task is not None)
        while self._responses and (self._bytes > RESPONSE_BYTES_MAX or self._oldest().used < self._too_old()):
            self.remove(self._oldest().id)

    def get(self, id: str, owner: str) -> StoredResponse | None:
        """Return a response of this owner, and use it."""
        response = self._responses.get(id)
        if response is None or response.owner != owner:
            return None
        if response.used < self._too_old():
            self.remove(id)
            return None
        response.used = self._clock()
        self._responses.move_to_end(id)
        return response

    async def from_shared(self, id: str, owner: str) -> StoredResponse | None:
        """Return a copy from shared memory; one that was being made by a process that has ended has failed."""
        copy = None if self._shared is None else await self._shared.get(id, owner)
        return None if copy is None else copied(failed(copy.response) if copy.running else copy.response)

    async def erase(self, id: str, owner: str) -> bool:
        """Delete a response from all memory of this machine; return whether it was there."""
        stored = self.get(id, owner)
        if stored is not None:
            self.remove(id)
            if stored.task is not None:
                stored.task.cancel()
        shared = self._shared is not None and await self._shared.remove(id, owner)
        return stored is not None or shared

    def all_for_peers(self) -> list[HeldResponse]:
        """Return all for another process, the longest unused first; what is still being made has failed."""
        return [_at_the_end(response) for response in self._responses.values() if response.used >= self._too_old()]

    def remove(self, id: str) -> None:
        """Drop a response from this process, where it is there."""
        response = self._responses.pop(id, None)
        if response is not None:
            self._bytes -= response.size

    def run(self, making: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Begin to make a background response."""
        return self._tasks.spawn(making)

    async def close(self) -> None:
        """Stop the background responses."""
        await self._tasks.close()
        if self._shared is not None:
            await self._shared.close()

    def _oldest(self) -> StoredResponse:
        return next(iter(self._responses.values()))

    def _too_old(self) -> float:
        return self._clock() - RESPONSE_TTL


def copied(response: HeldResponse) -> StoredResponse:
    """Return another process's response, which has no task here."""
    return StoredResponse(response.id, response.owner, response.session, response.body, response.items)


def _at_the_end(stored: StoredResponse) -> HeldResponse:
    """Return what a response is when its process ends."""
    return stored.for_peers() if stored.task is None else failed(stored.for_peers())


def failed(response: HeldResponse) -> HeldResponse:
    """Return what has become of a response that was being made by a process that has ended."""
    error = {"code": "server_error", "message": "the frontend process that made it has ended"}
    body = msgspec.json.encode({**msgspec.json.decode(response.body), "status": "failed", "error": error})
    return msgspec.structs.replace(response, body=body)
