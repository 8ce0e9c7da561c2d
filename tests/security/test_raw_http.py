"""Can bytes on one connection become another's request or answer, stop the server, or stay behind in it?"""

import asyncio
import json
import os
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from penstock.config.settings.frontend_settings import FrontendSettings, LimitSettings, UpstreamSettings
from tests.frontend.raw import Answer, connect, read_answer
from tests.frontend.stand import Stand, eventually, stand
from tests.security.attacks import CHUNKS, FRAMING, HIDDEN, LINES, ODD, PATH, SMUGGLED, chat, head, post

ROUNDS = int(os.environ.get("PENSTOCK_SEEDS", "1"))
ANSWERS = {200, 400, 401, 403, 404, 405, 408, 413, 414, 415, 417, 421, 431, 501, 505}
"""No 500, no 502: nothing that a client writes makes us or an engine fail."""


@pytest.fixture(autouse=True)
def short_goodbyes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refused client has a shorter while in which the rest of what it says is read: every test here waits for it."""
    monkeypatch.setattr("penstock.frontend.http.http1_server.LINGER", 0.05)
    monkeypatch.setattr("penstock.frontend.http.http1_listener.SWEEP_EVERY", 0.02)
    monkeypatch.setattr("penstock.frontend.http_server.LINGER", 0.05)


async def echo(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """Answer with the prompt's own text, so that a mixed-up answer shows."""
    await asyncio.sleep(0.001)
    text = body["messages"][0].get("content") if body.get("messages") else body.get("prompt")
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    return web.json_response({"id": "a", "choices": [choice]})


@asynccontextmanager
async def besieged(**options: Any) -> AsyncIterator[Stand]:
    """A stand whose engine echoes; afterwards nothing may be left of anybody's connection."""
    async with stand(**options) as s, siege(s):
        yield s


@asynccontextmanager
async def siege(s: Stand) -> AsyncIterator[None]:
    """A good client is answered before and after the body, which leaves nothing of anybody's connection."""
    s.engines[0].reply = echo
    await good(s, "before")
    await idle(s)
    tasks = len(asyncio.all_tasks())
    yield
    await good(s, "after")
    await idle(s)
    await eventually(lambda: len(asyncio.all_tasks()) <= tasks, 10)
    assert not any(SMUGGLED in body.decode("utf-8", "replace") for body in s.engines[0].bodies)


async def besiege(attack: Callable[[Stand, bytes], Awaitable[None]], data: Mapping[str, bytes]) -> None:
    """Attack one stand with one after the other; raise all that went wrong, each with its name."""
    faults = []
    async with stand() as s:
        for name, raw in data.items():
            try:
                async with siege(s):
                    await attack(s, raw)
            except (AssertionError, TimeoutError) as error:
                faults.append(f"{name}: {error!r}")
    assert data and not faults, "\n".join(faults)


async def idle(s: Stand) -> None:
    await eventually(
        lambda: s.service.gate.inflight == 0 and len(s.service.exchanges.attempts) == 0 and s.server._open == 0, 20
    )


async def good(s: Stand, marker: str) -> None:
    """A client that does everything right gets its own answer, on a connection of its own."""
    reader, writer = await connect(s)
    try:
        for turn in range(2):
            writer.write(post(chat(f"{marker} {turn}")))
            found = await read_answer(reader)
            assert found.status == 200, found
            assert json.loads(found.body)["choices"][0]["message"]["content"] == f"{marker} {turn}"
    finally:
        writer.close()


async def get(s: Stand, path: str) -> str:
    """Ask on a connection that ends with the answer."""
    return await (await s.http.get(path, headers={"connection": "close"})).text()


async def answers(
    s: Stand, data: bytes, *, end: bool = False, patience: float = 3.0, expected: int | None = None
) -> tuple[list[Answer], bool]:
    """Send bytes; return the answers, each well formed, and whether the server then closed the connection.

    Args:
        patience: seconds until a server that says nothing more counts as done.
        expected: answers after which a moment is enough to see that there is no other.
    """
    reader, writer = await connect(s)
    writer.write(data)
    if end:
        writer.write_eof()
    found: list[Answer] = []
    try:
        async with asyncio.timeout(patience) as limit:
            while True:
                said = await read_answer(reader)
                if said.status >= 200:
                    found.append(said)
                if len(found) == expected:
                    limit.reschedule(asyncio.get_running_loop().time() + 0.05)
    except asyncio.IncompleteReadError as error:
        assert not error.partial, f"half an answer: {error.partial!r}"
        return found, True
    except ConnectionError:
        return found, True
    except TimeoutError:
        return found, False
    finally:
        writer.close()


async def test_what_can_be_understood_in_two_ways_is_refused_and_ends_the_connection() -> None:
    async def refused(s: Stand, raw: bytes) -> None:
        before = len(s.engines[0].bodies)
        found, closed = await answers(s, raw)
        assert closed, found
        assert [answer.status for answer in found if answer.status < 400] == [], found
        assert len(found) <= 1 and {answer.status for answer in found} <= ANSWERS
        assert len(s.engines[0].bodies) == before

    await besiege(refused, {**FRAMING, **CHUNKS, **LINES})


async def test_what_is_unusual_is_answered_or_refused_and_the_next_request_is_its_own() -> None:
    async def apart(s: Stand, raw: bytes) -> None:
        before = len(s.engines[0].bodies)
        found, closed = await answers(s, raw + post(chat("the next one")), patience=10.0, expected=2)
        assert found and {answer.status for answer in found} <= ANSWERS, found
        texts = [json.loads(a.body)["choices"][0]["message"]["content"] for a in found if b'"choices"' in a.body]
        assert texts in ([], ["in front"], ["the next one"], ["in front", "the next one"])
        assert len(s.engines[0].bodies) - before == len(texts)
        assert all("x-evil" not in answer.headers for answer in found)
        assert len(found) == 2 or closed, found

    await besiege(apart, ODD)


async def test_requests_in_one_packet_are_answered_in_order_and_garbage_ends_it() -> None:
    async with besieged() as s:
        many = b"".join(post(chat(f"n{number}")) for number in range(20))
        found, closed = await answers(s, many + b"\x00garbage\r\n\r\n" + HIDDEN)
        texts = [json.loads(a.body)["choices"][0]["message"]["content"] for a in found if a.status == 200]
        assert texts == [f"n{number}" for number in range(20)] and closed
        assert [a.status for a in found[len(texts) :]] == [400]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/embeddings", "/v1/models", "/clear_kv_blocks"])
async def test_a_wrong_length_is_never_filled_up_with_anothers_bytes(path: str) -> None:
    async with besieged() as s:
        before = len(s.engines[0].bodies)
        short = post(chat("short"), path=path.encode(), length=len(chat("short")) + 50)
        found, closed = await answers(s, short, end=True)
        assert closed and all(400 <= answer.status < 500 for answer in found), found
        assert len(s.engines[0].bodies) == before and s.engines[0].resets == 0
        long = post(chat("long"), path=path.encode(), length=len(chat("long")) - 3)
        found, closed = await answers(s, long + HIDDEN)
        assert closed and {answer.status for answer in found} <= ANSWERS, found


async def test_a_client_that_leaves_at_any_byte_leaves_nothing_behind() -> None:
    async with besieged() as s:
        whole = post(chat("leaves", stream=True)) + post(chat("leaves twice"))
        for at in range(0, len(whole), 7):
            _, writer = await connect(s)
            writer.write(whole[:at])
            if at % 2:
                await asyncio.sleep(0)
            writer.transport.abort()


HEADERS = [
    b"x-request-id: a\rx-evil: 1",
    b"x-request-id: a%0d%0ax-evil: 1",
    "x-request-id: a嘊嘍x-evil: 1".encode(),
    b"x-request-id: a\x0bx-evil: 1",
    b"x-request-id: \xe5\x98\x8a\xff",
    b'x-penstock-context-type: a"} 1\\nevil_metric 5',
    b"x-penstock-context-type: a\\",
    b"x-penstock-session-id: a\tb",
    b"x-penstock-worker: e0 x-evil: 1",
    b"traceparent: 00-\x7f",
    b"traceparent: a b\xff",
    b"tracestate: =,=,\xc3\xa4",
    b"content-type: application/json; a=\xff",
    b"x-forwarded-for: 127.0.0.1",
    b"authorization: Bearer \xff",
]


async def test_no_header_of_a_client_becomes_a_header_of_ours() -> None:
    async def injected(s: Stand, line: bytes) -> None:
        found, _ = await answers(s, post(chat("injected"), line), expected=1)
        assert found and {answer.status for answer in found} <= ANSWERS, found
        for answer in found:
            assert "x-evil" not in answer.headers
            assert answer.headers.get("x-request-id", "").isascii() and "evil" not in str(answer.headers)
        for headers in s.engines[0].headers:
            assert "x-evil" not in headers
        text = await get(s, "/metrics")
        assert "\nevil_metric" not in text

    await besiege(injected, {repr(line): line for line in HEADERS})


async def test_no_text_of_a_body_becomes_a_header_or_a_log_line(caplog: pytest.LogCaptureFixture) -> None:
    async with besieged() as s:
        evil = "m\r\nx-evil: 1\r\n\r\n{}"
        for body in (
            {"model": evil, "messages": [{"role": "user", "content": "x"}]},
            {"model": "m", "messages": [{"role": "user", "content": "x"}], "nvext": {"cache_salt": evil}},
            {"model": "m", "messages": [{"role": "user", "content": "x"}], "nvext": {"backend_instance_id": evil}},
            {"model": "m", "messages": [{"role": "user", "content": "x"}], "nvext": {"context_type": evil}},
            {"model": "m", "messages": [{"role": "user", "content": "x"}], "nvext": {"session_id": evil}},
        ):
            found, _ = await answers(s, post(json.dumps(body).encode()), expected=1)
            assert [a.status for a in found if a.status >= 500] == [] and len(found) == 1
            assert "x-evil" not in found[0].headers
        await get(s, "/v1/%0d%0aINFO%20forged%20line")
        await get(s, "/v1/models/%0aforged")
        lines = [record.getMessage() for record in caplog.records]
        assert not any("\n" in line or "\r" in line for line in lines)


async def test_slow_heads_and_bodies_end_by_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.frontend.http.request_context.BODY_TIMEOUT", 0.5)
    monkeypatch.setattr("penstock.frontend.http.http1_server.HEAD_TIMEOUT", 0.5)
    for server in ("http.http1_server", "http_server"):
        monkeypatch.setattr(f"penstock.frontend.{server}.KEEP_ALIVE", 0.5)
    async with besieged() as s:
        body = chat("slow")
        whole = post(body)
        dribbled = post(body, path=b"/v1/models")
        chunks = head(b"transfer-encoding: chunked") + b"".join(b"1\r\n%c\r\n" % byte for byte in body)
        behind = b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n"
        cases = (whole, dribbled, chunks, whole[: whole.index(b"\r\n\r\n") + 4], behind + whole)

        async def dribble(data: bytes, at_once: int) -> None:
            reader, writer = await connect(s)
            writer.write(data[:at_once])
            async with asyncio.timeout(15):
                for byte in data[at_once:]:
                    if reader.at_eof() or writer.is_closing():
                        break
                    try:
                        writer.write(bytes([byte]))
                        await writer.drain()
                    except ConnectionError:
                        break
                    await asyncio.sleep(0.05)
                else:
                    pytest.fail(f"it was read to its end: {data[:60]!r}")
            writer.close()

        at_once = (0, 0, len(head(b"transfer-encoding: chunked")), 20, len(behind) + 9)
        await asyncio.gather(*map(dribble, cases, at_once))
        assert not any(b"slow" in raw for raw in s.engines[0].bodies)


async def test_a_client_that_never_reads_is_cut_off() -> None:
    async def endless(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if not body.get("stream"):
            return await echo(request, body)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        event = json.dumps({"choices": [{"index": 0, "delta": {"content": "x" * 5000}}]}).encode()
        while True:
            await response.write(b"data: " + event + b"\n\n")

    async with besieged(frontend=FrontendSettings(upstream=UpstreamSettings(stall_timeout=0.5))) as s:
        s.engines[0].reply = endless
        reader, writer = await connect(s, limit=1000)
        writer.write(post(chat("never reads", stream=True)))
        await eventually(lambda: len(s.engines[0].bodies) > 2 and s.service.gate.inflight == 1)
        await eventually(lambda: s.service.gate.inflight == 0, 20)
        await asyncio.wait_for(s.engines[0].hung_up.wait(), 20)
        writer.close()
        assert reader is not None


def spoil(raw: bytes, rng: random.Random) -> bytes:
    """Change a request a little, anywhere."""
    data = bytearray(raw)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data))
        kind = rng.randrange(7)
        if kind == 0:
            data[at] = rng.randrange(256)
        elif kind == 1:
            del data[at : at + rng.randint(1, 20)]
        elif kind == 2:
            data[at:at] = rng.choice(
                [
                    b"\r\n",
                    b"\n",
                    b"\r",
                    b"\0",
                    b" ",
                    b":",
                    b"0\r\n\r\n",
                    b"\r\n\r\n",
                    b"\xff",
                    b"transfer-encoding: chunked\r\n",
                    b"content-length: 3\r\n",
                ]
            )
        elif kind == 3:
            data[at:at] = data[at : at + rng.randint(1, 60)]
        elif kind == 4:
            other = rng.randrange(len(data))
            data[at], data[other] = data[other], data[at]
        elif kind == 5:
            line = data.find(b"\r\n", at)
            data[at:at] = data[line : line + rng.randint(2, 40)] if line > 0 else b""
        else:
            data[at:at] = rng.randbytes(rng.randint(1, 30))
        if not data:
            return b"\r\n"
    return bytes(data)


@pytest.mark.parametrize("round", range(ROUNDS))
async def test_spoilt_requests_beside_good_clients(round: int) -> None:
    """A few hundred requests with random changes, while others ask and get their own answers."""
    rng = random.Random(f"fast {round}")
    valid = [
        post(chat("spoilt")),
        post(chat("spoilt", stream=True)),
        head(b"transfer-encoding: chunked")
        + b"5\r\n"
        + chat("spoilt")[:5]
        + b"\r\n%x\r\n" % (len(chat("spoilt")) - 5)
        + chat("spoilt")[5:]
        + b"\r\n0\r\n\r\n",
        post(b'{"model":"m","prompt":"spoilt"}', path=b"/v1/completions"),
        post(b'{"model":"m","input":"spoilt"}', b"x-penstock-priority: 3", path=b"/v1/embeddings"),
        b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET /admin/decisions?limit=3 HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n",
    ]
    statuses: Counter[int] = Counter()
    done = False

    async def client(name: str) -> int:
        count = 0
        while not done:
            await good(s, f"good {name} {count}")
            count += 1
        return count

    async with besieged(frontend=FrontendSettings(limits=LimitSettings(body_max=100_000))) as s:
        clients = [asyncio.create_task(client(str(number))) for number in range(2)]
        for _ in range(13):
            batch = [
                spoil(rng.choice(valid) + (rng.choice(valid) if rng.random() < 0.3 else b""), rng) for _ in range(12)
            ]
            for found, _ in await asyncio.gather(
                *(answers(s, data, end=rng.random() < 0.5, patience=0.2) for data in batch)
            ):
                statuses.update(answer.status for answer in found)
        done = True
        assert all([await each > 3 for each in clients])
        assert set(statuses) <= ANSWERS, statuses
        assert statuses[400] > 20 and statuses[200] > 0, statuses
        for raw in s.engines[0].bodies:
            assert isinstance(json.loads(raw), dict), raw
        assert s.service.metrics is not None and PATH
