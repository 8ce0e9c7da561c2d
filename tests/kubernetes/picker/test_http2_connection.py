"""Our gRPC server against the real client library: messages, flow control, ends, health, TLS, and bad peers."""

import asyncio
import ssl
import struct
from collections.abc import AsyncIterator
from functools import partial

import pytest

from penstock.adapters.listen_address import free_port
from penstock_kubernetes.picker.ext_proc_listener import ExtProcListener
from penstock_kubernetes.picker.http2_connection import GrpcStream, Http2Connection, StreamHandler
from penstock_kubernetes.picker.picker import Picker
from tests.frontend.stand import stand
from tests.kubernetes.picker.envoy import with_picker

grpc = pytest.importorskip("grpc")


class Echo:
    """Sends each message back ``times`` times, and ends when the caller does."""

    def __init__(self, stream: GrpcStream, times: int) -> None:
        self.stream, self.times = stream, times

    def message(self, data: bytes) -> None:
        for _ in range(self.times):
            self.stream.send(data)

    def half_closed(self) -> None:
        self.stream.finish()

    def reset(self) -> None:
        RESETS.append(self.stream.id)


RESETS: list[int] = []


def call(path: str, stream: GrpcStream) -> StreamHandler | None:
    return Echo(stream, 40 if path.endswith("Many") else 1) if path.startswith("/test.Echo/") else None


@pytest.fixture
async def address() -> AsyncIterator[str]:
    connections: set[Http2Connection] = set()
    server = await asyncio.get_running_loop().create_server(
        partial(Http2Connection, call, 64 << 20, connections), "127.0.0.1", 0
    )
    yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    server.close()
    for connection in list(connections):
        connection.close()


def channel(address: str) -> "grpc.aio.Channel":
    limits = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    return grpc.aio.insecure_channel(address, options=limits)


async def exchange(channel: "grpc.aio.Channel", method: str, messages: list[bytes]) -> list[bytes]:
    async def all_of() -> AsyncIterator[bytes]:
        for message in messages:
            yield message

    return [message async for message in channel.stream_stream(f"/test.Echo/{method}")(all_of())]


async def test_messages_of_any_size_come_back_on_many_calls_of_one_connection(address: str) -> None:
    async with channel(address) as open:
        sizes = [0, 1, 100, 16_384, 62_000, 1 << 20, 20 << 20]
        messages = [bytes([size % 251]) * size for size in sizes]
        assert await exchange(open, "Once", messages) == messages
        answers = await asyncio.gather(*[exchange(open, "Once", [b"%d" % n] * 5) for n in range(200)])
        assert answers == [[b"%d" % n] * 5 for n in range(200)]


async def test_answers_wait_for_the_clients_window(address: str) -> None:
    async with channel(address) as open:
        got = await exchange(open, "Many", [b"x" * 200_000])
        assert [len(one) for one in got] == [200_000] * 40


async def test_an_unknown_method_and_a_call_that_is_given_up(address: str) -> None:
    async with channel(address) as open:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await open.unary_unary("/test.Nothing/At")(b"")
        assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
        RESETS.clear()
        running = open.stream_stream("/test.Echo/Once")()
        await running.write(b"a")
        assert await running.read() == b"a"
        running.cancel()
        async with asyncio.timeout(5):
            while not RESETS:
                await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    "bytes_",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + struct.pack(">BHBBI", 255, 0, 0, 0, 1),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + struct.pack(">BHBBI", 0, 1, 9, 4, 1) + b"x",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + struct.pack(">BHBBI", 0, 3, 1, 4, 1) + b"\xff\xff\xff",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + struct.pack(">BHBBI", 0, 1, 0, 8, 1) + b"\xff",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + struct.pack(">BHBBI", 0, 1, 8, 0, 0) + b"x",
    ],
)
async def test_a_peer_that_breaks_the_rules_loses_its_connection_only(address: str, bytes_: bytes) -> None:
    host, port = address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(bytes_)
    await writer.drain()
    writer.write_eof()
    async with asyncio.timeout(5):
        await reader.read()
    writer.close()
    async with channel(address) as open:
        assert await exchange(open, "Once", [b"still here"]) == [b"still here"]


async def test_health_is_told_over_tls_until_the_process_drains() -> None:
    async with stand(1, settings=with_picker(tls=True)) as found:
        listener = ExtProcListener(Picker(found.service))
        await listener.start(0)
        host, port = listener.address.split(":")
        certificate = await asyncio.to_thread(ssl.get_server_certificate, (host, int(port)))
        secure = grpc.ssl_channel_credentials(certificate.encode())
        options = [("grpc.ssl_target_name_override", "penstock")]
        async with grpc.aio.secure_channel(listener.address, secure, options=options) as open:
            check = open.unary_unary("/grpc.health.v1.Health/Check")
            liveness, readiness = b"\x0a\x08liveness", b"\x0a\x09readiness"
            assert [await check(one) for one in (b"", liveness, readiness)] == [b"\x08\x01"] * 3
            found.service.gate.draining = True
            assert [await check(one) for one in (liveness, readiness)] == [b"\x08\x01", b"\x08\x02"]
            found.service.gate.draining = False
        await listener.close()


async def test_a_second_process_listens_at_the_next_port() -> None:
    port = free_port()
    async with stand(0, settings=with_picker(listen_port=port)) as found:
        listener = ExtProcListener(Picker(found.service))
        await listener.start(1)
        assert listener.address == f"127.0.0.1:{port + 1}"
        await listener.close()
