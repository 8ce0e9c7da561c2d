"""Does the hand-written server hold its own against clients that pipeline, dribble, smuggle, leave or want the rest?"""

import asyncio
import gzip
import json
import os
import ssl
import zlib
from pathlib import Path
from typing import Any

import pytest
import uvloop
from aiohttp import web

from penstock.config.settings.frontend_settings import FrontendSettings, LimitSettings, SecuritySettings
from penstock.frontend.http import http1_listener, http1_server
from penstock.frontend.http.http1_messages import answer_head
from tests.certificate import make_certificate
from tests.frontend.raw import Answer, connect, read_answer
from tests.frontend.stand import Stand, answer, answer_well, eventually, stand

BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]}).encode()
STREAM = json.dumps({"model": "m", "stream": True, "messages": [{"role": "user", "content": "hi"}]}).encode()


@pytest.fixture(scope="module")
def event_loop_policy() -> asyncio.AbstractEventLoopPolicy:
    """The loop that a frontend runs on; the other suites here drive the same code on the standard one."""
    return uvloop.EventLoopPolicy()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http1_listener, "SWEEP_EVERY", 0.02)
    monkeypatch.setattr(http1_server, "LINGER", 0.1)


def post(body: bytes = BODY, *more: str, version: str = "1.1", path: str = "/v1/chat/completions") -> bytes:
    lines = "".join(f"{line}\r\n" for line in more)
    return f"POST {path} HTTP/{version}\r\nhost: x\r\n{lines}content-length: {len(body)}\r\n\r\n".encode() + body


def chunked(body: bytes, size: int, last: bytes = b"0\r\n\r\n") -> bytes:
    pieces = [body[i : i + size] for i in range(0, len(body), size)]
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    return head + b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + last


async def exchange(s: Stand, data: bytes, count: int) -> list[Answer]:
    """Send bytes on one connection and read so many answers."""
    reader, writer = await connect(s)
    writer.write(data)
    try:
        async with asyncio.timeout(5):
            return [await read_answer(reader) for _ in range(count)]
    finally:
        writer.close()


async def closed(reader: asyncio.StreamReader) -> bool:
    async with asyncio.timeout(5):
        return await reader.read(1) == b""


async def test_one_connection_carries_one_request_after_another() -> None:
    async with stand() as s:
        reader, writer = await connect(s)
        for number in range(3):
            writer.write(post(BODY, f"x-request-id: r{number}"))
            found = await read_answer(reader)
            assert found.status == 200 and found.headers["x-request-id"] == f"r{number}"
            assert "connection" not in found.headers
            writer.write(post(STREAM))
            found = await read_answer(reader)
            assert found.status == 200 and found.body.endswith(b"data: [DONE]\n\n")
        writer.write(post(BODY, "connection: close"))
        found = await read_answer(reader)
        assert found.headers["connection"] == "close" and await closed(reader)
        writer.close()


async def test_pipelined_requests_are_answered_one_at_a_time_and_in_order() -> None:
    async with stand() as s:
        at_once = most = 0

        async def counting(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            nonlocal at_once, most
            at_once += 1
            most = max(most, at_once)
            await asyncio.sleep(0.01)
            at_once -= 1
            return await answer_well(request, body)

        s.engines[0].reply = counting
        data = b"".join(post(BODY, f"x-request-id: r{number}") for number in range(5))
        data += chunked(BODY, 20) + post(STREAM) + b"\r\n" + post(BODY, "x-request-id: last")
        answers = await exchange(s, data, 8)
        assert [a.status for a in answers] == [200] * 8
        assert [a.headers["x-request-id"] for a in answers[:5]] == [f"r{n}" for n in range(5)]
        assert answers[-1].headers["x-request-id"] == "last"
        assert most == 1


async def test_many_requests_ahead_stop_the_reading_and_are_all_answered() -> None:
    async with stand() as s:
        release = asyncio.Event()

        async def waiting(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            await release.wait()
            return await answer_well(request, body)

        s.engines[0].reply = waiting
        reader, writer = await connect(s)
        writer.write(post() * 1500)
        assert s.server._listener is not None
        await eventually(lambda: any(c._paused for c in s.server._listener.connections))  # type: ignore[union-attr]
        assert all(len(c._ahead) < 600_000 for c in s.server._listener.connections)
        release.set()
        async with asyncio.timeout(30):
            for _ in range(1500):
                assert (await read_answer(reader)).status == 200
        writer.close()


@pytest.mark.parametrize("size", [1, 3, 64, 500])
async def test_chunked_bodies_arrive_as_they_were(size: int) -> None:
    body = BODY[:-1] + b',"x":"\\r\\n\\r\\n' + b" \r\n\r\n".replace(b"\r\n", b"") + b'"}'
    async with stand() as s:
        for last in (b"0\r\n\r\n", b"0\r\ntrailer: x\r\n\r\n", b"0;ext=1\r\n\r\n"):
            found = await exchange(s, chunked(body, size, last) + post(), 2)
            assert [a.status for a in found] == [200, 200]
        assert s.engines[0].bodies[::2] == [body] * 3


async def test_a_chunked_body_full_of_blank_lines_is_read_and_ends_its_connection_only_if_something_follows() -> None:
    body = BODY + b"\r\n\r\n" * 500
    async with stand() as s:
        reader, writer = await connect(s)
        writer.write(chunked(body, 700))
        assert (await read_answer(reader)).status == 200
        writer.write(post())
        assert (await read_answer(reader)).status == 200
        writer.write(chunked(body, 700) + post())
        assert (await read_answer(reader)).status == 200
        # Where the body ended is not known here: nothing that follows is taken for a request.
        assert await closed(reader)
        assert len(s.engines[0].bodies) == 3
        writer.close()


async def test_cut_anywhere_it_is_one_request() -> None:
    async with stand() as s:
        for data in (post(), chunked(BODY, 30), b"\r\n" + post()):
            for size in (1, 2, 5, 17):
                reader, writer = await connect(s)
                for start in range(0, len(data), size):
                    writer.write(data[start : start + size])
                    await asyncio.sleep(0)
                assert (await read_answer(reader)).status == 200
                writer.close()


async def test_http_1_0_gets_no_chunks_and_the_connections_end() -> None:
    async with stand() as s:
        reader, writer = await connect(s)
        writer.write(post(STREAM, version="1.0"))
        async with asyncio.timeout(5):
            whole = await reader.read()
        head, _, body = whole.partition(b"\r\n\r\n")
        assert b"transfer-encoding" not in head.lower() and b"connection: close" in head.lower()
        assert body.startswith(b"data: ") and body.endswith(b"data: [DONE]\n\n")
        writer.close()
        kept = await exchange(s, post(BODY, "connection: keep-alive", version="1.0") + post(BODY, version="1.0"), 2)
        assert kept[0].headers["connection"] == "keep-alive" and kept[1].headers["connection"] == "close"


async def test_every_other_request_is_aiohttps_and_the_connection_stays_ours() -> None:
    async with stand() as s:
        models = b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n"
        health = b"GET /health HTTP/1.0\r\nhost: x\r\nconnection: keep-alive\r\n\r\n"
        drain = b"POST /admin/drain HTTP/1.1\r\nhost: x\r\n"
        sized = drain + b"content-length: 2\r\n\r\n{}"
        chunked = drain + b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\n1\r\n}\r\n0\r\n\r\n"
        asked = models + post() + health + sized + post() + chunked + post() + models
        for size in (len(asked), 7):
            reader, writer = await connect(s)
            for start in range(0, len(asked), size):
                writer.write(asked[start : start + size])
                await asyncio.sleep(0)
            found = [await read_answer(reader) for _ in range(8)]
            assert [a.status for a in found] == [200, 200, 200, 403, 200, 403, 200, 200], found
            assert found[0].body == found[7].body and b'"m"' in found[0].body
            assert [a.headers.get("connection") for a in found] == [None, None, "keep-alive", *[None] * 5]
            assert s.server._listener is not None
            (ours,) = s.server._listener.connections
            await eventually(lambda: ours.idle and not s.server._runners[0].server.connections)  # noqa: B023
            writer.write(b"GET /live HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n" + post())
            last = await read_answer(reader)
            assert last.status == 200 and last.headers["connection"] == "close" and await closed(reader)
            writer.close()
        assert len(s.engines[0].bodies) == 6


async def test_rare_requests_for_an_engine_are_served_here_too() -> None:
    async with stand() as s:
        (refused,) = await exchange(s, post(BODY, "expect: something"), 1)
        assert refused.status == 417
        (upgrade,) = await exchange(s, post(BODY, "connection: upgrade", "upgrade: h2c"), 1)
        assert upgrade.status == 200 and upgrade.headers["connection"] == "close"
        for path in ("/v1/chat/completions?x=1", "/v1/%63hat/completions", "http://x/v1/chat/completions"):
            (found,) = await exchange(s, post(path=path), 1)
            assert found.status == 200 and "connection" not in found.headers, path
        (slash,) = await exchange(s, post(path="/v1%2fchat/completions"), 1)
        assert slash.status == 404
        (other,) = await exchange(s, b"GET /v1/chat/completions HTTP/1.1\r\nhost: x\r\n\r\n", 1)
        assert other.status == 405 and other.headers["allow"] == "POST"


@pytest.mark.parametrize("length", [10, 300_000])
async def test_compressed_bodies_are_unpacked(length: int) -> None:
    body = json.dumps({"model": "m", "prompt": os.urandom(length).hex()}).encode()
    limits = LimitSettings(body_max=2 * length + 1000)
    bare = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    async with stand(frontend=FrontendSettings(limits=limits)) as s:
        packed = {
            "gzip": gzip.compress(body),
            "deflate": zlib.compress(body),
            "identity": body,
            "GZIP": gzip.compress(body),
        }
        cases = [*packed.items(), ("deflate", bare.compress(body) + bare.flush())]
        for coding, raw in cases:
            (found,) = await exchange(s, post(raw, f"content-encoding: {coding}", path="/v1/completions"), 1)
            assert found.status == 200 and s.engines[0].bodies[-1] == body, (coding, found)
        reached = len(s.engines[0].bodies)
        bomb = gzip.compress(b" " * (limits.body_max + 1))
        for coding, raw, status in (
            ("gzip", body, 400),
            ("gzip", packed["gzip"][:-1], 400),
            ("gzip", packed["gzip"] + b"x", 400),
            ("br", body, 400),
            ("gzip", bomb, 413),
        ):
            (found,) = await exchange(s, post(raw, f"content-encoding: {coding}", path="/v1/completions"), 1)
            assert found.status == status, (coding, found)
        assert len(s.engines[0].bodies) == reached


async def test_proxied_routes_are_served_here_too() -> None:
    routes = ("/v1/embeddings", "/v1/jobs/{job}/run")
    async with stand(frontend=FrontendSettings(proxied_routes=routes)) as s:
        for path in ("/v1/embeddings", "/v1/jobs/7/run", "/v1/jobs/a%20b%3Fc/run"):
            (found,) = await exchange(s, post(b'{"model":"m","input":"x"}', path=path), 1)
            assert found.status == 200 and "connection" not in found.headers
            assert s.engines[0].paths[-1] == path  # an escape stays one: it must not become a query
        for path in ("/v1/jobs/run", "/v1/jobs/a/b/run", "/v1/jobs//run"):
            (found,) = await exchange(s, post(b'{"model":"m","input":"x"}', path=path), 1)
            assert found.status == 404


SMUGGLED = b"GET /admin/status HTTP/1.1\r\nhost: x\r\n\r\n"
MALFORMED = {
    "two lengths": b"content-length: 5\r\ncontent-length: 6\r\n",
    "same length twice": b"content-length: 5\r\ncontent-length: 5\r\n",
    "length and chunks": b"content-length: 5\r\ntransfer-encoding: chunked\r\n",
    "chunks and length": b"transfer-encoding: chunked\r\ncontent-length: 5\r\n",
    "list of lengths": b"content-length: 5, 5\r\n",
    "plus": b"content-length: +5\r\n",
    "minus": b"content-length: -5\r\n",
    "hexadecimal": b"content-length: 0x5\r\n",
    "no length": b"content-length: \r\n",
    "huge length": b"content-length: 99999999999999999999999\r\n",
    "unknown coding": b"transfer-encoding: xchunked\r\n",
    "two codings": b"transfer-encoding: gzip, chunked\r\n",
    "chunked twice": b"transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n",
    "identity": b"transfer-encoding: identity\r\n",
    "folded": b"a: b\r\n c\r\n",
    "blank before colon": b"content-length : 5\r\n",
    "nul": b"a: b\0c\r\n",
    "bare line feed": b"a: b\ncontent-length: 5\r\n",
    "bare return": b"a: b\rcontent-length: 5\r\n",
    "no colon": b"abc\r\n",
    "no name": b": x\r\n",
    "control": b"a: \x01\r\n",
}


@pytest.mark.parametrize("name", MALFORMED)
async def test_what_could_be_read_in_two_ways_is_refused_and_nothing_behind_it_is_read(name: str) -> None:
    async with stand() as s:
        reader, writer = await connect(s)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n" + MALFORMED[name] + b"\r\n0\r\n\r\n" + SMUGGLED)
        found = await read_answer(reader)
        assert found.status == 400 and found.headers["connection"] == "close"
        assert json.loads(found.body)["error"]["code"] == "invalid_http"
        assert await closed(reader)
        assert s.engines[0].bodies == []
        writer.close()


@pytest.mark.parametrize(
    "body",
    [
        b"zz\r\n",
        b"5\r\nabcdefgh\r\n",
        b"5 \r\nabcde\r\n0\r\n\r\n",
        b"-1\r\n",
        b"5\nabcde\n0\n\n",
        b"FFFFFFFFFFFFFFFFFF\r\n",
    ],
)
async def test_chunks_that_are_none_are_400_and_the_end(body: bytes) -> None:
    async with stand() as s:
        reader, writer = await connect(s)
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n" + body + SMUGGLED
        )
        found = await read_answer(reader)
        assert found.status == 400 and json.loads(found.body)["error"]["code"] == "invalid_body"
        assert await closed(reader)
        assert s.engines[0].bodies == [] and s.service.gate.inflight == 0
        writer.close()


@pytest.mark.parametrize("start", [b"\x16\x03\x01\x02\x00\x01", b"hello there", b"GET / HTTP/1.1\nhost: x\n"])
async def test_what_is_no_http_is_refused_without_waiting_for_its_end(start: bytes) -> None:
    async with stand() as s:
        (found,) = await exchange(s, start, 1)
        assert found.status == 400


async def test_heads_have_limits() -> None:
    async with stand() as s:
        (many,) = await exchange(s, post(BODY, *[f"a{n}: x" for n in range(200)]), 1)
        assert many.status == 431
        (long,) = await exchange(s, post(BODY, "a: " + "x" * 70_000), 1)
        assert long.status == 431 and json.loads(long.body)["error"]["code"] == "head_too_large"
        (endless,) = await exchange(s, b"GET / HTTP/1.1\r\n" + b"a: " + b"x" * 300_000, 1)
        assert endless.status == 431
        assert (await s.chat()).status == 200


async def test_who_dribbles_or_sleeps_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.frontend.http.http1_server.HEAD_TIMEOUT", 0.3)
    monkeypatch.setattr("penstock.frontend.http.http1_server.KEEP_ALIVE", 0.3)
    async with stand() as s:
        reader, writer = await connect(s)
        async with asyncio.timeout(5):
            with pytest.raises(ConnectionError):
                while True:  # a byte now and then does not help
                    writer.write(b"P" if not writer.transport.get_write_buffer_size() else b"")
                    await asyncio.sleep(0.05)
                    if reader.at_eof() or reader._buffer:  # type: ignore[attr-defined]
                        raise ConnectionError
        writer.close()
        reader, writer = await connect(s)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost:")
        found = await read_answer(reader)
        assert found.status == 408 and json.loads(found.body)["error"]["code"] == "head_timeout"
        writer.close()
        quiet, writer = await connect(s)
        assert await closed(quiet)
        writer.close()
        used, writer = await connect(s)
        writer.write(post())
        assert (await read_answer(used)).status == 200 and await closed(used)
        writer.close()
        assert s.server._listener is not None
        await eventually(lambda: not s.server._listener.connections)  # type: ignore[union-attr]


async def test_an_answer_before_the_bodys_end_is_seen_and_ends_the_connection() -> None:
    async with stand(frontend=FrontendSettings(limits=LimitSettings(body_max=1000))) as s:
        reader, writer = await connect(s)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 5000000\r\n\r\n" + b"x" * 100_000)
        found = await read_answer(reader)
        assert found.status == 413 and found.headers["connection"] == "close"
        with pytest.raises(ConnectionError):
            async with asyncio.timeout(5):
                while True:
                    writer.write(b"x" * 100_000)
                    await writer.drain()
        writer.close()


async def test_a_slow_reader_stops_the_engine_and_gets_everything() -> None:
    async with stand() as s:
        sent = 0
        total = 300

        async def flood(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            nonlocal sent
            response = web.StreamResponse(headers={"content-type": "text/event-stream"})
            await response.prepare(request)
            for number in range(total):
                text = json.dumps({"choices": [{"index": 0, "delta": {"content": f"{number} " + "x" * 100_000}}]})
                await response.write(f"data: {text}\n\n".encode())
                sent += 1
            await response.write(b"data: [DONE]\n\n")
            return response

        s.engines[0].reply = flood
        reader, writer = await connect(s)
        writer.write(post(STREAM))
        before = -1
        async with asyncio.timeout(20):
            while before != sent or not sent:
                before = sent
                await asyncio.sleep(0.1)
            assert sent < total
            found = await read_answer(reader)
        assert found.body.count(b"data: ") == total + 1 and found.body.endswith(b"[DONE]\n\n")
        writer.write(post())
        writer.close()


async def test_a_client_that_leaves_leaves_nothing_behind() -> None:
    async with stand() as s:

        async def endless(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            return await answer(request, body, 100_000, gap=0.005)

        s.engines[0].reply = endless
        for data in (post()[:40], post()[:-5], chunked(BODY, 10)[:-8], post(STREAM)):
            reader, writer = await connect(s)
            writer.write(data)
            if data == post(STREAM):
                await reader.readuntil(b"t3 ")
            else:
                await eventually(lambda: any(not c.idle for c in s.server._listener.connections))  # type: ignore[union-attr]
            writer.transport.abort()
            await eventually(lambda: not s.server._listener.connections and not s.service.gate.inflight)  # type: ignore[union-attr]
        async with asyncio.timeout(5):
            await s.engines[0].hung_up.wait()
        await eventually(lambda: s.records)
        assert s.records[0].outcome == "cancelled" and len(s.records) == 1


async def test_draining_closes_what_waits_and_lets_run_what_runs() -> None:
    async with stand() as s:
        release = asyncio.Event()

        async def waiting(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            await release.wait()
            return await answer_well(request, body)

        s.engines[0].reply = waiting
        idle, idle_writer = await connect(s)
        busy, busy_writer = await connect(s)
        busy_writer.write(post())
        await eventually(lambda: s.service.gate.inflight == 1)
        draining = asyncio.create_task(s.server.drain(5.0))
        assert await closed(idle)
        with pytest.raises(ConnectionError):
            await connect(s)
        release.set()
        found = await read_answer(busy)
        assert found.status == 200 and found.headers["connection"] == "close" and await closed(busy)
        assert await draining
        idle_writer.close()
        busy_writer.close()


def test_headers_of_answers_have_no_line_breaks() -> None:
    for bad in ("x\r\ny: z", "x\ny", "x\ry"):
        with pytest.raises(ValueError, match="line break"):
            answer_head(200, {"content-type": bad}, "id", "")


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[str, str]:
    """A certificate and its key."""
    return make_certificate(tmp_path)


async def test_tls_is_served_on_both_paths(certificate: tuple[str, str]) -> None:
    cert, key = certificate
    security = SecuritySettings(tls_cert=cert, tls_key=key)
    async with stand(frontend=FrontendSettings(security=security)) as s:
        assert s.server.url.startswith("https://")
        trusting = ssl.create_default_context(cafile=cert)
        reader, writer = await connect(s, ssl=trusting, server_hostname="localhost")
        large = json.dumps({"model": "m", "prompt": "x" * 500_000}).encode()
        for data in (post(), post(STREAM), post(large, path="/v1/completions")):
            writer.write(data)
            assert (await read_answer(reader)).status == 200
        writer.write(b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await read_answer(reader)).status == 200
        writer.close()
