"""A process that owns the memory at the other end: of an agent over TCP or shm, of a host slab, of a bare socket."""

import asyncio
import mmap
import socket
import sys
import threading

import numpy as np
from child import serve
from sizes import PEER_BLOCK, SECRET, TOTAL
from xxhash import xxh3_64_intdigest

from penstock.kernel.secret import ClusterSecret
from penstock_kv.transfer.backends.shm_backend import ShmBackend
from penstock_kv.transfer.backends.tcp_backend import TcpBackend
from penstock_kv.transfer.peer_slabs import BlockPlace, PeerSlabs
from penstock_kv.transfer.shared_memory import SharedMemory
from penstock_kv.transfer.transfer_agent import TransferAgent


def main(kind: str) -> None:
    {"tcp": agent, "shm": agent, "slab": slab, "socket": bare}[kind](kind)


def agent(kind: str) -> None:
    """An agent with one region of random bytes; says its metadata."""

    async def run() -> None:
        backend = TcpBackend(ClusterSecret(SECRET)) if kind == "tcp" else ShmBackend()
        async with TransferAgent("owner", [backend]) as owner:
            if kind == "tcp":
                owner.register_memory(random_bytes())
            else:
                shared = SharedMemory.create(TOTAL)
                shared.array[:] = random_bytes()
                owner.register_shared(shared)
            await asyncio.to_thread(serve, {"metadata": owner.metadata().hex()}, dict)

    asyncio.run(run())


class Slab:
    """Blocks of `PEER_BLOCK` bytes under their numbers, as a tier process has them."""

    block_bytes = PEER_BLOCK

    def __init__(self) -> None:
        self.memory = SharedMemory.create(TOTAL)
        self.memory.array[:] = random_bytes()
        offsets = range(0, TOTAL, PEER_BLOCK)
        self._places = {
            number.to_bytes(32, "big"): BlockPlace(
                offset, 1, xxh3_64_intdigest(self.memory.array.data[offset : offset + PEER_BLOCK])
            )
            for number, offset in enumerate(offsets)
        }

    def place(self, key: bytes) -> BlockPlace | None:
        return self._places.get(key)


def slab(_: str) -> None:
    async def run() -> None:
        owner = Slab()
        peer = PeerSlabs("owner", ClusterSecret(SECRET), owner, owner.memory, ("127.0.0.1", 0))
        address = await peer.start()
        await asyncio.to_thread(serve, {"address": address}, dict)
        await peer.close()

    asyncio.run(run())


def bare(_: str) -> None:
    """Sends or receives everything over one connection, in calls of the size that the first 9 bytes say."""
    listener = socket.create_server(("127.0.0.1", 0))
    memory = random_bytes().data

    def accept() -> None:
        while True:
            connection, _ = listener.accept()
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            head = connection.recv(9, socket.MSG_WAITALL)
            block = int.from_bytes(head[1:], "little")
            for at in range(0, TOTAL, block):
                part = memory[at : at + block]
                if head[:1] == b"r":
                    connection.sendall(part)
                else:
                    receive(connection, part)
            if head[:1] == b"w":
                connection.sendall(b"k")
            connection.close()

    threading.Thread(target=accept, daemon=True).start()
    serve({"address": listener.getsockname()}, dict)


def receive(connection: socket.socket, part: memoryview) -> None:
    """Fill a buffer."""
    while part:
        part = part[connection.recv_into(part) :]


def random_bytes() -> np.ndarray:
    memory = np.frombuffer(mmap.mmap(-1, TOTAL, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)
    memory[:] = np.resize(np.random.default_rng(1).integers(0, 256, 1 << 20, np.uint8), TOTAL)
    return memory


if __name__ == "__main__":
    main(sys.argv[1])
