"""Connections to pods: logs, and ports forwarded over WebSocket and SPDY frames."""

import asyncio
import zlib
from pathlib import Path
from typing import NamedTuple

from aiohttp import WSMsgType, web

from penstock.adapters.task_cancel import cancel_all
from penstock.kernel.values import JsonObject
from tests.doubles.kubernetes.api.api_requests import flag, number
from tests.doubles.kubernetes.objects.api_failures import ApiFailure, bad_request
from tests.doubles.kubernetes.objects.patches import first_at

_WORDS = (
    "options head post put delete trace accept accept-charset accept-encoding accept-language accept-ranges age allow "
    "authorization cache-control connection content-base content-encoding content-language content-length "
    "content-location content-md5 content-range content-type date etag expect expires from host if-match "
    "if-modified-since if-none-match if-range if-unmodified-since last-modified location max-forwards pragma "
    "proxy-authenticate proxy-authorization range referer retry-after server te trailer transfer-encoding upgrade "
    "user-agent vary via warning www-authenticate method get status"
)
_PHRASES = ("200 OK", "version", "HTTP/1.1", "url", "public", "set-cookie", "keep-alive", "origin")
_TEXT = (
    "100101201202205206300302303304305306307402405406407408409410411412413414415416417502504505"
    "203 Non-Authoritative Information204 No Content301 Moved Permanently400 Bad Request401 Unauthorized403 Forbidden"
    "404 Not Found500 Internal Server Error501 Not Implemented503 Service UnavailableJan Feb Mar Apr May Jun Jul Aug "
    "Sept Oct Nov Dec 00:00:00 Mon, Tue, Wed, Thu, Fri, Sat, Sun, GMTchunked,text/html,image/png,image/jpg,image/gif,"
    "application/xml,application/xhtml+xml,text/plain,text/javascript,publicprivatemax-age=gzip,deflate,sdch"
    "charset=utf-8charset=iso-8859-1,utf-,*,enq=0."
)
DICTIONARY = (
    b"".join(len(name).to_bytes(4, "big") + name.encode() for name in (*_WORDS.split(), *_PHRASES)) + _TEXT.encode()
)
"""The dictionary of SPDY/3's header compression; its Adler-32 is 0xe3c6a7c2, else no peer can read a header."""
SYN_STREAM, SYN_REPLY, RST_STREAM, PING = 1, 2, 3, 6
FIN = 1
CONTROL = 0x8003


class SpdyFrame(NamedTuple):
    """A frame: its type (0 for data), its stream (or a ping's number), headers or data, and whether it is the last."""

    type: int
    stream: int
    headers: dict[str, str]
    data: bytes
    last: bool


class SpdyFrames:
    """Reads and writes the frames of one connection; both directions of its headers are one compressed stream each."""

    def __init__(self) -> None:
        self._buffer = b""
        self._inflate = zlib.decompressobj(zdict=DICTIONARY)
        self._deflate = zlib.compressobj(zdict=DICTIONARY)

    def feed(self, data: bytes) -> list[SpdyFrame]:
        """Return the frames that are complete by now."""
        self._buffer += data
        frames = []
        while len(self._buffer) >= 8:
            length = int.from_bytes(self._buffer[5:8], "big")
            if len(self._buffer) < 8 + length:
                break
            head, body, self._buffer = self._buffer[:8], self._buffer[8 : 8 + length], self._buffer[8 + length :]
            last = bool(head[4] & FIN)
            if head[0] & 0x80:
                stream = int.from_bytes(body[:4], "big")
                frame_type = int.from_bytes(head[2:4], "big")
                headers = self._headers(body[10:]) if frame_type == SYN_STREAM else {}
                frames.append(SpdyFrame(frame_type, stream, headers, b"", last))
            else:
                frames.append(SpdyFrame(0, int.from_bytes(head[:4], "big"), {}, body, last))
        return frames

    def reply(self, stream: int) -> bytes:
        """Return the frame that accepts a stream."""
        block = self._deflate.compress(bytes(4)) + self._deflate.flush(zlib.Z_SYNC_FLUSH)
        return _control(SYN_REPLY, stream.to_bytes(4, "big") + block)

    def pong(self, number: int) -> bytes:
        """Return the answer to a ping."""
        return _control(PING, number.to_bytes(4, "big"))

    def data(self, stream: int, data: bytes, *, last: bool = False) -> bytes:
        """Return a frame of data."""
        return stream.to_bytes(4, "big") + bytes([FIN if last else 0]) + len(data).to_bytes(3, "big") + data

    def _headers(self, block: bytes) -> dict[str, str]:
        text = self._inflate.decompress(block)
        headers, position = {}, 4
        for _ in range(int.from_bytes(text[:4], "big")):
            parts = []
            for _ in range(2):
                length = int.from_bytes(text[position : position + 4], "big")
                parts.append(text[position + 4 : position + 4 + length].decode())
                position += 4 + length
            headers[parts[0].lower()] = parts[1]
        return headers


def _control(frame_type: int, body: bytes) -> bytes:
    return CONTROL.to_bytes(2, "big") + frame_type.to_bytes(2, "big") + bytes(1) + len(body).to_bytes(3, "big") + body


CHANNELS = "v4.channel.k8s.io"
"""The plain form of a port-forward: each message starts with its channel's number."""
TUNNELED = "SPDY/3.1+portforward.k8s.io"
"""The form of kubectl: streams of SPDY in the messages of a WebSocket."""
CHUNK = 32 << 10
"""Bytes of one message."""
LOG_POLL_S = 0.1


async def logs(request: web.Request, pod: JsonObject, folder: Path) -> web.StreamResponse:
    """Answer with the log of a container, as it grows where the query says ``follow``."""
    metadata, query = pod["metadata"], request.query
    containers = [each["name"] for each in pod["spec"]["containers"]]
    name = query.get("container") or containers[0]
    if "container" not in query and len(containers) > 1:
        raise bad_request(
            f"a container name must be specified for pod {metadata['name']}, choose one of: [{' '.join(containers)}]"
        )
    if name not in containers:
        raise bad_request(f"container {name} is not valid for pod {metadata['name']}")
    path = folder / "logs" / metadata["namespace"] / metadata["name"] / f"{name}.log"
    if not path.exists():
        raise bad_request(f"container {name!r} in pod {metadata['name']!r} is waiting to start: it has written nothing")
    response = web.StreamResponse(headers={"Content-Type": "text/plain"})
    await response.prepare(request)
    with path.open("rb") as file:
        tail = number(query, "tailLines")
        lines = file.read().splitlines(keepends=True)
        await response.write(b"".join(lines if tail is None else lines[len(lines) - min(tail, len(lines)) :]))
        while flag(query, "follow"):
            if data := file.read():
                await response.write(data)
            elif not path.exists() or request.transport is None:
                break
            await asyncio.sleep(LOG_POLL_S)
    await response.write_eof()
    return response


def pod_address(pod: JsonObject) -> str:
    """Return the address of a pod that runs.

    Raises:
        ApiFailure: 500 for a pod that does not run, as a kubelet answers.
    """
    address, phase = first_at(pod, ".status.podIP"), first_at(pod, ".status.phase")
    if not address or phase != "Running":
        raise ApiFailure(
            500, "InternalError", f"unable to forward port because pod is not running. Current status={phase}"
        )
    return str(address)


async def forward(request: web.Request, address: str) -> web.StreamResponse:
    """Forward ports of a pod in the form that the client speaks."""
    if TUNNELED in request.headers.get("Sec-WebSocket-Protocol", ""):
        return await forward_streams(request, address)
    return await forward_channels(request, address)


async def forward_streams(request: web.Request, address: str) -> web.StreamResponse:
    """Forward streams of SPDY: for each connection one of errors and one of data, which name the port."""
    socket = web.WebSocketResponse(protocols=(TUNNELED,))
    await socket.prepare(request)
    tunnel = _Tunnel(socket, address)
    try:
        async for message in socket:
            if message.type is WSMsgType.BINARY:
                await tunnel.receive(message.data)
    finally:
        await tunnel.close()
    return socket


class _Tunnel:
    """The streams of one `kubectl port-forward`."""

    def __init__(self, socket: web.WebSocketResponse, address: str) -> None:
        self._socket = socket
        self._address = address
        self._frames = SpdyFrames()
        self._errors: dict[str, int] = {}
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._tasks = set[asyncio.Task[None]]()

    async def receive(self, data: bytes) -> None:
        """Act on what came from the client."""
        for frame in self._frames.feed(data):
            if frame.type == SYN_STREAM:
                await self._socket.send_bytes(self._frames.reply(frame.stream))
                request = frame.headers.get("requestid", "")
                if frame.headers.get("streamtype") == "error":
                    self._errors[request] = frame.stream
                else:
                    await self._open(frame.stream, int(frame.headers["port"]), self._errors.pop(request, 0))
            elif frame.type == PING:
                await self._socket.send_bytes(self._frames.pong(frame.stream))
            elif writer := self._writers.get(frame.stream):
                if frame.data:
                    writer.write(frame.data)
                    await writer.drain()
                if frame.type == RST_STREAM:
                    writer.close()
                elif frame.last and writer.can_write_eof():
                    writer.write_eof()

    async def _open(self, stream: int, port: int, errors: int) -> None:
        try:
            reader, self._writers[stream] = await asyncio.open_connection(self._address, port)
        except OSError as failure:
            text = f"error forwarding port {port} to pod: {failure}".encode()
            await self._socket.send_bytes(self._frames.data(errors, text, last=True))
            await self._socket.send_bytes(self._frames.data(stream, b"", last=True))
            return
        task = asyncio.create_task(self._pump(reader, stream, errors))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _pump(self, reader: asyncio.StreamReader, stream: int, errors: int) -> None:
        while data := await reader.read(CHUNK):
            await self._socket.send_bytes(self._frames.data(stream, data))
        for each in (stream, errors):
            await self._socket.send_bytes(self._frames.data(each, b"", last=True))
        self._writers.pop(stream).close()

    async def close(self) -> None:
        """Close the connections to the pod."""
        await cancel_all(self._tasks)
        for writer in self._writers.values():
            writer.close()


async def forward_channels(request: web.Request, address: str) -> web.StreamResponse:
    """Forward the port of a query: channel 0 has its data and channel 1 its errors, each opened by the port."""
    port = number(request.query, "ports")
    if port is None:
        raise bad_request("query parameter 'ports' is required")
    socket = web.WebSocketResponse(protocols=(CHANNELS,))
    await socket.prepare(request)
    for channel in (b"\0", b"\1"):
        await socket.send_bytes(channel + port.to_bytes(2, "little"))
    try:
        reader, writer = await asyncio.open_connection(address, port)
    except OSError as failure:
        await socket.send_bytes(b"\1" + f"an error occurred forwarding {port}: {failure}".encode())
        await socket.close()
        return socket
    pump = asyncio.create_task(_pump(reader, socket))
    async for message in socket:
        if message.type is WSMsgType.BINARY:
            writer.write(message.data[1:])
            await writer.drain()
    await cancel_all([pump])
    writer.close()
    return socket


async def _pump(reader: asyncio.StreamReader, socket: web.WebSocketResponse) -> None:
    try:
        while data := await reader.read(CHUNK):
            await socket.send_bytes(b"\0" + data)
    finally:
        await socket.close()
