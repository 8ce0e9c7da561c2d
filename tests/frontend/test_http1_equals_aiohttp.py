"""Do hand-written server and client answer the same bytes, cut at the same places, as ones over aiohttp do?

Where they differ by intent:
- malformed heads: 400 with our JSON and a code, where the library answers in text; both end the connection;
- heads that are too large: 431, where the library answers 400;
- a refusal that is sent before the whole body has come is the connection's last;
- ``Expect: 100-continue`` is answered when the body is wanted, not before the key is looked at.
"""

import asyncio
import gzip
import json
import zlib
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.config.settings.frontend_settings import FrontendSettings, LimitSettings, SecuritySettings
from tests.adapters.aiohttp_client import AiohttpEngineClient
from tests.depth import deep
from tests.frontend.aiohttp_server import aiohttp_server
from tests.frontend.raw import Answer, connect, read_answer
from tests.frontend.stand import Stand, stand

VARYING = {"date", "x-penstock-queue-ms"}
KEY = "key-for-the-tests"
CHAT, TEXT, EMBED = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
ODD_PATHS = (
    *("/v1/%63ompletions", "http://x/v1/completions?a", "/v1/completions#a"),  # other ways to name a route of engines
    *("/v1//completions", "/v1/chat%2Fx", "/v1%2Fcompletions", "/v1/%2563ompletions"),
)
PACKED = {"content-encoding: gzip": gzip.compress, "content-encoding: deflate": zlib.compress}
USER = [{"role": "user", "content": "grüße"}]
BODIES: list[Any] = [
    {"model": "m", "messages": USER},
    {"model": "m", "messages": USER, "stream": True},
    {"model": "m", "messages": USER, "stream": True, "stream_options": {"include_usage": True}},
    {"model": "m", "prompt": "text"},
    {"model": "m", "prompt": [1, 2, 3], "stream": True},
    {"model": "m", "prompt": "x" * 3000},
    {"model": "nope", "prompt": "x"},
    {"model": "m", "input": "x"},
    {"model": "m", "messages": []},
    "text",
    None,
]
HEADERS = [
    (),
    ("content-type: application/json", "Accept-Encoding: gzip, br"),
    ("X-Penstock-Priority: high",),
    ("x-penstock-session-id: a", "X-PENSTOCK-SESSION-ID: b"),
    ("traceparent: 00-aa-bb-01", "cookie:", "x-strange: \xe4"),
    ("x-request-id: not sane",),
    ("expect: 100-continue",),
    ("connection: Keep-Alive, TE",),
    ("content-encoding: gzip",),
    ("content-encoding: deflate",),
    ("content-encoding: Identity",),
]


@st.composite
def requests(draw: st.DrawFn, last: bool) -> bytes:
    """One request's bytes; only the ``last`` of a connection may end it."""
    kind = draw(st.integers(0, 11))
    number = draw(st.integers(0, 999))
    if kind == 0:
        path = draw(st.sampled_from(["/v1/models", "/v1/models/m", "/v1/models/x", CHAT, "/nothing", "/v1/files"]))
        return f"GET {path} HTTP/1.1\r\nhost: x\r\nx-request-id: g{number}\r\n{_key(draw)}\r\n".encode()
    path = draw(st.sampled_from([CHAT, CHAT, TEXT, TEXT, EMBED, CHAT + "?a=b", *ODD_PATHS]))
    body = draw(st.sampled_from(BODIES))
    raw = b"" if body is None else json.dumps(body, ensure_ascii=draw(st.booleans())).encode()
    lines = draw(st.sampled_from(HEADERS))
    more = "".join(f"{line}\r\n" for line in lines)
    raw = PACKED.get("".join(lines), bytes)(raw)
    version = "1.0" if last and draw(st.integers(0, 3)) == 0 else "1.1"
    if last and draw(st.booleans()) and "connection" not in more:
        more += "Connection: close\r\n"
    head = f"POST {path} HTTP/{version}\r\nHost: x\r\n{_key(draw)}{more}"
    if "x-request-id" not in more:
        head += f"x-request-id: p{number}\r\n"
    if version == "1.1" and draw(st.integers(0, 3)) == 0:
        size = draw(st.integers(1, 400))
        pieces = [raw[start : start + size] for start in range(0, len(raw), size)]
        framed = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
        return head.encode("latin-1") + b"Transfer-Encoding: chunked\r\n\r\n" + framed
    return head.encode("latin-1") + f"Content-Length: {len(raw)}\r\n\r\n".encode() + raw


def _key(draw: st.DrawFn) -> str:
    return "" if draw(st.integers(0, 9)) == 0 else f"authorization: Bearer {KEY}\r\n"


class Pair:
    """The two servers, over engines that answer alike, and the loop that runs them."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.stands: list[Stand] = []
        self._stack = AsyncExitStack()

    async def open(self) -> None:
        frontend = FrontendSettings(
            security=SecuritySettings(api_keys=(KEY,)), limits=LimitSettings(body_max=2000, prompt_max=700)
        )
        opened = self._stack.enter_async_context
        plain = await opened(stand(frontend=frontend, calls=AiohttpEngineClient()))
        plain.server.url = await opened(aiohttp_server(plain.service))
        self.stands = [plain, await opened(stand(frontend=frontend))]

    async def close(self) -> None:
        await self._stack.aclose()

    def both(self, pieces: list[bytes], count: int) -> tuple[list[Answer], list[Answer]]:
        async def ask() -> list[list[Answer]]:
            return list(await asyncio.gather(*(conversation(s, pieces, count) for s in self.stands)))

        plain, fast = self.loop.run_until_complete(ask())
        return plain, fast


async def conversation(s: Stand, pieces: list[bytes], count: int) -> list[Answer]:
    """Send pieces and return up to so many answers, fewer where the server ends the connection."""
    reader, writer = await connect(s)
    answers: list[Answer] = []

    async def send() -> None:
        for piece in pieces:
            writer.write(piece)
            await asyncio.sleep(0)

    sending = asyncio.create_task(send())
    try:
        async with asyncio.timeout(15):
            while len(answers) < count:
                found = await read_answer(reader)
                if found.status >= 200:
                    answers.append(found)
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    finally:
        await sending
        writer.close()
    return answers


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    found = Pair()
    found.loop.run_until_complete(found.open())
    yield found
    found.loop.run_until_complete(found.close())
    found.loop.close()


def same(plain: Answer, fast: Answer) -> None:
    """Compare two answers in all that has a meaning."""
    assert fast.status == plain.status, (plain, fast)
    if plain.headers.get("content-type", "").startswith("text/plain"):
        return  # the library's own words
    mine, theirs = dict(fast.headers), dict(plain.headers)
    # Ours may end a connection where theirs goes on: see above. What no header says depends on the version.
    kept, theirs_kept = mine.pop("connection", ""), theirs.pop("connection", "")
    assert kept in ("", "close", theirs_kept)
    for found in (mine, theirs):
        for name in VARYING:
            found.pop(name, None)
        for name in ("x-request-id", "x-penstock-request-id"):
            if found.get(name, "").startswith("req-"):
                found[name] = "made"
    assert mine == theirs
    assert fast.body == plain.body


@settings(max_examples=deep(100))
@given(st.lists(requests(last=False), max_size=3), requests(last=True), st.data())
def test_same_bytes_same_answers(pair: Pair, first: list[bytes], final: bytes, data: st.DataObject) -> None:
    asked = [*first, final]
    whole = b"".join(asked)
    cuts = sorted(set(data.draw(st.lists(st.integers(0, len(whole)), max_size=12), label="cuts")))
    pieces = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)]) if a < b]
    plain, fast = pair.both(pieces, len(asked))
    for theirs, mine in zip(plain, fast):
        same(theirs, mine)
    if len(fast) != len(plain):
        # Only ever fewer, and only because the connection was said to end.
        assert len(fast) < len(plain) and fast and fast[-1].headers.get("connection") == "close", (plain, fast)
        assert fast[-1].status >= 400


JUNK = st.binary(max_size=60) | st.sampled_from(
    [b"\r\n", b"\n", b"\0", b" ", b":", b"a: b\r\n", b"0\r\n\r\n", b"\r\n\r\n"]
)


@settings(max_examples=deep(60))
@given(requests(last=False), st.integers(0, 400), JUNK, st.integers(0, 5))
def test_spoilt_bytes_are_refused_or_understood_alike(pair: Pair, raw: bytes, at: int, junk: bytes, gone: int) -> None:
    at = min(at, raw.find(b"\r\n\r\n"))
    spoilt = raw[:at] + junk + raw[at + gone :]
    before = [len(s.engines[0].bodies) for s in pair.stands]
    # A second request that ends the connection, so that neither server waits for more.
    last = f"GET /v1/models HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\nconnection: close\r\n\r\n".encode()

    async def ask() -> list[list[Answer]]:
        return list(await asyncio.gather(*(hurried(s, spoilt + last) for s in pair.stands)))

    plain, fast = pair.loop.run_until_complete(ask())
    reached = [len(s.engines[0].bodies) - b for s, b in zip(pair.stands, before)]
    # Ours is never the one that lets more through to an engine.
    assert reached[1] <= reached[0], (spoilt, plain, fast)
    if plain and fast and plain[0].status < 400:
        assert fast[0].status in (plain[0].status, 400, 431), (spoilt, plain, fast)
    if fast and fast[0].status < 400:
        assert plain and plain[0].status == fast[0].status, (spoilt, plain, fast)


async def hurried(s: Stand, data: bytes) -> list[Answer]:
    """Send bytes and return what is answered before a moment of silence."""
    reader, writer = await connect(s)
    writer.write(data)
    answers: list[Answer] = []
    try:
        while True:
            async with asyncio.timeout(0.15):
                found = await read_answer(reader)
            if found.status >= 200:
                answers.append(found)
    except (asyncio.IncompleteReadError, ConnectionError, TimeoutError, ValueError, KeyError, IndexError):
        pass
    writer.close()
    return answers
