"""`HttpExchange`: the seam between a client's request with its answer and the HTTP server that carries it.

The thin HTTP binding: a completion's life (`penstock.frontend.exchange.exchange`) knows only this.
`penstock.frontend.http.http1_exchange` implements it, of the server written by hand for speed; one over aiohttp is its
oracle in the tests.
"""

from collections.abc import Mapping
from typing import Any, Protocol


class HttpExchange(Protocol):
    """A client's request. ``headers`` is case-insensitive; ``fields`` go into its line of the access log.

    An answer is either one `send`, or `open`, any number of `write`, and `end`. Where the client is gone, the task
    that serves it is cancelled; a waiting call may raise ConnectionResetError before that.
    """

    id: str
    """The request's id; it goes out as x-request-id."""
    method: str
    path: str
    headers: Mapping[str, str]
    remote: str | None
    name: str
    """Name of the API key, or the address: the caller for counts and logs."""
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

    @property
    def last_write(self) -> float:
        """`time.monotonic` when bytes were last sent to the client, or its request began; infinity without a client."""
        ...

    async def send(self, status: int, body: bytes, headers: Mapping[str, str], *, close: bool = False) -> None:
        """Answer as a whole; ``headers`` name at least content-type. ``close`` ends the connection afterwards."""
        ...

    def open(self, status: int, headers: Mapping[str, str]) -> None:
        """Begin a streamed answer; its head goes out together with the first `write`, in one packet."""
        ...

    def write(self, data: bytes, *, last: bool = False) -> None:
        """Send bytes of the body as soon as possible; where `full`, wait for `drained`.

        Args:
            last: nothing comes after them, so that the end of the body goes out in the same packet. `end` follows.
        """
        ...

    @property
    def full(self) -> bool:
        """Whether the client reads more slowly than we write."""
        ...

    async def drained(self) -> None:
        """Wait until the client has read all or enough of the written bytes.

        Raises:
            ConnectionResetError: the client is gone.
        """
        ...

    async def end(self) -> None:
        """End the streamed answer."""
        ...

    def abort(self) -> None:
        """Cut the connection at once."""
        ...
