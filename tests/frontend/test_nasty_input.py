"""Does anything that a client can send give a traceback, a 500, or reach an engine malformed?"""

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config.settings.frontend_settings import FrontendSettings, LimitSettings
from penstock.frontend.prompt.request_body import decode_object, parse
from penstock.kernel.errors import ClientError
from tests.frontend.stand import Stand, stand

GOOD: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}

BODIES: list[bytes] = [
    b"",
    b"   ",
    b"{",
    b"null",
    b"[]",
    b'"text"',
    b"{}",
    b'{"model": "m"}',
    b'{"model": ""}',
    b'{"model": 5, "messages": [{"role":"user"}]}',
    b'{"model": "m", "messages": "hi"}',
    b'{"model": "m", "messages": []}',
    b'{"model": "m", "messages": {}}',
    b'{"model": "m", "messages": [5]}',
    b'{"model": "m", "messages": [{}]}',
    b'{"model": "m", "messages": [{"role": 5}]}',
    b'{"model": "m", "messages": [{"role": "user", "content": 5}]}',
    b'{"model": "m", "messages": [{"role": "user", "content": [5]}]}',
    b'{"model": "m", "messages": [{"role": "user", "content": "\xff\xfe"}]}',
    b'{"model": "m", "messages": [{"role": "user", "content": "\\ud800"}]}',
    b'{"model": "m", "messages": [{"role": "user", "content": "a\x00"}]}',
    b'{"model": "\xc3\x28", "messages": [{"role": "user"}]}',
    b'\xef\xbb\xbf{"model": "m"}',
    b'{"model": "m", "messages": [{"role": "user", "content": "x"}], "t": NaN}',
    b'{"model": "m", "messages": [{"role": "user", "content": "x"}], "t": 1e999}',
    b'{"model": "m", "messages": [{"role": "user", "content": "x"}], "stream": "yes"}',
    b'{"model": "m", "messages": [{"role": "user", "content": "x"}], "stream_options": 1}',
    b'{"model": "m", "messages": [{"role": "user", "content": "x"}], "n": -1}',
    b'{"model": "m", "messages": [{"role": "user", "content": "x"}], "n": true}',
    b'{"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": "9"}',
    b'{"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": {}}',
    b'{"model": "m", "messages": [{"role": "user", "content": "x"}], "nvext": []}',
    b'{"model": "m", "messages": [{"role": "user", "content": "x"}], "nvext": {"agent_hints": {"priority": "x"}}}',
    b'{"model": "m", "messages": [{"role": "user", "content": "x"}], "nvext": {"agent_hints": {"osl": -1}}}',
    b'{"model": "m", "messages": [{"role": "user", "content": "x"}], "nvext": {"token_data": [-1]}}',
    b'{"model": "m", "messages": [{"role": "user", "content": "x"}], "nvext": {"token_data": [4294967296]}}',
    b'{"model": "m", "messages": [{"role": "user", "content": "x"}], "nvext": {"cache_salt": ""}}',
    b'{"model": "m", "messages": [{"role": "user", "content": "x"}], "nvext": {"extra_fields": "timing"}}',
    b'{"model": "m", "messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": 3}',
    b"[" * 200_000,
    b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
    b'{"model": "m", "messages": [{"role": "user", "content": "x"}], "x": ' + b"[" * 100 + b"]" * 100 + b"}",
]
COMPLETIONS: list[bytes] = [
    b'{"model": "m"}',
    b'{"model": "m", "prompt": 5}',
    b'{"model": "m", "prompt": []}',
    b'{"model": "m", "prompt": {}}',
    b'{"model": "m", "prompt": [1, "a"]}',
    b'{"model": "m", "prompt": [true]}',
    b'{"model": "m", "prompt": [1.5]}',
    b'{"model": "m", "prompt": [-1]}',
    b'{"model": "m", "prompt": [99999999999]}',
    b'{"model": "m", "prompt": [[1], "a"]}',
    b'{"model": "m", "prompt": [[]]}',
    b'{"model": "m", "prompt": [["a"]]}',
]


async def refused(s: Stand, path: str, body: bytes) -> None:
    answer = await s.http.post(path, data=body, headers={"content-type": "application/json"})
    found = await answer.json()
    assert answer.status == 400, (body[:80], answer.status, found)
    assert set(found["error"]) == {"message", "type", "param", "code"}
    assert found["error"]["type"] == "invalid_request_error"
    assert "Traceback" not in found["error"]["message"]


async def test_malformed_bodies_are_clean_400s(caplog: pytest.LogCaptureFixture) -> None:
    async with stand() as s:
        for body in BODIES:
            await refused(s, "/v1/chat/completions", body)
        for body in [*BODIES[:10], *COMPLETIONS]:
            await refused(s, "/v1/completions", body)
        assert s.engines[0].bodies == []
        assert (await s.chat()).status == 200
        assert not [record for record in caplog.records if record.levelname == "ERROR"]
        text = await (await s.http.get("/metrics")).text()
        assert 'error_type="validation",model="unknown"' in text


@pytest.mark.parametrize(
    "headers",
    [
        {"x-penstock-priority": "high"},
        {"x-dynamo-request-priority": "99999999999999999999999999"},
        {"x-penstock-strict-priority": "-1"},
        {"x-dynamo-dp-rank": "a"},
        {"x-penstock-timeout": "nan"},
        {"x-penstock-timeout": "-1"},
        {"x-penstock-router-temperature": "inf"},
        {"x-penstock-session-id": "x" * 300},
        {"x-penstock-session-id": ""},
    ],
)
async def test_malformed_headers_are_clean_400s(headers: dict[str, str]) -> None:
    async with stand() as s:
        answer = await s.chat(headers=headers)
        assert answer.status == 400
        assert (await answer.json())["error"]["code"] == "invalid_header"


async def raw(s: Stand, data: bytes, *, end: bool = False) -> bytes:
    """Send bytes and return what comes back until the server closes or is silent for a moment."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(s.server.url.rsplit(":", 1)[1]))
    writer.write(data)
    if end:
        writer.write_eof()
    got = b""
    try:
        async with asyncio.timeout(3):
            while part := await reader.read(65_536):
                got += part
                if b"\r\n\r\n" in got and got.rstrip().endswith(b"}"):
                    break
    except (TimeoutError, ConnectionResetError):
        pass
    writer.close()
    return got


@pytest.mark.parametrize(
    "head",
    [
        b"content-length: 5\r\ncontent-length: 6\r\n",
        b"content-length: 5\r\ntransfer-encoding: chunked\r\n",
        b"content-length: -5\r\n",
        b"content-length: abc\r\n",
        b"transfer-encoding: chunked, chunked\r\n",
        b"bad header line\r\n",
        b"x: " + b"y" * 100_000 + b"\r\n",
    ],
)
async def test_contradicting_heads_are_400(head: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async with stand() as s:
        got = await raw(s, b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n" + head + b"\r\n12345")
        assert got.startswith((b"HTTP/1.1 400", b"HTTP/1.0 400", b"HTTP/1.1 431")), got[:200]
        assert b"Traceback" not in got
        assert s.engines[0].bodies == []


async def test_body_that_stops_in_the_middle_reaches_no_engine() -> None:
    async with stand() as s:
        await raw(s, b'POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{"model":', end=True)
        broken = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n"
        got = await raw(s, broken)
        assert b" 400 " in got.split(b"\r\n")[0] or got == b""
        assert s.engines[0].bodies == []
        assert (await s.chat()).status == 200
        assert s.service.gate.inflight == 0


async def test_huge_body_is_413_without_being_read() -> None:
    async with stand(frontend=FrontendSettings(limits=LimitSettings(body_max=10_000))) as s:
        announced = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 9000000000\r\n\r\n"
        got = await raw(s, announced)
        assert got.startswith(b"HTTP/1.1 413") and b"body_too_large" in got
        expecting = announced.replace(b"\r\n\r\n", b"\r\nexpect: 100-continue\r\n\r\n")
        got = await raw(s, expecting)
        assert got.startswith(b"HTTP/1.1 413")
        chunked = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
        got = await raw(s, chunked + (b"400\r\n" + b" " * 1024 + b"\r\n") * 20)
        assert got.startswith(b"HTTP/1.1 413")
        assert (await s.chat("x" * 9_000)).status == 200
        assert (await s.chat("x" * 10_001)).status == 413


async def test_expect_continue_is_answered() -> None:
    async with stand() as s:
        body = json.dumps(GOOD).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", int(s.server.url.rsplit(":", 1)[1]))
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: {len(body)}"
        writer.write(head.encode() + b"\r\n\r\n")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100")
        writer.write(body)
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        writer.close()


async def test_unknown_routes_and_methods() -> None:
    async with stand() as s:
        for method, path, status in (
            ("GET", "/v1/chat/completions", 405),
            ("DELETE", "/v1/models/m", 405),
            ("POST", "/v1/fine_tuning/jobs", 404),
            ("DELETE", "/v1/models", 405),
            ("GET", "/nothing", 404),
            ("POST", "/health", 405),
            ("GET", "/rerank", 405),
            ("TRACE", "/rerank", 405),
            ("GET", "/v1/models/nope", 404),
        ):
            answer = await s.http.request(method, path)
            assert answer.status == status, (method, path, answer.status)
            assert "error" in await answer.json()
            assert ("allow" in answer.headers) == (status == 405)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=12,
)
WORDS = "model messages prompt stream stream_options nvext n max_tokens tools role content chat_template_kwargs"
names = st.sampled_from(WORDS.split())


@given(st.dictionaries(names, json_values | st.just("m") | st.just([{"role": "user", "content": "x"}])), st.booleans())
def test_any_object_parses_or_is_a_client_error(body: dict[str, Any], chat: bool) -> None:
    raw_body = json.dumps(body).encode()
    try:
        found = parse("chat_completions" if chat else "completions", raw_body)
    except ClientError as error:
        assert 400 <= error.status < 500
    else:
        assert found.raw == raw_body


@given(st.binary(max_size=200))
def test_any_bytes_decode_or_are_a_client_error(raw_body: bytes) -> None:
    try:
        assert isinstance(decode_object(raw_body), dict)
    except ClientError as error:
        assert error.status == 400
