"""Ways over TCP between two processes of this host: a bare socket, the library, and a peer's host slab."""

import asyncio
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from child import Child
from memory import Ways, library, page_memory
from owner import Slab, receive
from sizes import PEER_BLOCK, SECRET, TOTAL

from penstock.kernel.secret import ClusterSecret
from penstock_kv.transfer.backends.tcp_backend import TcpBackend
from penstock_kv.transfer.peer_slabs import PeerSlabs
from penstock_kv.transfer.transfer_agent import TransferAgent

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
    """Another worker's host slab, by shared memory and over TCP as from another host."""
    raw, child = Child(sys.executable, "owner.py", "socket"), Child(sys.executable, "owner.py", "slab")
    host, port = child.hello["address"]
    slab = Slab()
    mine = slab.memory.array.data
    keys = [number.to_bytes(32, "big") for number in range(TOTAL // PEER_BLOCK)]
    offsets = range(0, TOTAL, PEER_BLOCK)

    def blocks(link: PeerSlabs) -> Callable[[int], Awaitable[float]]:
        async def run(_: int) -> float:
            start = time.perf_counter()
            answer = await link.ask("owner", keys, 60)
            results = await link.read("owner", keys, offsets, 60)
            seconds = time.perf_counter() - start
            assert answer.blocks == len(keys), answer
            assert {result.outcome for result in results} == {"ok"}
            return seconds

        return run

    near, far = (PeerSlabs(name, ClusterSecret(SECRET), slab, slab.memory, ("127.0.0.1", 0)) for name in ("a", "b"))
    for link in (near, far):
        await link.start()
        link.add("owner", (host, port))
    await far.ask("owner", keys, 60)
    far.agent.remote("owner").parts.pop("shm")
    yield {
        "read": {
            "bare socket": bare_socket(raw.hello["address"], mine, b"r"),
            "peer's blocks": blocks(far),
            "peer's blocks, one host": blocks(near),
        }
    }
    await near.close()
    await far.close()
    raw.close()
    child.close()
