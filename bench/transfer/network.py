"""Ways over TCP between two processes of this host: a bare socket, the library, and a peer's host slab."""

import asyncio
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from child import Child
from memory import Ways, library, page_memory
from owner import receive
from sizes import PEER_BLOCK, SECRET, TOTAL

from penstock.kernel.secret import ClusterSecret
from penstock.transfer.backends.tcp_backend import TcpBackend
from penstock.transfer.peer_link import PeerIdentity, PeerLink
from penstock.transfer.transfer_agent import TransferAgent

__all__ = ["PEER_BLOCK", "peer", "tcp"]


def bare_socket(address: list[object], memory: memoryview, kind: bytes) -> Callable[[int], Awaitable[float]]:
    """A connection and nothing else: calls of the block's size into and out of the same kind of memory."""

    def run(block: int) -> float:
        with socket.create_connection((str(address[0]), int(str(address[1])))) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            start = time.perf_counter()
            connection.sendall(kind + block.to_bytes(8, "little"))
            for at in range(0, TOTAL, block):
                part = memory[at : at + block]
                if kind == b"r":
                    receive(connection, part)
                else:
                    connection.sendall(part)
            if kind == b"w":
                connection.recv(1)
            return time.perf_counter() - start

    async def in_thread(block: int) -> float:
        return await asyncio.to_thread(run, block)

    return in_thread


@asynccontextmanager
async def tcp() -> AsyncIterator[Ways]:
    """An agent of this process and one of another."""
    raw, child = Child(sys.executable, "owner.py", "socket"), Child(sys.executable, "owner.py", "tcp")
    async with TransferAgent("reader", [TcpBackend(ClusterSecret(SECRET))]) as reader:
        mine = page_memory(1)
        local = reader.register_memory(mine)
        (remote,) = reader.add_remote(bytes.fromhex(child.hello["metadata"])).regions
        address = raw.hello["address"]
        yield {
            "read": {
                "bare socket": bare_socket(address, mine.data, b"r"),
                "tcp": library(reader, "read", local.id, remote),
            },
            "write": {
                "bare socket": bare_socket(address, mine.data, b"w"),
                "tcp": library(reader, "write", local.id, remote),
            },
        }
    raw.close()
    child.close()


@asynccontextmanager
async def peer() -> AsyncIterator[Ways]:
    """A link to another worker's host slab."""
    raw, child = Child(sys.executable, "owner.py", "socket"), Child(sys.executable, "owner.py", "slab")
    address = child.hello["address"]
    link = PeerLink((address[0], address[1]), ClusterSecret(SECRET), PeerIdentity("reader", 1), "owner")
    mine = page_memory(1)
    keys = [number.to_bytes(32, "big") for number in range(TOTAL // PEER_BLOCK)]
    buffers = [mine.data[at : at + PEER_BLOCK] for at in range(0, TOTAL, PEER_BLOCK)]

    async def blocks(_: int) -> float:
        start = time.perf_counter()
        answer = await link.ask(keys, 60)
        results = await link.read(keys, buffers, 60)
        seconds = time.perf_counter() - start
        assert answer.blocks == len(keys), answer
        assert {result.outcome for result in results} == {"ok"}
        return seconds

    yield {"read": {"bare socket": bare_socket(raw.hello["address"], mine.data, b"r"), "peer's blocks": blocks}}
    await link.close()
    raw.close()
    child.close()
