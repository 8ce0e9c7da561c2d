"""What is a caller? One HTTP request and the way to answer it, whichever server carries it.

The thin HTTP binding: a completion's life (`penstock.frontend.exchange`) knows only this. Behind it stand
`penstock.frontend.plain`, over aiohttp, and `penstock.frontend.wire`, written by hand for speed, with the former as
its oracle.
"""

from collections.abc import Mapping
from typing import Any, Protocol


class Caller(Protocol):
    """A client's request. ``headers`` is case-insensitive; ``fields`` go into its line of the access log.

    An answer is either one `send`, or `open`, any number of `write`, and `end`. Where the client is gone, the task
    that serves it is cancelled; what waits may raise ConnectionResetError before that.
    """

    id: str
    """The request's id; it goes out as x-request-id."""
    method: str
    path: str
    headers: Mapping[str, str]
    remote: str | None
    name: str
    """Of the API key, or the address: who is counted and logged."""
    fields: dict[str, Any]

    async def body(self) -> bytes:
        """Return the whole body.

        Raises:
            ClientError: 413 too large, 408 too slow, 400 broken off.
        """
        ...

    @property
    def begun(self) -> bool:
        """Whether an answer was sent or opened."""
        ...

    @property
    def status(self) -> int | None:
        """The status that was sent or opened; None before."""
        ...

    async def send(self, status: int, body: bytes, headers: Mapping[str, str], *, close: bool = False) -> None:
        """Answer as a whole; ``headers`` name at least content-type. ``close`` ends the connection afterwards."""
        ...

    def open(self, status: int, headers: Mapping[str, str]) -> None:
        """Begin a streamed answer; its head goes out together with the first `write`, in one packet."""
        ...

    def write(self, data: bytes) -> None:
        """Send bytes of the body as soon as can be; `full` says when to wait for `drained`."""
        ...

    @property
    def full(self) -> bool:
        """Whether the client takes more slowly than we write."""
        ...

    async def drained(self) -> None:
        """Wait until all or enough of what was written has been taken.

        Raises:
            ConnectionResetError: the client is gone.
        """
        ...

    async def end(self, *, close: bool = False) -> None:
        """End the streamed answer; ``close`` ends the connection, so that a client sees that it is not whole."""
        ...

    def abort(self) -> None:
        """Cut the connection at once."""
        ...
