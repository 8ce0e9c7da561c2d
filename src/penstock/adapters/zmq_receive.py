"""Sockets that receive ZeroMQ messages, and one message of a socket that may be closed during the wait."""

import asyncio

import zmq
import zmq.asyncio


def receiving_socket(
    context: zmq.Context[zmq.Socket[bytes]], kind: int, messages: int, size: int
) -> zmq.asyncio.Socket:
    """Return a socket that notices a peer which vanished, and that `close` does not hold up.

    Args:
        messages: how many may wait to be received.
        size: bytes of the largest one; a larger one drops the connection.
    """
    socket = zmq.asyncio.Context(context).socket(kind)
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
