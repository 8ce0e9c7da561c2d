"""Connections to pods through the API server: their logs, and their ports by WebSocket.

Logs are read where the kubelet's double writes them: `logs/NAMESPACE/POD/CONTAINER.log` below the server's folder.
"""

import asyncio
from pathlib import Path

from aiohttp import WSMsgType, web

from penstock.adapters.task_cancel import cancel_all
from penstock.kernel.values import JsonObject
from tests.doubles.kubernetes.api.api_requests import flag, number
from tests.doubles.kubernetes.api.spdy_frames import PING, RST_STREAM, SYN_STREAM, SpdyFrames
from tests.doubles.kubernetes.objects.api_failures import ApiFailure, bad_request
from tests.doubles.kubernetes.objects.json_paths import first_at

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
    if name not in containers and name not in [each["name"] for each in pod["spec"].get("initContainers") or []]:
        raise bad_request(f"container {name} is not valid for pod {metadata['name']}")
    previous = flag(query, "previous")
    path = folder / "logs" / metadata["namespace"] / metadata["name"]
    path /= f"{name}.previous.log" if previous else f"{name}.log"
    if not path.exists():
        word = f"previous terminated container {name!r}" if previous else f"container {name!r}"
        raise bad_request(f"{word} in pod {metadata['name']!r} is waiting to start: it has written nothing yet")
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
    """Forward the ports of a query: per port a channel of data and a channel of errors, each opened by the port."""
    ports = [int(each) for text in request.query.getall("ports", []) for each in text.split(",")]
    if not ports:
        raise bad_request("query parameter 'ports' is required")
    socket = web.WebSocketResponse(protocols=(CHANNELS,))
    await socket.prepare(request)
    writers: dict[int, asyncio.StreamWriter] = {}
    async with asyncio.TaskGroup() as tasks:
        readers = []
        for index, port in enumerate(ports):
            data, error = 2 * index, 2 * index + 1
            mark = port.to_bytes(2, "little")
            await socket.send_bytes(bytes([data]) + mark)
            await socket.send_bytes(bytes([error]) + mark)
            try:
                reader, writers[data] = await asyncio.open_connection(address, port)
            except OSError as failure:
                await socket.send_bytes(bytes([error]) + f"an error occurred forwarding {port}: {failure}".encode())
                continue
            readers.append(tasks.create_task(_pump(reader, socket, data)))
        async for message in socket:
            if message.type is WSMsgType.BINARY and (writer := writers.get(message.data[0])):
                writer.write(message.data[1:])
                await writer.drain()
        for task in readers:
            task.cancel()
    for writer in writers.values():
        writer.close()
    return socket


async def _pump(reader: asyncio.StreamReader, socket: web.WebSocketResponse, channel: int) -> None:
    while data := await reader.read(CHUNK):
        await socket.send_bytes(bytes([channel]) + data)
    await socket.close()
