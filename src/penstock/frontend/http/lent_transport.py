"""`LentTransport`: what aiohttp gets in place of a connection's transport, for one request and its answer."""

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

from penstock.adapters.http1_connection import Http1Connection
from penstock.frontend.http.http1_messages import END


class LentTransport(asyncio.Transport):
    """The way of one answer.

    Args:
        connection: stays ours: closing the lent transport leaves it open.
        server: makes the protocol object of the aiohttp server.
        closed: called in a later turn of the loop when the answer is over.
    """

    def __init__(self, connection: Http1Connection, server: Callable[[], Any], closed: Callable[[], None]) -> None:
        super().__init__()
        self.keep_alive = False
        """Whether the head of the answer leaves the connection open."""
        self.handler: Any = server()
        self._connection = connection
        self._transport = connection.transport
        self._on_close = closed
        self._closed = self._begun = False
        self.handler.connection_made(self)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self._begun:
            head, end, _ = bytes(data).lower().partition(END)
            self._begun = not head.startswith(b"http/1.1 1")
            self.keep_alive = bool(end) and b"\r\nconnection: close" not in head
        self._transport.write(data)

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        self.write(b"".join(list_of_data))

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            asyncio.get_running_loop().call_soon(self._on_close)

    def abort(self) -> None:
        self._connection.abort()

    def is_closing(self) -> bool:
        return self._closed or bool(self._transport.is_closing())

    def pause_reading(self) -> None:
        self._connection.pause()

    def resume_reading(self) -> None:
        self._connection.resume()

    def get_write_buffer_size(self) -> int:
        return int(self._transport.get_write_buffer_size())

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)
