"""The TCP mover: bounds, damage, deadlines, strangers and restarts, on real sockets of this host."""

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from penstock.kernel.secret import ClusterSecret
from penstock_kv.transfer.tcp.link_jobs import NoticeJob, SpanReadJob, WriteJob
from penstock_kv.transfer.tcp.tcp_frames import ITEMS_MAX, CallerHello, RegionSpan, WriteSpans
from penstock_kv.transfer.tcp.tcp_link import TcpLink
from penstock_kv.transfer.tcp.tcp_server import TcpServer
from penstock_kv.transfer.tcp.tcp_stream import PeerIdentity, TcpStream, call

SECRET = ClusterSecret("the secret of this cluster")
SIZE = 1 << 20
OWNER, READER = PeerIdentity("owner", 7), PeerIdentity("reader", 1)


class Results(dict[int, str]):
    """Outcome per position."""

    def report(self, position: int, outcome: str, cause: str) -> None:
        assert position not in self, "an item has one result"
        self[position] = outcome


class World:
    """An owner with one region of 1 MiB, and a link to it."""

    def __init__(self) -> None:
        self.notices: list[tuple[str, bytes]] = []
        self.memory = bytearray(bytes(range(256)) * (SIZE // 256))
        self.server = self.owner(OWNER)
        self.address = self.server.start("127.0.0.1")
        self.link = TcpLink(self.address, SECRET, READER, peer="owner")

    def owner(self, me: PeerIdentity) -> TcpServer:
        server = TcpServer(me, SECRET, notice=lambda peer, body: self.notices.append((peer.name, body)))
        server.regions.add(1, memoryview(self.memory), writable=True)
        server.regions.add(2, memoryview(self.memory)[:4096], writable=False)
        return server

    async def read(
        self, spans: list[RegionSpan], buffer: bytearray, *, seconds: float = 5.0, epoch: int = 7
    ) -> list[str]:
        return await self._run(SpanReadJob, spans, buffer, seconds, epoch)

    async def write(
        self, spans: list[RegionSpan], buffer: bytearray, *, seconds: float = 5.0, epoch: int = 7
    ) -> list[str]:
        return await self._run(WriteJob, spans, buffer, seconds, epoch)

    async def _run(
        self,
        kind: type[SpanReadJob] | type[WriteJob],
        spans: list[RegionSpan],
        buffer: bytearray,
        seconds: float,
        epoch: int,
    ) -> list[str]:
        results, view, at, parts = Results(), memoryview(buffer), 0, []
        for span in spans:
            parts.append(view[at : at + span.length])
            at += span.length
        job = kind(spans, parts, results.report, seconds, epoch)
        self.link.submit(job)
        await job.wait()
        return [results[position] for position in range(len(spans))]


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.link.close()
    world.server.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("tcp")]


async def test_spans_are_read_and_written_in_place(world: World) -> None:
    spans = [RegionSpan(1, 256 * at + 3, 200) for at in range(700)] + [RegionSpan(1, 0, SIZE)]
    buffer = bytearray(sum(span.length for span in spans))
    assert set(await world.read(spans, buffer)) == {"ok"}
    expected = b"".join(bytes(world.memory[span.offset : span.offset + span.length]) for span in spans)
    assert buffer == expected
    assert set(await world.write([RegionSpan(1, 5, 9), RegionSpan(1, SIZE - 1, 1)], bytearray(b"123456789Z"))) == {"ok"}
    assert world.memory[5:14] == b"123456789"
    assert world.memory[-1:] == b"Z"


async def test_more_items_than_a_request_has(world: World) -> None:
    spans = [RegionSpan(1, at, 1) for at in range(ITEMS_MAX + 5)]
    buffer = bytearray(len(spans))
    assert await world.read(spans, buffer) == ["ok"] * len(spans)
    assert buffer == world.memory[: len(spans)]


@pytest.mark.parametrize(
    ("span", "outcome"),
    [
        (RegionSpan(1, SIZE - 9, 10), "denied"),
        (RegionSpan(1, -1, 10), "denied"),
        (RegionSpan(1, 1 << 62, 10), "denied"),
        (RegionSpan(3, 0, 10), "absent"),
        (RegionSpan(2, 4090, 10), "denied"),
    ],
)
async def test_only_registered_bytes_are_reached_and_the_others_go_on(
    world: World, span: RegionSpan, outcome: str
) -> None:
    before = bytes(world.memory)
    good = RegionSpan(1, 0, 8)
    assert await world.read([good, span, good], bytearray(26)) == ["ok", outcome, "ok"]
    assert await world.write([good, span, good], bytearray(before[:8] + b"x" * 10 + before[:8])) == [
        "ok",
        outcome,
        "ok",
    ]
    assert world.memory == before


async def test_a_read_only_region_is_not_written(world: World) -> None:
    assert await world.write([RegionSpan(2, 0, 10)], bytearray(10)) == ["denied"]
    assert await world.read([RegionSpan(2, 0, 10)], bytearray(10)) == ["ok"]


async def test_a_notice_reaches_the_owner(world: World) -> None:
    results = Results()
    job = NoticeJob(b"blocks 1 to 4", results.report, 5.0, 7)
    world.link.submit(job)
    await job.wait()
    assert results == {0: "ok"}
    assert world.notices == [("reader", b"blocks 1 to 4")]


async def test_another_secret_is_refused_by_both_ends(world: World) -> None:
    stranger = TcpLink(world.address, ClusterSecret("the secret of another one"), READER)
    results = Results()
    job = SpanReadJob([RegionSpan(1, 0, 8)], [memoryview(bytearray(8))], results.report, 5.0)
    stranger.submit(job)
    await job.wait()
    assert results == {0: "failed"}
    stranger.close()
    # An impostor that skips the reader's own check can't prove itself to the owner either.
    stream = TcpStream(socket.create_connection(world.address), listener=False)
    stream.send(CallerHello(1, "impostor", 1, bytes(32)))
    stream.receive()
    stream.authenticate((bytes(32), bytes(32)))
    stream.send(CallerHello(1, "impostor", 1, bytes(32)))
    stream.close()
    assert await world.read([RegionSpan(1, 0, 8)], bytearray(8)) == ["ok"]


@pytest.mark.parametrize("garbage", [b"", b"\xff" * 64, b"GET / HTTP/1.1\r\n\r\n", b"\x04\x00\x00\x00\x93\x01\x02\x03"])
async def test_garbage_costs_one_connection_and_nothing_else(world: World, garbage: bytes) -> None:
    with socket.create_connection(world.address) as connection:
        connection.sendall(garbage)
        with contextlib.suppress(OSError):  # the owner may have hung up already
            connection.shutdown(socket.SHUT_WR)
            assert await asyncio.to_thread(connection.recv, 1) == b""
    assert await world.read([RegionSpan(1, 0, 8)], bytearray(8)) == ["ok"]


async def test_a_silent_peer_is_late_and_the_buffer_is_left_alone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        link = TcpLink(silent.getsockname(), SECRET, READER)
        results = Results()
        job = SpanReadJob([RegionSpan(1, 0, 8)], [memoryview(bytearray(8))], results.report, 0.1)
        began = time.monotonic()
        link.submit(job)
        await job.wait()
        assert time.monotonic() - began < 2
        assert results == {0: "late"}
        link.close()


async def test_a_job_that_waits_behind_another_ends_when_it_is_cancelled() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        link = TcpLink(silent.getsockname(), SECRET, READER, streams=1)
        results = [Results(), Results()]
        jobs = [SpanReadJob([RegionSpan(1, 0, 8)], [memoryview(bytearray(8))], each.report, 3.0) for each in results]
        for job in jobs:
            link.submit(job)
        waiting = asyncio.create_task(jobs[1].wait())
        await asyncio.sleep(0.05)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert results == [{}, {0: "late"}]
        await asyncio.to_thread(link.close)
        await jobs[0].wait()


async def test_a_restart_on_the_same_address_is_stale_for_old_jobs_and_fine_for_new_ones(world: World) -> None:
    assert await world.read([RegionSpan(1, 0, 8)], bytearray(8)) == ["ok"]
    world.server.close()
    assert await world.read([RegionSpan(1, 0, 8)], bytearray(8)) == ["failed"]
    world.server = world.owner(PeerIdentity("owner", 8))
    world.server.start(*world.address)
    await asyncio.sleep(0.06)  # the pause after a failed connection
    assert await world.read([RegionSpan(1, 0, 8)], bytearray(8), epoch=7) == ["stale"]
    assert await world.read([RegionSpan(1, 0, 8)], bytearray(8), epoch=8) == ["ok"]
    # A connection to the old life is made anew without a failure.
    world.server.close()
    world.server = world.owner(PeerIdentity("owner", 9))
    world.server.start(*world.address)
    assert await world.read([RegionSpan(1, 0, 8)], bytearray(8), epoch=9) == ["ok"]


async def test_a_dead_peer_fails_at_once_during_the_pause(world: World) -> None:
    world.server.close()
    began = time.monotonic()
    for _ in range(50):
        assert await world.read([RegionSpan(1, 0, 8)], bytearray(8)) == ["failed"]
    assert time.monotonic() - began < 2


async def test_another_process_on_the_peers_address_is_refused(world: World) -> None:
    link = TcpLink(world.address, SECRET, READER, peer="somebody else")
    results = Results()
    job = SpanReadJob([RegionSpan(1, 0, 8)], [memoryview(bytearray(8))], results.report, 5.0)
    link.submit(job)
    await job.wait()
    assert results == {0: "failed"}
    link.close()


class Meddler:
    """A relay on the way that flips one bit of what the owner sends, from some byte on."""

    def __init__(self, target: tuple[str, int], at: int) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = self._listener.getsockname()
        self._target, self._at = target, at
        self._threads = [threading.Thread(target=self._run, daemon=True)]
        self._threads[0].start()

    def _run(self) -> None:
        reader, _ = self._listener.accept()
        owner = socket.create_connection(self._target)
        # Either end hangs up when it sees the damage.
        up = threading.Thread(target=self._pump, args=(reader, owner, None), daemon=True)
        up.start()
        self._pump(owner, reader, self._at)
        up.join()
        reader.close()
        owner.close()

    @staticmethod
    def _pump(source: socket.socket, target: socket.socket, at: int | None) -> None:
        passed = 0
        with contextlib.suppress(ConnectionError):
            while data := bytearray(source.recv(65536)):
                if at is not None and passed <= at < passed + len(data):
                    data[at - passed] ^= 4
                passed += len(data)
                target.sendall(data)
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.close()
        for thread in self._threads:
            thread.join()


@pytest.mark.parametrize(
    ("at", "outcome"), [(20, "failed"), (130, "failed"), (100_000, "corrupt"), (900_000, "corrupt")]
)
async def test_a_bit_that_changes_on_the_way_is_never_data(world: World, at: int, outcome: str) -> None:
    meddler = Meddler(world.address, at)
    link, world.link = world.link, TcpLink(meddler.address, SECRET, READER)
    assert await world.read([RegionSpan(1, 0, SIZE)], bytearray(SIZE)) == [outcome]
    world.link.close()
    world.link = link
    meddler.close()


async def test_a_region_that_leaves_ends_the_calls_on_it(world: World) -> None:
    # A writer announces a payload and stops in its middle; then the region leaves.
    stream = TcpStream(socket.create_connection(world.address), listener=False)
    call(stream, SECRET, READER, time.monotonic() + 5)
    stream.send(WriteSpans(1, 30.0, [RegionSpan(1, 0, 4096)]))
    stream.send_payload(memoryview(b"x" * 100))
    while world.memory[:100] != b"x" * 100:
        await asyncio.sleep(0.001)
    await asyncio.to_thread(world.server.regions.remove, 1)
    after = bytes(world.memory)
    assert await world.read([RegionSpan(1, 0, 8)], bytearray(8)) == ["absent"]
    assert world.memory == after
    stream.close()
