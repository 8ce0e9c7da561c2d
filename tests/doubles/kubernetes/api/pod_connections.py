"""Connections to pods: logs, and ports forwarded over WebSockets."""

import asyncio
from pathlib import Path

from aiohttp import WSMsgType, web

from penstock.adapters.task_cancel import cancel_all
from penstock.kernel.values import JsonObject
from tests.doubles.kubernetes.api.api_requests import number
from tests.doubles.kubernetes.objects.api_failures import ApiFailure, bad_request
from tests.doubles.kubernetes.objects.patches import first_at

CHANNELS = "v4.channel.k8s.io"
"""The form of a port-forward in which each message starts with its channel's number; kubectl speaks another."""
CHUNK = 32 << 10
"""Bytes of one message."""


def logs(request: web.Request, pod: JsonObject, folder: Path) -> web.Response:
    """Answer with the log of a container, as far as it is written."""
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
    lines, tail = path.read_bytes().splitlines(keepends=True), number(query, "tailLines")
    return web.Response(body=b"".join(lines if tail is None else lines[max(0, len(lines) - tail) :]))


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
