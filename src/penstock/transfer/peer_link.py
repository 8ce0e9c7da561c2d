"""Peers' host tiers over TCP: `PeerServer` lets other workers read blocks of ours, `PeerLink` reads theirs.

A reader asks how many leading blocks a peer has, gets their slots and generations, and reads them by key, slot and
generation. The owner compares them before it sends and once more after, so that a slot that got another block
meanwhile is ``stale``; the reader compares the checksum that the owner took when the block was stored. A peer that was
restarted since the question, on the same address too, answers ``stale`` for everything.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import NamedTuple

from penstock.kernel.secret import ClusterSecret
from penstock.transfer.storage.block_store import BlockResult
from penstock.transfer.tcp.link_jobs import AskJob, BlockReadJob, Report, wait_for_jobs
from penstock.transfer.tcp.tcp_frames import MoveOutcome, SlabBlock
from penstock.transfer.tcp.tcp_link import SPLIT_BYTES, TcpLink
from penstock.transfer.tcp.tcp_server import BlockOwner, LentBlock, TcpServer
from penstock.transfer.tcp.tcp_stream import PeerIdentity

__all__ = ["BlockOwner", "LentBlock", "PeerAnswer", "PeerIdentity", "PeerLink", "PeerServer", "SlabBlock"]

PLACES_MAX = 1 << 17
"""Slots of a peer's blocks that a link remembers between a question and the read, some 30 MB."""


class PeerAnswer(NamedTuple):
    """How many leading blocks a peer has. ``cause``: why there is no answer, in words; empty where there is one."""

    blocks: int
    cause: str = ""


class PeerServer:
    """Serves one host slab to peers that have the cluster's secret.

    Args:
        me: name of the worker and epoch of its life: another number after each restart (such as its start in ns).
        owner: called from the threads of connections; see `BlockOwner`.
        log: takes a line for each connection that ends by a fault.
    """

    def __init__(
        self,
        me: PeerIdentity,
        secret: ClusterSecret,
        owner: BlockOwner,
        log: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._server = TcpServer(me, secret, blocks=owner, log=log)
        self.faults = self._server.faults
        """Connections by why they ended: ``refused`` (another secret), ``broken``, ``full``."""

    def start(self, host: str, port: int = 0) -> tuple[str, int]:
        """Listen; return the address, which peers need."""
        return self._server.start(host, port)

    def close(self) -> None:
        """Stop; afterwards no thread touches the slab. Blocks for some milliseconds."""
        self._server.close()


class PeerLink:
    """The way to one peer's `PeerServer`; its calls come from one event loop and never raise for a peer.

    Args:
        me: our own name and epoch.
        peer: name of the peer; another process on its address is refused.
    """

    def __init__(self, address: tuple[str, int], secret: ClusterSecret, me: PeerIdentity, peer: str) -> None:
        self._link = TcpLink(address, secret, me, peer=peer)
        self._epoch: int | None = None
        self._places: dict[bytes, SlabBlock] = {}

    @property
    def address(self) -> tuple[str, int]:
        """Where the peer listens."""
        return self._link.address

    async def ask(self, keys: Sequence[bytes], seconds: float) -> PeerAnswer:
        """Return how many leading blocks of a chain the peer has, of the first `ITEMS_MAX` keys; keep their places."""
        causes: list[str] = []
        job = AskJob(keys, lambda _, outcome, cause: causes.append(cause or outcome), seconds)
        self._link.submit(job)
        await job.wait()
        if causes != ["ok"]:
            return PeerAnswer(0, causes[0])
        if job.peer_epoch != self._epoch:
            self._epoch, self._places = job.peer_epoch, {}
        for block in job.blocks:
            self._places.pop(block.key, None)
            self._places[block.key] = block
        while len(self._places) > PLACES_MAX:
            del self._places[next(iter(self._places))]
        return PeerAnswer(len(job.blocks))

    async def read(self, keys: Sequence[bytes], buffers: Sequence[memoryview], seconds: float) -> list[BlockResult]:
        """Read blocks that an answer of `ask` had, into buffers of the block's size.

        A buffer's content counts only where its result is ``ok``; the result has the block's checksum then. Once this
        returns, also by cancellation, nothing touches the buffers any more.
        """
        results = [BlockResult("absent", "the peer did not say that it has this block")] * len(keys)
        known = [position for position, key in enumerate(keys) if key in self._places]
        # Large reads are divided among the connections; for a small one that would only be more frames.
        parts = self._link.streams if sum(len(buffers[position]) for position in known) >= SPLIT_BYTES else 1
        share = max(1, -(-len(known) // parts))
        jobs = []
        for start in range(0, len(known), share):
            positions = known[start : start + share]
            job = BlockReadJob(
                [self._places[keys[position]] for position in positions],
                [buffers[position] for position in positions],
                _reporter(results, positions),
                seconds,
                self._epoch,
            )
            self._link.submit(job)
            jobs.append((job, positions))
        await wait_for_jobs([job for job, _ in jobs])
        for job, positions in jobs:
            for position, checksum in zip(positions, job.sums):
                results[position] = results[position]._replace(checksum=checksum)
        for key, result in zip(keys, results):
            if result.outcome in ("absent", "corrupt", "stale"):
                self._places.pop(key, None)
        return results

    async def close(self) -> None:
        """End everything; afterwards nothing touches any buffer."""
        await asyncio.to_thread(self._link.close)


def _reporter(results: list[BlockResult], positions: Sequence[int]) -> Report:
    def report(number: int, outcome: MoveOutcome, cause: str) -> None:
        results[positions[number]] = BlockResult("failed" if outcome == "denied" else outcome, cause)

    return report
