"""Does the hand-written engine client do what one over aiohttp does, whatever an engine sends, and cut however?"""

import asyncio
import base64
import socket
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvloop

from penstock.adapters.engines.http.engine_call import (
    COMMAND_MAX,
    CallStopped,
    EngineBroken,
    EngineCall,
    EngineCalls,
    EngineUnreachable,
)
from penstock.adapters.engines.http.http1_client import Http1Client
from penstock.kernel.errors import EngineError
from tests.adapters.aiohttp_client import AiohttpEngineClient
from tests.certificate import make_certificate

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
BOTH = pytest.mark.parametrize("kind", ["plain", "fast"])
SSE = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.fixture(scope="module")
def event_loop_policy() -> asyncio.AbstractEventLoopPolicy:
    """The loop that a frontend runs on; the suites in tests/frontend drive the same code on the standard one."""
    return uvloop.EventLoopPolicy()


def client(kind: str, **options: Any) -> EngineCalls:
    return AiohttpEngineClient(**options) if kind == "plain" else Http1Client(**options)


class Raw:
    """An engine that sends exactly the bytes that a test says."""

    def __init__(self, handler: Handler) -> None:
        self.handler = handler
        self.connections = 0
        self.requests: list[bytes] = []
        self.gone = asyncio.Event()
        """Set when a connection was closed by the other side."""
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            await self.handler(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            self.gone.set()
        finally:
            writer.close()

    async def request(self, reader: asyncio.StreamReader) -> bytes:
        """Read one request; return its body."""
        head = await reader.readuntil(b"\r\n\r\n")
        self.requests.append(head)
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        return await reader.readexactly(length)


@asynccontextmanager
async def engine(answers: list[bytes] | Handler, tls: ssl.SSLContext | None = None) -> AsyncIterator[Raw]:
    """Serve; a list means: answer each connection's next request with the next bytes."""
    left = list(answers) if isinstance(answers, list) else []

    async def scripted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while left:
            await raw.request(reader)
            writer.write(left.pop(0))
            await writer.drain()
        await reader.readexactly(1)

    raw = Raw(scripted if isinstance(answers, list) else answers)
    server = await asyncio.start_server(raw.serve, "127.0.0.1", 0, ssl=tls)
    port = server.sockets[0].getsockname()[1]
    raw.url = f"http://127.0.0.1:{port}" if tls is None else f"https://localhost:{port}"
    try:
        yield raw
    finally:
        server.close()


class Taker:
    """A sink that is full when told so."""

    def __init__(self) -> None:
        self.got = b""
        self.full = False
        self.asked = asyncio.Event()
        self.free = asyncio.Event()

    def feed(self, data: bytes) -> bool:
        self.got += data
        return True

    async def drained(self) -> None:
        if self.full:
            self.asked.set()
            await self.free.wait()
            self.full = False


def post(calls: EngineCalls, url: str, body: bytes = b"{}", path: str = "/v1/x", **headers: str) -> EngineCall:
    return calls.call(url, path, body, {"content-type": "application/json", **headers})


async def ask(calls: EngineCalls, url: str, body: bytes = b"{}", **headers: str) -> tuple[int, str, bytes]:
    call = post(calls, url, body, **headers)
    try:
        await call.begin()
        return call.status, call.content_type, await call.read()
    finally:
        call.close()


def unary(body: bytes, status: bytes = b"200 OK", more: bytes = b"") -> bytes:
    return b"HTTP/1.1 %b\r\ncontent-type: application/json\r\n%bcontent-length: %d\r\n\r\n%b" % (
        status,
        more,
        len(body),
        body,
    )


@BOTH
async def test_answers_of_every_framing_arrive_whole_and_connections_are_kept(kind: str) -> None:
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2;x=y\r\nde\r\n0\r\ntrailer: 1\r\n\r\n"
    to_the_end = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\n\r\nuntil the end"

    async def closing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for answer in (
            unary(b'{"a":1}'),
            chunked,
            b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early\r\nlink: x\r\n\r\n" + unary(b"late"),
            b"HTTP/1.1 204 No Content\r\n\r\n",
            unary(b""),
            to_the_end,
        ):
            await raw.request(reader)
            writer.write(answer)
        writer.close()

    async with engine(closing) as raw:
        calls = client(kind)
        assert await ask(calls, raw.url) == (200, "application/json", b'{"a":1}')
        assert await ask(calls, raw.url) == (200, "application/json", b"abcde")
        assert await ask(calls, raw.url) == (200, "application/json", b"late")
        assert (await ask(calls, raw.url))[0] == 204
        assert (await ask(calls, raw.url))[2] == b""
        assert await ask(calls, raw.url) == (200, "text/plain", b"until the end")
        assert raw.connections == 1
        await calls.close()


@BOTH
async def test_the_request_is_one_post_with_the_headers_given(kind: str) -> None:
    async with engine([unary(b"{}")] * 2) as raw:
        calls = client(kind)
        await ask(calls, raw.url, b"x" * 300_000, traceparent="00-ä")
        head = raw.requests[0]
        assert head.startswith(b"POST /v1/x HTTP/1.1\r\n")
        lines = head.decode().lower().split("\r\n")[1:-2]
        assert sorted(lines) == sorted(
            [
                f"host: {raw.url[7:]}",
                "accept: */*",
                "content-type: application/json",
                "traceparent: 00-ä",
                "content-length: 300000",
            ]
        )
        assert raw.connections == 1
        await calls.close()


@BOTH
async def test_a_url_with_a_path_is_kept_in_front(kind: str) -> None:
    async with engine([unary(b"{}")]) as raw:
        calls = client(kind)
        await ask(calls, raw.url + "/base/")
        assert raw.requests[0].startswith(b"POST /base/v1/x HTTP/1.1\r\n")
        await calls.close()


@BOTH
async def test_a_stream_is_handed_on_piece_by_piece_and_its_connection_kept(kind: str) -> None:
    more = asyncio.Event()

    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(2):
            await raw.request(reader)
            writer.write(SSE + b"6\r\none\n\n.\r\n")
            await more.wait()
            writer.write(b"3\r\ntwo\r\n0\r\n\r\n")
        await reader.readexactly(1)

    async with engine(slow) as raw:
        calls = client(kind)
        for _ in range(2):
            more.clear()
            taker = Taker()
            call = post(calls, raw.url)
            await call.begin()
            assert call.streams and call.status == 200
            relaying = asyncio.create_task(call.relay(taker.feed, taker))
            async with asyncio.timeout(5):
                while not taker.got:
                    await asyncio.sleep(0)
            assert taker.got == b"one\n\n."
            more.set()
            await relaying
            assert taker.got == b"one\n\n.two"
            call.close()
        assert raw.connections == 1
        await calls.close()


@pytest.mark.parametrize("ends", [True, False])
async def test_a_connection_whose_answer_lacks_only_its_end_is_kept_where_that_comes(
    ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.adapters.engines.http.http1_client_pool.LINGER", 60.0 if ends else 0.0)
    end = asyncio.Event()

    async def late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await raw.request(reader)
        writer.write(SSE + b"6\r\n[DONE]\r\n")
        await end.wait()
        writer.write(b"0\r\n\r\n" if ends else b"")
        await raw.request(reader)
        writer.write(unary(b"ok"))
        await reader.readexactly(1)

    async with engine(late) as raw:
        calls = client("fast")
        assert isinstance(calls, Http1Client)
        call = post(calls, raw.url)
        await call.begin()
        await call.relay(lambda data: False, Taker())
        call.close(lingers=True)
        (pool,) = calls._origins.values()
        assert len(pool._lingering) == 1
        end.set()
        async with asyncio.timeout(5):
            while pool._lingering:
                await asyncio.sleep(0.01)
        assert (await ask(calls, raw.url))[2] == b"ok" if ends else pool.open == 0
        assert raw.connections == 1
        await calls.close()


@pytest.mark.parametrize("size", [1, 2, 3, 7, 50])
@BOTH
async def test_cut_anywhere_it_is_the_same(kind: str, size: int) -> None:
    whole = SSE + b"".join(b"%x\r\n%b\r\n" % (n, b"y" * n) for n in range(1, 40)) + b"0\r\n\r\n"

    async def cut(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await raw.request(reader)
        for start in range(0, len(whole), size):
            writer.write(whole[start : start + size])
            await asyncio.sleep(0)
        await reader.readexactly(1)

    async with engine(cut) as raw:
        calls = client(kind)
        taker = Taker()
        call = post(calls, raw.url)
        await call.begin()
        await call.relay(taker.feed, taker)
        assert taker.got == b"y" * sum(range(40))
        call.close()
        await calls.close()


@BOTH
async def test_next_gives_what_is_there_and_then_the_end(kind: str) -> None:
    async with engine([SSE + b"3\r\nabc\r\n0\r\n\r\n"]) as raw:
        calls = client(kind)
        call = post(calls, raw.url)
        await call.begin()
        assert await call.next() == b"abc"
        assert await call.next() == b""
        call.close()
        await calls.close()


@BOTH
async def test_a_full_sink_stops_the_reading(kind: str) -> None:
    sent = 0
    total = 64 * 1024 * 1024

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await raw.request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: %d\r\n\r\n" % total)
        while sent < total:
            writer.write(b"z" * 65_536)
            sent += 65_536
            await writer.drain()
        await reader.readexactly(1)

    async with engine(flood) as raw:
        calls = client(kind)
        taker = Taker()
        size = 0

        def feed(data: bytes) -> bool:
            nonlocal size
            size += len(data)
            return True

        taker.full = True
        call = post(calls, raw.url)
        await call.begin()
        relaying = asyncio.create_task(call.relay(feed, taker))
        await taker.asked.wait()
        before = -1
        while before != sent:  # until the buffers between are full
            before = sent
            await asyncio.sleep(0.05)
        assert sent < total and size < total
        taker.free.set()
        await relaying
        assert size == total
        call.close()
        await calls.close()


@BOTH
async def test_what_feed_raises_comes_out_and_false_ends_it(kind: str) -> None:
    async with engine([SSE + b"3\r\nabc\r\n"]) as raw:
        calls = client(kind)

        def wrong(data: bytes) -> bool:
            raise KeyError("mine")

        call = post(calls, raw.url)
        await call.begin()
        with pytest.raises(KeyError, match="mine"):
            await call.relay(wrong, Taker())
        call.close()
        async with asyncio.timeout(5):
            await raw.gone.wait()
        await calls.close()

    async with engine([SSE + b"3\r\nabc\r\n"]) as raw:
        calls = client(kind)
        call = post(calls, raw.url)
        await call.begin()
        await call.relay(lambda data: False, Taker())
        call.close()
        async with asyncio.timeout(5):
            await raw.gone.wait()  # an unfinished answer's connection is closed at once
        await calls.close()


async def test_what_feed_raises_later_comes_out_too() -> None:
    first = asyncio.Event()

    async def two(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await raw.request(reader)
        writer.write(SSE + b"1\r\na\r\n")
        await first.wait()
        writer.write(b"1\r\nb\r\n")
        await reader.readexactly(1)

    def feed(data: bytes) -> bool:
        if data == b"b":
            raise KeyError("mine")
        first.set()
        return True

    async with engine(two) as raw:
        calls = client("fast")
        call = post(calls, raw.url)
        await call.begin()
        with pytest.raises(KeyError):
            await call.relay(feed, Taker())
        call.close()
        async with asyncio.timeout(5):
            await raw.gone.wait()
        await calls.close()


@BOTH
@pytest.mark.parametrize("where", ["head", "body", "whole", "drained"])
async def test_stop_ends_every_wait_at_once(kind: str, where: str) -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await raw.request(reader)
        if where != "head":
            writer.write(SSE + b"1\r\na\r\n")
        await reader.readexactly(1)

    async with engine(silent) as raw:
        calls = client(kind)
        call = post(calls, raw.url)
        taker = Taker()
        taker.full = where == "drained"

        async def work() -> None:
            await call.begin()
            if where == "whole":
                await call.read()
            else:
                await call.relay(taker.feed, taker)

        if kind == "plain" and where == "drained":
            pytest.skip("the plain sink never blocks for longer than the client's own watch")
        task = asyncio.create_task(work())
        async with asyncio.timeout(5):
            while not (raw.requests if where == "head" else call.status if where == "whole" else taker.got):
                await asyncio.sleep(0.001)
            if where == "drained":
                await taker.asked.wait()
            call.stop("enough")
            call.stop("second")
            with pytest.raises(CallStopped, match="enough"):
                await task
        with pytest.raises(CallStopped):
            await call.next() if where != "head" else await call.begin()
        call.close()
        async with asyncio.timeout(5):
            await raw.gone.wait()
        await calls.close()


@BOTH
async def test_cancelling_closes_the_engines_connection(kind: str) -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await raw.request(reader)
        await reader.readexactly(1)

    async with engine(silent) as raw:
        calls = client(kind)
        task = asyncio.create_task(ask(calls, raw.url))
        async with asyncio.timeout(5):
            while not raw.requests:
                await asyncio.sleep(0.001)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await raw.gone.wait()
        await calls.close()


BREAKS = {
    "length": b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nabc",
    "chunk": SSE + b"5\r\nabc",
    "no last chunk": SSE + b"3\r\nabc\r\n",
    "bad size": SSE + b"3\r\nabc\r\nzz\r\n",
}


@BOTH
@pytest.mark.parametrize("name", BREAKS)
async def test_an_answer_that_breaks_off_is_broken_after_its_pieces(kind: str, name: str) -> None:
    async def breaking(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await raw.request(reader)
        writer.write(BREAKS[name])
        await writer.drain()

    async with engine(breaking) as raw:
        calls = client(kind)
        taker = Taker()
        call = post(calls, raw.url)
        # aiohttp drops the head, or a piece, that came in the same packet as what is malformed.
        with pytest.raises(EngineBroken if kind == "fast" else EngineError):
            await call.begin()
            await call.relay(taker.feed, taker)
        if kind == "fast":
            assert taker.got == b"abc"
        call.close()
        with pytest.raises(EngineError):
            await ask(calls, raw.url)
        await calls.close()


MALFORMED = [
    b"nonsense\r\n\r\n",
    b"HTTP/1.1 abc\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
    b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\n",
    b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n",
    b"HTTP/1.1 101 Switching\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nx: " + b"y" * 600_000,
    b"HTTP/1.1 100 Continue\r\n\r\n" * 20_000,
]


@pytest.mark.parametrize("number", range(len(MALFORMED)))
async def test_a_malformed_head_is_the_engines_fault_and_the_connection_is_gone(number: int) -> None:
    async def wrong(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await raw.request(reader)
        writer.write(MALFORMED[number])
        await writer.drain()
        await reader.readexactly(1)

    async with engine(wrong) as raw:
        calls = client("fast")
        with pytest.raises(EngineBroken):
            async with asyncio.timeout(5):
                await ask(calls, raw.url)
            raise AssertionError
        async with asyncio.timeout(5):
            await raw.gone.wait()
        await calls.close()


async def test_a_compressed_body_that_nobody_asked_for_is_refused() -> None:
    async with engine([unary(b"\x1f\x8b", more=b"content-encoding: gzip\r\n")]) as raw:
        calls = client("fast")
        with pytest.raises(EngineBroken, match="compressed"):
            await ask(calls, raw.url)
        await calls.close()


@BOTH
async def test_a_kept_connection_that_was_closed_meanwhile_is_replaced_once(kind: str) -> None:
    async def one_each(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await raw.request(reader)
        writer.write(unary(b"ok"))
        await writer.drain()
        # The next request finds the connection closing: it is read, and never answered.
        await raw.request(reader)
        if raw.connections == 2:
            raise ConnectionError
        transport: Any = writer.transport
        transport.abort()

    async with engine(one_each) as raw:
        calls = client(kind)
        assert (await ask(calls, raw.url))[2] == b"ok"
        assert (await ask(calls, raw.url))[2] == b"ok"
        assert raw.connections == 2 and len(raw.requests) == 3
        await calls.close()


@BOTH
async def test_a_fresh_connection_that_hangs_up_is_not_tried_again(kind: str) -> None:
    async def never(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await raw.request(reader)

    async with engine(never) as raw:
        calls = client(kind)
        with pytest.raises(EngineUnreachable):
            await ask(calls, raw.url)
        assert len(raw.requests) == 1
        await calls.close()


@BOTH
async def test_nobody_there_is_unreachable(kind: str) -> None:
    calls = client(kind)
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        for url in (f"http://127.0.0.1:{held.getsockname()[1]}", "http://[::1", "http://a..b:1", "ftp://x", "nothing"):
            with pytest.raises(EngineUnreachable):
                await ask(calls, url)
    await calls.close()


@BOTH
async def test_a_connection_that_is_not_accepted_in_time_is_unreachable(kind: str) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen(0)
        url = f"http://127.0.0.1:{held.getsockname()[1]}"
        fillers = [socket.socket() for _ in range(4)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(held.getsockname())
        calls = client(kind, connect_timeout=0.2)
        with pytest.raises(EngineUnreachable):
            await ask(calls, url)
        stopped = post(client(kind, connect_timeout=60), url)
        beginning = asyncio.create_task(stopped.begin())
        await asyncio.sleep(0.05)
        stopped.stop("enough")
        with pytest.raises(CallStopped):
            await beginning
        for filler in fillers:
            filler.close()
        await calls.close()


@BOTH
async def test_calls_above_the_limit_wait_for_a_connection(kind: str) -> None:
    release = asyncio.Event()

    async def held(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await raw.request(reader)
            await release.wait()
            writer.write(unary(b"ok"))

    async with engine(held) as raw:
        calls = client(kind, connections_max=2)
        tasks = [asyncio.create_task(ask(calls, raw.url)) for _ in range(7)]
        async with asyncio.timeout(5):
            while len(raw.requests) < 2:
                await asyncio.sleep(0.001)
        tasks[4].cancel()  # one that waits for its turn
        release.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [r for r in results if isinstance(r, tuple)] == [(200, "application/json", b"ok")] * 6
        assert raw.connections == 2
        await calls.close()


async def test_a_place_is_passed_on_when_connections_end() -> None:
    async def closing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await raw.request(reader)
        writer.write(unary(b"ok", more=b"connection: close\r\n"))
        await writer.drain()

    async with engine(closing) as raw:
        calls = client("fast", connections_max=1)
        results = await asyncio.gather(*(ask(calls, raw.url) for _ in range(20)))
        assert {body for _, _, body in results} == {b"ok"}
        assert raw.connections == 20
        await calls.close()


async def test_idle_connections_are_closed_before_engines_do_and_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.adapters.engines.http.http1_client_pool.FORGOTTEN_AFTER", 2)
    monkeypatch.setattr("penstock.adapters.engines.http.http1_client.SWEEP_EVERY", 0.02)
    async with engine([unary(b"ok")] * 3) as raw:
        calls = Http1Client(keep_alive=0.05)
        await ask(calls, raw.url)
        async with asyncio.timeout(5):
            await raw.gone.wait()
            while calls._origins:
                await asyncio.sleep(0.01)
        assert calls._sweeper is None and not calls._targets
        await ask(calls, raw.url)
        assert raw.connections == 2
        await calls.close()


async def test_bytes_that_nobody_asked_for_end_a_connection() -> None:
    async with engine([unary(b"ok") + b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nfoo", unary(b"second")]) as raw:
        calls = client("fast")
        assert (await ask(calls, raw.url))[2] == b"ok"
        assert (await ask(calls, raw.url))[2] == b"second"
        assert raw.connections == 2
        await calls.close()


@BOTH
async def test_an_early_answer_to_a_large_body_arrives(kind: str) -> None:
    async def early(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(unary(b"too large", status=b"413 Too Large"))
        await writer.drain()
        while await reader.read(1 << 20):
            pass

    async with engine(early) as raw:
        calls = client(kind)
        assert (await ask(calls, raw.url, b"x" * 30_000_000))[0] == 413
        await calls.close()


async def test_line_breaks_never_get_into_a_head() -> None:
    calls = client("fast")
    for value in ("a\r\nx: y", "a\nb", "a\rb", "a\0b"):
        with pytest.raises(ValueError, match="line break"):
            post(calls, "http://127.0.0.1:1", traceparent=value)
    await calls.close()


async def test_nodelay_is_set() -> None:
    async with engine([unary(b"ok")]) as raw:
        calls = client("fast")
        call = post(calls, raw.url)
        await call.begin()
        sock = call._connection.transport.get_extra_info("socket")  # type: ignore[attr-defined]
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
        call.close()
        await calls.close()


@BOTH
async def test_a_user_in_a_url_goes_into_a_header(kind: str) -> None:
    async with engine([unary(b"ok")]) as raw:
        calls = client(kind)
        await ask(calls, raw.url.replace("//", "//user:p%40ss@"))
        lines = raw.requests[0].lower().split(b"\r\n")
        assert b"authorization: basic " + base64.b64encode(b"user:p@ss").lower() in lines
        assert f"host: {raw.url[7:]}".encode() in lines
        await calls.close()


async def test_a_url_that_no_request_line_may_have_is_unreachable() -> None:
    calls = client("fast")
    for url in (
        "http://h:1/a b",
        "http://h:1/?q",
        "http://h:1/#f",
        "http://h:x",
        "http://h\u00e4:1",
        "http://h:1/\r\nx: y",
    ):
        with pytest.raises(EngineUnreachable, match="not an http or https URL"):
            await ask(calls, url)
    await calls.close()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return make_certificate(tmp_path_factory.mktemp("tls"))


def contexts(certificate: tuple[str, str]) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Return the server's context, and that of a client that trusts it."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(*certificate)
    return server, ssl.create_default_context(cafile=certificate[0])


@BOTH
async def test_https_engines_stream_and_their_connections_are_kept(kind: str, certificate: tuple[str, str]) -> None:
    served, trusting = contexts(certificate)
    pieces = [b"z" * 70_000] * 40
    stream = SSE + b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"

    async def closing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for answer in (unary(b"ok"), stream, b"HTTP/1.1 200 OK\r\n\r\nto the end"):
            await raw.request(reader)
            writer.write(answer)

    async with engine(closing, served) as raw:
        calls = client(kind, tls=trusting)
        assert (await ask(calls, raw.url, b"x" * 300_000))[2] == b"ok"
        call, taker = post(calls, raw.url), Taker()
        await call.begin()
        await call.relay(taker.feed, taker)
        call.close()
        assert taker.got == b"".join(pieces)
        assert (await ask(calls, raw.url))[2] == b"to the end"
        assert raw.connections == 1 and f"host: {raw.url[8:]}".encode() in raw.requests[0].lower().split(b"\r\n")
        await calls.close()


@BOTH
async def test_an_https_engine_without_a_trusted_certificate_is_unreachable(
    kind: str, certificate: tuple[str, str]
) -> None:
    served, trusting = contexts(certificate)
    async with engine([unary(b"ok")] * 3, served) as raw:
        for calls, url in (
            (client(kind), raw.url),  # nobody signed it
            (client(kind, tls=trusting), raw.url.replace("localhost", "127.0.0.1")),  # it is another's
            (client(kind, tls=trusting), raw.url.replace("https", "http")),
        ):
            with pytest.raises(EngineError):
                await ask(calls, url)
            await calls.close()
        assert not raw.requests
    async with engine([unary(b"ok")]) as plain:
        calls = client(kind, tls=trusting, connect_timeout=0.3)  # it waits for the rest of a head, as servers do
        with pytest.raises(EngineUnreachable):
            await ask(calls, plain.url.replace("http://127.0.0.1", "https://localhost"))
        await calls.close()


@BOTH
async def test_a_tls_handshake_has_the_connects_time_and_stop_ends_it(kind: str, certificate: tuple[str, str]) -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    _, trusting = contexts(certificate)
    async with engine(silent) as raw:
        url = raw.url.replace("http://127.0.0.1", "https://localhost")
        if kind == "fast":
            calls = client(kind, tls=trusting, connect_timeout=0.1)
            with pytest.raises(EngineUnreachable):
                await ask(calls, url)
            await calls.close()
        calls = client(kind, tls=trusting)
        call = post(calls, url)
        beginning = asyncio.create_task(call.begin())
        await asyncio.sleep(0.05)
        call.stop("enough")
        with pytest.raises(CallStopped):
            await beginning
        await calls.close()


@BOTH
async def test_a_command_returns_what_the_engine_says_or_that_it_says_nothing(kind: str) -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await raw.request(reader)
        if len(raw.requests) == 2:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n")
        await reader.readexactly(1)

    async with engine([unary(b"done", b"202 Accepted"), unary(b"")]) as raw:
        calls = client(kind)
        assert await calls.command(raw.url, "/reset", 5.0) == (202, b"done")
        assert await calls.command(raw.url + "/", "/reset", 5.0) == (200, b"")
        assert (
            raw.requests[0].startswith(b"POST /reset HTTP/1.1\r\n") and b"content-length: 0" in raw.requests[0].lower()
        )
        await calls.close()
    async with engine(silent) as raw:
        calls = client(kind)
        for url in (raw.url, raw.url, "http://127.0.0.1:9"):
            with pytest.raises(EngineUnreachable, match="no answer from"):
                await calls.command(url, "/reset", 0.2)
        await calls.close()


async def test_of_a_commands_answer_so_much_is_read_and_no_more() -> None:
    async with engine([unary(b"x" * (COMMAND_MAX + 100))]) as raw:
        calls = client("fast")
        assert await calls.command(raw.url, "/reset", 5.0) == (200, b"x" * COMMAND_MAX)
        await calls.close()


@BOTH
async def test_retry_after_is_read_where_it_is_a_number(kind: str) -> None:
    async with engine([unary(b"{}", b"503 Busy", b"Retry-After: 7\r\n"), unary(b"{}", b"503 Busy")]) as raw:
        calls = client(kind)
        for expected in (7.0, None):
            call = post(calls, raw.url)
            await call.begin()
            assert (call.status, call.retry_after) == (503, expected)
            await call.read()
            call.close()
        await calls.close()


async def test_a_loop_that_is_busy_for_longer_than_the_connects_time_blames_no_engine() -> None:
    """As where thousands of requests come at once: the engine has taken the connection long before we see it."""
    busy = True

    async def hog() -> None:
        while busy:
            time.sleep(0.03)  # noqa: ASYNC251 - this is what makes a loop late
            await asyncio.sleep(0)

    async with engine([unary(b"ok")]) as raw:
        calls = client("fast", connect_timeout=0.02)
        hogging = asyncio.create_task(hog())
        try:
            assert (await ask(calls, raw.url))[2] == b"ok"
        finally:
            busy = False
            await hogging
            await calls.close()
