"""Connections to pods: logs, and ports forwarded over WebSockets."""

import asyncio
from pathlib import Path

from aiohttp import WSMsgType, web

from penstock.adapters.task_cancel import cancel_all
from penstock.kernel.values import JsonObject
from tests.doubles.kubernetes.api.api_requests import flag, number
from tests.doubles.kubernetes.objects.api_failures import ApiFailure, bad_request
from tests.doubles.kubernetes.objects.patches import first_at

CHANNELS = "v4.channel.k8s.io"
"""The form of a port-forward in which each message starts with its channel's number; kubectl speaks another."""
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
