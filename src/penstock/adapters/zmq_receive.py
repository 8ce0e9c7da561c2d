"""Receives one message from a ZeroMQ socket that may be closed during the wait."""

import asyncio

import zmq.asyncio


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
