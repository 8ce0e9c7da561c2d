"""`TcpBackend`: carries transfers of memory between hosts, over the TCP mover."""

import asyncio
from collections.abc import Sequence

import msgspec

from penstock.kernel.errors import ConfigError
from penstock.kernel.secret import ClusterSecret
from penstock.transfer.descriptors import MemoryRegion, RegionInfo
from penstock.transfer.tcp.link_jobs import LinkJob, NoticeJob, SpanReadJob, WriteJob, wait_for_jobs
from penstock.transfer.tcp.tcp_frames import MoveOutcome, RegionSpan
from penstock.transfer.tcp.tcp_link import SPLIT_BYTES, TcpLink
from penstock.transfer.tcp.tcp_server import TcpServer
from penstock.transfer.tcp.tcp_stream import PeerIdentity
from penstock.transfer.transfer_backend import Capabilities, LocalAgent, RemoteAgent, TransferOrder
from penstock.transfer.transfer_status import PieceFailed, TransferStatus

STATUSES: dict[MoveOutcome, TransferStatus] = {
    "absent": TransferStatus.NOT_FOUND,
    "denied": TransferStatus.NOT_ALLOWED,
    "corrupt": TransferStatus.MISMATCH,
    "stale": TransferStatus.DISCONNECTED,
    "failed": TransferStatus.DISCONNECTED,
    "late": TransferStatus.LATE,
}
JOB_SECONDS = 60.0
"""The agent cancels a transfer at its deadline; this is only for a peer that is asked to give up by itself."""
NOTICE_SECONDS = 10.0


class TcpAddress(msgspec.Struct, frozen=True, array_like=True):
    """Where an agent listens: its part of the metadata."""

    host: str
    port: int


class TcpBackend:
    """Listens for peers, and has a `TcpLink` to each peer that it moved something to or from.

    Args:
        secret: of the cluster; both ends prove that they have it.
        host, port: to listen on; port 0 takes a free one.
        advertise: host that peers connect to; default ``host``.
    """

    name = "tcp"
    capabilities = Capabilities(
        kinds=frozenset({("dram", "dram")}),
        reach="network",
        notifications=True,
        rank=30,
    )

    def __init__(
        self, secret: ClusterSecret, host: str = "127.0.0.1", port: int = 0, *, advertise: str | None = None
    ) -> None:
        if host in ("", "0.0.0.0", "::") and advertise is None:
            raise ConfigError(
                f"host {host!r} of the TCP backend names no address that peers could connect to",
                hint="set advertise to the name or address of this host",
            )
        self._secret = secret
        self._host, self._port, self._advertise = host, port, advertise or host
        self._links: dict[tuple[str, int], TcpLink] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._address: TcpAddress | None = None

    def attach(self, owner: LocalAgent) -> None:
        self._me = PeerIdentity(owner.name, owner.epoch)
        self._server = TcpServer(
            self._me, self._secret, notice=lambda peer, body: owner.deliver(peer.name, peer.epoch, body)
        )

    async def start(self) -> None:
        _, port = self._server.start(self._host, self._port)
        self._address = TcpAddress(self._advertise, port)

    def registered(self, region: MemoryRegion) -> None:
        if region.kind == "dram":
            self._server.regions.add(region.id, region.bytes_of().data, writable=region.info.writable)

    def deregistered(self, region: MemoryRegion) -> None:
        self._server.regions.remove(region.id)

    def metadata_part(self) -> bytes:
        return b"" if self._address is None else msgspec.msgpack.encode(self._address)

    def refusal(self, peer: RemoteAgent, local: Sequence[MemoryRegion], remote: Sequence[RegionInfo]) -> str | None:
        try:
            msgspec.msgpack.decode(peer.parts[self.name], type=TcpAddress)
        except msgspec.MsgspecError:
            return f"{peer.name!r} was not started when it made its metadata"
        return None

    async def move(self, order: TransferOrder) -> None:
        link = self._link(order.peer)
        jobs: list[LinkJob] = []
        for positions in _shares(order, link.streams):
            pieces = [order.pieces[position] for position in positions]
            spans = [RegionSpan(piece.remote.id, piece.remote_offset, piece.length) for piece in pieces]
            buffers = [
                piece.local.bytes_of().data[piece.local_offset : piece.local_offset + piece.length] for piece in pieces
            ]
            kind = SpanReadJob if order.direction == "read" else WriteJob
            job = kind(spans, buffers, _Reporter(order, positions), JOB_SECONDS, order.peer.epoch)
            link.submit(job)
            jobs.append(job)
        await wait_for_jobs(jobs)

    async def notify(self, peer: RemoteAgent, payload: bytes) -> None:
        results: list[tuple[MoveOutcome, str]] = []
        job = NoticeJob(payload, lambda _, outcome, cause: results.append((outcome, cause)), NOTICE_SECONDS, peer.epoch)
        self._link(peer).submit(job)
        await wait_for_jobs([job])
        outcome, cause = results[0]
        if outcome != "ok":
            raise PieceFailed(STATUSES[outcome], f"{peer.name!r} did not get the notification: {cause}")

    def disconnect(self, peer: RemoteAgent) -> None:
        link = self._links.pop((peer.name, peer.epoch), None)
        if link is not None:
            task = asyncio.create_task(asyncio.to_thread(link.close))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        links, self._links = self._links, {}
        for link in links.values():
            await asyncio.to_thread(link.close)
        if self._closing:
            await asyncio.wait(self._closing)
        if self._address is not None:
            await asyncio.to_thread(self._server.close)

    def _link(self, peer: RemoteAgent) -> TcpLink:
        place = (peer.name, peer.epoch)
        if place not in self._links:
            address = msgspec.msgpack.decode(peer.parts[self.name], type=TcpAddress)
            self._links[place] = TcpLink((address.host, address.port), self._secret, self._me, peer=peer.name)
        return self._links[place]


class _Reporter:
    """Turns the results of a job into those of an order's pieces."""

    def __init__(self, order: TransferOrder, positions: range) -> None:
        self._order, self._positions = order, positions

    def __call__(self, number: int, outcome: MoveOutcome, cause: str) -> None:
        if outcome == "ok":
            self._order.succeeded(self._positions[number])
        else:
            self._order.failed(self._positions[number], PieceFailed(STATUSES[outcome], cause))


def _shares(order: TransferOrder, parts: int) -> list[range]:
    """Divide the pieces of a large order among the connections, by bytes."""
    total = sum(piece.length for piece in order.pieces)
    if total < SPLIT_BYTES:
        return [range(len(order.pieces))]
    shares, start, size = [], 0, 0
    for position, piece in enumerate(order.pieces):
        size += piece.length
        if size * parts >= total:
            shares.append(range(start, position + 1))
            start, size = position + 1, 0
    if start < len(order.pieces):
        shares.append(range(start, len(order.pieces)))
    return shares
