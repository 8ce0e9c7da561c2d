"""A client that sends exactly the bytes that a test says, and reads answers as a strict one would."""

import asyncio
from dataclasses import dataclass
from typing import Any

from tests.frontend.stand import Stand


@dataclass
class Answer:
    """One answer; names of headers are lower case."""

    status: int
    headers: dict[str, str]
    body: bytes


async def connect(s: Stand, **options: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Open a connection to a stand's endpoint."""
    return await asyncio.open_connection("127.0.0.1", int(s.server.url.rsplit(":", 1)[1]), **options)


async def read_answer(reader: asyncio.StreamReader) -> Answer:
    """Read one answer; where its head does not say where its body ends, the connection's end does.

    Raises:
        asyncio.IncompleteReadError: the connection ended before that.
    """
    async with asyncio.timeout(20):
        head = (await reader.readuntil(b"\r\n\r\n")).decode("utf-8", "surrogateescape")
        first, *lines = head[:-4].split("\r\n")
        headers: dict[str, str] = {}
        for line in lines:
            name, _, value = line.partition(":")
            assert name.lower() not in headers, f"{name} comes twice"
            headers[name.lower()] = value.strip()
        status = int(first.split(" ")[1])
        body = b""
        if headers.get("transfer-encoding") == "chunked":
            assert "content-length" not in headers
            while size := int(await reader.readline(), 16):
                body += await reader.readexactly(size)
                assert await reader.readexactly(2) == b"\r\n"
            assert await reader.readexactly(2) == b"\r\n"
        elif "content-length" in headers:
            body = await reader.readexactly(int(headers["content-length"]))
        elif status >= 200 and status not in (204, 304):
            body = await reader.read()
        return Answer(status, headers, body)
