"""`TcpBackend`: carries transfers of memory between hosts, over the TCP mover."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from penstock.kernel.errors import ConfigError
from penstock.kernel.secret import ClusterSecret
from penstock_kv.transfer.agent_metadata import decode_metadata
from penstock_kv.transfer.descriptors import MemoryRegion, RegionInfo
from penstock_kv.transfer.tcp.link_jobs import LinkJob, NoticeJob, QuestionJob, SpanReadJob, WriteJob, wait_for_jobs
from penstock_kv.transfer.tcp.tcp_frames import MoveOutcome, RegionSpan
from penstock_kv.transfer.tcp.tcp_link import SPLIT_BYTES, TcpLink
from penstock_kv.transfer.tcp.tcp_server import TcpServer
from penstock_kv.transfer.tcp.tcp_stream import PeerIdentity
from penstock_kv.transfer.transfer_backend import Capabilities, LocalAgent, RemoteAgent, TransferOrder
from penstock_kv.transfer.transfer_status import PieceFailed, TransferStatus

STATUSES: dict[MoveOutcome, TransferStatus] = {
    "absent": TransferStatus.NOT_FOUND,
    "denied": TransferStatus.NOT_ALLOWED,
    "corrupt": TransferStatus.MISMATCH,
    "stale": TransferStatus.DISCONNECTED,
    "failed": TransferStatus.DISCONNECTED,
    "late": TransferStatus.LATE,
}
NOTICE_SECONDS = 10.0
METADATA = "metadata"
"""Topic of the question for an agent's metadata, by which agents that know an address and the secret meet."""


class TcpAddress(msgspec.Struct, frozen=True, array_like=True):
    """Where an agent listens: its part of the metadata."""

    host: str
    port: int


class TcpAnswer(NamedTuple):
    """What a peer said to a question. ``epoch``: of its life."""

    epoch: int
    body: bytes


class TcpBackend:
    """Listens for peers, and has a `TcpLink` to each peer that it moved something to or from, or asked something.

    Args:
        secret: of the cluster; both ends prove that they have it.
        host, port: to listen on; port 0 takes a free one.
        advertise: host that peers connect to; default ``host``.
        answers: topic -> what answers peers' questions about it, in a thread of theirs.
        log: takes a line for each connection of a peer that ends by a fault, in a thread of theirs.
    """

    name = "tcp"
    capabilities = Capabilities(
        kinds=frozenset({("dram", "dram")}),
        reach="network",
        notifications=True,
        rank=30,
        checks=True,
    )

    def __init__(
        self,
        secret: ClusterSecret,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        advertise: str | None = None,
        answers: Mapping[str, Callable[[bytes], bytes]] | None = None,
        log: Callable[[str], None] = lambda line: None,
    ) -> None:
        if host in ("", "0.0.0.0", "::") and advertise is None:
            raise ConfigError(
                f"host {host!r} of the TCP backend names no address that peers could connect to",
                hint="set advertise to the name or address of this host",
            )
        self._secret = secret
        self._host, self._port, self._advertise = host, port, advertise or host
        self._answers, self._log = dict(answers or {}), log
        self._links: dict[tuple[str, TcpAddress], TcpLink] = {}
        self._met: dict[str, TcpAddress] = {}
        """Where peers were met; they may advertise another address, which need not lead there from here."""
        self._closing: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self.address: TcpAddress | None = None
        """Where peers reach this agent, once it is started."""

    def attach(self, owner: LocalAgent) -> None:
        self._owner = owner
        self._me = PeerIdentity(owner.name, owner.epoch)
        self._server = TcpServer(
            self._me,
            self._secret,
            answers={METADATA: self._say_metadata, **self._answers},
            notice=lambda peer, body: owner.deliver(peer.name, peer.epoch, body),
            log=self._log,
        )

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        _, port = self._server.start(self._host, self._port)
        self.address = TcpAddress(self._advertise, port)

    def registered(self, region: MemoryRegion) -> None:
        if region.kind == "dram":
            self._server.regions.add(region.id, region.bytes_of().data, writable=region.info.writable)

    def deregistered(self, region: MemoryRegion) -> None:
        self._server.regions.remove(region.id)

    def metadata_part(self) -> bytes:
        return b"" if self.address is None else msgspec.msgpack.encode(self.address)

    def refusal(self, peer: RemoteAgent, local: Sequence[MemoryRegion], remote: Sequence[RegionInfo]) -> str | None:
        if peer.name in self._met:
            return None
        try:
            msgspec.msgpack.decode(peer.parts[self.name], type=TcpAddress)
        except msgspec.MsgspecError:
            return f"{peer.name!r} was not started when it made its metadata"
        return None

    async def move(self, order: TransferOrder) -> None:
        link = self._link_of(order.peer)
        jobs: list[LinkJob] = []
        for positions in _shares(order, link.streams):
            pieces = [order.pieces[position] for position in positions]
            spans = [RegionSpan(piece.remote.id, piece.remote_offset, piece.length) for piece in pieces]
            buffers = [
                piece.local.bytes_of().data[piece.local_offset : piece.local_offset + piece.length] for piece in pieces
            ]
            reporter, epoch = _Reporter(order, positions), order.peer.epoch
            if order.direction == "read":
                sums = None if order.checksums is None else [order.checksums[position] for position in positions]
                job: LinkJob = SpanReadJob(spans, buffers, reporter, order.seconds, epoch, sums=sums)
            else:
                job = WriteJob(spans, buffers, reporter, order.seconds, epoch)
            link.submit(job)
            jobs.append(job)
        await wait_for_jobs(jobs)

    async def notify(self, peer: RemoteAgent, payload: bytes) -> None:
        results: list[tuple[MoveOutcome, str]] = []
        job = NoticeJob(payload, lambda _, outcome, cause: results.append((outcome, cause)), NOTICE_SECONDS, peer.epoch)
        self._link_of(peer).submit(job)
        await wait_for_jobs([job])
        outcome, cause = results[0]
        if outcome != "ok":
            raise PieceFailed(STATUSES[outcome], f"{peer.name!r} did not get the notification: {cause}")

    async def ask(self, name: str, address: tuple[str, int], topic: str, body: bytes, seconds: float) -> TcpAnswer:
        """Ask the agent that listens at an address.

        Args:
            name: that it must have; empty takes any holder of the secret.
        Raises:
            PieceFailed: DISCONNECTED or LATE; the message says why there is no answer.
        """
        results: list[tuple[MoveOutcome, str]] = []
        job = QuestionJob(topic, body, lambda _, outcome, cause: results.append((outcome, cause)), seconds)
        self._link(name, TcpAddress(*address)).submit(job)
        await wait_for_jobs([job])
        outcome, cause = results[0]
        if outcome != "ok":
            raise PieceFailed(STATUSES[outcome], cause or outcome)
        return TcpAnswer(job.peer_epoch, job.answer)

    async def meet(self, name: str, address: tuple[str, int], seconds: float) -> bytes:
        """Return the metadata of the agent that listens at an address, which is the way to it from now on.

        Raises:
            PieceFailed, TransferRefused: there is none, or what it says can't be read.
        """
        answer = await self.ask(name, address, METADATA, b"", seconds)
        self._met[name or decode_metadata(answer.body).name] = TcpAddress(*address)
        return answer.body

    def disconnect(self, peer: RemoteAgent) -> None:
        self._end_links(peer.name)

    async def close(self) -> None:
        links, self._links = self._links, {}
        for link in links.values():
            await asyncio.to_thread(link.close)
        if self._closing:
            await asyncio.wait(self._closing)
        if self.address is not None:
            await asyncio.to_thread(self._server.close)

    def leave(self, name: str) -> None:
        """End the connections to an agent, which may never have been met."""
        self._met.pop(name, None)
        self._end_links(name)

    def _end_links(self, name: str) -> None:
        for place in [place for place in self._links if place[0] == name]:
            task = asyncio.create_task(asyncio.to_thread(self._links.pop(place).close))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    def _link_of(self, peer: RemoteAgent) -> TcpLink:
        met = self._met.get(peer.name)
        return self._link(peer.name, met or msgspec.msgpack.decode(peer.parts[self.name], type=TcpAddress))

    def _link(self, name: str, address: TcpAddress) -> TcpLink:
        place = (name, address)
        if place not in self._links:
            self._links[place] = TcpLink((address.host, address.port), self._secret, self._me, peer=name or None)
        return self._links[place]

    def _say_metadata(self, body: bytes) -> bytes:
        """Answer a peer's `meet`, in a thread of its connection: regions and backends are the event loop's."""

        async def metadata() -> bytes:
            return self._owner.metadata()

        assert self._loop is not None, "the server is started by the loop"
        return asyncio.run_coroutine_threadsafe(metadata(), self._loop).result(NOTICE_SECONDS)


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
