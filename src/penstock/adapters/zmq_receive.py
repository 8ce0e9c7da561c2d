"""ZeroMQ sockets that receive: the process's context, sockets for it, one message, and notice of messages."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

import zmq
import zmq.asyncio

AnySocket = TypeVar("AnySocket", zmq.Socket[bytes], zmq.asyncio.Socket)

SOCKETS_MAX = 16_384
"""Sockets of this process. An engine whose KV events are heard takes three; libzmq's own limit is 1,023 in all."""


def shared_context() -> "zmq.Context[zmq.Socket[bytes]]":
    """Return the context of this process. Its limit counts from the first socket on, so ask here for that one, too."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    if context.max_sockets != SOCKETS_MAX:
        context.max_sockets = SOCKETS_MAX
    return context


def receiving_socket(kind: int, messages: int, size: int) -> "zmq.Socket[bytes]":
    """Return a plain socket that notices a peer which vanished, and that `close` does not hold up.

    Args:
        messages: how many of each connection may wait to be received.
        size: bytes of the largest one; a larger one drops the connection.
    """
    return _receiving(shared_context().socket(kind), messages, size)


def awaited_socket(kind: int, messages: int, size: int) -> zmq.asyncio.Socket:
    """Return the same as a socket whose methods are awaited: for what few of a process have."""
    return _receiving(zmq.asyncio.Context(shared_context()).socket(kind), messages, size)


def _receiving(socket: AnySocket, messages: int, size: int) -> AnySocket:
    socket.linger = 0
    socket.rcvhwm = messages
    socket.maxmsgsize = size
    # Without these a peer that vanished without a FIN is waited for until the kernel gives up (hours).
    socket.heartbeat_ivl = 5_000
    socket.heartbeat_timeout = 15_000
    return socket


async def receive(socket: zmq.asyncio.Socket) -> list[bytes] | None:
    """Return a message's frames, or None where the socket was closed.

    Raises:
        asyncio.CancelledError: the waiting task was cancelled.
    """
    if socket.closed:
        return None
    try:
        return await socket.recv_multipart()
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if socket.closed and task is not None and not task.cancelling():
            return None  # pyzmq cancels the waits of a socket that is closed; that is an end, not a cancel
        raise


def received(socket: "zmq.Socket[bytes]") -> list[bytes] | None:
    """Return a message's frames, or None where none waits."""
    try:
        return socket.recv_multipart(zmq.NOBLOCK)
    except zmq.Again:
        return None


class MessageNotice:
    """Calls back on the event loop when messages came to a plain socket that had none.

    No task and no timer: the loop's own selector watches all sockets. Who is called has to read until none is left
    before the next call comes.
    """

    def __init__(self, socket: "zmq.Socket[bytes]", readable: Callable[[], None]) -> None:
        self._socket = socket
        self._readable = readable
        self._loop = asyncio.get_running_loop()
        self._descriptor: int | None = socket.FD
        self._loop.add_reader(self._descriptor, self._check_readable)
        self._first = self._loop.call_soon(self._check_readable)  # what came before there was a reader

    def _check_readable(self) -> None:
        # ZeroMQ's descriptor tells that something happened; to ask what takes it back, and so must be done each time.
        if not self._socket.closed and int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._readable()

    def close(self) -> None:
        """Call no more. Call this before the socket is closed."""
        self._first.cancel()
        if self._descriptor is not None:
            self._loop.remove_reader(self._descriptor)
            self._descriptor = None
