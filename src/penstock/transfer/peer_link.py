"""Peers' host tiers over TCP: `PeerServer` lets other workers read blocks of ours, `PeerLink` reads theirs.

A reader asks how many leading blocks a peer has, gets their slots and generations, and reads them by key, slot and
generation. The owner compares them before it sends and once more after, so that a slot that got another block
meanwhile is ``stale``; the reader compares the checksum that the owner took when the block was stored. A peer that was
restarted since the question, on the same address too, answers ``stale`` for everything.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from penstock.kernel.secret import ClusterSecret
from penstock.transfer.storage.block_store import BlockResult, Outcome
from penstock.transfer.tcp.link_jobs import AskJob, BlockReadJob
from penstock.transfer.tcp.tcp_frames import ITEMS_MAX, MoveOutcome, PeerBlock
from penstock.transfer.tcp.tcp_link import TcpLink
from penstock.transfer.tcp.tcp_server import BlockOwner, LentBlock, TcpServer
from penstock.transfer.tcp.tcp_stream import PeerIdentity

__all__ = ["BlockOwner", "LentBlock", "PeerAnswer", "PeerBlock", "PeerIdentity", "PeerLink", "PeerServer"]


class PeerAnswer(NamedTuple):
    """The leading blocks that a peer has. ``cause``: why there is no answer, in words; empty where there is one."""

    blocks: Sequence[PeerBlock]
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

    @property
    def address(self) -> tuple[str, int]:
        """Where the peer listens."""
        return self._link.address

    async def ask(self, keys: Sequence[bytes], seconds: float) -> PeerAnswer:
        """Return the leading blocks of a chain that the peer has, of the first `ITEMS_MAX` keys."""
        if not keys:
            return PeerAnswer(())
        causes: list[str] = []
        job = AskJob(keys, lambda _, outcome, cause: causes.append(cause or outcome), seconds)
        self._link.submit(job)
        await job.wait()
        return PeerAnswer(job.blocks, "" if causes == ["ok"] else causes[0])

    async def read(
        self, blocks: Sequence[PeerBlock], buffers: Sequence[memoryview], seconds: float
    ) -> list[BlockResult]:
        """Read blocks of an answer into buffers of the block's size.

        A buffer's content counts only where its result is ``ok``. Once this returns, also by cancellation, nothing
        touches the buffers any more.
        """
        outcomes: list[tuple[MoveOutcome, str]] = [("failed", "")] * len(blocks)

        def report(position: int, outcome: MoveOutcome, cause: str) -> None:
            outcomes[position] = (outcome, cause)

        share = -(-len(blocks) // self._link.streams)
        if share * len(buffers[0]) < SPLIT_BYTES if blocks else True:
            share = max(1, len(blocks))
        jobs = []
        return []
